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
    CE_SUBJECT,
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

_TIME: Final = sa.DateTime(timezone=True)
_JSON: Final = pg.JSONB(none_as_null=True)
_UUID: Final = pg.UUID(as_uuid=True)

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
    f'@.key like_regex "^(ce_|({"|".join(sorted(RESERVED_HEADERS))})$)" flag "i" && @.key != "{CE_SUBJECT}" || '
    f'@.key like_regex "^({CONTENT_TYPE}|{IDEMPOTENCY_KEY}|{TRACEPARENT}|{TRACESTATE})$" flag "i" '
    '&& @.key like_regex "[A-Z]" || '
    f'@.key == "{IDEMPOTENCY_KEY}" && @.value like_regex "[\\u0001-\\u001f\\u007f]"'
)

# Regular expressions that count take Postgres milliseconds, in the writer's transaction. NULL, for no header, passes.
_LENGTHS: Final = (
    f"char_length(headers ->> '{IDEMPOTENCY_KEY}'::text) BETWEEN 1 AND {MAX_IDEMPOTENCY_KEY} "
    f"AND char_length(headers ->> '{CE_SUBJECT}'::text) BETWEEN 1 AND {MAX_AGGREGATE_ID}"
)

# The relay recognizes copies of dead letters and replays by these headers.
_NO_RELAY_HEADER: Final = (
    "NOT pg_catalog.jsonb_path_exists(headers, "
    f'\'$.keyvalue() ? (@.key like_regex "^{RELAY_HEADER_PREFIX}" flag "i")\')'
)


class TableBuilder:
    """Adds the tables of one schema to a MetaData. ``made`` has them by name."""

    def __init__(self, metadata: sa.MetaData, schema: str) -> None:
        self.made: dict[str, sa.Table] = {}
        self._metadata = metadata
        self._schema = schema

    def add(self, name: str, *items: sa.schema.SchemaItem, **options: Any) -> None:
        self.made[name] = sa.Table(name, self._metadata, *items, schema=self._schema, **options)

    def add_audit(self, comment: str) -> None:
        """Add the table of what operators did, by whom and why."""
        self.add(
            "audit",
            sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
            sa.Column("at", _TIME, nullable=False, server_default=sa.text("now()")),
            sa.Column("who", sa.Text, nullable=False, server_default=sa.text("SESSION_USER")),
            sa.Column("what", sa.Text, nullable=False),
            sa.Column("why", sa.Text),
            sa.Column("details", _JSON, nullable=False),
            sa.PrimaryKeyConstraint("id", name="audit_pkey"),
            comment=comment,
        )

    def attach_default(self, parent: str) -> None:
        """Make ``{parent}_default`` the parent's partition for rows that have no other, as soon as it is created."""
        default = f"{parent}_default"
        names = {"parent": self._quoted(parent), "partition": self._quoted(default)}
        attach = sa.DDL("ALTER TABLE %(parent)s ATTACH PARTITION %(partition)s DEFAULT", context=names)  # type: ignore[no-untyped-call]
        sa.event.listen(self.made[default], "after_create", attach)

    def _quoted(self, name: str) -> str:
        return ".".join('"' + part.replace('"', '""') + '"' for part in (self._schema, name))


@dataclass(frozen=True)
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
        return tuple(vars(self).values())


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
    tables = TableBuilder(metadata, schema)
    tables.add(
        "events",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("lane", sa.SmallInteger, sa.Computed(lane_expression(lanes), persisted=True), nullable=False),
        sa.Column("event_id", _UUID, nullable=False, server_default=sa.text(_UUID7)),
        *_written_columns(),
        sa.Column("created_at", _TIME, nullable=False, server_default=sa.text("now()")),
        # Inserted by the relay or an operator's command: a copy of a dead letter, a replay, a retry. Writers must not
        # have the right to set it: see docs/operations/migrations.md.
        sa.Column("from_relay", sa.Boolean, nullable=False, server_default=sa.text("false")),
        # (lane, id), not (id): a relay reads one lane in id order, and this index has that order.
        sa.PrimaryKeyConstraint("lane", "id", name="events_pkey"),
        *_checks("events", f"from_relay OR {_NO_RELAY_HEADER}"),
        comment="Events written in business transactions and not yet published. Insert only; the relay deletes.",
    )
    tables.add(
        "lanes",
        sa.Column("lane", sa.SmallInteger, nullable=False, autoincrement=False),
        sa.Column("owner", sa.Text),
        sa.Column("epoch", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        # The last batch that exactly-once delivery settled here; NULL before the first one.
        sa.Column("last_batch", sa.BigInteger),
        sa.Column(
            "lease_until", _TIME, nullable=False, server_default=sa.text("'-infinity'::timestamp with time zone")
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
        comment="Who publishes each lane. The epoch rises with every change of owner: the fencing token.",
    )
    tables.add(
        "relays",
        sa.Column("instance", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("started_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("heartbeat_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("alive_until", _TIME, nullable=False),
        sa.Column("source", sa.Text, nullable=False, server_default=sa.text("'polling'::text")),
        # The numbers of the pauses that it obeys.
        sa.Column("obeys", pg.ARRAY(sa.BigInteger), nullable=False, server_default=sa.text("'{}'::bigint[]")),
        # The number that its session has locked (pg_advisory_lock) for as long as it lives: others may take its lanes
        # when the lock is gone. NULL: when their leases have expired.
        sa.Column("session", sa.BigInteger),
        sa.PrimaryKeyConstraint("instance", name="relays_pkey"),
        sa.CheckConstraint("char_length(instance) BETWEEN 1 AND 200", name="relays_instance_length"),
        comment="Relays that are running or ran lately; lanes are shared out evenly among the living.",
    )
    tables.add(
        "failures",
        sa.Column("lane", sa.SmallInteger, nullable=False),
        sa.Column("id", sa.BigInteger, nullable=False),
        sa.Column("event_id", _UUID, nullable=False),
        sa.Column("aggregate_type", sa.Text, nullable=False),
        sa.Column("aggregate_id", sa.Text, nullable=False),
        sa.Column("blocks", sa.Boolean, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("last_error", sa.Text, nullable=False),
        sa.Column("first_failed_at", _TIME, nullable=False),
        sa.Column("last_failed_at", _TIME, nullable=False),
        sa.Column("next_attempt_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("lane", "id", name="failures_pkey"),
        sa.CheckConstraint("attempts >= 0", name="failures_attempts"),
        sa.Index("failures_key_hash", "lane", "aggregate_type", sa.text(_KEY_HASH)),
        sa.Index(
            "failures_next_attempt",
            *("lane", "next_attempt_at", "id"),
            postgresql_where=sa.text("next_attempt_at < 'infinity'"),
        ),
        comment="Events that could not be published as they are, and whose key waits. infinity: waits for an operator.",
    )
    tables.add(
        "dead_letters",
        *_event_columns(),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("last_error", sa.Text, nullable=False),
        sa.Column("first_failed_at", _TIME, nullable=False),
        sa.Column("dead_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("lane", "id", name="dead_letters_pkey"),
        sa.Index("dead_letters_event_id", "event_id"),
        comment="Events that failed for good, whole. They wait for `outbox dead-letters retry` or `discard`.",
    )
    tables.add(
        "published",
        *_archive_columns(),
        sa.Index("published_event_id", "event_id"),
        sa.Index("published_key_hash", "aggregate_type", sa.text(_KEY_HASH)),
        postgresql_partition_by="RANGE (published_at)",
        comment="The archive: events that were published, by day. Kept for as long as relay.archive_days says.",
    )
    tables.add(
        "published_default",
        *_archive_columns(),
        sa.Index("published_default_event_id", "event_id"),
        sa.Index("published_default_key_hash", "aggregate_type", sa.text(_KEY_HASH)),
        comment="Published events of days that have no partition of their own.",
    )
    tables.attach_default("published")
    tables.add_audit("What people did to events by hand: retried, discarded, replayed, reconciled.")
    tables.add(
        "streams",
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
        sa.Column("flushed_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("created_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("slot", name="streams_pkey"),
        comment="The replication slot that the outbox is read through, and the position up to which it keeps no WAL.",
    )
    tables.add(
        "pauses",
        sa.Column("number", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("scope", sa.Text, nullable=False),
        # The lane's number or the topic's name.
        sa.Column("name", sa.Text, nullable=False),
        # Operators have no right to set these two.
        sa.Column("requested_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("requested_by", sa.Text, nullable=False, server_default=sa.text("SESSION_USER")),
        sa.Column("reason", sa.Text),
        sa.PrimaryKeyConstraint("number", name="pauses_pkey"),
        sa.UniqueConstraint("scope", "name", name="pauses_scope_name"),
        sa.CheckConstraint("scope IN ('all', 'lane', 'topic')", name="pauses_scope"),
        sa.CheckConstraint("(scope = 'all') = (name = '')", name="pauses_name"),
        sa.CheckConstraint("scope <> 'lane' OR name ~ '^(0|[1-9][0-9]{0,2})$'", name="pauses_lane"),
        comment="What relays must not publish for now.",
    )
    tables.add(
        "scheduled",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("event_id", _UUID, nullable=False, server_default=sa.text(_UUID7)),
        *_written_columns(),
        sa.Column("not_before", _TIME, nullable=False),
        sa.Column("scheduled_at", _TIME, nullable=False, server_default=sa.text("now()")),
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
        comment="Events that are not to be published before a time. A relay moves them into events when it has come.",
    )
    tables.add(
        "verified",
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("verified_until", _TIME, nullable=False),
        sa.Column("missing", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("repeated", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("other", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("skipped", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("checked_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("differences", _JSON, nullable=False, server_default=sa.text("'[]'::jsonb")),
        sa.PrimaryKeyConstraint("topic", name="verified_pkey"),
        comment="How far `outbox audit --follow` has compared each topic, and what it has found.",
    )
    tables.add(
        "idempotency_keys",
        sa.Column("aggregate_type", sa.Text, nullable=False),
        sa.Column("idempotency_key", sa.Text, nullable=False),
        sa.Column("event_id", _UUID, nullable=False),
        # With them the key is that of another fact, not of the same one again.
        sa.Column("aggregate_id", sa.Text, nullable=False),
        sa.Column("event_type", sa.Text, nullable=False),
        sa.Column("added_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("aggregate_type", "idempotency_key", name="idempotency_keys_pkey"),
        sa.Index("idempotency_keys_event_id", "event_id"),
        sa.Index("idempotency_keys_added_at", "added_at"),
        comment="Keys of events that were added once and are not added again. Kept for relay.idempotency_days.",
    )
    return OutboxTables(**tables.made)


def _checks(table: str, own_headers: str) -> list[sa.CheckConstraint]:
    """Return the constraints on what a writer gives. ``own_headers``: no header is one by which relays know copies."""
    checks = {
        "aggregate_type_length": f"char_length(aggregate_type) BETWEEN 1 AND {MAX_AGGREGATE_TYPE}",
        "aggregate_id_length": f"char_length(aggregate_id) BETWEEN 1 AND {MAX_AGGREGATE_ID}",
        "event_type_length": f"char_length(event_type) BETWEEN 1 AND {MAX_EVENT_TYPE}",
        "one_payload": "pg_catalog.num_nonnulls(payload, payload_bytes) <= 1",
        # Text values only: a number or a list has no single form as a Kafka header. Names that the relay sets itself
        # are refused, and names that Kafka tools can't show.
        "headers_text": "jsonb_typeof(headers) = 'object' AND "
        f"NOT pg_catalog.jsonb_path_exists(headers, '$.keyvalue() ? ({_BAD_HEADER})') AND {_LENGTHS}",
        "relay_headers": own_headers,
        "size": "octet_length(aggregate_id) + coalesce(octet_length(payload::text), octet_length(payload_bytes), 0)"
        f" + coalesce(octet_length(headers::text), 0) <= {MAX_EVENT_BYTES}",
    }
    return [sa.CheckConstraint(text, name=f"{table}_{name}") for name, text in checks.items()]


def _written_columns() -> list[sa.Column[Any]]:
    """Return the columns that a writer fills, besides the id."""
    return [
        sa.Column("aggregate_type", sa.Text, nullable=False),
        sa.Column("aggregate_id", sa.Text, nullable=False),
        sa.Column("event_type", sa.Text, nullable=False),
        sa.Column("payload", _JSON),
        sa.Column("payload_bytes", pg.BYTEA),
        sa.Column("headers", _JSON),
    ]


def _event_columns() -> list[sa.Column[Any]]:
    """Return the columns of an event that has left ``events``."""
    return [
        sa.Column("lane", sa.SmallInteger, nullable=False),
        sa.Column("id", sa.BigInteger, nullable=False),
        sa.Column("event_id", _UUID, nullable=False),
        *_written_columns(),
        sa.Column("created_at", _TIME, nullable=False),
    ]


def _archive_columns() -> list[sa.Column[Any]]:
    """Return an archived event's columns. Its place in Kafka is NULL if it was settled from a marker after a crash."""
    return [
        *_event_columns(),
        sa.Column("published_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("topic", sa.Text),
        sa.Column("partition", sa.Integer),
        sa.Column("offset", sa.BigInteger),
    ]
