"""The consumers' tables, in the sink's database. Importing this needs no pyspark and connects to nothing.

``offsets`` moves in the transaction of the effect, so reading messages again is harmless. ``processed_messages``
catches messages that the producer repeated under another offset. It is partitioned by day, so that forgetting is DROP
TABLE; the day depends only on the message id (a UUIDv7 contains its time), so a message that is repeated after midnight
is still recognized. Ids without a time all count as the day 1970-01-01, which has a partition of its own and is never
forgotten; days without a partition go to the default one. ``dead_letters``, ``losses`` and ``audit`` are for operators;
``reservations`` has the effects outside the database. ``checkpoints`` is for Spark streams what ``offsets`` is for the
consumer's own reading.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from outbox.consumer.model import DEFAULT_SCHEMA
from outbox.tables import TableBuilder

_TIME: Final = sa.DateTime(timezone=True)
_JSON: Final = pg.JSONB(none_as_null=True)
_UUID: Final = pg.UUID(as_uuid=True)


def consumer_tables(metadata: sa.MetaData, schema: str = DEFAULT_SCHEMA) -> tuple[sa.Table, ...]:
    """Add the tables of all consumer groups of one sink to a MetaData. Returns them in the order of their creation."""
    tables = TableBuilder(metadata, schema)
    tables.add(
        "groups",
        sa.Column("grp", sa.Text, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False, server_default=sa.text("1")),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("taken_at", _TIME, nullable=False, server_default=sa.text("now()")),
        # Ids of days before this one are no longer all remembered: their messages become dead letters.
        sa.Column("forgotten_before", sa.Date),
        # When the last driver ended normally. If NULL or before taken_at, the driver is running or was killed.
        sa.Column("ended_at", _TIME),
        # What the job of the last take-over declares; only shown, never used. NULL before the first one.
        sa.Column("strategy", sa.Text),
        sa.Column("atomic", sa.Text),
        # {topic: {added partition: {"topic_id": …, "before" and "ends": {other partition: end}}}}; see AddedEnds.
        sa.Column("added_ends", _JSON),
        sa.PrimaryKeyConstraint("grp", name="groups_pkey"),
        sa.CheckConstraint("char_length(grp) BETWEEN 1 AND 200", name="groups_grp_length"),
        comment="Who consumes for each group. The generation rises with every take-over: the fencing token.",
    )
    tables.add(
        "offsets",
        sa.Column("grp", sa.Text, nullable=False),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("part", sa.Integer, nullable=False),
        sa.Column("topic_id", sa.Text, nullable=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("updated_at", _TIME, nullable=False, server_default=sa.text("now()")),
        # How far a read_committed reader could have read when this was last moved; only shown, never used.
        sa.Column("log_end", sa.BigInteger),
        sa.Column("applied", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("duplicates", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("dead", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        # A leader of this epoch had the log up to epoch_offset, which is at or before next_offset.
        sa.Column("leader_epoch", sa.Integer),
        sa.Column("epoch_offset", sa.BigInteger),
        # At-most-once: the position has passed these offsets, and the end of their effect is not confirmed. NULL: none.
        sa.Column("unconfirmed_from", sa.BigInteger),
        sa.Column("unconfirmed_end", sa.BigInteger),
        sa.PrimaryKeyConstraint("grp", "topic", "part", name="offsets_pkey"),
        sa.CheckConstraint("next_offset >= 0 AND part >= 0", name="offsets_not_negative"),
        comment="The next offset of each partition to apply. Moves in the transaction of the effect.",
    )
    tables.add(
        "processed_messages",
        *_id_columns(),
        # The id first: it alone decides nearly every comparison in the index.
        sa.PrimaryKeyConstraint("message_id", "grp", "day", name="processed_messages_pkey"),
        postgresql_partition_by="RANGE (day)",
        comment="Ids of the messages whose effect is in the sink, by the day in the id.",
    )
    tables.add(
        "processed_messages_default",
        *_id_columns(),
        sa.PrimaryKeyConstraint("message_id", "grp", "day", name="processed_messages_default_pkey"),
        # For the query by group that finds the days to forget.
        sa.Index("processed_messages_default_days", "grp", "day", postgresql_where=sa.text("day > '1970-01-01'::date")),
        comment="Ids without a time, and of days that have no partition of their own.",
    )
    tables.attach_default("processed_messages")
    tables.add(
        "dead_letters",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("grp", sa.Text, nullable=False),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("topic_id", sa.Text, nullable=False),
        sa.Column("part", sa.Integer, nullable=False),
        sa.Column("message_offset", sa.BigInteger, nullable=False),
        sa.Column("message_id", _UUID),
        sa.Column("message_key", pg.BYTEA),
        sa.Column("message_value", pg.BYTEA),
        # [{"key": name, "value": base64 or null}, ...], in the message's order: names may repeat.
        sa.Column("message_headers", _JSON, nullable=False),
        sa.Column("message_time", _TIME, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("sqlstate", sa.Text),
        sa.Column("state", sa.Text, nullable=False, server_default=sa.text("'dead'")),
        sa.Column("attempts", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("died_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("last_failed_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("id", name="dead_letters_pkey"),
        sa.UniqueConstraint("grp", "topic", "part", "message_offset", "topic_id", name="dead_letters_place"),
        sa.CheckConstraint(
            "reason IN ('undecodable', 'no-id', 'too-old', 'failed', 'rejected', 'behind')", name="dead_letters_reason"
        ),
        sa.CheckConstraint("state IN ('dead', 'retry')", name="dead_letters_state"),
        # By hash: a key may be longer than an index takes.
        sa.Index("dead_letters_key", "grp", "topic", sa.text("sha256(message_key)")),
        # For the looks of each second: the first to be retried, the first behind another of each key, and what those
        # are behind, however many wait.
        sa.Index(
            "dead_letters_retry",
            *("grp", "topic", "part", "message_offset", "id"),
            postgresql_where=sa.text("state = 'retry'"),
        ),
        sa.Index(
            "dead_letters_behind",
            *("grp", "topic", "part", sa.text("sha256(message_key)"), "message_offset"),
            postgresql_where=sa.text("state = 'dead' AND reason = 'behind'"),
        ),
        sa.Index(
            "dead_letters_first",
            *("grp", "topic", sa.text("sha256(message_key)"), "part", "message_offset"),
            postgresql_where=sa.text("state = 'dead' AND reason <> 'behind'"),
        ),
        # With keep_order those that are behind others, slice by slice. An expression, because the primary key would be
        # taken for an order by id, and filter all of the others.
        sa.Index(
            "dead_letters_behind_by_id",
            *("grp", sa.text("(- id)")),
            postgresql_where=sa.text("state = 'dead' AND reason = 'behind'"),
        ),
        comment="Messages that could not be applied, whole. They wait for `outbox dead-letters retry` or `discard`.",
    )
    tables.add(
        "losses",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("grp", sa.Text, nullable=False),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("topic_id", sa.Text, nullable=False),
        sa.Column("part", sa.Integer, nullable=False),
        sa.Column("first_offset", sa.BigInteger, nullable=False),
        # Not included. NULL when it can't be known, as after a topic was recreated.
        sa.Column("end_offset", sa.BigInteger),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("found_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("accepted_at", _TIME),
        sa.PrimaryKeyConstraint("id", name="losses_pkey"),
        sa.CheckConstraint("kind IN ('retention', 'cut', 'recreated', 'given-up')", name="losses_kind"),
        # What Kafka lost is recorded once, however often the group is started. Each batch is given up once.
        sa.Index(
            "losses_open",
            *("grp", "topic", "part", "kind"),
            unique=True,
            postgresql_where=sa.text("accepted_at IS NULL AND kind <> 'given-up'"),
        ),
        comment="What Kafka lost before the group read it, which halts it until `outbox offsets reset` accepts it; and "
        "what a group has given up at-most-once.",
    )
    tables.add(
        "reservations",
        # The order in which messages were applied; per key that is the order of their offsets.
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("grp", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("message_id", _UUID, nullable=False),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("part", sa.Integer, nullable=False),
        sa.Column("message_offset", sa.BigInteger, nullable=False),
        # Calls with the same key go out one after the other; NULL: in no order.
        sa.Column("order_key", sa.Text),
        sa.Column("state", sa.Text, nullable=False, server_default=sa.text("'reserved'")),
        # The effect may have happened; the provider has not confirmed either.
        sa.Column("unsure", sa.Boolean, nullable=False, server_default=sa.text("false")),
        # The effect is to be cancelled. The call is never made again.
        sa.Column("taking_back", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("request", _JSON, nullable=False),
        sa.Column("response", _JSON),
        # Rises with every claim and never falls: the token that identifies a late answer.
        sa.Column("attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("budget_from", sa.Integer, nullable=False, server_default=sa.text("0")),
        # Until when the provider knows the key of the first attempt.
        sa.Column("key_until", _TIME),
        sa.Column("worker", sa.Text),
        sa.Column("last_error", sa.Text),
        # A later answer of the provider that contradicts the state.
        sa.Column("conflict", sa.Text),
        sa.Column("reserved_at", _TIME, nullable=False, server_default=sa.text("now()")),
        # While a call is under way: the end of its lease.
        sa.Column("next_attempt_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("settled_at", _TIME),
        # Behind an earlier call of its order_key, whose settlement releases it. Claims do not look at it until then.
        sa.Column("parked", sa.Boolean, nullable=False, server_default=sa.text("false")),
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
        sa.Index(
            "reservations_open",
            *("grp", "name", "parked", "next_attempt_at", "id"),
            postgresql_where=sa.text("state IN ('reserved', 'calling', 'cancelling')"),
        ),
        # By hash: a key may be longer than an index takes.
        sa.Index(
            "reservations_order",
            *("grp", "name", sa.text("hashtextextended(order_key, 0::bigint)"), "id"),
            postgresql_where=sa.text("settled_at IS NULL"),
        ),
        # For operators: few rows among many that are settled.
        sa.Index(
            "reservations_attention",
            *("grp", "name", "id"),
            postgresql_where=sa.text("state = 'stuck' OR conflict IS NOT NULL"),
        ),
        comment="Effects outside the database: reserved with the offsets, called with the id, then settled.",
        # Few of its rows are open and change, among all those that were settled: a fifth of the table would be millions
        # of dead rows, which each claim passes in ``reservations_open``.
        postgresql_with={"autovacuum_vacuum_scale_factor": 0.01},
    )
    tables.add_audit("What people did to groups by hand: offsets set, dead letters retried or discarded.")
    tables.add(
        "checkpoints",
        sa.Column("grp", sa.Text, nullable=False),
        # From Spark's checkpoint: a new checkpoint has another id.
        sa.Column("query_id", _UUID, nullable=False),
        sa.Column("batch_id", sa.BigInteger, nullable=False),
        # A hash of Spark's plan of the batch, and of those before it, which shows what a copy of a checkpoint follows:
        # after one was copied, two batches may have the same number.
        sa.Column("content", sa.Text, nullable=False),
        sa.Column("applied", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("duplicates", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("updated_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("grp", name="checkpoints_pkey"),
        sa.CheckConstraint("batch_id >= 0", name="checkpoints_not_negative"),
        comment="The last batch of each stream that was applied. Moves in the transaction of the effect.",
    )
    return tuple(tables.made.values())


def _id_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("grp", sa.Text, nullable=False),
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("message_id", _UUID, nullable=False),
        sa.Column("seen_at", _TIME, nullable=False, server_default=sa.text("now()")),
    ]
