"""Read the current state of the outbox, for `outbox status` and the metrics. Read-only, and without locks.

A backlog of millions is not counted row by row: each lane is counted up to a limit, along its primary key, and the rest
is estimated from the planner's statistics. ``exact`` tells whether the backlog was counted.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from outbox._clients.visible import VisibleTables
from relay.core.pauses import Paused, Pauses, Scope, ScopeKind
from relay.database import unavailable_on_error
from relay.lanes import source_problem
from relay.settle.statements import KEEP_TO_THE_INDEX, STATEMENT_LIMIT, names_of
from relay.tasks.scheduled import next_due
from relay.wal.slot import Slot, SlotNames, SlotState, find_problem, names_in_checkpoint

COUNTED: Final = 10_000
"""How many rows are counted in each lane, of failures, and of dead letters. A larger backlog is estimated."""
_STATEMENT_SECONDS: Final = 10

LANES: Final = """
SELECT l.lane, l.owner, l.source, l.streaming, l.epoch, l.last_batch,
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
SELECT instance, version, source, started_at, alive_until > clock_timestamp() AS alive,
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

FAILURES: Final = """
SELECT (SELECT count(*) FROM (SELECT FROM {failures} WHERE isfinite(next_attempt_at) LIMIT %(most)s) AS f) AS retrying,
       (SELECT count(*) FROM (SELECT FROM {failures} WHERE NOT isfinite(next_attempt_at) AND blocks
                               LIMIT %(most)s) AS f) AS blocking"""

DEAD: Final = "SELECT count(*) AS dead_letters FROM (SELECT FROM {dead_letters} LIMIT %(most)s) AS d"

_SCHEDULED: Final = """
SELECT (SELECT count(*) FROM (SELECT FROM {scheduled} LIMIT %(most)s) AS s) AS scheduled,
       {next_due} AS next_due_seconds"""

_PAUSES: Final = """
SELECT p.number, p.scope, p.name, p.requested_at, p.requested_by, p.reason,
       ARRAY(SELECT r.instance FROM {relays} AS r
              WHERE r.alive_until >= clock_timestamp() AND NOT p.number = ANY(r.obeys)
              ORDER BY r.instance) AS unconfirmed
  FROM {pauses} AS p ORDER BY p.scope, p.name"""

_HOLDS_FIRST: Final = """
SELECT coalesce(owner = %(instance)s AND lease_until > clock_timestamp(), false) FROM {lanes} ORDER BY lane LIMIT 1"""


@dataclass(frozen=True, slots=True)
class LaneState:
    """One lane.

    owner           the relay that holds it, or held it last; None if it was released.
    lease_seconds   the remaining time of the lease; negative after it has expired, None if there is none.
    events          the rows that wait in it, counted up to COUNTED.
    oldest_seconds  the age of the first of these; None if there are none.
    paused          whether an operator has paused the lane, or all lanes.
    """

    lane: int
    owner: str | None
    source: str
    streaming: bool
    epoch: int
    last_batch: int | None
    lease_seconds: float | None
    events: int = 0
    oldest_seconds: float | None = None
    paused: bool = False

    @property
    def held(self) -> bool:
        """Return whether a relay holds the lane."""
        return self.owner is not None and (self.lease_seconds or 0.0) > 0


@dataclass(frozen=True, slots=True)
class RelayState:
    """A relay that is running or ran recently. ``lanes`` are those that it holds now."""

    instance: str
    version: str
    source: str
    started_at: dt.datetime
    alive: bool
    heartbeat_seconds: float
    lanes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SlotSummary:
    """The replication slot. ``problem`` says why the stream can't be relied on; None if it can."""

    slot: str
    retained_bytes: int
    lag_bytes: int
    lag_seconds: float
    active: bool
    problem: str | None


@dataclass(frozen=True, slots=True)
class OutboxState:
    """The outbox at one moment, by the database's clock. Figures of a table that the role can't read are None or empty.

    backlog         rows that wait to be published; ``exact`` when all of them were counted.
    counted         whether counting them ended in time; if not, lanes show no events and nobody knows their age.
    oldest_seconds  the age of the oldest first row of a lane that is not paused; None without any.
    retrying        events that failed and wait for another attempt.
    dead_letters    events that wait for an operator; ``blocking`` of them hold back later events of their keys. Each
                    of these three figures is counted up to COUNTED.
    written, gone   rows inserted and deleted since the server's statistics began: two readings give the rates.
    scheduled       events that wait for their time, counted up to COUNTED too; ``next_due_seconds`` is the time until
                    the first of them is due, negative if it is; None without any.
    slot            None if the outbox has none.
    pauses          the pauses that operators have requested.
    hidden          the tables that the role can't read, each with the grant that is missing.
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

    def problems(self, standing_seconds: float = 60.0) -> list[str]:
        """Return the problems that need an operator; empty if there are none.

        standing_seconds  an event that is older than this is a problem, unless another problem explains its age.
        """
        found = [f"{table} can't be read: {why}" for table, why in self.hidden.items()]
        found += [_explained(one) for one in self.pauses]
        if not self.counted:
            found.append(
                f"the waiting events could not be counted within {_STATEMENT_SECONDS} s, so nobody knows their age: is "
                "a transaction open for long (pg_stat_activity.xact_start), and keeps dead rows?"
            )
        idle = [lane for lane in self.lanes if not lane.held and not lane.paused]
        waiting = [lane.lane for lane in idle if lane.events]
        all_paused = bool(self.lanes) and all(lane.paused for lane in self.lanes)
        # A pause explains the age of what waits; which events go to a paused topic is not known here.
        topics = any(one.scope.kind is ScopeKind.TOPIC for one in self.pauses)
        if "relays" not in self.hidden and not any(relay.alive for relay in self.relays):
            waits = self.backlog and not all_paused
            found.append("no relay is running" + (f", and {self.backlog:,} events wait" if waits else ""))
        elif (unheld := self._source_problem() or _unheld(waiting)) is not None:
            found.append(unheld)
        elif (
            self.oldest_seconds is not None
            and self.oldest_seconds > standing_seconds
            and not self.retrying
            and not self.blocking
            and not topics
        ):
            slow = [
                lane.lane for lane in self.lanes if not lane.paused and (lane.oldest_seconds or 0.0) > standing_seconds
            ]
            found.append(f"the oldest event has waited for {self.oldest_seconds:.0f} s (lanes {_few(slow)})")
        if self.retrying:
            found.append(f"{self.retrying:,} events are retrying: `outbox dead-letters list`")
        if self.dead_letters:
            held = f", {self.blocking:,} of them hold back their keys" if self.blocking else ""
            found.append(f"{self.dead_letters:,} dead letters{held}: `outbox dead-letters list`")
        elif self.blocking:
            found.append(
                f"{self.blocking:,} keys wait for dead letters that somebody has deleted: `outbox dead-letters list`"
            )
        if self.next_due_seconds is not None and -self.next_due_seconds > standing_seconds:
            found.append(
                f"a scheduled event is overdue by {-self.next_due_seconds:.0f} s: is a relay running, or "
                "does an open transaction have its row locked?"
            )
        if self.slot is not None and self.slot.problem is not None:
            found.append(self.slot.problem)
        return found

    def _source_problem(self) -> str | None:
        """Return why no relay that runs takes any lane: all are of the other source."""
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


def holds_first_lane(connection: psycopg.Connection[Any], schema: str, instance: str) -> bool:
    """Return whether a relay holds the first lane. Raises Unavailable or SchemaError."""
    with unavailable_on_error("looking at the first lane"):
        query = sql.SQL(_HOLDS_FIRST).format(**names_of(schema))
        row = connection.execute(query, {"instance": instance}).fetchone()
    return row is not None and bool(row[0])


def look_at_tables(connection: psycopg.Connection[Any], schema: str) -> OutboxState:
    """Read the outbox's state without the slot, in one snapshot. Raises Unavailable or SchemaError."""
    tables = names_of(schema)
    tables["next_due"] = next_due(tables)
    bound = {"most": COUNTED, "events": sql.Identifier(schema, "events").as_string(None)}

    with unavailable_on_error("looking at the outbox"), connection.cursor(row_factory=dict_row) as cursor:

        def read(text: str) -> list[dict[str, Any]]:
            return cursor.execute(sql.SQL(text).format(**tables), bound).fetchall()

        lanes: list[LaneState] = []
        relays: list[RelayState] = []
        visible = VisibleTables(connection, schema)
        with connection.transaction():
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute(STATEMENT_LIMIT, (f"{_STATEMENT_SECONDS}s",))
            cursor.execute(KEEP_TO_THE_INDEX, {"local": True})
            pauses: Sequence[Paused] = ()
            with visible.reading("pauses", "relays"):
                pauses = _paused(read(_PAUSES))
            now = Pauses.of((one.number, one.scope.kind, one.scope.name) for one in pauses)
            with visible.reading("lanes"):
                lanes = [LaneState(**row, paused=now.holds(row["lane"])) for row in read(LANES)]
            with visible.reading("relays"):
                relays = [RelayState(**row) for row in read(_RELAYS)]
            figures = _besides(visible, read)
            (rest,) = read(_REST)
            # Last, so that all else is known where this takes too long.
            waiting: dict[int, dict[str, Any]] | None = None
            with suppress(psycopg.errors.QueryCanceled), visible.reading("events", "lanes"):
                waiting = {row["lane"]: row for row in read(WAITING)}
    if waiting is not None:
        lanes = [replace(lane, **waiting[lane.lane]) for lane in lanes if lane.lane in waiting]
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
        **figures,
    )


def _besides(visible: VisibleTables, read: Callable[[str], list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the counts of failed and of scheduled events; None for those of a table that the role can't read."""
    figures: dict[str, Any] = dict.fromkeys(("retrying", "blocking", "dead_letters", "scheduled", "next_due_seconds"))
    with visible.reading("failures"):
        figures |= read(FAILURES)[0]
    with visible.reading("dead_letters"):
        figures |= read(DEAD)[0]
    with visible.reading("scheduled"):
        figures |= read(_SCHEDULED)[0]
    return figures


def without_event(names: Mapping[str, sql.Composable]) -> sql.Composable:
    """Return SQL that says whether the event of the row ``f`` of failures was deleted by hand."""
    return sql.SQL(_WITHOUT_EVENT).format(**names)


def read_lanes(connection: psycopg.Connection[Any], schema: str) -> list[LaneState]:
    """Return the lanes, without what waits in them. Raises Unavailable, or SchemaError without the table or a right."""
    return [LaneState(**row) for row in read_rows(connection, "reading the lanes", LANES, names_of(schema))]


def read_rows(
    connection: psycopg.Connection[Any],
    doing: str,
    statement: str,
    names: Mapping[str, sql.Composable],
    values: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of a statement for an operator who waits for them: it is cancelled after 10 s.

    ``connection`` is in autocommit. Raises Unavailable, also when the statement takes too long, and SchemaError without
    the tables or the rights.
    """
    with (
        unavailable_on_error(doing),
        connection.transaction(),
        connection.cursor(row_factory=dict_row) as cursor,
    ):
        cursor.execute(STATEMENT_LIMIT, (f"{_STATEMENT_SECONDS}s",))
        return cursor.execute(sql.SQL(statement).format(**names), values).fetchall()


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


def _explained(paused: Paused) -> str:
    text = f"{paused}; `outbox relay resume` ends it"
    if paused.unconfirmed:
        text += f". Running relays that do not obey it yet: {', '.join(paused.unconfirmed)}"
    return text


def _slot(connection: psycopg.Connection[Any], names: SlotNames) -> SlotSummary:
    state: SlotState = Slot(connection, names).look()
    problem = find_problem(state, names)
    return SlotSummary(
        slot=names.slot,
        retained_bytes=state.retained_bytes,
        lag_bytes=state.lag_bytes,
        lag_seconds=state.lag_seconds,
        active=state.active_pid is not None,
        problem=None if problem is None else str(problem),
    )


def _unheld(waiting: Sequence[int]) -> str | None:
    return f"events wait in lanes that no relay holds: {_few(waiting)}" if waiting else None


def _few(lanes: Sequence[int]) -> str:
    shown = ", ".join(map(str, lanes[:8]))
    return shown if len(lanes) <= 8 else f"{shown} and {len(lanes) - 8} more"
