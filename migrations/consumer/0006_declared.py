"""What a group's job declares: its strategy, and what it applies in one transaction. `outbox doctor` shows them.

Locks: ACCESS EXCLUSIVE on ``groups`` for a moment; nothing is rewritten. NULL until the group is taken over again.

Frozen as it was written; a test holds it against spark_jobs/postgres/tables.py.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "consumer_0006"
down_revision = "consumer_0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.add_column("groups", sa.Column("strategy", sa.Text, nullable=True), schema=schema)
    op.add_column("groups", sa.Column("atomic", sa.Text, nullable=True), schema=schema)


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.drop_column("groups", "atomic", schema=schema)
    op.drop_column("groups", "strategy", schema=schema)
