"""The doctor's checks of the outbox's database."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import psycopg
from psycopg import errors, sql

from outbox._clients.checks import Check, Finding, failure, ok, warning
from relay.config import Settings, SourceKind
from relay.core.pauses import Paused
from relay.insights import COUNTED, DEAD, FAILURES, WAITING, read_pauses, without_event
from relay.operations.doctor.run import Rows, asking
from relay.operations.guarantee import slot_cost
from relay.operations.wal_setup import Cdc, Status
from relay.settle.settlement import lanes_text
from relay.settle.statements import names_of
from relay.wal.slot import Slot, slot_names

_SERVER: Final = (
    "SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit')"
)
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
 WHERE s.seqrelid = pg_get_serial_sequence({events_name}, 'id')::regclass"""

_NEXT: Final = "SELECT last_value + CASE WHEN is_called THEN 1 ELSE 0 END FROM {sequence}"
_HIGHEST: Final = """
SELECT max((SELECT max(id) FROM {table} AS t WHERE t.lane = l.lane)) FROM generate_series(0, 255) AS l(lane)"""

_HIGHEST_PUBLISHED: Final = "SELECT max(id) FROM {table}"
_ARCHIVE_TIMEOUT: Final = "SELECT set_config('statement_timeout', '5s', true)"
_WITHOUT_EVENT: Final = "SELECT count(*) FROM {failures} AS f WHERE {without_event}"

# The relay and operators have DELETE; a superuser has every right.
_POSERS: Final = """
SELECT r.rolname FROM pg_roles AS r
 WHERE NOT r.rolsuper AND r.rolname NOT LIKE 'pg\\_%'
   AND has_column_privilege(r.oid, {events_name}::regclass, 'from_relay', 'INSERT')
   AND NOT has_table_privilege(r.oid, {events_name}::regclass, 'DELETE')
 ORDER BY r.rolname"""

_RATE_SECONDS: Final = 1.0
_FAILOVER_FROM: Final = 170000
# The slot, the standbys that have slots, and whether logical slots wait for any of them (Postgres 17).
_STANDBYS: Final = """
SELECT {failover}, (SELECT count(*) FROM pg_replication_slots WHERE slot_type = 'physical'),
       coalesce(current_setting('synchronized_standby_slots', true), '') <> ''
  FROM pg_replication_slots WHERE slot_name = %(slot)s"""
# The comparison makes tables in a schema of its own, and rolls them back.
_MAY_COMPARE: Final = "SELECT has_database_privilege(current_database(), 'CREATE')"


def checks(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Check]:
    """Return the checks of the server's settings, the outbox's tables, rights, ids and source, and its backlog."""
    schema = settings.db_schema
    ask = asking(connection, _names(schema))
    yield Check("Postgres", ask(_SERVER), _server)
    yield Check("ids of events", partial(check_ids, connection, schema), grant=f"SELECT on the tables of {schema}")
    # What follows reads these tables.
    yield Check("tables", partial(_tables, connection, settings), essential=True)
    if connection.info.server_version >= _PUBLISHES_GENERATED:
        yield Check("publications", ask(_STANDING_IN_THE_WAY, schema=schema), partial(_publications, schema))
    names = slot_names(settings)
    yield Check(
        "source", Cdc(connection, names).status, partial(_sources, settings), f"SELECT on {schema}.lanes and streams"
    )
    if settings.source is SourceKind.WAL:
        knows = connection.info.server_version >= _FAILOVER_FROM
        query = ask(_STANDBYS.replace("{failover}", "failover" if knows else "false"), slot=names.slot)
        yield Check("slot, failover", query, partial(_failover, f"slot {names.slot}, failover", knows))
    yield Check(
        "slot, cost", partial(_cost, Slot(connection, names), settings, names.slot), grant=f"SELECT on {schema}.streams"
    )
    yield Check("rights", ask(_POSERS), partial(_rights, schema))
    pauses = partial(read_pauses, connection, schema)
    yield Check("pauses", pauses, _pauses, f"SELECT on {schema}.pauses and relays")
    grant = f"SELECT on {schema}.events, failures and dead_letters"
    failures, dead = ask(FAILURES, most=COUNTED), ask(DEAD, most=COUNTED)
    yield Check("failures", lambda: (failures(), dead()), _failures, grant)
    yield Check("failures without an event", ask(_WITHOUT_EVENT), _without_event, grant)
    waiting = ask(WAITING, most=1)
    yield Check("backlog", lambda: (waiting(), pauses()), _backlog, f"SELECT on {schema}.events, lanes and pauses")


def _names(schema: str) -> dict[str, sql.Composable]:
    names = names_of(schema)
    events_name = sql.Literal(sql.Identifier(schema, "events").as_string(None))
    return names | {"events_name": events_name, "without_event": without_event(names)}


def _server(rows: Rows) -> Iterator[Finding]:
    ((version, fsync, synchronous),) = rows
    yield ok("Postgres", f"version {version}")
    if fsync != "on":
        yield failure(
            "Postgres fsync",
            "fsync is off: a crash of the machine can lose or damage anything",
            "turn fsync on",
            "fsync = on",
        )
    if synchronous == "off":
        yield warning(
            "Postgres synchronous_commit",
            "off: a crash loses the last transactions although they were reported as committed. The relay publishes "
            "nothing before it is durable, so Kafka never holds an event whose transaction was lost",
            setting="synchronous_commit = on",
        )


def _tables(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    from outbox._app.schema_drift import check

    if connection.execute(_MAY_COMPARE).fetchone() != (True,):
        yield ok(
            "tables",
            "were not compared with this version's: this role has no CREATE on the database",
            "run `outbox db check` as the tables' owner",
        )
        return
    differences = check(settings.require_database(), settings.db_schema)
    for line in differences:
        yield failure("tables", line, "see `outbox db check`; `outbox db upgrade` brings them up to date")
    if not differences:
        yield ok("tables", f"schema {settings.db_schema} is as this version expects")


def _pauses(pauses: Iterable[Paused]) -> Iterator[Finding]:
    for paused in pauses:
        yield warning("pauses", str(paused), "`outbox relay resume` ends it")


def _failures(answers: tuple[Rows, Rows]) -> Iterator[Finding]:
    ((retrying, blocking),), ((dead,),) = answers
    waiting = retrying + blocking
    if waiting or dead:
        yield warning("failures", f"{waiting} events wait, {dead} dead letters", "see `outbox dead-letters list`")


def _without_event(rows: Rows) -> Iterator[Finding]:
    ((count,),) = rows
    if count:
        yield warning(
            "failures without an event",
            f"the events of {count} failures were deleted by hand, and the later events of their keys may wait",
            "`outbox dead-letters list` shows them, `outbox dead-letters discard EVENT_ID --reason …` frees the keys",
        )


def _backlog(answers: tuple[Rows, Sequence[Paused]]) -> Iterator[Finding]:
    lanes, pauses = answers
    oldest = max((age for _, _, age in lanes if age is not None), default=0.0)
    if oldest > 60:
        do = "is it one of what is paused?" if pauses else "is a relay running?"
        yield warning("backlog", f"the oldest event is {oldest:.0f} s old", do)


def _publications(schema: str, rows: Rows) -> Iterator[Finding]:
    """Name publications of deletes without a generated key column: since Postgres 18, a DELETE then fails."""
    for (name,) in rows:
        yield failure(
            f"publication {name}",
            f"publishes deletes of {schema}.events without the generated column lane of its key: Postgres "
            "refuses every DELETE, so the relay can settle nothing",
            f"ALTER PUBLICATION {sql.Identifier(name).as_string(None)} SET (publish_generated_columns = stored), "
            "or leave the table out of it",
        )


def check_ids(connection: psycopg.Connection[Any], schema: str) -> Iterator[Finding]:
    """Check that ids increase from event to event and none is assigned twice: the relay reads a key in that order."""
    name = sql.Identifier(schema, "events").as_string(None)
    if connection.execute("SELECT to_regclass(%s)", (name,)).fetchone() == (None,):
        return
    row = connection.execute(sql.SQL(_IDENTITY).format(**_names(schema))).fetchone()
    if row is None:
        return
    cache, readable, *sequence = row
    if cache > 1:
        yield failure(
            "ids of events, cache",
            f"each session takes {cache} ids at once (CACHE {cache}): an event can get a lower id than an earlier one "
            "of its key, and be published before it",
            f"ALTER TABLE {name} ALTER COLUMN id SET CACHE 1",
        )
    if not readable:
        return
    lanes = sql.Identifier(schema, "lanes").as_string(None)
    ((next_id,),) = connection.execute(sql.SQL(_NEXT).format(sequence=sql.Identifier(*sequence))).fetchall()
    for table in ("events", "failures", "dead_letters", "published"):
        highest = _highest_id(connection, schema, table)
        if highest is not None and highest >= next_id:
            yield failure(
                "ids of events",
                f"the next event gets the id {next_id}, and {schema}.{table} has ids up to {highest}: "
                "TRUNCATE … RESTART IDENTITY, a sequence that was set back, or a copy that left it out. Ids are given "
                "twice, and running relays pass lower ones by",
                f"stop the relays; ALTER TABLE {name} ALTER COLUMN id RESTART WITH {highest + 1}; "  # noqa: S608  shown
                f"UPDATE {lanes} SET low_water_mark = NULL, mark_failures = NULL; start them again",
            )
            return


def _highest_id(connection: psycopg.Connection[Any], schema: str, table: str) -> int | None:
    """Return the highest id of a table; None if it is empty, missing, unreadable, or an archive too large to search."""
    query = _HIGHEST_PUBLISHED if table == "published" else _HIGHEST
    try:
        with connection.transaction():
            connection.execute(_ARCHIVE_TIMEOUT)
            row = connection.execute(sql.SQL(query).format(table=sql.Identifier(schema, table))).fetchone()
    except (errors.QueryCanceled, errors.UndefinedTable, errors.InsufficientPrivilege):
        return None
    return None if row is None else row[0]


def _rights(schema: str, rows: Rows) -> Iterator[Finding]:
    """Name roles that can write what only the relay may write."""
    for (role,) in rows:
        yield warning(
            f"role {role}",
            f"may set from_relay in {schema}.events, so that its rows can pose as copies of dead letters "
            "and pass a blocked key by",
            f"`outbox db roles writer={role} --apply` grants INSERT on the other columns alone",
        )


def _sources(settings: Settings, status: Status) -> Iterator[Finding]:
    """Check the source that the lanes are read from, and the slot."""
    sources = sorted({lane.source for lane in status.lanes})
    if sources and sources != [settings.source]:
        yield warning(
            "source",
            f"the lanes are read from {' and '.join(sources)}, these settings say {settings.source}: a relay with them "
            "waits",
            f"set OUTBOX_SOURCE={sources[0]}, or `outbox relay switch {settings.source}`",
        )
    about = f"slot {settings.wal.slot}"
    if "wal" in sources or (settings.source is SourceKind.WAL and status.slot.known):
        if status.problem is not None:
            yield failure(about, status.problem)
        else:
            yield ok(about, f"whole; {status.slot.retained_bytes >> 20} MiB of WAL are kept for it")
    elif settings.source is SourceKind.WAL:
        yield failure(about, status.problem or "is not set up", "run `outbox cdc setup`")
    elif status.slot.there and status.slot.known:
        yield warning(
            about,
            f"keeps {status.slot.retained_bytes >> 20} MiB of WAL, and nobody reads it",
            "`outbox relay switch wal`, or `outbox cdc drop`",
        )
    tables = [lane.lane for lane in status.lanes if lane.source == "wal" and not lane.streaming]
    if tables:
        yield warning(
            f"{about}, lanes",
            f"{lanes_text(tables)}: read from the table and not streamed, because of failures, to catch up, or because "
            "a lane can't be taken over",
            "`outbox dead-letters list`; the relay's log and /readyz name what a lane waits for",
        )
    if status.slot.retained_bytes > settings.wal.retained_limit_bytes:
        yield failure(
            f"{about}, WAL",
            f"{status.slot.retained_bytes >> 20} MiB are kept for it, the limit is "
            f"{settings.wal.retained_limit_bytes >> 20}: the server's disk fills up",
            "is a relay with source=wal running?",
        )


def _failover(about: str, knows: bool, rows: Rows) -> Iterator[Finding]:
    """Check whether the slot outlives a failover to a standby; ``knows``: whether Postgres can synchronize slots."""
    if not rows:
        return
    ((failover, standbys, waited_for),) = rows
    lost = "after a failover it is not there: the lanes stop until `outbox cdc setup --repair`"
    if failover and (waited_for or not standbys):
        yield ok(about, "it is synchronized to standbys that have sync_replication_slots")
    elif failover:
        yield warning(
            about,
            f"{standbys} standbys have slots, and no commit that it shows waits for one of them: after a failover the "
            "standby can lack what is published, and the lanes stop",
            "name the standbys' slots in synchronized_standby_slots",
            "synchronized_standby_slots",
        )
    elif knows:
        yield warning(
            about,
            f"it is made without failover: {lost}",
            "with the relay on polling, `outbox cdc drop` and `outbox cdc setup` make it anew, with failover",
            "failover of the slot",
        )
    elif standbys:
        yield warning(about, f"before Postgres 17, {lost}", "upgrade to Postgres 17 or later", "Postgres 17")


def _cost(slot: Slot, settings: Settings, name: str) -> Iterator[Finding]:
    """Find how much WAL the slot keeps, and how long its limits last at the present rate."""
    before, began = slot.look(), time.monotonic()
    if not before.there:
        return
    time.sleep(_RATE_SECONDS)
    now = slot.look()
    rate = max(now.current_lsn - before.current_lsn, 0) / (time.monotonic() - began)
    text = slot_cost(now.retained_bytes, settings.wal.retained_limit_bytes, now.safe_wal_bytes, rate)
    yield ok(f"slot {name}, cost", text)
