"""The outbox's tables in SQLAlchemy Core. Needs no engine and no connection.

``events`` is append-and-delete: writers INSERT, the relay DELETEs what Kafka has acknowledged, and no row is ever
UPDATEd. So the hot table holds only unpublished events, and Debezium's outbox EventRouter can read the same table.

The database computes ``lane`` from the key, so that any language, a trigger or plain SQL can insert. For the same
reason the CHECK constraints repeat the writer's checks.

A host application's migration creates them with its own search path. So that no function or operator that is planted
in one of its schemas is taken for pg_catalog's, arguments have exactly the types of pg_catalog's functions; where those
take any type, the name is qualified. Defaults and expressions are written as Postgres prints them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from outbox.errors import ConfigurationError
from outbox.event import (
    CONTENT_TYPE,
    DEFAULT_SCHEMA,
    IDEMPOTENCY_KEY,
    MAX_AGGREGATE_ID,
    MAX_AGGREGATE_TYPE,
    MAX_EVENT_BYTES,
    MAX_EVENT_TYPE,
    MAX_IDEMPOTENCY_KEY,
    RELAY_HEADER_PREFIX,
    RESERVED_HEADERS,
    TRACEPARENT,
    TRACESTATE,
)

DEFAULT_LANES: Final = 4
MAX_LANES: Final = 256

# A UUIDv7 (RFC 9562) for rows without an event_id: 48 bits of Unix milliseconds over 74 random bits. An expression,
# because uuidv7() is new in Postgres 18, and a host application's alembic autogenerate would not create a function.
# Bits 4-7 of byte 6 hold the version: a random v4's 0100 becomes 0111. As Postgres prints it, like every default here:
# a host's autogenerate with compare_server_default compares the texts, and then two values, which differ.
_UUID7: Final = (
    "(encode(set_bit(set_bit(OVERLAY(uuid_send(gen_random_uuid()) PLACING "
    "SUBSTRING(int8send(((EXTRACT(epoch FROM clock_timestamp()) * (1000)::numeric))::bigint) FROM 3) FROM 1 FOR 6), "
    "(52)::bigint, 1), (53)::bigint, 1), 'hex'::text))::uuid"
)

# A btree entry has at most 2,704 bytes, and a key may have 4,000.
_KEY_HASH: Final = "hashtextextended(aggregate_id, 0::bigint)"

# What event.check_header refuses: names that the relay sets, in any case, and others than lower case of those it reads.
_BAD_HEADER: Final = (
    '@.value.type() != "string" || !(@.key like_regex "^[A-Za-z0-9._-]{1,100}$") || '
    f'@.key like_regex "^(ce_|({"|".join(sorted(RESERVED_HEADERS))})$)" flag "i" || '
    f'@.key like_regex "^({CONTENT_TYPE}|{IDEMPOTENCY_KEY}|{TRACEPARENT}|{TRACESTATE})$" flag "i" '
    '&& @.key like_regex "[A-Z]" || '
    f'@.key == "{IDEMPOTENCY_KEY}" && !(@.value like_regex "^[^\\u0001-\\u001f\\u007f]{{1,{MAX_IDEMPOTENCY_KEY}}}$")'
)

# The relay recognizes copies of dead letters and replays by these headers.
_NO_RELAY_HEADER: Final = (
    "NOT pg_catalog.jsonb_path_exists(headers, "
    f'\'$.keyvalue() ? (@.key like_regex "^{RELAY_HEADER_PREFIX}" flag "i")\')'
)


@dataclass(frozen=True, slots=True)
class OutboxTables:
    """The tables of one outbox, bound to their MetaData."""

    events: sa.Table
    lanes: sa.Table
    relays: sa.Table
    failures: sa.Table
    dead_letters: sa.Table
    published: sa.Table
    published_default: sa.Table
    audit: sa.Table
    streams: sa.Table
    pauses: sa.Table
    scheduled: sa.Table
    verified: sa.Table
    idempotency_keys: sa.Table

    @property
    def all(self) -> tuple[sa.Table, ...]:
        """Every table, in the order in which they can be created."""
        return (
            self.events,
            self.lanes,
            self.relays,
            self.failures,
            self.dead_letters,
            self.published,
            self.published_default,
            self.audit,
            self.streams,
            self.pauses,
            self.scheduled,
            self.verified,
            self.idempotency_keys,
        )


def lane_expression(lanes: int) -> str:
    """Return the SQL of an event's lane, 0 to ``lanes`` - 1: a hash of the key, so one key is always in one lane."""
    if not 1 <= lanes <= MAX_LANES:
        raise ConfigurationError(f"lanes must be 1 to {MAX_LANES}, not {lanes}")
    key = "hashtextextended(aggregate_id, hashtextextended(aggregate_type, (0)::bigint))"
    return f"(abs(mod({key}, ({int(lanes)})::bigint)))::smallint"


def outbox_tables(metadata: sa.MetaData, schema: str = DEFAULT_SCHEMA, lanes: int = DEFAULT_LANES) -> OutboxTables:
    """Add the outbox's tables to a host application's MetaData (for its own alembic history) and return them.

    lanes is the number of lanes that ``events.lane`` is computed for; the host's migration must also insert the rows
    0 to lanes - 1 into ``lanes`` (see docs/operations/migrations.md). Raises ConfigurationError when it is out of
    range.
    """
    events = sa.Table(
        "events",
        metadata,
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("lane", sa.SmallInteger, sa.Computed(lane_expression(lanes), persisted=True), nullable=False),
        sa.Column("event_id", pg.UUID(as_uuid=True), nullable=False, server_default=sa.text(_UUID7)),
        sa.Column("aggregate_type", sa.Text, nullable=False),
        sa.Column("aggregate_id", sa.Text, nullable=False),
        sa.Column("event_type", sa.Text, nullable=False),
        sa.Column("payload", pg.JSONB(none_as_null=True)),
        sa.Column("payload_bytes", pg.BYTEA),
        sa.Column("headers", pg.JSONB(none_as_null=True)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        # Inserted by the relay or an operator's command: a copy of a dead letter, a replay, a retry. Writers must not
        # have the right to set it: see docs/operations/migrations.md.
        sa.Column("from_relay", sa.Boolean, nullable=False, server_default=sa.text("false")),
        # (lane, id), not (id): a relay reads one lane in id order, and this index has that order.
        sa.PrimaryKeyConstraint("lane", "id", name="events_pkey"),
        *_checks("events", f"from_relay OR {_NO_RELAY_HEADER}"),
        schema=schema,
        comment="Events written in business transactions and not yet published. Insert only; the relay deletes.",
    )
    lanes_table = sa.Table(
        "lanes",
        metadata,
        sa.Column("lane", sa.SmallInteger, nullable=False, autoincrement=False),
        sa.Column("owner", sa.Text),
        sa.Column("epoch", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        # The last batch that exactly-once delivery settled here; NULL before the first one.
        sa.Column("last_batch", sa.BigInteger),
        sa.Column(
            "lease_until",
            sa.DateTime(timezone=True),
            nullable=False,
            server_default=sa.text("'-infinity'::timestamp with time zone"),
        ),
        sa.Column("source", sa.Text, nullable=False, server_default=sa.text("'polling'::text")),
        # Source wal: the lane takes its events from the stream, not from the table.
        sa.Column("streaming", sa.Boolean, nullable=False, server_default=sa.text("false")),
        # Source wal: the last event settled, by its transaction's commit record (a byte position in the WAL).
        sa.Column("commit_lsn", sa.BigInteger),
        # Exactly-once: the prefix of the ids under which the lane may have been written; the next holder fences them
        # first. NULL: no id needs to be fenced.
        sa.Column("transactional_id", sa.Text),
        # Source polling: the next holder may read above this id if the failures up to it are these (a digest).
        sa.Column("low_water_mark", sa.BigInteger),
        sa.Column("mark_failures", sa.Text),
        sa.PrimaryKeyConstraint("lane", name="lanes_pkey"),
        sa.CheckConstraint(f"lane BETWEEN 0 AND {MAX_LANES - 1}", name="lanes_lane_range"),
        sa.CheckConstraint("epoch >= 0 AND last_batch >= 0", name="lanes_counters"),
        sa.CheckConstraint("source IN ('polling', 'wal')", name="lanes_source"),
        sa.CheckConstraint("(low_water_mark IS NULL) = (mark_failures IS NULL)", name="lanes_mark"),
        schema=schema,
        comment="Who publishes each lane. The epoch rises with every change of owner: the fencing token.",
    )
    relays = sa.Table(
        "relays",
        metadata,
        sa.Column("instance", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("alive_until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("source", sa.Text, nullable=False, server_default=sa.text("'polling'::text")),
        # The numbers of the pauses that it obeys.
        sa.Column("obeys", pg.ARRAY(sa.BigInteger), nullable=False, server_default=sa.text("'{}'::bigint[]")),
        # The number that its session has locked (pg_advisory_lock) for as long as it lives: others may take its lanes
        # when the lock is gone. NULL: when their leases have expired.
        sa.Column("session", sa.BigInteger),
        sa.PrimaryKeyConstraint("instance", name="relays_pkey"),
        sa.CheckConstraint("char_length(instance) BETWEEN 1 AND 200", name="relays_instance_length"),
        schema=schema,
        comment="Relays that are running or ran lately; lanes are shared out evenly among the living.",
    )
    failures = sa.Table(
        "failures",
        metadata,
        sa.Column("lane", sa.SmallInteger, nullable=False),
        sa.Column("id", sa.BigInteger, nullable=False),
        sa.Column("event_id", pg.UUID(as_uuid=True), nullable=False),
        sa.Column("aggregate_type", sa.Text, nullable=False),
        sa.Column("aggregate_id", sa.Text, nullable=False),
        sa.Column("blocks", sa.Boolean, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("last_error", sa.Text, nullable=False),
        sa.Column("first_failed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_failed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("lane", "id", name="failures_pkey"),
        sa.CheckConstraint("attempts >= 0", name="failures_attempts"),
        sa.Index("failures_key_hash", "lane", "aggregate_type", sa.text(_KEY_HASH)),
        sa.Index(
            "failures_next_attempt",
            "lane",
            "next_attempt_at",
            "id",
            postgresql_where=sa.text("next_attempt_at < 'infinity'"),
        ),
        schema=schema,
        comment="Events that could not be published as they are, and whose key waits. infinity: waits for an operator.",
    )
    dead_letters = sa.Table(
        "dead_letters",
        metadata,
        *_event_columns(),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("last_error", sa.Text, nullable=False),
        sa.Column("first_failed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("dead_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("lane", "id", name="dead_letters_pkey"),
        sa.Index("dead_letters_event_id", "event_id"),
        schema=schema,
        comment="Events that failed for good, whole. They wait for `outbox dead-letters retry` or `discard`.",
    )
    published = sa.Table(
        "published",
        metadata,
        *_archive_columns(),
        sa.Index("published_event_id", "event_id"),
        sa.Index("published_key_hash", "aggregate_type", sa.text(_KEY_HASH)),
        schema=schema,
        postgresql_partition_by="RANGE (published_at)",
        comment="The archive: events that were published, by day. Kept for as long as relay.archive_days says.",
    )
    published_default = sa.Table(
        "published_default",
        metadata,
        *_archive_columns(),
        sa.Index("published_default_event_id", "event_id"),
        sa.Index("published_default_key_hash", "aggregate_type", sa.text(_KEY_HASH)),
        schema=schema,
        comment="Published events of days that have no partition of their own.",
    )
    parent_name, default_name = (_quoted(schema, table.name) for table in (published, published_default))
    sa.event.listen(
        published_default,
        "after_create",
        sa.DDL(  # type: ignore[no-untyped-call]
            "ALTER TABLE %(parent)s ATTACH PARTITION %(partition)s DEFAULT",
            context={"parent": parent_name, "partition": default_name},
        ),
    )
    audit = sa.Table(
        "audit",
        metadata,
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("who", sa.Text, nullable=False, server_default=sa.text("SESSION_USER")),
        sa.Column("what", sa.Text, nullable=False),
        sa.Column("why", sa.Text),
        sa.Column("details", pg.JSONB(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="audit_pkey"),
        schema=schema,
        comment="What people did to events by hand: retried, discarded, replayed, reconciled.",
    )
    streams = sa.Table(
        "streams",
        metadata,
        sa.Column("slot", sa.Text, nullable=False),
        sa.Column("publication", sa.Text, nullable=False),
        # Changes whenever the publication does: changes that were unpublished even for a moment are silently lost.
        sa.Column("publication_version", sa.Text, nullable=False),
        sa.Column("system_identifier", sa.Text, nullable=False),
        sa.Column("timeline", sa.Integer, nullable=False),
        # Transactions older than this one may have ended before the slot begins; no lane streams while one is open.
        sa.Column("opened_xid", sa.BigInteger, nullable=False),
        # Written before it is confirmed to the server: the slot's own position is never above it, unless another client
        # moved it.
        sa.Column("flushed_lsn", sa.BigInteger, nullable=False),
        sa.Column("flushed_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("slot", name="streams_pkey"),
        schema=schema,
        comment="The replication slot that the outbox is read through, and the position up to which it keeps no WAL.",
    )
    pauses = sa.Table(
        "pauses",
        metadata,
        sa.Column("number", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("scope", sa.Text, nullable=False),
        # The lane's number or the topic's name.
        sa.Column("name", sa.Text, nullable=False),
        # Operators have no right to set these two.
        sa.Column("requested_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("requested_by", sa.Text, nullable=False, server_default=sa.text("SESSION_USER")),
        sa.Column("reason", sa.Text),
        sa.PrimaryKeyConstraint("number", name="pauses_pkey"),
        sa.UniqueConstraint("scope", "name", name="pauses_scope_name"),
        sa.CheckConstraint("scope IN ('all', 'lane', 'topic')", name="pauses_scope"),
        sa.CheckConstraint("(scope = 'all') = (name = '')", name="pauses_name"),
        sa.CheckConstraint("scope <> 'lane' OR name ~ '^(0|[1-9][0-9]{0,2})$'", name="pauses_lane"),
        schema=schema,
        comment="What relays must not publish for now.",
    )
    scheduled = sa.Table(
        "scheduled",
        metadata,
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("event_id", pg.UUID(as_uuid=True), nullable=False, server_default=sa.text(_UUID7)),
        sa.Column("aggregate_type", sa.Text, nullable=False),
        sa.Column("aggregate_id", sa.Text, nullable=False),
        sa.Column("event_type", sa.Text, nullable=False),
        sa.Column("payload", pg.JSONB(none_as_null=True)),
        sa.Column("payload_bytes", pg.BYTEA),
        sa.Column("headers", pg.JSONB(none_as_null=True)),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=False),
        sa.Column("scheduled_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("id", name="scheduled_pkey"),
        # Those of events: a row that is accepted here is never refused there, where it would keep the others waiting.
        *_checks("scheduled", _NO_RELAY_HEADER),
        # Times that every language has; infinity has no year.
        sa.CheckConstraint(
            "coalesce(extract(year FROM not_before AT TIME ZONE 'UTC') BETWEEN 1::numeric AND 9998::numeric, false)",
            name="scheduled_not_before",
        ),
        sa.Index("scheduled_due", "not_before", "id"),
        sa.Index("scheduled_event_id", "event_id"),
        schema=schema,
        comment="Events that are not to be published before a time. A relay moves them into events when it has come.",
    )
    verified = sa.Table(
        "verified",
        metadata,
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("verified_until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("missing", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("repeated", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("other", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("skipped", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("checked_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("differences", pg.JSONB(none_as_null=True), nullable=False, server_default=sa.text("'[]'::jsonb")),
        sa.PrimaryKeyConstraint("topic", name="verified_pkey"),
        schema=schema,
        comment="How far `outbox audit --follow` has compared each topic, and what it has found.",
    )
    idempotency_keys = sa.Table(
        "idempotency_keys",
        metadata,
        sa.Column("aggregate_type", sa.Text, nullable=False),
        sa.Column("idempotency_key", sa.Text, nullable=False),
        sa.Column("event_id", pg.UUID(as_uuid=True), nullable=False),
        # With them the key is that of another fact, not of the same one again.
        sa.Column("aggregate_id", sa.Text, nullable=False),
        sa.Column("event_type", sa.Text, nullable=False),
        sa.Column("added_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("aggregate_type", "idempotency_key", name="idempotency_keys_pkey"),
        sa.Index("idempotency_keys_event_id", "event_id"),
        sa.Index("idempotency_keys_added_at", "added_at"),
        schema=schema,
        comment="Keys of events that were added once and are not added again. Kept for relay.idempotency_days.",
    )
    return OutboxTables(
        events=events,
        lanes=lanes_table,
        relays=relays,
        failures=failures,
        dead_letters=dead_letters,
        published=published,
        published_default=published_default,
        audit=audit,
        streams=streams,
        pauses=pauses,
        scheduled=scheduled,
        verified=verified,
        idempotency_keys=idempotency_keys,
    )


def _checks(table: str, own_headers: str) -> list[sa.CheckConstraint]:
    """Return the constraints on what a writer gives. ``own_headers``: no header is one by which relays know copies."""
    return [
        sa.CheckConstraint(
            f"char_length(aggregate_type) BETWEEN 1 AND {MAX_AGGREGATE_TYPE}", name=f"{table}_aggregate_type_length"
        ),
        sa.CheckConstraint(
            f"char_length(aggregate_id) BETWEEN 1 AND {MAX_AGGREGATE_ID}", name=f"{table}_aggregate_id_length"
        ),
        sa.CheckConstraint(
            f"char_length(event_type) BETWEEN 1 AND {MAX_EVENT_TYPE}", name=f"{table}_event_type_length"
        ),
        sa.CheckConstraint("pg_catalog.num_nonnulls(payload, payload_bytes) <= 1", name=f"{table}_one_payload"),
        # Text values only: a number or a list has no single form as a Kafka header. Names that the relay sets itself
        # are refused, and names that Kafka tools can't show.
        sa.CheckConstraint(
            "jsonb_typeof(headers) = 'object' AND "
            f"NOT pg_catalog.jsonb_path_exists(headers, '$.keyvalue() ? ({_BAD_HEADER})')",
            name=f"{table}_headers_text",
        ),
        sa.CheckConstraint(own_headers, name=f"{table}_relay_headers"),
        sa.CheckConstraint(
            "octet_length(aggregate_id) + coalesce(octet_length(payload::text), octet_length(payload_bytes), 0)"
            f" + coalesce(octet_length(headers::text), 0) <= {MAX_EVENT_BYTES}",
            name=f"{table}_size",
        ),
    ]


def _event_columns() -> list[sa.Column[Any]]:
    """Return the columns of an event that has left ``events``."""
    return [
        sa.Column("lane", sa.SmallInteger, nullable=False),
        sa.Column("id", sa.BigInteger, nullable=False),
        sa.Column("event_id", pg.UUID(as_uuid=True), nullable=False),
        sa.Column("aggregate_type", sa.Text, nullable=False),
        sa.Column("aggregate_id", sa.Text, nullable=False),
        sa.Column("event_type", sa.Text, nullable=False),
        sa.Column("payload", pg.JSONB(none_as_null=True)),
        sa.Column("payload_bytes", pg.BYTEA),
        sa.Column("headers", pg.JSONB(none_as_null=True)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    ]


def _archive_columns() -> list[sa.Column[Any]]:
    """Return an archived event's columns. Its place in Kafka is NULL if it was settled from a marker after a crash."""
    return [
        *_event_columns(),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("topic", sa.Text),
        sa.Column("partition", sa.Integer),
        sa.Column("offset", sa.BigInteger),
    ]


def _quoted(schema: str, name: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name))
