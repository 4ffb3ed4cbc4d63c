"""The leader epoch of each group's offsets, by which a log that was cut and has grown again is noticed (KIP-320).

Locks: ACCESS EXCLUSIVE on ``offsets`` for a moment; nothing is rewritten. NULL until an offset is moved.

Frozen as it was written; a test holds it against spark_jobs/postgres/tables.py.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "consumer_0008"
down_revision = "consumer_0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.add_column("offsets", sa.Column("leader_epoch", sa.Integer(), nullable=True), schema=schema)
    op.add_column("offsets", sa.Column("epoch_offset", sa.BigInteger(), nullable=True), schema=schema)


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.drop_column("offsets", "epoch_offset", schema=schema)
    op.drop_column("offsets", "leader_epoch", schema=schema)
