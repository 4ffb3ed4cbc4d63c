"""When a group's last driver ended normally: one that did not may have been killed by a message.

Locks: ACCESS EXCLUSIVE on ``groups`` for a moment; nothing is rewritten.

Frozen as it was written; a test holds it against spark_jobs/postgres/tables.py.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "consumer_0005"
down_revision = "consumer_0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.add_column("groups", sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True), schema=schema)


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.drop_column("groups", "ended_at", schema=schema)
