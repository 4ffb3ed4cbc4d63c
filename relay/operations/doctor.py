"""``outbox doctor``: explains the chosen delivery, and checks whether Postgres and Kafka are set up for it."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import psycopg
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource  # type: ignore[attr-defined]
from psycopg import errors, sql

from outbox._app.migrate import EVERYBODY_EMITS
from outbox._app.settings import client_options
from outbox.errors import OutboxError, SchemaError
from relay.config import Delivery, Settings, SourceKind, delivery_seconds, producer_options, state_topic_name
from relay.database import Connector, unavailable_on_error
from relay.kafka.client import silent, text_of
from relay.kafka.open_transactions import OpenTransaction, OpenTransactions, Whose
from relay.operations.wal_setup import Cdc
from relay.parts import build_router
from relay.ports import Unavailable
from relay.settlement import lanes_text
from relay.wal.slot import slot_names

_SECONDS: Final = 10.0
# A relay's own transactions take milliseconds.
_UNMOVED_SECONDS: Final = 5.0
_PUBLISHES_GENERATED: Final = 180000

_STANDING_IN_THE_WAY: Final = """
SELECT p.pubname FROM pg_publication AS p JOIN pg_publication_tables AS t ON t.pubname = p.pubname
 WHERE t.schemaname = %(schema)s AND t.tablename = 'events' AND (p.pubdelete OR p.pubupdate)
   AND NOT 'lane' = ANY(t.attnames)
 ORDER BY p.pubname"""

# The sequence behind events.id, and the highest id of each table that keeps one.
_IDENTITY: Final = """
SELECT s.seqcache, has_sequence_privilege(s.seqrelid, 'SELECT'), n.nspname, c.relname
  FROM pg_sequence AS s JOIN pg_class AS c ON c.oid = s.seqrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE s.seqrelid = pg_get_serial_sequence({name}, 'id')::regclass"""
_NEXT: Final = "SELECT last_value + CASE WHEN is_called THEN 1 ELSE 0 END FROM {sequence}"
_HIGHEST: Final = """
SELECT max((SELECT max(id) FROM {table} AS t WHERE t.lane = l.lane)) FROM generate_series(0, 255) AS l(lane)"""
_HIGHEST_PUBLISHED: Final = "SELECT max(id) FROM {table}"
_ARCHIVE_TIMEOUT: Final = "SELECT set_config('statement_timeout', '5s', true)"

_WITHOUT_EVENT: Final = """
SELECT count(*) FROM {failures} AS f
 WHERE NOT EXISTS (SELECT FROM {events} AS e WHERE e.lane = f.lane AND e.id = f.id)
   AND NOT EXISTS (SELECT FROM {dead_letters} AS d WHERE d.lane = f.lane AND d.id = f.id)"""

# The relay and operators have DELETE; a superuser has every right.
_POSERS: Final = """
SELECT r.rolname FROM pg_roles AS r
 WHERE NOT r.rolsuper AND r.rolname NOT LIKE 'pg\\_%%'
   AND has_column_privilege(r.oid, {name}::regclass, 'from_relay', 'INSERT')
   AND NOT has_table_privilege(r.oid, {name}::regclass, 'DELETE')
 ORDER BY r.rolname"""

# Counted only up to the number shown as "more than".
_WITHOUT_TIME: Final = """
SELECT count(*) FROM (SELECT FROM {processed} WHERE day = date '1970-01-01' LIMIT %(most)s) AS counted"""
_OPEN_LOSSES: Final = """
SELECT grp, topic, count(*) FROM {losses} WHERE accepted_at IS NULL GROUP BY grp, topic ORDER BY grp, topic"""
_MANY: Final = 1_000_000
_DAY_MS: Final = 86_400_000

# No request returns a broker's version. A setting that is new in 4.3 shows whether it is older.
_SINCE_4_3: Final = "cordoned.log.dirs"

_Config = Callable[[str], str]

EXPLAINED: Final[Mapping[Delivery, str]] = {
    Delivery.AT_MOST_ONCE: "A row is deleted before it is sent, and nothing is sent again: no event stands on Kafka "
    "twice, some may be lost (what was in flight when a relay, broker or connection failed). Lowest latency. For "
    "events that are worth nothing when late.",
    Delivery.AT_LEAST_ONCE: "A row is deleted after Kafka acknowledged it: no event is lost; after a crash at most one "
    "batch of each lane stands on Kafka twice, under the same event id. In order per key once repeats are dropped. For "
    "consumers that dedup by event id, as the Spark jobs here do; with OffsetsOnly such a batch is applied twice.",
    Delivery.EXACTLY_ONCE: "A batch and the note of what is in it are one Kafka transaction: for a reader with "
    "read_committed no event is lost and none stands there twice, in order per key, whatever is killed. Costs a few "
    "milliseconds per batch. For consumers that can't dedup, or do without it: Spark jobs with OffsetsOnly. To these a "
    "replay is a second event.",
}


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its subject, what was found, and what to do about it, if anything."""

    level: Level
    about: str
    found: str
    do: str = ""


def examine(settings: Settings) -> Iterator[Finding]:
    """Run all checks; an unreachable server is a finding too. Raises ConfigurationError for invalid settings."""
    yield Finding(Level.OK, f"delivery {settings.delivery}", EXPLAINED[settings.delivery])
    options = producer_options(settings)
    lease = settings.relay.lease_seconds
    yield Finding(
        Level.OK,
        "times",
        f"a killed relay's lanes are taken over after {lease:g} s; a batch that Kafka does not acknowledge within "
        f"{delivery_seconds(settings):g} s is dropped and read again",
    )
    lanes = 0
    consumed: Sequence[str] = ()
    try:
        with Connector(settings.require_database(), "outbox doctor")() as connection:
            yield from _postgres(connection, settings)
            if _has_consumers(connection, settings):
                consumed = _consumed_topics(connection, settings)
                yield from _consumers(connection, settings)
            lanes = _count(connection, settings, "lanes")
    except OutboxError as error:
        yield Finding(Level.FAILURE, "Postgres", str(error))
    try:
        yield from _kafka(settings, options, lanes, consumed)
    except (OutboxError, KafkaException) as error:
        text = text_of(error) if isinstance(error, KafkaException) else str(error)
        yield Finding(Level.FAILURE, "Kafka", text, "check OUTBOX_KAFKA__BOOTSTRAP_SERVERS and the credentials")


def _postgres(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    from outbox._app.schema_drift import check

    with unavailable_on_error("asking for its settings"):
        query = (
            "SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit')"
        )
        row = connection.execute(query).fetchone()
    assert row is not None
    version, fsync, synchronous = row
    yield from _identity(connection, settings)
    yield Finding(Level.OK, "Postgres", f"version {version}")
    if fsync != "on":
        yield Finding(
            Level.FAILURE,
            "Postgres fsync",
            "fsync is off: a crash of the machine can lose or damage anything",
            "turn fsync on",
        )
    if synchronous == "off":
        yield Finding(
            Level.WARNING,
            "Postgres synchronous_commit",
            "off: a crash loses the last transactions although they were reported as committed. The relay publishes "
            "nothing before it is durable, so Kafka never holds an event whose transaction was lost",
        )
    differences = check(settings.require_database(), settings.db_schema)
    for line in differences:
        yield Finding(
            Level.FAILURE, "tables", line, "see `outbox db check`; `outbox db upgrade` brings them up to date"
        )
    if differences:
        return
    yield Finding(Level.OK, "tables", f"schema {settings.db_schema} is as this version expects")
    yield from _publications(connection, settings)
    yield from _sources(connection, settings)
    yield from _rights(connection, settings)
    waiting, dead = (_count(connection, settings, name) for name in ("failures", "dead_letters"))
    if waiting or dead:
        yield Finding(
            Level.WARNING, "failures", f"{waiting} events wait, {dead} dead letters", "see `outbox dead-letters list`"
        )
    names = {name: sql.Identifier(settings.db_schema, name) for name in ("events", "failures", "dead_letters")}
    with unavailable_on_error("looking for failures without an event"):
        without = connection.execute(sql.SQL(_WITHOUT_EVENT).format(**names)).fetchone()
    if without is not None and without[0]:
        yield Finding(
            Level.WARNING,
            "failures without an event",
            f"the events of {without[0]} failures were deleted by hand, and the later events of their keys may wait",
            "`outbox dead-letters list` shows them, `outbox dead-letters discard EVENT_ID --reason …` frees the keys",
        )
    with unavailable_on_error("looking at the backlog"):
        oldest = connection.execute(
            sql.SQL("SELECT extract(epoch FROM clock_timestamp() - min(created_at))::float8 FROM {}").format(
                sql.Identifier(settings.db_schema, "events")
            )
        ).fetchone()
    if oldest is not None and oldest[0] is not None and oldest[0] > 60:
        yield Finding(Level.WARNING, "backlog", f"the oldest event is {oldest[0]:.0f} s old", "is a relay running?")


def _publications(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    """Check for publications of deletes without a generated key column: since Postgres 18, a DELETE then fails."""
    with unavailable_on_error("looking at publications"):
        if connection.info.server_version < _PUBLISHES_GENERATED:
            return
        rows = connection.execute(_STANDING_IN_THE_WAY, {"schema": settings.db_schema}).fetchall()
    for (name,) in rows:
        yield Finding(
            Level.FAILURE,
            f"publication {name}",
            f"publishes deletes of {settings.db_schema}.events without the generated column lane of its key: Postgres "
            "refuses every DELETE, so the relay can settle nothing",
            f"ALTER PUBLICATION {sql.Identifier(name).as_string(connection)} SET (publish_generated_columns = stored), "
            "or leave the table out of it",
        )


def _identity(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    """Check that ids increase from event to event and none is assigned twice: the relay reads a key in that order."""
    events = sql.Identifier(settings.db_schema, "events")
    name = events.as_string(connection)
    with unavailable_on_error("looking at the ids of events"):
        there = connection.execute("SELECT to_regclass(%s) IS NOT NULL", (name,)).fetchone()
        if there != (True,):
            return
        row = connection.execute(sql.SQL(_IDENTITY).format(name=sql.Literal(name))).fetchone()
    if row is None:
        return
    cache, readable, *sequence = row
    if cache > 1:
        yield Finding(
            Level.FAILURE,
            "ids of events, cache",
            f"each session takes {cache} ids at once (CACHE {cache}): an event can get a lower id than an earlier one "
            "of its key, and be published before it",
            f"ALTER TABLE {name} ALTER COLUMN id SET CACHE 1",
        )
    if not readable:
        return
    with unavailable_on_error("looking at the ids of events"):
        next_id = connection.execute(sql.SQL(_NEXT).format(sequence=sql.Identifier(*sequence))).fetchone()
    assert next_id is not None
    for table in ("events", "failures", "dead_letters", "published"):
        highest = _highest_id(connection, settings, table)
        if highest is not None and highest >= next_id[0]:
            yield Finding(
                Level.FAILURE,
                "ids of events",
                f"the next event gets the id {next_id[0]}, and {settings.db_schema}.{table} has ids up to {highest}: "
                "TRUNCATE … RESTART IDENTITY, a sequence that was set back, or a copy that left it out. Ids are given "
                "twice, and running relays pass lower ones by",
                f"stop the relays; ALTER TABLE {name} ALTER COLUMN id RESTART WITH {highest + 1}; start them again",
            )
            return


def _highest_id(connection: psycopg.Connection[Any], settings: Settings, table: str) -> int | None:
    """Return the highest id of a table; None if it is empty, missing, unreadable, or an archive too large to search."""
    query = _HIGHEST_PUBLISHED if table == "published" else _HIGHEST
    identifier = sql.Identifier(settings.db_schema, table)
    try:
        with unavailable_on_error(f"looking at the ids of {table}"), connection.transaction():
            connection.execute(_ARCHIVE_TIMEOUT)
            row = connection.execute(sql.SQL(query).format(table=identifier)).fetchone()
    except (Unavailable, SchemaError) as error:
        if isinstance(error.__cause__, errors.QueryCanceled | errors.UndefinedTable | errors.InsufficientPrivilege):
            return None
        raise
    return None if row is None else row[0]


def _rights(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    """Find roles that can write what only the relay may write."""
    name = sql.Identifier(settings.db_schema, "events").as_string(connection)
    with unavailable_on_error("looking at rights"):
        posers = connection.execute(sql.SQL(_POSERS).format(name=sql.Literal(name))).fetchall()
        emits = connection.execute(EVERYBODY_EMITS).fetchone()
    for (role,) in posers:
        yield Finding(
            Level.WARNING,
            f"role {role}",
            f"may set from_relay in {settings.db_schema}.events, so that its rows can pose as copies of dead letters "
            "and pass a blocked key by",
            f"`outbox db roles writer={role} --apply` grants INSERT on the other columns alone",
        )
    if settings.wal.messages and emits == (True,):
        yield Finding(
            Level.WARNING,
            "messages",
            "wal.messages is on, and every role of this database may write messages: the relay publishes them",
            "`outbox db roles writer=ROLE relay=ROLE --messages --apply` as a superuser; it revokes EXECUTE on "
            "pg_logical_emit_message from PUBLIC, and grants it to these roles",
        )


def _sources(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    """Check the source that the lanes are read from, and the slot."""
    names = slot_names(settings)
    status = Cdc(connection, names).status()
    sources = sorted({lane.source for lane in status.lanes})
    if sources and sources != [settings.source]:
        yield Finding(
            Level.WARNING,
            "source",
            f"the lanes are read from {' and '.join(sources)}, these settings say {settings.source}: a relay with them "
            "waits",
            "set OUTBOX_SOURCE, or `outbox relay switch`",
        )
    about = f"slot {names.slot}"
    if "wal" in sources or (settings.source is SourceKind.WAL and status.slot.known):
        if status.problem is not None:
            yield Finding(Level.FAILURE, about, status.problem)
        else:
            yield Finding(Level.OK, about, f"whole; {status.slot.retained_bytes >> 20} MiB of WAL are kept for it")
    elif settings.source is SourceKind.WAL:
        yield Finding(Level.FAILURE, about, status.problem or "is not set up", "run `outbox cdc setup`")
    elif status.slot.there and status.slot.known:
        yield Finding(
            Level.WARNING,
            about,
            f"keeps {status.slot.retained_bytes >> 20} MiB of WAL, and nobody reads it",
            "`outbox relay switch wal`, or `outbox cdc drop`",
        )
    tables = [lane.lane for lane in status.lanes if lane.source == "wal" and not lane.streaming]
    if tables:
        yield Finding(
            Level.WARNING,
            f"{about}, lanes",
            f"{lanes_text(tables)}: read from the table and not streamed, because of failures, to catch up, or because "
            "a lane can't be taken over",
            "`outbox dead-letters list`; the relay's log and /readyz name what a lane waits for",
        )
    if status.slot.message_at is not None and settings.source is SourceKind.WAL and not settings.wal.messages:
        meant = "messages" in settings.wal.model_fields_set
        yield Finding(
            Level.WARNING if meant else Level.FAILURE,
            "messages",
            f"events without a row were published, the last at {status.slot.message_at.isoformat(timespec='seconds')}, "
            + (
                "and wal.messages is false: they become dead letters"
                if meant
                else "and wal.messages is not set: a relay with these settings does not start"
            ),
            "set OUTBOX_WAL__MESSAGES=true; or, when no service uses transport='message' any more, false",
        )
    if status.slot.retained_bytes > settings.wal.retained_limit_bytes:
        yield Finding(
            Level.FAILURE,
            f"{about}, WAL",
            f"{status.slot.retained_bytes >> 20} MiB are kept for it, the limit is "
            f"{settings.wal.retained_limit_bytes >> 20}: the server's disk fills up",
            "is a relay with source=wal running?",
        )


def _count(connection: psycopg.Connection[Any], settings: Settings, table: str) -> int:
    with unavailable_on_error(f"counting {table}"):
        row = connection.execute(
            sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(settings.db_schema, table))
        ).fetchone()
    assert row is not None
    return int(row[0])


def _has_consumers(connection: psycopg.Connection[Any], settings: Settings) -> bool:
    """Return whether the consumers' tables are in this database: sinks are often in another one."""
    names = [
        sql.Identifier(settings.consumer_schema, name).as_string(connection)
        for name in ("offsets", "losses", "processed_messages")
    ]
    with unavailable_on_error("looking for the consumers' tables"):
        row = connection.execute(
            "SELECT bool_and(to_regclass(name) IS NOT NULL) FROM unnest(%s::text[]) AS name", (names,)
        ).fetchone()
    return row == (True,)


def _consumed_topics(connection: psycopg.Connection[Any], settings: Settings) -> list[str]:
    with unavailable_on_error("reading the consumers' topics"):
        rows = connection.execute(
            sql.SQL("SELECT DISTINCT topic FROM {} ORDER BY topic").format(
                sql.Identifier(settings.consumer_schema, "offsets")
            )
        ).fetchall()
    return [row[0] for row in rows]


def _consumers(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    """Check the consumers' tables: losses that halt a group, and ids that are never forgotten."""
    names = {name: sql.Identifier(settings.consumer_schema, name) for name in ("losses", "processed_messages")}
    with unavailable_on_error("looking at the consumers' tables"):
        losses = connection.execute(sql.SQL(_OPEN_LOSSES).format(losses=names["losses"])).fetchall()
        counted = connection.execute(
            sql.SQL(_WITHOUT_TIME).format(processed=names["processed_messages"]), {"most": _MANY + 1}
        ).fetchone()
    for group, topic, count in losses:
        yield Finding(
            Level.FAILURE,
            f"group {group}",
            f"Kafka lost messages of {count} partition{'s' if count != 1 else ''} of {topic} before the group read "
            "them: it halts",
            f"see `outbox offsets show`; `outbox offsets reset {group} --topic {topic} --to loss` accepts it",
        )
    assert counted is not None
    shown = f"more than {_MANY:,}" if counted[0] > _MANY else f"{counted[0]:,}"
    yield Finding(
        Level.OK,
        "remembered ids",
        f"for {settings.consumer.keep_days} days; {shown} without a time (no UUIDv7) are kept for ever",
        "ids that are UUIDv7 can be forgotten" if counted[0] else "",
    )


def _remembered(name: str, keep_days: int, config: _Config) -> Iterator[Finding]:
    """Check whether messages can outlive their remembered ids: a re-read would make dead letters of them."""
    if config("cleanup.policy") == "compact":
        kept, ms = "its messages for as long as they are the last of their keys", -1
    else:
        ms = int(config("retention.ms"))
        kept = "every message" if ms < 0 else f"messages for {ms / _DAY_MS:g} days"
    if 0 <= ms <= keep_days * _DAY_MS:
        return
    yield Finding(
        Level.WARNING,
        f"topic {name}, ids",
        f"it keeps {kept}, ids are remembered for {keep_days} days: going back further makes dead letters of what is "
        "forgotten, instead of applying it twice",
        "raise consumer.keep_days above the topic's retention.ms and the longest outage of a relay, or lower "
        "retention.ms",
    )


def _kafka(settings: Settings, options: Mapping[str, str], lanes: int, consumed: Sequence[str]) -> Iterator[Finding]:
    admin = AdminClient(dict(client_options(settings)), logger=silent())
    metadata = admin.list_topics(timeout=_SECONDS)
    brokers = len(metadata.brokers)
    yield Finding(Level.OK, "Kafka", f"{brokers} broker{'s' if brokers != 1 else ''} at {settings.require_kafka()}")
    if brokers < 3:
        yield Finding(
            Level.WARNING,
            "Kafka brokers",
            f"with {brokers} there are fewer than 3 copies of an event: losing a disk loses what was acknowledged",
            "run three brokers or more, with min.insync.replicas=2",
        )

    def config(kind: Any, name: str) -> _Config:
        resource = ConfigResource(kind, name)
        entries = admin.describe_configs([resource], request_timeout=_SECONDS)[resource].result()
        return lambda entry: str(entries[entry].value)

    yield from _topics(settings, admin, metadata, consumed, config)
    yield from _open_transactions(settings, options)
    if settings.delivery is Delivery.EXACTLY_ONCE:
        yield from _transactions(settings, options, lanes, admin, metadata, config)
        if state_topic_name(settings) in metadata.topics:
            yield from _may_write(admin, state_topic_name(settings))


def _topics(
    settings: Settings,
    admin: AdminClient,
    metadata: Any,
    consumed: Sequence[str],
    config: Callable[[Any, str], _Config],
) -> Iterator[Finding]:
    for aggregate_type, route in sorted((settings.routes or {}).items()):
        topic = metadata.topics.get(route.topic)
        if topic is None:
            level = Level.OK if settings.create_topics else Level.FAILURE
            do = (
                ""
                if settings.create_topics
                else "create it, or set OUTBOX_CREATE_TOPICS=true; if it is there, grant DESCRIBE on it"
            )
            yield Finding(level, f"topic {route.topic}", f"does not exist yet ({aggregate_type})", do)
            continue
        yield from _may_write(admin, route.topic)
        try:
            yield from _topic(route.topic, topic, config(ConfigResource.Type.TOPIC, route.topic))
        except KafkaException as error:
            # A relay does not need this right on the topics of events.
            if error.args[0].code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise
            yield Finding(
                Level.WARNING,
                f"topic {route.topic}, settings",
                "these credentials may not read its settings, so they were not looked at",
                "grant DESCRIBE_CONFIGS on the topic, or run this with other credentials",
            )
    for name in sorted(_dead_letter_topics(settings)):
        if name in metadata.topics:
            yield from _may_write(admin, name)
    for name in consumed:
        if name in metadata.topics:
            yield from _remembered(name, settings.consumer.keep_days, config(ConfigResource.Type.TOPIC, name))


def _open_transactions(settings: Settings, options: Mapping[str, str]) -> Iterator[Finding]:
    """Find transactions that do not move: read_committed readers see nothing behind them."""
    timeout = int(options.get("transaction.timeout.ms", 60_000)) / 1000
    may_write = build_router(settings).may_write
    transactions = OpenTransactions(client_options(settings), may_write, state_topic_name(settings), timeout)
    found = transactions.examine(transactions.unmoved(_UNMOVED_SECONDS))
    for each in found:
        yield _open_transaction(each, transactions.limit(each.whose))
    if not found:
        yield Finding(Level.OK, "open transactions", "none stands still in the outbox's topics")


def _open_transaction(found: OpenTransaction, limit: float) -> Finding:
    age = None if found.since is None else time.time() - found.since
    since = "" if found.since is None else f", since {dt.datetime.fromtimestamp(found.since, dt.UTC).isoformat()}"
    whose = {
        Whose.AN_OUTBOX: " of a relay",
        Whose.ANOTHER: " of another program",
        Whose.UNKNOWN: " (whose it is and since when, its first record tells: grant READ on the topic)",
    }[found.whose]
    topic, partition = found.undecided.partition
    about = f"topic {topic} partition {partition}, transaction"
    text = (
        f"readers in read_committed wait at offset {found.undecided.stable}, of {found.undecided.end}, for the end of "
        f"a transaction{whose}{since}; "
    )
    if age is not None and age >= limit:
        return Finding(
            Level.FAILURE,
            about,
            f"{text}it has outlasted its time-out: a broker has lost its end (KAFKA-20734), or no coordinator answers",
            "`outbox relay reconcile` says how many events are in it and whether the outbox still has their rows, and "
            "what ends it",
        )
    return Finding(
        Level.WARNING,
        about,
        f"{text}it did not move within {_UNMOVED_SECONDS:g} s",
        f"look again in {limit - (age or 0.0):.0f} s: if it is at the same offset then, run `outbox relay reconcile`",
    )


def _dead_letter_topics(settings: Settings) -> set[str]:
    given = [settings.failures.dead_letter_topic]
    given += [route.dead_letter_topic for route in (settings.routes or {}).values()]
    return {topic for topic in given if topic is not None}


def _may_write(admin: AdminClient, name: str) -> Iterator[Finding]:
    """Check whether the credentials may write to a topic, as far as the broker reports it."""
    described = admin.describe_topics(
        TopicCollection([name]), include_authorized_operations=True, request_timeout=_SECONDS
    )[name].result()
    operations = described.authorized_operations
    if operations and AclOperation.WRITE not in operations:
        yield Finding(
            Level.FAILURE,
            f"topic {name}, rights",
            f"these credentials may not write to it, only {', '.join(sorted(each.name for each in operations))}",
            "grant WRITE on the topic to the relay's user",
        )


def _transactions(
    settings: Settings,
    options: Mapping[str, str],
    lanes: int,
    admin: AdminClient,
    metadata: Any,
    config: Callable[[Any, str], _Config],
) -> Iterator[Finding]:
    try:
        yield from _brokers(admin, metadata)
        yield from _transaction_timeout(settings, options, metadata, config)
    except KafkaException as error:
        # A relay does not need this right.
        if error.args[0].code() != KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            raise
        yield Finding(
            Level.WARNING,
            "Kafka's settings",
            "these credentials may not read the brokers' settings, so neither their version nor "
            "transaction.max.timeout.ms was looked at",
            "grant DESCRIBE_CONFIGS on the cluster, or run this with other credentials",
        )
    state = state_topic_name(settings)
    found = metadata.topics.get(state)
    if found is None:
        yield Finding(Level.OK, f"state topic {state}", "does not exist yet; the relay creates it, compacted")
        return
    yield from _topic(state, found, config(ConfigResource.Type.TOPIC, state))
    if len(found.partitions) < lanes:
        yield Finding(
            Level.OK,
            f"state topic {state}",
            f"{len(found.partitions)} partitions, {lanes} lanes: the relay adds some",
        )
    for name, wanted in (("cleanup.policy", "compact"), ("unclean.leader.election.enable", "false")):
        value = config(ConfigResource.Type.TOPIC, state)(name)
        if value != wanted:
            yield Finding(
                Level.FAILURE, f"state topic {state}", f"{name}={value} could lose markers", f"set {name}={wanted}"
            )


def _transaction_timeout(
    settings: Settings, options: Mapping[str, str], metadata: Any, config: Callable[[Any, str], _Config]
) -> Iterator[Finding]:
    """Check whether the brokers allow the relay's transaction timeout."""
    broker = str(next(iter(metadata.brokers)))
    limit = int(config(ConfigResource.Type.BROKER, broker)("transaction.max.timeout.ms"))
    asked = int(options["transaction.timeout.ms"])
    if asked > limit:
        yield Finding(
            Level.FAILURE,
            "transaction.timeout.ms",
            f"{asked} is above the broker's transaction.max.timeout.ms of {limit}: no transaction can begin",
            f"{_lower_timeout(settings, limit)}, or raise the broker's limit",
        )


def _lower_timeout(settings: Settings, limit: int) -> str:
    """Return what to lower so that a transaction's timeout fits the broker's limit."""
    if "transaction.timeout.ms" in settings.kafka:
        return "lower kafka.transaction.timeout.ms"
    # The timeout is three times that of a batch, which is two thirds of the lease unless it is given.
    if delivery_seconds(settings) < settings.relay.lease_seconds * 2 / 3:
        return f"it is three times the delivery timeout: set kafka.delivery.timeout.ms to {limit // 3} or less"
    return f"it is twice the lease: set OUTBOX_RELAY__LEASE_SECONDS to {limit // 2000} or less"


def _brokers(admin: AdminClient, metadata: Any) -> Iterator[Finding]:
    """Warn of brokers that can lose the end of a transaction (KAFKA-20734)."""
    resources = [ConfigResource(ConfigResource.Type.BROKER, str(broker)) for broker in sorted(metadata.brokers)]
    answers = admin.describe_configs(resources, request_timeout=_SECONDS)
    newer = [resource.name for resource, answer in answers.items() if _SINCE_4_3 in answer.result()]
    if newer:
        yield Finding(
            Level.WARNING,
            "Kafka's version",
            f"broker {', '.join(sorted(newer))} is 4.3 or newer (it has the setting {_SINCE_4_3}; which release it is, "
            "brokers do not tell): 4.3.1 and 4.4.0 can lose the markers of a transaction when a broker restarts "
            "(KAFKA-20734), and readers in read_committed then wait for its end for good",
            "run 4.2.1, or a release whose notes name KAFKA-20734 as fixed; where it has happened, the lane stops, and "
            "`outbox relay reconcile` names the partition",
        )
    else:
        yield Finding(Level.OK, "Kafka's version", f"older than 4.3 (no broker has the setting {_SINCE_4_3})")


def _topic(name: str, topic: Any, config: _Config) -> Iterator[Finding]:
    copies = min(len(partition.replicas) for partition in topic.partitions.values())
    required = int(config("min.insync.replicas"))
    said = f"{len(topic.partitions)} partitions, {copies} replicas, min.insync.replicas={required}"
    if copies == 1 or required == 1:
        yield Finding(
            Level.WARNING,
            f"topic {name}",
            f"{said}: an acknowledged event stands on one disk",
            "replication factor 3 and min.insync.replicas=2",
        )
    elif required >= copies:
        yield Finding(
            Level.WARNING,
            f"topic {name}",
            f"{said}: one broker that is away stops publishing",
            "min.insync.replicas one below the replication factor",
        )
    else:
        yield Finding(Level.OK, f"topic {name}", said)
    if config("unclean.leader.election.enable") == "true":
        yield Finding(
            Level.FAILURE,
            f"topic {name}",
            "unclean.leader.election.enable=true: acknowledged events can be lost",
            "set it to false",
        )
    policy = config("cleanup.policy")
    if "compact" in policy and not name.endswith(".relay.state"):
        yield Finding(
            Level.WARNING,
            f"topic {name}",
            f"cleanup.policy={policy}: of the events of a key only the last is kept",
            "fine for snapshots of state, not for events",
        )
