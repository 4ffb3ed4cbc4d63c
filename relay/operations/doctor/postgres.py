"""The doctor's checks of the outbox's database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import psycopg
from psycopg import errors, sql

from outbox._app.text import bytes_text
from outbox._clients.checks import Check, Finding, failure, ok, warning
from outbox._clients.counting import counted
from outbox.consumer.ids import DAY_OF_ID
from relay.config import Settings, SourceKind
from relay.insights import without_event
from relay.operations.guarantee import slot_cost
from relay.operations.recover import CLOCKS
from relay.operations.wal_setup import FAILOVER_FROM, GENERATED_FROM, Cdc, Status
from relay.row_access import row_problems
from relay.settle.settlement import lanes_text
from relay.settle.statements import STATEMENT_LIMIT, names_of
from relay.wal.slot import Slot, slot_names

Rows = list[tuple[Any, ...]]

_SERVER: Final = """
SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit'),
       extract(epoch FROM clock_timestamp())::float8"""
_PUBLICATIONS_OF_DELETES: Final = """
SELECT p.pubname, EXISTS (SELECT FROM pg_publication_rel AS r
                           WHERE r.prpubid = p.oid AND r.prrelid = {events_name}::regclass)
  FROM pg_publication AS p JOIN pg_publication_tables AS t ON t.pubname = p.pubname
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
_ARCHIVE_LIMIT: Final = "5s"
# Of the next ones: there may be millions.
_TOO_LATE: Final = """
SELECT count(*) FROM (
    SELECT not_before, event_id AS message_id FROM {scheduled} ORDER BY not_before, id LIMIT 10000) AS soon
 WHERE {day_of_id} > date '1970-01-01'
   AND CAST(not_before AT TIME ZONE 'UTC' AS date) - {day_of_id} > %(keep_days)s"""
_WITHOUT_EVENT: Final = "SELECT count(*) FROM {failures} AS f WHERE {without_event}"

# The relay and operators have DELETE; a superuser has every right.
_MAY_SET_FROM_RELAY: Final = """
SELECT r.rolname FROM pg_roles AS r
 WHERE NOT r.rolsuper AND r.rolname NOT LIKE 'pg\\_%'
   AND has_column_privilege(r.oid, {events_name}::regclass, 'from_relay', 'INSERT')
   AND NOT has_table_privilege(r.oid, {events_name}::regclass, 'DELETE')
 ORDER BY r.rolname"""

_RATE_SECONDS: Final = 1.0
# The slot, the standbys that have slots, and whether logical slots wait for any of them (Postgres 17).
_STANDBYS: Final = """
SELECT {failover}, (SELECT count(*) FROM pg_replication_slots WHERE slot_type = 'physical'),
       coalesce(current_setting('synchronized_standby_slots', true), '') <> ''
  FROM pg_replication_slots WHERE slot_name = %(slot)s"""
# The comparison makes tables in a schema of its own, and rolls them back.
_MAY_COMPARE: Final = "SELECT has_database_privilege(current_database(), 'CREATE')"


def checks(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Check]:
    """Return the checks of the server's settings, the outbox's tables, ids, source, slot and rights."""
    schema = settings.db_schema
    in_schema = _names(schema)

    def ask(statement: str, **values: Any) -> Callable[[], Rows]:
        return lambda: connection.execute(sql.SQL(statement).format(**in_schema), values or None).fetchall()

    yield Check("Postgres", ask(_SERVER), _server)
    yield Check("ids of events", partial(check_ids, connection, schema), grant=f"SELECT on the tables of {schema}")
    hidden = partial(row_problems, connection, schema, every_role=True)
    yield Check("rows", hidden, lambda problems: [failure("rows", found, do) for found, do in problems])
    # What follows reads these tables.
    yield Check("tables", partial(_tables, connection, settings), essential=True)
    rejects = connection.info.server_version >= GENERATED_FROM
    yield Check("publications", ask(_PUBLICATIONS_OF_DELETES, schema=schema), partial(_publications, schema, rejects))
    slot = slot_names(settings)
    yield Check(
        "source", Cdc(connection, slot).status, partial(_sources, settings), f"SELECT on {schema}.lanes and streams"
    )
    if settings.source is SourceKind.WAL:
        knows = connection.info.server_version >= FAILOVER_FROM
        query = ask(_STANDBYS.replace("{failover}", "failover" if knows else "false"), slot=slot.slot)
        yield Check("slot, failover", query, partial(_failover, f"slot {slot.slot}, failover", knows))
    yield Check(
        "slot, cost", partial(_cost, Slot(connection, slot), settings, slot.slot), grant=f"SELECT on {schema}.streams"
    )
    yield Check("rights", ask(_MAY_SET_FROM_RELAY), partial(_rights, schema))
    grant = f"SELECT on {schema}.events, failures and dead_letters"
    yield Check("failures without an event", ask(_WITHOUT_EVENT), _without_event, grant)
    keep_days = settings.consumer.keep_days
    too_late = ask(_TOO_LATE, keep_days=keep_days)
    yield Check("scheduled events", too_late, partial(_too_late, keep_days), f"SELECT on {schema}.scheduled")


def _names(schema: str) -> dict[str, sql.Composable]:
    names = names_of(schema)
    events_name = sql.Literal(names["events"].as_string(None))
    return names | {"events_name": events_name, "without_event": without_event(names), "day_of_id": sql.SQL(DAY_OF_ID)}


def _server(rows: Rows) -> Iterator[Finding]:
    ((version, fsync, synchronous, seconds),) = rows
    ahead = time.time() - seconds
    yield ok("Postgres", f"version {version}")
    if fsync != "on":
        found = "fsync is off: a crash of the machine can lose or corrupt data"
        yield failure("Postgres fsync", found, "turn fsync on", "fsync = on")
    if synchronous == "off":
        yield warning(
            "Postgres synchronous_commit",
            "off: a crash loses the last transactions although they were reported as committed. The relay publishes "
            "an event only once it is durable, so Kafka never holds one whose transaction was lost",
            setting="synchronous_commit = on",
        )

    if abs(ahead) > CLOCKS.total_seconds():
        found = f"this machine's is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the database's"
        yield warning("clocks", f"{found}. Messages have the relay's time, and `outbox recover` may miss them")


def _tables(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[Finding]:
    from outbox._app.schema_drift import drift

    if connection.execute(_MAY_COMPARE).fetchone() != (True,):
        found = "were not compared with this version's: this role has no CREATE on the database"
        yield ok("tables", found, "run `outbox db check` as the tables' owner")
        return
    tables = drift(settings.require_database(), settings.db_schema)
    for line in tables.differences:
        if tables.later:
            yield warning("tables", line, "this version runs with the tables of the next one: keep them")
        else:
            yield failure("tables", line, "see `outbox db check`; `outbox db upgrade` brings them up to date")
    if not tables.differences:
        yield ok("tables", f"schema {settings.db_schema} matches this version")


def _without_event(rows: Rows) -> Iterator[Finding]:
    ((count,),) = rows
    if count:
        yield warning(
            "failures without an event",
            f"the events of {counted(count, 'failure')} were deleted by hand; the later events of their keys may wait",
            "`outbox dead-letters list` shows them, `outbox dead-letters discard EVENT_ID --reason …` frees the keys",
        )


def _too_late(keep_days: int, rows: Rows) -> Iterator[Finding]:
    ((count,),) = rows
    if count:
        yield warning(
            "scheduled events",
            f"{count:,} of the next 10,000 are due more than {keep_days} days after the day in their ids: consumers "
            "that remember ids may have forgotten it by then, and take them for repeats (too-old)",
            "raise consumer.keep_days, or cancel them and write them anew with a UUIDv4 as event_id",
        )


def _publications(schema: str, rejects: bool, rows: Rows) -> Iterator[Finding]:
    """Name publications of deletes without a generated key column: since Postgres 18, a DELETE then fails.

    Before, a subscribing Postgres stops at a delete; with the column, at an insert already.
    """
    events = sql.Identifier(schema, "events").as_string(None)
    for name, listed in rows:
        found = f"publishes deletes of {schema}.events without the generated column lane of its key"
        alter = f"ALTER PUBLICATION {sql.Identifier(name).as_string(None)}"
        out = "leave events out of it: " + (
            f"{alter} DROP TABLE {events}"
            if listed
            else "create one that names its tables, instead of ALL TABLES or TABLES IN SCHEMA"
        )
        if rejects:
            yield failure(
                f"publication {name}",
                f"{found}: Postgres rejects every DELETE, so the relay can't settle anything",
                f"{out}; or, unless a Postgres subscribes to it, which would stop at the next event, {alter} "
                "SET (publish_generated_columns = stored)",
            )
        else:
            yield warning(
                f"publication {name}",
                f"{found}: a Postgres that subscribes to it stops at the first one, and its slot then keeps the WAL",
                out,
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
            f"each session takes {cache} ids at once (CACHE {cache}): an event can get a lower id than an earlier "
            "event of its key, and be published first",
            f"ALTER TABLE {name} ALTER COLUMN id SET CACHE 1",
        )
    if not readable:
        return
    # The sequence last: it is ahead of all that writers have added meanwhile.
    tables = ("events", "failures", "dead_letters", "published")
    highest, table = max((_highest_id(connection, schema, table) or 0, table) for table in tables)
    ids = sql.Identifier(*sequence).as_string(None)
    ((next_id,),) = connection.execute(sql.SQL(_NEXT).format(sequence=sql.SQL(ids))).fetchall()
    if highest >= next_id:
        lanes = sql.Identifier(schema, "lanes").as_string(None)
        yield failure(
            "ids of events",
            f"the next event gets the id {next_id}, and {schema}.{table} has ids up to {highest}: "
            "TRUNCATE … RESTART IDENTITY, a sequence that was reset, or a copy without it. Ids repeat, and running "
            "relays skip lower ones",
            "stop the relays and the writers; "  # noqa: S608  shown
            f"SELECT setval('{ids}', greatest(last_value, {highest})) FROM {ids}; "
            f"UPDATE {lanes} SET low_water_mark = NULL, mark_failures = NULL; start them again",
        )


def _highest_id(connection: psycopg.Connection[Any], schema: str, table: str) -> int | None:
    """Return the highest id of a table; None if it is empty, missing, unreadable, or an archive too large to search."""
    query = _HIGHEST_PUBLISHED if table == "published" else _HIGHEST
    try:
        with connection.transaction():
            connection.execute(STATEMENT_LIMIT, (_ARCHIVE_LIMIT,))
            row = connection.execute(sql.SQL(query).format(table=sql.Identifier(schema, table))).fetchone()
    except (errors.QueryCanceled, errors.UndefinedTable, errors.InsufficientPrivilege):
        return None
    return None if row is None else row[0]


def _rights(schema: str, rows: Rows) -> Iterator[Finding]:
    for (role,) in rows:
        yield warning(
            f"role {role}",
            f"may set from_relay in {schema}.events, so that its rows can pose as copies of dead letters and overtake "
            "a blocked key",
            f"`outbox db roles writer={role} --apply` grants INSERT on the other columns only",
        )


def _sources(settings: Settings, status: Status) -> Iterator[Finding]:
    sources = sorted({lane.source for lane in status.lanes})
    if sources and sources != [settings.source]:
        yield warning(
            "source",
            f"the lanes are read from {' and '.join(sources)}, but these settings say {settings.source}: a relay with "
            "these settings waits",
            f"set OUTBOX_SOURCE={sources[0]}, or run `outbox relay switch {settings.source}`",
        )
    about, slot = f"slot {settings.wal.slot}", status.slot
    retained = f"{bytes_text(slot.retained_bytes)} of WAL are retained"
    if "wal" in sources or settings.source is SourceKind.WAL:
        if status.problem is None and slot.has_checkpoint:
            yield ok(about, f"has no gap; {retained}")
        else:
            do = "" if slot.has_checkpoint else "run `outbox cdc setup`"
            yield failure(about, status.problem or "is not set up", do)
    elif slot.exists and slot.has_checkpoint:
        yield warning(about, f"is not read; {retained}", "`outbox relay switch wal`, or `outbox cdc drop`")
    if tables := [lane.lane for lane in status.lanes if lane.source == "wal" and not lane.streaming]:
        yield warning(
            f"{about}, lanes",
            f"{lanes_text(tables)}: read from the table, because of failures, to catch up, or because a lane can't be "
            "taken over",
            "see `outbox dead-letters list`; the relay's log and /readyz name what a lane waits for",
        )
    if slot.retained_bytes > settings.wal.retained_limit_bytes:
        limit = bytes_text(settings.wal.retained_limit_bytes)
        found = f"{retained}, over the limit of {limit}: the server's disk fills up"
        yield failure(f"{about}, WAL", found, "is a relay with source=wal running?")


def _failover(about: str, knows: bool, rows: Rows) -> Iterator[Finding]:
    """Check whether the slot outlives a failover to a standby; ``knows``: whether Postgres can synchronize slots."""
    if not rows:
        return
    ((failover, standbys, waited_for),) = rows
    lost = "it is lost at a failover: the lanes stop until `outbox cdc setup --repair`"
    if failover and (waited_for or not standbys):
        yield ok(about, "synchronized to standbys that have sync_replication_slots")
    elif failover:
        yield warning(
            about,
            f"{standbys} standbys have slots, but it does not wait for any of them: after a failover the standby can "
            "lack what is published, and the lanes stop",
            "name the standbys' slots in synchronized_standby_slots",
            "synchronized_standby_slots",
        )
    elif knows:
        yield warning(
            about,
            f"it was created without failover: {lost}",
            "switch to polling, then `outbox cdc drop` and `outbox cdc setup` create it with failover",
            "failover of the slot",
        )
    elif standbys:
        yield warning(about, f"before Postgres 17, {lost}", "upgrade to Postgres 17 or later", "Postgres 17")


def _cost(slot: Slot, settings: Settings, name: str) -> Iterator[Finding]:
    """Return how much WAL the slot retains, and how long its limits last at the current rate."""
    before, began = slot.look(), time.monotonic()
    if not before.exists:
        return
    time.sleep(_RATE_SECONDS)
    now = slot.look()
    rate = max(now.current_lsn - before.current_lsn, 0) / (time.monotonic() - began)
    text = slot_cost(now.retained_bytes, settings.wal.retained_limit_bytes, now.safe_wal_bytes, rate)
    yield ok(f"slot {name}, cost", text)
