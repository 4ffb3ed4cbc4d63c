"""Read the current state of the outbox, for `outbox status` and the metrics. Read-only, and without locks.

A backlog of millions is not counted row by row: each lane is counted up to a limit, along its primary key, and the rest
is estimated from the planner's statistics.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads

from outbox._clients.counting import counted
from outbox._clients.visible import VisibleTables
from outbox.external import exact_json
from relay.core.pauses import Paused, Pauses, Scope, ScopeKind
from relay.database import one_snapshot, unavailable_on_error
from relay.lanes import source_problem
from relay.settle.settlement import lanes_text
from relay.settle.statements import KEEP_TO_THE_INDEX, STATEMENT_LIMIT, names_of
from relay.tasks.scheduled import next_due
from relay.wal.slot import Slot, SlotNames, find_problem, names_in_checkpoint

COUNTED: Final = 10_000
"""The most rows that are counted in each lane, of failures, and of dead letters. A larger backlog is estimated."""
_STATEMENT_SECONDS: Final = 10

_LANES: Final = """
SELECT l.lane, l.owner, l.source, l.streaming, l.epoch, l.last_batch, l.commit_lsn,
       CASE WHEN isfinite(l.lease_until)
            THEN extract(epoch FROM l.lease_until - clock_timestamp())::float8 END AS lease_seconds
  FROM {lanes} AS l ORDER BY l.lane"""

_WITHOUT_EVENT: Final = """
NOT EXISTS (SELECT FROM {events} AS e WHERE e.lane = f.lane AND e.id = f.id)
   AND NOT EXISTS (SELECT FROM {dead_letters} AS d WHERE d.lane = f.lane AND d.id = f.id)"""

# While an old transaction keeps dead rows, WAITING passes all of them.
WAITING: Final = """
SELECT l.lane,
       (SELECT count(*) FROM (SELECT FROM {events} AS e WHERE e.lane = l.lane
                               ORDER BY e.id LIMIT %(most)s) AS counted) AS events,
       (SELECT extract(epoch FROM clock_timestamp() - {created_at})::float8 FROM {events} AS e
         WHERE e.lane = l.lane ORDER BY e.id LIMIT 1) AS oldest_seconds
  FROM {lanes} AS l"""

_RELAYS: Final = """
SELECT instance, version, source, started_at, {alive} AS alive,
       extract(epoch FROM clock_timestamp() - heartbeat_at)::float8 AS heartbeat_seconds
  FROM {relays} ORDER BY instance"""

# The planner's own estimate: rows per page at the last ANALYZE, times the current number of pages.
_REST: Final = """
SELECT clock_timestamp() AS at, s.n_tup_ins AS written, s.n_tup_del AS gone,
       CASE WHEN c.relpages > 0 AND c.reltuples >= 0
            THEN c.reltuples / c.relpages * (pg_relation_size(c.oid) / current_setting('block_size')::int)
            END::float8 AS estimate
  FROM pg_class AS c LEFT JOIN pg_stat_user_tables AS s ON s.relid = c.oid
 WHERE c.oid = to_regclass(%(events)s)"""

_FAILURES: Final = """
SELECT (SELECT count(*) FROM (SELECT FROM {failures} WHERE isfinite(next_attempt_at) LIMIT %(most)s) AS f) AS retrying,
       (SELECT count(*) FROM (SELECT FROM {failures} WHERE NOT isfinite(next_attempt_at) AND blocks
                               LIMIT %(most)s) AS f) AS blocking"""

_DEAD: Final = "SELECT count(*) AS dead_letters FROM (SELECT FROM {dead_letters} LIMIT %(most)s) AS d"

_SCHEDULED: Final = """
SELECT (SELECT count(*) FROM (SELECT FROM {scheduled} LIMIT %(most)s) AS s) AS scheduled,
       {next_due} AS next_due_seconds"""

ALL_TOPICS: Final = ""
"""In place of a topic in ``verified``: up to here `outbox audit --follow` has looked for topics."""

_VERIFIED: Final = """
SELECT topic, verified_until, missing, repeated, other, skipped, checked_at, {differences} AS differences
  FROM {verified} ORDER BY topic"""

# Who holds lanes may publish: also a relay that has just left them with a turn in flight, or whose own row is locked.
_PAUSES: Final = """
SELECT p.number, p.scope, p.name, p.requested_at, p.requested_by, p.reason,
       ARRAY(SELECT instance FROM {relays} WHERE alive_until >= clock_timestamp() AND NOT p.number = ANY(obeys)
              UNION
             SELECT owner FROM {lanes} WHERE owner IS NOT NULL AND lease_until >= clock_timestamp()
                AND NOT EXISTS (SELECT FROM {relays} WHERE instance = owner AND p.number = ANY(obeys))
              ORDER BY 1) AS unconfirmed
  FROM {pauses} AS p ORDER BY p.scope, p.name"""


@dataclass(frozen=True, slots=True)
class LaneState:
    """One lane.

    owner           the relay that holds it, or held it last; None if it was released.
    commit_lsn      the WAL position of its last event from the stream.
    lease_seconds   the remaining time of the lease; negative after it has expired, None if there is none.
    events          the waiting rows, counted up to COUNTED; ``oldest_seconds`` is the age of the first of them.
    paused          whether an operator has paused the lane, or all lanes.
    """

    lane: int
    owner: str | None
    source: str
    streaming: bool
    epoch: int
    last_batch: int | None
    commit_lsn: int | None
    lease_seconds: float | None
    events: int = 0
    oldest_seconds: float | None = None
    paused: bool = False

    @property
    def held(self) -> bool:
        return self.owner is not None and (self.lease_seconds or 0.0) > 0


@dataclass(frozen=True, slots=True)
class RelayState:
    instance: str
    version: str
    source: str
    started_at: dt.datetime
    alive: bool
    heartbeat_seconds: float
    lanes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """How far `outbox audit --follow` has compared a topic, and what it has found since it began.

    verified_until   events that were written before are compared.
    other            differences that are neither ``missing`` nor ``repeated`` events.
    skipped          minutes of which nothing can be said: Kafka or the archive lacked what is needed.
    differences      the newest ones, where they are wanted.
    """

    topic: str
    verified_until: dt.datetime
    missing: int
    repeated: int
    other: int
    skipped: int
    checked_at: dt.datetime
    differences: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SlotSummary:
    slot: str
    retained_bytes: int
    lag_bytes: int
    lag_seconds: float
    active: bool
    problem: str | None


@dataclass(frozen=True, slots=True)
class OutboxState:
    """The outbox at one moment, by the database's clock. Figures of a table that the role can't read are None or empty.

    backlog         the waiting rows; ``exact`` if all of them were counted.
    counted         whether they were counted in time; if not, lanes show no events, and their age is unknown.
    oldest_seconds  the age of the oldest first row of a lane that is not paused; None without any.
    retrying        events that failed and wait for another attempt, counted up to COUNTED like the next three.
    dead_letters    events that wait for an operator; ``blocking`` of them block later events of their keys.
    verified        the topics that `outbox audit --follow` compares.
    scheduled       scheduled events; ``next_due_seconds`` is the time until the first is due, negative if it is.
    written, gone   rows inserted and deleted since the server's statistics began: two readings give the rates.
    hidden          the tables that the role can't read, each with the missing grant.
    """

    at: dt.datetime
    backlog: int | None
    exact: bool
    counted: bool
    oldest_seconds: float | None
    retrying: int | None
    dead_letters: int | None
    blocking: int | None
    written: int | None
    gone: int | None
    lanes: Sequence[LaneState]
    relays: Sequence[RelayState]
    slot: SlotSummary | None
    hidden: Mapping[str, str] = field(default_factory=dict)
    pauses: Sequence[Paused] = ()
    scheduled: int | None = None
    next_due_seconds: float | None = None
    verified: Sequence[Verified] = ()

    def problems(self, standing_seconds: float = 60.0) -> list[str]:
        """Return the problems that need an operator: also an event that is older, unless another explains its age."""
        found = [f"{table} can't be read: {why}" for table, why in self.hidden.items()]
        for one in self.pauses:
            missing = f". Unconfirmed by: {', '.join(one.unconfirmed)}" if one.unconfirmed else ""
            found.append(f"{one}; `outbox relay resume{one.scope.option}` ends it{missing}")
        if not self.counted:
            found.append(
                f"the waiting events could not be counted within {_STATEMENT_SECONDS} s, so their age is unknown: does "
                "a long transaction (pg_stat_activity.xact_start) keep dead rows?"
            )
        if (stuck := self._stuck(standing_seconds)) is not None:
            found.append(stuck)
        if self.retrying:
            found.append(f"{counted(self.retrying, 'event')} retrying: `outbox dead-letters list`")
        if self.dead_letters:
            blocking = f", {counted(self.blocking, 'key')} blocked" if self.blocking else ""
            found.append(f"{counted(self.dead_letters, 'dead letter')}{blocking}: `outbox dead-letters list`")
        elif self.blocking:
            found.append(f"{counted(self.blocking, 'key')} blocked by deleted dead letters: `outbox dead-letters list`")
        if self.next_due_seconds is not None and -self.next_due_seconds > standing_seconds:
            found.append(
                f"a scheduled event is overdue by {-self.next_due_seconds:.0f} s: is a relay running, or "
                "does an open transaction lock its row?"
            )
        if self.slot is not None and self.slot.problem is not None:
            found.append(self.slot.problem)
        return found

    def _stuck(self, standing_seconds: float) -> str | None:
        """Return why events wait, apart from pauses and failures."""
        all_paused = bool(self.lanes) and all(lane.paused for lane in self.lanes)
        if "relays" not in self.hidden and not any(relay.alive for relay in self.relays):
            waiting = 0 if all_paused else self.backlog or 0
            return "no relay is running" + (f", and {counted(waiting, 'event')} waiting" if waiting else "")
        if (other := self._source_problem()) is not None:
            return other
        if orphans := [lane.lane for lane in self.lanes if lane.events and not lane.held and not lane.paused]:
            return f"events wait in {lanes_text(orphans)}, which no relay holds"
        # A failure or a paused topic explains the age; which events go to a paused topic is not known here.
        explained = self.retrying or self.blocking or any(one.scope.kind is ScopeKind.TOPIC for one in self.pauses)
        if explained or self.oldest_seconds is None or self.oldest_seconds <= standing_seconds:
            return None
        slow = [lane.lane for lane in self.lanes if not lane.paused and (lane.oldest_seconds or 0.0) > standing_seconds]
        return f"the oldest event has waited for {self.oldest_seconds:.0f} s ({lanes_text(slow)})"

    def _source_problem(self) -> str | None:
        """Return why no running relay takes any lane: all lanes have the other source."""
        running = {relay.source for relay in self.relays if relay.alive}
        of_lanes = {lane.source for lane in self.lanes if not lane.held}
        if len(running) != 1 or len(of_lanes) != 1 or running == of_lanes:
            return None
        return source_problem(*of_lanes, *running)


def look(connection: psycopg.Connection[Any], names: SlotNames) -> OutboxState:
    """Read the outbox's state. Raises Unavailable, and SchemaError without the tables or a right."""
    state = look_at_tables(connection, names.schema)
    visible = VisibleTables(connection, names.schema)
    known: SlotNames | None = None
    with unavailable_on_error("looking for a stream"), visible.reading("streams"):
        known = names_in_checkpoint(connection, names)
    if visible.hidden:
        return replace(state, hidden={**state.hidden, **visible.hidden})
    # The slot's own figures need the lanes' positions.
    return state if known is None or "lanes" in state.hidden else replace(state, slot=_slot(connection, known))


def look_at_tables(connection: psycopg.Connection[Any], schema: str) -> OutboxState:
    """Read the outbox's state without the slot, in one snapshot. Raises Unavailable or SchemaError."""
    tables = names_of(schema)
    tables["next_due"] = next_due(tables)
    tables["differences"] = sql.SQL("'[]'::jsonb")
    bound = {"most": COUNTED, "events": sql.Identifier(schema, "events").as_string(None)}
    visible = VisibleTables(connection, schema)
    with unavailable_on_error("looking at the outbox"), connection.cursor(row_factory=dict_row) as cursor:

        def execute(text: str) -> list[dict[str, Any]]:
            return cursor.execute(sql.SQL(text).format(**tables), bound).fetchall()

        def read(text: str, *needed: str) -> list[dict[str, Any]] | None:
            """Return rows; None if the role can't read one of these tables."""
            rows = None
            with visible.reading(*needed):
                rows = execute(text)
            return rows

        with one_snapshot(connection, _STATEMENT_SECONDS):
            cursor.execute(KEEP_TO_THE_INDEX, {"local": True})
            pauses = _paused(read(_PAUSES, "pauses", "relays", "lanes") or ())
            now = Pauses.of((one.number, one.scope.kind, one.scope.name) for one in pauses)
            lanes = [LaneState(**row, paused=now.covers(row["lane"])) for row in read(_LANES, "lanes") or ()]
            verified = [Verified(**row) for row in read(_VERIFIED, "verified") or () if row["topic"] != ALL_TOPICS]
            relays = [RelayState(**row) for row in read(_RELAYS, "relays") or ()]
            counts = ("retrying", "blocking", "dead_letters", "scheduled", "next_due_seconds")
            figures: dict[str, Any] = dict.fromkeys(counts)
            for table, query in (("failures", _FAILURES), ("dead_letters", _DEAD), ("scheduled", _SCHEDULED)):
                for row in read(query, table) or ():
                    figures |= row
            (rest,) = execute(_REST)
            # Last, so that all else is known where this takes too long.
            waiting = None
            with suppress(psycopg.errors.QueryCanceled):
                waiting = read(WAITING, "events", "lanes")
    if waiting is not None:
        of_lane = {row["lane"]: row for row in waiting}
        lanes = [replace(lane, **of_lane[lane.lane]) for lane in lanes if lane.lane in of_lane]
    held: dict[str | None, list[int]] = {}
    for lane in lanes:
        if lane.held:
            held.setdefault(lane.owner, []).append(lane.lane)
    counted = sum(lane.events for lane in lanes)
    exact = waiting is not None and all(lane.events < COUNTED for lane in lanes)
    unseen = not visible.hidden.keys().isdisjoint({"events", "lanes"})
    return OutboxState(
        at=rest["at"],
        backlog=None if unseen else counted if exact else max(counted, int(rest["estimate"] or 0)),
        exact=exact,
        counted=waiting is not None or unseen,
        oldest_seconds=max(
            (lane.oldest_seconds for lane in lanes if lane.oldest_seconds is not None and not lane.paused), default=None
        ),
        written=rest["written"],
        gone=rest["gone"],
        lanes=lanes,
        relays=[replace(relay, lanes=tuple(held.get(relay.instance, ()))) for relay in relays],
        slot=None,
        hidden=visible.hidden,
        pauses=pauses,
        verified=verified,
        **figures,
    )


def without_event(names: Mapping[str, sql.Composable]) -> sql.Composable:
    return sql.SQL(_WITHOUT_EVENT).format(**names)


def read_lanes(connection: psycopg.Connection[Any], schema: str) -> list[LaneState]:
    """Return the lanes, without their events. Raises Unavailable, or SchemaError without the table or a right."""
    return [LaneState(**row) for row in read_rows(connection, "reading the lanes", _LANES, names_of(schema))]


def read_rows(
    connection: psycopg.Connection[Any],
    doing: str,
    statement: str,
    names: Mapping[str, sql.Composable],
    values: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of a statement for an operator who waits for them: it is cancelled after 10 s.

    Values of JSON may have Decimals: see ``exact_json``.

    Raises Unavailable, also when it takes too long, and SchemaError without the tables or the rights.
    """
    with unavailable_on_error(doing), connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
        set_json_loads(exact_json.loads, cursor)
        cursor.execute(STATEMENT_LIMIT, (f"{_STATEMENT_SECONDS}s",))
        return cursor.execute(sql.SQL(statement).format(**names), values).fetchall()


def read_verified(connection: psycopg.Connection[Any], schema: str) -> list[Verified]:
    """Return what `outbox audit --follow` has found, of ALL_TOPICS too. Raises Unavailable and SchemaError."""
    names = names_of(schema) | {"differences": sql.SQL("differences")}
    return [Verified(**row) for row in read_rows(connection, "reading what was verified", _VERIFIED, names)]


def read_pauses(connection: psycopg.Connection[Any], schema: str) -> list[Paused]:
    """Return all pauses. Raises Unavailable, or SchemaError without the table or a right."""
    return _paused(read_rows(connection, "reading the pauses", _PAUSES, names_of(schema)))


def _paused(rows: Sequence[dict[str, Any]]) -> list[Paused]:
    return [
        Paused(
            scope=Scope(ScopeKind(row.pop("scope")), row.pop("name")), unconfirmed=tuple(row.pop("unconfirmed")), **row
        )
        for row in rows
    ]


def _slot(connection: psycopg.Connection[Any], names: SlotNames) -> SlotSummary:
    state = Slot(connection, names).look()
    problem = find_problem(state, names)
    return SlotSummary(
        slot=names.slot,
        retained_bytes=state.retained_bytes,
        lag_bytes=state.lag_bytes,
        lag_seconds=state.lag_seconds,
        active=state.active_pid is not None,
        problem=None if problem is None else str(problem),
    )
