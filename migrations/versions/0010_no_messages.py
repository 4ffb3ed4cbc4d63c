"""Every event is a row: no time of the last event without one, no positions within a transaction, no step in a drain.

Frozen as it was written.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "outbox_0010"
down_revision = "outbox_0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.drop_column("streams", "message_at", schema=schema)
    op.drop_constraint("lanes_position", "lanes", schema=schema)
    op.drop_column("lanes", "commit_number", schema=schema)
    op.drop_constraint("pauses_drain", "pauses", schema=schema)
    op.drop_column("pauses", "wal_lsn", schema=schema)
    op.create_check_constraint(
        "pauses_drain",
        "pauses",
        "drain_xid IS NOT NULL OR pg_catalog.num_nonnulls(last_id, drained_at) = 0",
        schema=schema,
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.drop_constraint("pauses_drain", "pauses", schema=schema)
    op.add_column("pauses", sa.Column("wal_lsn", sa.BigInteger()), schema=schema)
    op.create_check_constraint(
        "pauses_drain",
        "pauses",
        "drain_xid IS NOT NULL OR pg_catalog.num_nonnulls(wal_lsn, last_id, drained_at) = 0",
        schema=schema,
    )
    op.add_column("lanes", sa.Column("commit_number", sa.BigInteger()), schema=schema)
    op.execute(
        sa.update(sa.table("lanes", sa.column("commit_lsn"), sa.column("commit_number"), schema=schema))
        .where(sa.column("commit_lsn").is_not(None))
        .values(commit_number=0)
    )
    op.create_check_constraint(
        "lanes_position", "lanes", "(commit_lsn IS NULL) = (commit_number IS NULL)", schema=schema
    )
    op.add_column("streams", sa.Column("message_at", sa.DateTime(timezone=True)), schema=schema)
