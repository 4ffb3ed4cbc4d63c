"""The last batch of each Spark stream in the sink, for ``foreachBatch(exactly_once(job))``.

Locks: none; a table is added.

Frozen as it was written; a test holds it against spark_jobs/postgres/tables.py.
"""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql as pg

revision = "consumer_0004"
down_revision = "consumer_0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.create_table(
        "checkpoints",
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("query_id", pg.UUID(), nullable=False),
        sa.Column("batch_id", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("applied", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("duplicates", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("grp", name="checkpoints_pkey"),
        sa.CheckConstraint("batch_id >= 0", name="checkpoints_not_negative"),
        schema=schema,
        comment="The last batch of each stream that was applied. Moves in the transaction of the effect.",
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.drop_table("checkpoints", schema=schema)
