"""Pauses without drains: the command waits until the scope is drained, and pauses it then.

A drain that is not complete is a pause from here on.

Locks: ``pauses`` for the moment of dropping columns. Nothing is rewritten.

Frozen as it was written.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "outbox_0010"
down_revision = "outbox_0009"
branch_labels = None
depends_on = None

_COLUMNS = ("drain_xid", "wal_lsn", "last_id")


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.drop_constraint("pauses_drain", "pauses", schema=schema)
    for name in (*_COLUMNS, "drained_at"):
        op.drop_column("pauses", name, schema=schema)
    op.create_table_comment("pauses", "What relays must not publish for now.", schema=schema)


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    for name in _COLUMNS:
        op.add_column("pauses", sa.Column(name, sa.BigInteger()), schema=schema)
    op.add_column("pauses", sa.Column("drained_at", sa.DateTime(timezone=True)), schema=schema)
    op.create_check_constraint(
        "pauses_drain",
        "pauses",
        "drain_xid IS NOT NULL OR pg_catalog.num_nonnulls(wal_lsn, last_id, drained_at) = 0",
        schema=schema,
    )
    op.create_table_comment(
        "pauses",
        "What relays must not publish for now; with drain_xid, once what was written before it is published.",
        schema=schema,
    )
