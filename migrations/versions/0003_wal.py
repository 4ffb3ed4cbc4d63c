"""The WAL as a source: the source that each lane is read from, how far it was read, and the slot's checkpoint.

Frozen as it was written.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "outbox_0003"
down_revision = "outbox_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.add_column(
        "lanes",
        sa.Column("source", sa.Text(), nullable=False, server_default=sa.text("'polling'")),
        schema=schema,
    )
    op.add_column(
        "lanes",
        sa.Column("streaming", sa.Boolean(), nullable=False, server_default=sa.text("false")),
        schema=schema,
    )
    op.add_column("lanes", sa.Column("commit_lsn", sa.BigInteger()), schema=schema)
    op.add_column("lanes", sa.Column("commit_number", sa.BigInteger()), schema=schema)
    op.create_check_constraint("lanes_source", "lanes", "source IN ('polling', 'wal')", schema=schema)
    op.create_check_constraint(
        "lanes_position", "lanes", "(commit_lsn IS NULL) = (commit_number IS NULL)", schema=schema
    )
    op.add_column(
        "relays",
        sa.Column("source", sa.Text(), nullable=False, server_default=sa.text("'polling'")),
        schema=schema,
    )
    op.create_table(
        "streams",
        sa.Column("slot", sa.Text(), nullable=False),
        sa.Column("publication", sa.Text(), nullable=False),
        sa.Column("publication_version", sa.Text(), nullable=False),
        sa.Column("system_identifier", sa.Text(), nullable=False),
        sa.Column("timeline", sa.Integer(), nullable=False),
        sa.Column("opened_xid", sa.BigInteger(), nullable=False),
        sa.Column("flushed_lsn", sa.BigInteger(), nullable=False),
        sa.Column("flushed_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("message_at", sa.DateTime(timezone=True)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("slot", name="streams_pkey"),
        schema=schema,
        comment="The replication slot that the outbox is read through, and how far it has been told to forget the WAL.",
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.drop_table("streams", schema=schema)
    op.drop_column("relays", "source", schema=schema)
    op.drop_constraint("lanes_position", "lanes", schema=schema)
    op.drop_constraint("lanes_source", "lanes", schema=schema)
    for column in ("commit_number", "commit_lsn", "streaming", "source"):
        op.drop_column("lanes", column, schema=schema)
