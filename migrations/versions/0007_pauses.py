"""Pauses: what relays must not publish for now, and which of it is to be drained first.

``relays.obeys`` lists the pauses that a relay's loop obeys, so that a command can wait until a pause is in effect.
Relays of the previous version neither read the table nor write the column: they go on publishing what is paused.

Locks: ``relays`` for the moment of adding a column. Nothing is rewritten. Relays of this version need the rights on the
new table that `outbox db roles` prints.

Frozen as it was written.
"""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql as pg

revision = "outbox_0007"
down_revision = "outbox_0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.create_table(
        "pauses",
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("requested_by", sa.Text(), nullable=False, server_default=sa.text("session_user")),
        sa.Column("reason", sa.Text()),
        sa.Column("drain_xid", sa.BigInteger()),
        sa.Column("wal_lsn", sa.BigInteger()),
        sa.Column("last_id", sa.BigInteger()),
        sa.Column("drained_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("number", name="pauses_pkey"),
        sa.UniqueConstraint("scope", "name", name="pauses_scope_name"),
        sa.CheckConstraint("scope IN ('all', 'lane', 'topic')", name="pauses_scope"),
        sa.CheckConstraint("(scope = 'all') = (name = '')", name="pauses_name"),
        sa.CheckConstraint("scope <> 'lane' OR name ~ '^(0|[1-9][0-9]{0,2})$'", name="pauses_lane"),
        sa.CheckConstraint(
            "drain_xid IS NOT NULL OR pg_catalog.num_nonnulls(wal_lsn, last_id, drained_at) = 0", name="pauses_drain"
        ),
        schema=schema,
        comment="What relays must not publish for now; with drain_xid, once what was written before it is published.",
    )
    op.add_column(
        "relays",
        sa.Column("obeys", pg.ARRAY(sa.BigInteger()), nullable=False, server_default=sa.text("'{}'::bigint[]")),
        schema=schema,
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.drop_column("relays", "obeys", schema=schema)
    op.drop_table("pauses", schema=schema)
