"""The doctor's checks of Postgres: the outbox's tables, and the consumers' if they are there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import errors, sql

from outbox.errors import SchemaError
from relay.config import Settings, SourceKind
from relay.core.ports import Unavailable
from relay.database import unavailable_on_error
from relay.insights import read_pauses
from relay.operations.findings import Finding, Level
from relay.operations.guarantee import slot_cost
from relay.operations.isolation import alone
from relay.operations.wal_setup import Cdc
from relay.settle.settlement import lanes_text
from relay.settle.statements import names_of
from relay.wal.slot import Slot, slot_names

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
_RATE_SECONDS: Final = 1.0
_FAILOVER_FROM: Final = 170000
# The slot, the standbys that have slots, and whether logical slots wait for any of them (Postgres 17).
_STANDBYS: Final = """
SELECT {failover}, (SELECT count(*) FROM pg_replication_slots WHERE slot_type = 'physical'),
       coalesce(current_setting('synchronized_standby_slots', true), '') <> ''
  FROM pg_replication_slots WHERE slot_name = %(slot)s"""
_GROUPS: Final = """
SELECT grp, strategy, array(SELECT DISTINCT topic FROM {offsets} AS o WHERE o.grp = g.grp ORDER BY topic)
  FROM {groups} AS g ORDER BY grp"""
_HAS_CONSUMERS: Final = """
SELECT count(*) = 4 FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = %(schema)s AND c.relkind IN ('r', 'p')
   AND c.relname IN ('groups', 'offsets', 'losses', 'processed_messages')"""
CONSUMERS_GRANT: Final = "USAGE on the consumers' schema, and SELECT on its tables"

# The comparison makes tables in a schema of its own, and rolls them back.
_MAY_COMPARE: Final = "SELECT has_database_privilege(current_database(), 'CREATE')"


def check_outbox(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    """Check the server's settings, the outbox's tables, rights, ids and source, and its backlog; each by itself."""
    schema = settings.db_schema
    yield from alone("Postgres", partial(_server, connection))
    yield from alone("ids of events", partial(check_ids, connection, settings), f"SELECT on the tables of {schema}")
    differs = False
    for finding in alone("tables", partial(_tables, connection, settings)):
        differs = differs or finding.level is Level.FAILURE
        yield finding
    if differs:
        # What follows reads these tables.
        return
    yield from alone("publications", partial(_publications, connection, settings))
    yield from alone("source", partial(_sources, connection, settings), f"SELECT on {schema}.lanes and streams")
    yield from alone("slot, failover", partial(_failover, connection, settings))
    yield from alone("slot, cost", partial(_cost, connection, settings), f"SELECT on {schema}.streams")
    yield from alone("rights", partial(_rights, connection, settings))
    yield from alone("pauses", partial(_pauses, connection, settings), f"SELECT on {schema}.pauses and relays")
    yield from alone(
        "failures", partial(_failures, connection, settings), f"SELECT on {schema}.events, failures and dead_letters"
    )
    yield from alone("backlog", partial(_backlog, connection, settings), f"SELECT on {schema}.events and pauses")


def _server(connection: psycopg.Connection[Any]) -> Iterator[Finding]:
    with unavailable_on_error("asking for its settings"):
        query = (
            "SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit')"
        )
        row = connection.execute(query).fetchone()
    assert row is not None
    version, fsync, synchronous = row
    yield Finding(Level.OK, "Postgres", f"version {version}")
    if fsync != "on":
        yield Finding(
            Level.FAILURE,
            "Postgres fsync",
            "fsync is off: a crash of the machine can lose or damage anything",
            "turn fsync on",
            "fsync = on",
        )
    if synchronous == "off":
        yield Finding(
            Level.WARNING,
            "Postgres synchronous_commit",
            "off: a crash loses the last transactions although they were reported as committed. The relay publishes "
            "nothing before it is durable, so Kafka never holds an event whose transaction was lost",
            setting="synchronous_commit = on",
        )


def _tables(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    from outbox._app.schema_drift import check

    if connection.execute(_MAY_COMPARE).fetchone() != (True,):
        yield Finding(
            Level.OK,
            "tables",
            "were not compared with this version's: this role has no CREATE on the database",
            "run `outbox db check` as the tables' owner",
        )
        return
    differences = check(settings.require_database(), settings.db_schema)
    for line in differences:
        yield Finding(
            Level.FAILURE, "tables", line, "see `outbox db check`; `outbox db upgrade` brings them up to date"
        )
    if not differences:
        yield Finding(Level.OK, "tables", f"schema {settings.db_schema} is as this version expects")


def _pauses(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    for paused in read_pauses(connection, settings.db_schema):
        yield Finding(Level.WARNING, "pauses", str(paused), "`outbox relay resume` ends it")


def _failures(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    waiting, dead = (count_rows(connection, settings, name) for name in ("failures", "dead_letters"))
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


def _backlog(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    pauses = read_pauses(connection, settings.db_schema)
    with unavailable_on_error("looking at the backlog"):
        oldest = connection.execute(
            sql.SQL("SELECT extract(epoch FROM clock_timestamp() - min({created_at}))::float8 FROM {events}").format(
                **names_of(settings.db_schema)
            )
        ).fetchone()
    if oldest is not None and oldest[0] is not None and oldest[0] > 60:
        do = "is it one of what is paused?" if pauses else "is a relay running?"
        yield Finding(Level.WARNING, "backlog", f"the oldest event is {oldest[0]:.0f} s old", do)


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


def check_ids(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
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
    for (role,) in posers:
        yield Finding(
            Level.WARNING,
            f"role {role}",
            f"may set from_relay in {settings.db_schema}.events, so that its rows can pose as copies of dead letters "
            "and pass a blocked key by",
            f"`outbox db roles writer={role} --apply` grants INSERT on the other columns alone",
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
            f"set OUTBOX_SOURCE={sources[0]}, or `outbox relay switch {settings.source}`",
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
    if status.slot.retained_bytes > settings.wal.retained_limit_bytes:
        yield Finding(
            Level.FAILURE,
            f"{about}, WAL",
            f"{status.slot.retained_bytes >> 20} MiB are kept for it, the limit is "
            f"{settings.wal.retained_limit_bytes >> 20}: the server's disk fills up",
            "is a relay with source=wal running?",
        )


def _failover(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    """Check whether the slot outlives a failover to a standby."""
    about = f"slot {settings.wal.slot}, failover"
    if settings.source is not SourceKind.WAL:
        return
    knows = connection.info.server_version >= _FAILOVER_FROM
    with unavailable_on_error("looking at standbys"):
        query = sql.SQL(_STANDBYS).format(failover=sql.SQL("failover" if knows else "false"))
        row = connection.execute(query, {"slot": settings.wal.slot}).fetchone()
    if row is None:
        return
    failover, standbys, waited_for = row
    lost = "after a failover it is not there: the lanes stop until `outbox cdc setup --repair`"
    if failover and (waited_for or not standbys):
        yield Finding(Level.OK, about, "it is synchronized to standbys that have sync_replication_slots")
    elif failover:
        yield Finding(
            Level.WARNING,
            about,
            f"{standbys} standbys have slots, and no commit that it shows waits for one of them: after a failover the "
            "standby can lack what is published, and the lanes stop",
            "name the standbys' slots in synchronized_standby_slots",
            "synchronized_standby_slots",
        )
    elif knows:
        yield Finding(
            Level.WARNING,
            about,
            f"it is made without failover: {lost}",
            "with the relay on polling, `outbox cdc drop` and `outbox cdc setup` make it anew, with failover",
            "failover of the slot",
        )
    elif standbys:
        yield Finding(
            Level.WARNING, about, f"before Postgres 17, {lost}", "upgrade to Postgres 17 or later", "Postgres 17"
        )


def _cost(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    """Return how much WAL the slot keeps, and how long its limits last at the present rate."""
    names = slot_names(settings)
    with unavailable_on_error("looking at the slot"):
        before, began = Slot(connection, names).look(), time.monotonic()
        if not before.there:
            return
        time.sleep(_RATE_SECONDS)
        now = Slot(connection, names).look()
    rate = max(now.current_lsn - before.current_lsn, 0) / (time.monotonic() - began)
    text = slot_cost(now.retained_bytes, settings.wal.retained_limit_bytes, now.safe_wal_bytes, rate)
    yield Finding(Level.OK, f"slot {names.slot}, cost", text)


def lane_sources(connection: psycopg.Connection[Any], settings: Settings) -> dict[SourceKind, list[int]]:
    """Return the lanes by the source that they are read from."""
    with unavailable_on_error("looking at the lanes"):
        rows = connection.execute(
            sql.SQL("SELECT lane, source FROM {} ORDER BY lane").format(sql.Identifier(settings.db_schema, "lanes"))
        ).fetchall()
    found: dict[SourceKind, list[int]] = {}
    for lane, source in rows:
        found.setdefault(SourceKind(source), []).append(lane)
    return found


def count_rows(connection: psycopg.Connection[Any], settings: Settings, table: str) -> int:
    """Return the number of rows of one of the outbox's tables."""
    with unavailable_on_error(f"counting {table}"):
        row = connection.execute(
            sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(settings.db_schema, table))
        ).fetchone()
    assert row is not None
    return int(row[0])


def has_consumers(connection: psycopg.Connection[Any], settings: Settings) -> bool:
    """Return whether the consumers' tables are in this database: sinks are often in another one."""
    with unavailable_on_error("looking for the consumers' tables"):
        # Not to_regclass(), which needs USAGE on the schema.
        row = connection.execute(_HAS_CONSUMERS, {"schema": settings.consumer_schema}).fetchone()
    return row == (True,)


def consumed_topics(connection: psycopg.Connection[Any], settings: Settings) -> list[str]:
    """Return the topics that consumers with tables in this database read."""
    with unavailable_on_error("reading the consumers' topics"):
        rows = connection.execute(
            sql.SQL("SELECT DISTINCT topic FROM {} ORDER BY topic").format(
                sql.Identifier(settings.consumer_schema, "offsets")
            )
        ).fetchall()
    return [row[0] for row in rows]


class DeclaredGroup(NamedTuple):
    """A consumer group: the strategy of its job, None if it is not known, and the topics that it has read."""

    name: str
    strategy: str | None
    topics: Sequence[str]


def declared_groups(connection: psycopg.Connection[Any], settings: Settings) -> list[DeclaredGroup]:
    """Return the groups whose tables are in this database."""
    names = {name: sql.Identifier(settings.consumer_schema, name) for name in ("groups", "offsets")}
    with unavailable_on_error("looking at the groups"):
        rows = connection.execute(sql.SQL(_GROUPS).format(**names)).fetchall()
    return [DeclaredGroup(*row) for row in rows]


def check_consumers(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    """Check the consumers' tables: losses that halt a group, and ids that are never forgotten."""
    yield from alone("losses", partial(_losses, connection, settings), CONSUMERS_GRANT)
    yield from alone("remembered ids", partial(_remembered_ids, connection, settings), CONSUMERS_GRANT)


def _losses(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    table = sql.Identifier(settings.consumer_schema, "losses")
    with unavailable_on_error("looking at losses"):
        losses = connection.execute(sql.SQL(_OPEN_LOSSES).format(losses=table)).fetchall()
    for group, topic, count in losses:
        yield Finding(
            Level.FAILURE,
            f"group {group}",
            f"Kafka lost messages of {count} partition{'s' if count != 1 else ''} of {topic} before the group read "
            "them: it halts",
            f"see `outbox offsets show`; `outbox offsets reset {group} --topic {topic} --to loss` accepts it",
        )


def _remembered_ids(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    names = {"processed_messages": sql.Identifier(settings.consumer_schema, "processed_messages")}
    with unavailable_on_error("looking at remembered ids"):
        counted = connection.execute(
            sql.SQL(_WITHOUT_TIME).format(processed=names["processed_messages"]), {"most": _MANY + 1}
        ).fetchone()
    assert counted is not None
    shown = f"more than {_MANY:,}" if counted[0] > _MANY else f"{counted[0]:,}"
    yield Finding(
        Level.OK,
        "remembered ids",
        f"for {settings.consumer.keep_days} days; {shown} without a time (no UUIDv7) are kept for ever",
        "ids that are UUIDv7 can be forgotten" if counted[0] else "",
    )
