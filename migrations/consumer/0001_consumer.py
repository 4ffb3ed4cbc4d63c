"""The consumers' tables. outbox/consumer/tables.py says what each column is for.

Frozen once it is released: outbox/consumer/tables.py may change, this file may not. A test compares the result of
all revisions with it, through pg_catalog.
"""

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql as pg

revision = "consumer_1"
down_revision = None
branch_labels = ("consumer",)
depends_on = None

_NOW = sa.text("now()")
_ZERO = sa.text("0")
_FALSE = sa.text("false")
_MESSAGE_KEY_HASH = sa.text("sha256(message_key)")


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.create_table(
        "groups",
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False, server_default=sa.text("1")),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("taken_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("forgotten_before", sa.Date()),
        sa.Column("ended_at", _time()),
        sa.Column("strategy", sa.Text()),
        sa.Column("atomic", sa.Text()),
        sa.Column("added_ends", pg.JSONB()),
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
        sa.Column("updated_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("log_end", sa.BigInteger()),
        sa.Column("applied", sa.BigInteger(), nullable=False, server_default=_ZERO),
        sa.Column("duplicates", sa.BigInteger(), nullable=False, server_default=_ZERO),
        sa.Column("dead", sa.BigInteger(), nullable=False, server_default=_ZERO),
        sa.Column("leader_epoch", sa.Integer()),
        sa.Column("epoch_offset", sa.BigInteger()),
        sa.Column("unconfirmed_from", sa.BigInteger()),
        sa.Column("unconfirmed_end", sa.BigInteger()),
        sa.PrimaryKeyConstraint("grp", "topic", "part", name="offsets_pkey"),
        sa.CheckConstraint("next_offset >= 0 AND part >= 0", name="offsets_not_negative"),
        schema=schema,
        comment="The next offset of each partition to apply. Moves in the transaction of the effect.",
    )
    op.create_table(
        "processed_messages",
        *_processed(),
        sa.PrimaryKeyConstraint("message_id", "grp", "day", name="processed_messages_pkey"),
        schema=schema,
        postgresql_partition_by="RANGE (day)",
        comment="Ids of the messages whose effect is in the sink, by the day in the id.",
    )
    op.create_table(
        "processed_messages_default",
        *_processed(),
        sa.PrimaryKeyConstraint("message_id", "grp", "day", name="processed_messages_default_pkey"),
        schema=schema,
        comment="Ids without a time, and of days that have no partition of their own.",
    )
    op.create_index(
        "processed_messages_default_days",
        "processed_messages_default",
        ["grp", "day"],
        schema=schema,
        postgresql_where=sa.text("day > '1970-01-01'::date"),
    )
    parent, default = (_quoted(schema, name) for name in ("processed_messages", "processed_messages_default"))
    op.execute(
        sa.DDL(
            "ALTER TABLE %(parent)s ATTACH PARTITION %(partition)s DEFAULT",
            context={"parent": parent, "partition": default},
        )
    )
    op.create_table(
        "dead_letters",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("topic_id", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("message_offset", sa.BigInteger(), nullable=False),
        sa.Column("message_id", pg.UUID()),
        sa.Column("message_key", pg.BYTEA()),
        sa.Column("message_value", pg.BYTEA()),
        sa.Column("message_headers", pg.JSONB(), nullable=False),
        sa.Column("message_time", _time(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("sqlstate", sa.Text()),
        sa.Column("state", sa.Text(), nullable=False, server_default=sa.text("'dead'")),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("1")),
        sa.Column("died_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("last_failed_at", _time(), nullable=False, server_default=_NOW),
        sa.PrimaryKeyConstraint("id", name="dead_letters_pkey"),
        sa.UniqueConstraint("grp", "topic", "part", "message_offset", "topic_id", name="dead_letters_place"),
        sa.CheckConstraint(
            "reason IN ('undecodable', 'no-id', 'too-old', 'failed', 'rejected', 'behind')", name="dead_letters_reason"
        ),
        sa.CheckConstraint("state IN ('dead', 'retry')", name="dead_letters_state"),
        schema=schema,
        comment="Messages that could not be applied, whole. They wait for `outbox dead-letters retry` or `discard`.",
    )
    behind = "state = 'dead' AND reason = 'behind'"
    for name, columns, where in (
        ("key", ["grp", "topic", _MESSAGE_KEY_HASH], None),
        ("retry", ["grp", "topic", "part", "message_offset", "id"], "state = 'retry'"),
        ("behind", ["grp", "topic", "part", _MESSAGE_KEY_HASH, "message_offset"], behind),
        ("behind_by_id", ["grp", sa.text("(- id)")], behind),
        (
            "first",
            ["grp", "topic", _MESSAGE_KEY_HASH, "part", "message_offset"],
            "state = 'dead' AND reason <> 'behind'",
        ),
    ):
        op.create_index(
            f"dead_letters_{name}",
            "dead_letters",
            columns,
            schema=schema,
            postgresql_where=None if where is None else sa.text(where),
        )
    op.create_table(
        "losses",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("topic_id", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("first_offset", sa.BigInteger(), nullable=False),
        sa.Column("end_offset", sa.BigInteger()),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("found_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("accepted_at", _time()),
        sa.PrimaryKeyConstraint("id", name="losses_pkey"),
        sa.CheckConstraint("kind IN ('retention', 'cut', 'recreated', 'given-up')", name="losses_kind"),
        schema=schema,
        comment="What Kafka lost before the group read it, which halts it until `outbox offsets reset` accepts it; and "
        "what a group has given up at-most-once.",
    )
    op.create_index(
        "losses_open",
        "losses",
        ["grp", "topic", "part", "kind"],
        unique=True,
        schema=schema,
        postgresql_where=sa.text("accepted_at IS NULL AND kind <> 'given-up'"),
    )
    op.create_table(
        "reservations",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("message_id", pg.UUID(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("message_offset", sa.BigInteger(), nullable=False),
        sa.Column("order_key", sa.Text()),
        sa.Column("state", sa.Text(), nullable=False, server_default=sa.text("'reserved'")),
        sa.Column("unsure", sa.Boolean(), nullable=False, server_default=_FALSE),
        sa.Column("taking_back", sa.Boolean(), nullable=False, server_default=_FALSE),
        sa.Column("request", pg.JSONB(), nullable=False),
        sa.Column("response", pg.JSONB()),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=_ZERO),
        sa.Column("budget_from", sa.Integer(), nullable=False, server_default=_ZERO),
        sa.Column("key_until", _time()),
        sa.Column("worker", sa.Text()),
        sa.Column("last_error", sa.Text()),
        sa.Column("conflict", sa.Text()),
        sa.Column("reserved_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("next_attempt_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("settled_at", _time()),
        sa.Column("parked", sa.Boolean(), nullable=False, server_default=_FALSE),
        sa.PrimaryKeyConstraint("grp", "name", "message_id", name="reservations_pkey"),
        sa.CheckConstraint(
            "state IN ('reserved', 'calling', 'confirmed', 'cancelling', 'cancelled', 'stuck')",
            name="reservations_state",
        ),
        sa.CheckConstraint(
            "state = 'stuck' OR taking_back = (state IN ('cancelling', 'cancelled'))", name="reservations_taking_back"
        ),
        sa.CheckConstraint(
            "(settled_at IS NOT NULL) = (state IN ('confirmed', 'cancelled'))", name="reservations_settled"
        ),
        schema=schema,
        comment="Effects outside the database: reserved with the offsets, called with the id, then settled.",
    )
    for name, columns, where in (
        (
            "open",
            ["grp", "name", "parked", "next_attempt_at", "id"],
            "state IN ('reserved', 'calling', 'cancelling')",
        ),
        (
            "order",
            ["grp", "name", sa.text("hashtextextended(order_key, 0::bigint)"), "id"],
            "settled_at IS NULL",
        ),
        ("attention", ["grp", "name", "id"], "state = 'stuck' OR conflict IS NOT NULL"),
    ):
        op.create_index(f"reservations_{name}", "reservations", columns, schema=schema, postgresql_where=sa.text(where))
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", _time(), nullable=False, server_default=_NOW),
        sa.Column("who", sa.Text(), nullable=False, server_default=sa.text("session_user")),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("why", sa.Text()),
        sa.Column("details", pg.JSONB(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="audit_pkey"),
        schema=schema,
        comment="What people did to groups by hand: offsets set, dead letters retried or discarded.",
    )
    op.create_table(
        "checkpoints",
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("query_id", pg.UUID(), nullable=False),
        sa.Column("batch_id", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("applied", sa.BigInteger(), nullable=False, server_default=_ZERO),
        sa.Column("duplicates", sa.BigInteger(), nullable=False, server_default=_ZERO),
        sa.Column("updated_at", _time(), nullable=False, server_default=_NOW),
        sa.PrimaryKeyConstraint("grp", name="checkpoints_pkey"),
        sa.CheckConstraint("batch_id >= 0", name="checkpoints_not_negative"),
        schema=schema,
        comment="The last batch of each stream that was applied. Moves in the transaction of the effect.",
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    # The partitions of processed_messages are dropped with it.
    tables = ("checkpoints", "audit", "reservations", "losses", "dead_letters", "processed_messages", "offsets")
    for table in (*tables, "groups"):
        op.drop_table(table, schema=schema)


def _time() -> sa.DateTime:
    return sa.DateTime(timezone=True)


def _processed() -> list[sa.Column[Any]]:
    return [
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("message_id", pg.UUID(), nullable=False),
        sa.Column("seen_at", _time(), nullable=False, server_default=_NOW),
    ]


def _quoted(schema: str, name: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name))
