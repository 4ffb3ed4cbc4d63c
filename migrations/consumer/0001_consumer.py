"""Groups, offsets and processed messages. Frozen as it was written; a test holds it against the tables."""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql as pg

revision = "consumer_0001"
down_revision = None
branch_labels = ("consumer",)
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.create_table(
        "groups",
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False, server_default=sa.text("1")),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("grp", name="groups_pkey"),
        sa.CheckConstraint("char_length(grp) BETWEEN 1 AND 200", name="groups_grp_length"),
        schema=schema,
        comment="Who consumes for each group. The generation rises with every take-over: the fencing token.",
    )
    op.create_table(
        "offsets",
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("topic_id", sa.Text(), nullable=False),
        sa.Column("next_offset", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("grp", "topic", "part", name="offsets_pkey"),
        sa.CheckConstraint("next_offset >= 0 AND part >= 0", name="offsets_not_negative"),
        schema=schema,
        comment="The next offset of each partition to apply. Moves in the transaction of the effect.",
    )
    op.create_table(
        "processed_messages",
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("message_id", pg.UUID(), nullable=False),
        sa.PrimaryKeyConstraint("grp", "day", "message_id", name="processed_messages_pkey"),
        schema=schema,
        postgresql_partition_by="RANGE (day)",
        comment="Ids of the messages whose effect is in the sink, by the day in the id.",
    )
    op.create_table(
        "processed_messages_default",
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("message_id", pg.UUID(), nullable=False),
        sa.PrimaryKeyConstraint("grp", "day", "message_id", name="processed_messages_default_pkey"),
        schema=schema,
        comment="Ids without a time, and of days that have no partition of their own.",
    )
    parent, default = (_quoted(schema, name) for name in ("processed_messages", "processed_messages_default"))
    op.execute(
        sa.DDL(
            "ALTER TABLE %(parent)s ATTACH PARTITION %(partition)s DEFAULT",
            context={"parent": parent, "partition": default},
        )
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    for table in ("processed_messages", "offsets", "groups"):
        op.drop_table(table, schema=schema)


def _quoted(schema: str, name: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name))
