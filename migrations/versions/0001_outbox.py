"""The outbox's tables. outbox/tables.py says what each column is for.

Frozen once it is released: outbox/tables.py may change, this file may not. A test compares the result of all revisions
with outbox/tables.py, through pg_catalog. Expressions are written as there, defaults as Postgres prints them.
"""

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql as pg

revision = "outbox_1"
down_revision = None
branch_labels = ("outbox",)
depends_on = None

_UUID7 = sa.text(
    "(encode(set_bit(set_bit(OVERLAY(uuid_send(gen_random_uuid()) PLACING "
    "SUBSTRING(int8send(((EXTRACT(epoch FROM clock_timestamp()) * (1000)::numeric))::bigint) FROM 3) FROM 1 FOR 6), "
    "(52)::bigint, 1), (53)::bigint, 1), 'hex'::text))::uuid"
)
_KEY_HASH = sa.text("hashtextextended(aggregate_id, 0::bigint)")
_HEADERS = (
    "jsonb_typeof(headers) = 'object' AND NOT pg_catalog.jsonb_path_exists(headers, '$.keyvalue() ? ("
    '@.value.type() != "string" || !(@.key like_regex "^[A-Za-z0-9._-]{1,100}$") || '
    '@.key like_regex "^(ce_|(aggregate-type|event-type|id)$)" flag "i" && @.key != "ce_subject" || '
    '@.key like_regex "^(content-type|idempotency-key|traceparent|tracestate)$" flag "i" '
    '&& @.key like_regex "[A-Z]" || '
    '@.key == "idempotency-key" && @.value like_regex "[\\u0001-\\u001f\\u007f]")\') AND '
    "char_length(headers ->> 'idempotency-key'::text) BETWEEN 1 AND 255 AND "
    "char_length(headers ->> 'ce_subject'::text) BETWEEN 1 AND 1000"
)
_NO_RELAY_HEADER = (
    'NOT pg_catalog.jsonb_path_exists(headers, \'$.keyvalue() ? (@.key like_regex "^outbox-" flag "i")\')'
)
_SIZE = (
    "octet_length(aggregate_id) + coalesce(octet_length(payload::text), octet_length(payload_bytes), 0)"
    " + coalesce(octet_length(headers::text), 0) <= 1000000"
)
_NOW = sa.text("now()")
_ZERO = sa.text("0")
_FALSE = sa.text("false")
_POLLING = sa.text("'polling'::text")
_SESSION_USER = sa.text("SESSION_USER")


def upgrade() -> None:
    schema, lane_count = _settings()
    lane_of_key = (
        "(abs(mod(hashtextextended(aggregate_id, hashtextextended(aggregate_type, (0)::bigint)), "
        f"({lane_count})::bigint)))::smallint"
    )
    op.execute(sa.schema.CreateSchema(schema, if_not_exists=True))
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("lane", sa.SmallInteger(), sa.Computed(lane_of_key, persisted=True), nullable=False),
        sa.Column("event_id", pg.UUID(), nullable=False, server_default=_UUID7),
        *_contents(),
        sa.Column("created_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("from_relay", sa.Boolean(), nullable=False, server_default=_FALSE),
        sa.PrimaryKeyConstraint("lane", "id", name="events_pkey"),
        *_checks("events", f"from_relay OR {_NO_RELAY_HEADER}"),
        schema=schema,
        comment="Events written in business transactions and not yet published. Insert only; the relay deletes.",
    )
    lanes = op.create_table(
        "lanes",
        sa.Column("lane", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("owner", sa.Text()),
        sa.Column("epoch", sa.BigInteger(), nullable=False, server_default=_ZERO),
        sa.Column("last_batch", sa.BigInteger()),
        sa.Column(
            "lease_until", _time(), nullable=False, server_default=sa.text("'-infinity'::timestamp with time zone")
        ),
        sa.Column("source", sa.Text(), nullable=False, server_default=_POLLING),
        sa.Column("streaming", sa.Boolean(), nullable=False, server_default=_FALSE),
        sa.Column("commit_lsn", sa.BigInteger()),
        sa.Column("transactional_id", sa.Text()),
        sa.Column("low_water_mark", sa.BigInteger()),
        sa.Column("mark_failures", sa.Text()),
        sa.PrimaryKeyConstraint("lane", name="lanes_pkey"),
        sa.CheckConstraint("lane BETWEEN 0 AND 255", name="lanes_lane_range"),
        sa.CheckConstraint("epoch >= 0 AND last_batch >= 0", name="lanes_counters"),
        sa.CheckConstraint("source IN ('polling', 'wal')", name="lanes_source"),
        sa.CheckConstraint("(low_water_mark IS NULL) = (mark_failures IS NULL)", name="lanes_mark"),
        schema=schema,
        comment="Who publishes each lane. The epoch rises with every change of owner: the fencing token.",
    )
    op.create_table(
        "relays",
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("started_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("heartbeat_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("alive_until", _time(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False, server_default=_POLLING),
        sa.Column("obeys", pg.ARRAY(sa.BigInteger()), nullable=False, server_default=sa.text("'{}'::bigint[]")),
        sa.Column("session", sa.BigInteger()),
        sa.PrimaryKeyConstraint("instance", name="relays_pkey"),
        sa.CheckConstraint("char_length(instance) BETWEEN 1 AND 200", name="relays_instance_length"),
        schema=schema,
        comment="Relays that are running or ran lately; lanes are shared out evenly among the living.",
    )
    op.create_table(
        "failures",
        sa.Column("lane", sa.SmallInteger(), nullable=False),
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("event_id", pg.UUID(), nullable=False),
        sa.Column("aggregate_type", sa.Text(), nullable=False),
        sa.Column("aggregate_id", sa.Text(), nullable=False),
        sa.Column("blocks", sa.Boolean(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=False),
        sa.Column("first_failed_at", _time(), nullable=False),
        sa.Column("last_failed_at", _time(), nullable=False),
        sa.Column("next_attempt_at", _time(), nullable=False),
        sa.PrimaryKeyConstraint("lane", "id", name="failures_pkey"),
        sa.CheckConstraint("attempts >= 0", name="failures_attempts"),
        schema=schema,
        comment="Events that could not be published as they are, and whose key waits. infinity: waits for an operator.",
    )
    op.create_index("failures_key_hash", "failures", ["lane", "aggregate_type", _KEY_HASH], schema=schema)
    op.create_index(
        "failures_next_attempt",
        "failures",
        ["lane", "next_attempt_at", "id"],
        schema=schema,
        postgresql_where=sa.text("next_attempt_at < 'infinity'"),
    )
    op.create_table(
        "dead_letters",
        *_event(),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=False),
        sa.Column("first_failed_at", _time(), nullable=False),
        sa.Column("dead_at", _time(), nullable=False, server_default=_NOW),
        sa.PrimaryKeyConstraint("lane", "id", name="dead_letters_pkey"),
        schema=schema,
        comment="Events that failed for good, whole. They wait for `outbox dead-letters retry` or `discard`.",
    )
    op.create_index("dead_letters_event_id", "dead_letters", ["event_id"], schema=schema)
    op.create_table(
        "published",
        *_archived(),
        schema=schema,
        postgresql_partition_by="RANGE (published_at)",
        comment="The archive: events that were published, by day. Kept for as long as relay.archive_days says.",
    )
    op.create_table(
        "published_default",
        *_archived(),
        schema=schema,
        comment="Published events of days that have no partition of their own.",
    )
    for table in ("published", "published_default"):
        op.create_index(f"{table}_event_id", table, ["event_id"], schema=schema)
        op.create_index(f"{table}_key_hash", table, ["aggregate_type", _KEY_HASH], schema=schema)
    op.execute(
        sa.DDL(
            "ALTER TABLE %(parent)s ATTACH PARTITION %(partition)s DEFAULT",
            context={"parent": _quoted(schema, "published"), "partition": _quoted(schema, "published_default")},
        )
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", _time(), nullable=False, server_default=_NOW),
        sa.Column("who", sa.Text(), nullable=False, server_default=_SESSION_USER),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("why", sa.Text()),
        sa.Column("details", pg.JSONB(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="audit_pkey"),
        schema=schema,
        comment="What people did to events by hand: retried, discarded, replayed, reconciled.",
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
        sa.Column("flushed_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("created_at", _time(), nullable=False, server_default=_NOW),
        sa.PrimaryKeyConstraint("slot", name="streams_pkey"),
        schema=schema,
        comment="The replication slot that the outbox is read through, and the position up to which it keeps no WAL.",
    )
    op.create_table(
        "pauses",
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("requested_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("requested_by", sa.Text(), nullable=False, server_default=_SESSION_USER),
        sa.Column("reason", sa.Text()),
        sa.PrimaryKeyConstraint("number", name="pauses_pkey"),
        sa.UniqueConstraint("scope", "name", name="pauses_scope_name"),
        sa.CheckConstraint("scope IN ('all', 'lane', 'topic')", name="pauses_scope"),
        sa.CheckConstraint("(scope = 'all') = (name = '')", name="pauses_name"),
        sa.CheckConstraint("scope <> 'lane' OR name ~ '^(0|[1-9][0-9]{0,2})$'", name="pauses_lane"),
        schema=schema,
        comment="What relays must not publish for now.",
    )
    op.create_table(
        "scheduled",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("event_id", pg.UUID(), nullable=False, server_default=_UUID7),
        *_contents(),
        sa.Column("not_before", _time(), nullable=False),
        sa.Column("scheduled_at", _time(), nullable=False, server_default=_NOW),
        sa.PrimaryKeyConstraint("id", name="scheduled_pkey"),
        *_checks("scheduled", _NO_RELAY_HEADER),
        sa.CheckConstraint(
            "coalesce(extract(year FROM not_before AT TIME ZONE 'UTC') BETWEEN 1::numeric AND 9998::numeric, false)",
            name="scheduled_not_before",
        ),
        schema=schema,
        comment="Events that are not to be published before a time. A relay moves them into events when it has come.",
    )
    op.create_index("scheduled_due", "scheduled", ["not_before", "id"], schema=schema)
    op.create_index("scheduled_event_id", "scheduled", ["event_id"], schema=schema)
    op.create_table(
        "verified",
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("verified_until", _time(), nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False, server_default=_ZERO)
            for name in ("missing", "repeated", "other", "skipped")
        ),
        sa.Column("checked_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("differences", pg.JSONB(), nullable=False, server_default=sa.text("'[]'::jsonb")),
        sa.PrimaryKeyConstraint("topic", name="verified_pkey"),
        schema=schema,
        comment="How far `outbox audit --follow` has compared each topic, and what it has found.",
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("aggregate_type", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("event_id", pg.UUID(), nullable=False),
        sa.Column("aggregate_id", sa.Text(), nullable=False),
        sa.Column("event_type", sa.Text(), nullable=False),
        sa.Column("added_at", _time(), nullable=False, server_default=_NOW),
        sa.PrimaryKeyConstraint("aggregate_type", "idempotency_key", name="idempotency_keys_pkey"),
        schema=schema,
        comment="Keys of events that were added once and are not added again. Kept for relay.idempotency_days.",
    )
    for column in ("event_id", "added_at"):
        op.create_index(f"idempotency_keys_{column}", "idempotency_keys", [column], schema=schema)
    op.bulk_insert(lanes, [{"lane": lane} for lane in range(lane_count)])


def downgrade() -> None:
    schema, _ = _settings()
    # The archive's partitions are dropped with it.
    tables = (
        "idempotency_keys",
        "verified",
        "scheduled",
        "pauses",
        "streams",
        "audit",
        "published",
        "dead_letters",
        "failures",
        "relays",
        "lanes",
    )
    for table in (*tables, "events"):
        op.drop_table(table, schema=schema)


def _settings() -> tuple[str, int]:
    """Return the schema and the number of lanes. A host application that includes this history sets neither."""
    attributes = context.config.attributes
    return attributes.get("schema", "outbox"), int(attributes.get("lanes", 4))


def _time() -> sa.DateTime:
    return sa.DateTime(timezone=True)


def _contents() -> list[sa.Column[Any]]:
    """Return the columns that a writer fills."""
    return [
        sa.Column("aggregate_type", sa.Text(), nullable=False),
        sa.Column("aggregate_id", sa.Text(), nullable=False),
        sa.Column("event_type", sa.Text(), nullable=False),
        sa.Column("payload", pg.JSONB()),
        sa.Column("payload_bytes", pg.BYTEA()),
        sa.Column("headers", pg.JSONB()),
    ]


def _checks(table: str, own_headers: str) -> list[sa.CheckConstraint]:
    """Return the constraints on what a writer gives."""
    return [
        sa.CheckConstraint("char_length(aggregate_type) BETWEEN 1 AND 200", name=f"{table}_aggregate_type_length"),
        sa.CheckConstraint("char_length(aggregate_id) BETWEEN 1 AND 1000", name=f"{table}_aggregate_id_length"),
        sa.CheckConstraint("char_length(event_type) BETWEEN 1 AND 200", name=f"{table}_event_type_length"),
        sa.CheckConstraint("pg_catalog.num_nonnulls(payload, payload_bytes) <= 1", name=f"{table}_one_payload"),
        sa.CheckConstraint(_HEADERS, name=f"{table}_headers_text"),
        sa.CheckConstraint(own_headers, name=f"{table}_relay_headers"),
        sa.CheckConstraint(_SIZE, name=f"{table}_size"),
    ]


def _event() -> list[sa.Column[Any]]:
    """Return the columns of an event that has left ``events``."""
    return [
        sa.Column("lane", sa.SmallInteger(), nullable=False),
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("event_id", pg.UUID(), nullable=False),
        *_contents(),
        sa.Column("created_at", _time(), nullable=False),
    ]


def _archived() -> list[sa.Column[Any]]:
    """Return the columns of the archive."""
    return [
        *_event(),
        sa.Column("published_at", _time(), nullable=False, server_default=_NOW),
        sa.Column("topic", sa.Text()),
        sa.Column("partition", sa.Integer()),
        sa.Column("offset", sa.BigInteger()),
    ]


def _quoted(schema: str, name: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name))
