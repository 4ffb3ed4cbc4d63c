"""Move scheduled events into ``events`` when they are due. From then on they are events like any other.

A scheduled event is a row of ``scheduled``, which no lane and no stream reads, so that it delays nothing. When its time
has come by the database's clock, a relay deletes the row and inserts it into ``events``, in one statement: it gets an
id, a lane and its ``created_at`` at that moment, as if a writer had just written it. So neither the order of other
events nor the low-water mark of polling relays nor a position in the WAL depends on it.

Each control loop reads with its census when the next event is due, so a relay without scheduled events sends no
statement for them. Events that were moved leave dead index entries at the low end, which stay while some session holds
the xmin. So looks start a little below the lowest event that the last one found (``NextDue.seconds_back``). An event
whose transaction commits more than that after it was due is found by a look at all, a few seconds later. Any relay
moves; one at a time, by an advisory lock, because two could give later events lower ids.

| what happens                                | what follows                                                           |
|---------------------------------------------|------------------------------------------------------------------------|
| the relay is killed before the COMMIT       | the rows are still scheduled; another relay moves them                 |
| the relay is killed after it                | they are events, and are published as such                             |
| COMMIT succeeds, but its answer is lost     | the next look finds no such rows                                       |
| two relays look at the same time            | one has the lock; the other moves nothing, and looks again             |
| an event is cancelled at the same moment    | the first to lock the row wins. A locked row is skipped, and moved by  |
|                                             | a later look                                                           |
| … or gets another time                      | the same: it is moved, or waits for that time. A move that locks a     |
|                                             | version of the row which its DELETE does not see is tried once more    |
| the transaction that schedules commits late | the event is moved then                                                |
| no relay runs                               | they wait; `outbox status` and `outbox doctor` name them               |
| the database's clock goes back              | what is moved stays moved; the rest waits for its time                 |
| a role sets synchronous_commit off, and the | relays publish only what is flushed (see polling/source.py); an event  |
| database crashes after the move             | that was not is scheduled again by the crash, and moved again          |
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql

from relay.database import again_if_left, begin_session, one_write, unavailable_on_error
from relay.settle.statements import names_of

log = structlog.get_logger("relay")

_AT_ONCE: Final = 500
# A session costs more than a statement: one that is needed again within this time stays open.
_KEEP_SECONDS: Final = 5.0

# How far below the lowest event that was found looks start, and how often one looks at all events.
_BACK_SECONDS: Final = 10.0
_ALL_SECONDS: Final = 15.0

_NEXT: Final = """(SELECT extract(epoch FROM min(not_before) - clock_timestamp())::float8 FROM {scheduled}
  WHERE not_before >= {since})"""
"""SQL: in how many seconds the next event is due, negative if it is; NULL without any."""

_SINCE: Final = sql.SQL("coalesce(now() - make_interval(secs => %(back)s::float8), '-infinity')")

# now(), which is this statement's time: the index can't be asked for clock_timestamp(), which changes row by row. The
# rows are locked, so their places stay.
_MOVE: Final = """
WITH mover AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(hashtextextended(%(lock)s, 0)) AS ours),
due AS MATERIALIZED (
    SELECT s.ctid AS place, s.not_before, s.id FROM ONLY {scheduled} AS s
     WHERE (s.not_before, s.id) > (greatest({since}, %(after)s::timestamptz), %(after_id)s::bigint)
       AND s.not_before <= now() AND (SELECT ours FROM mover)
     ORDER BY s.not_before, s.id LIMIT %(most)s FOR UPDATE SKIP LOCKED),
found AS MATERIALIZED (SELECT ARRAY(SELECT place FROM due) AS places),
gone AS (DELETE FROM ONLY {scheduled} WHERE ctid = ANY((SELECT places FROM found)::tid[]) RETURNING *),
moved AS (
    INSERT INTO {events} (event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers)
    SELECT event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers
      FROM gone ORDER BY not_before, id
    RETURNING 1)
SELECT (SELECT count(*) FROM moved), d.not_before::text, d.id, {all_gone}
  FROM (SELECT 1) AS one LEFT JOIN (SELECT not_before, id FROM due ORDER BY not_before DESC, id DESC LIMIT 1) AS d
       ON true"""


def next_due(names: dict[str, sql.Composable], *, since: bool = False) -> sql.Composed:
    """Return a subquery: in how many seconds the next event is due; NULL without any.

    ``since``: it starts ``%(back)s`` seconds ago (NULL: at the lowest), see ``NextDue.seconds_back``.
    """
    return sql.SQL(_NEXT).format(**names, since=_SINCE if since else sql.SQL("'-infinity'"))


class NextDue:
    """When the next scheduled event is due, as this relay knows it. The control loop writes, the mover reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at: float | None = None
        self._lowest_at = 0.0
        self._all_at: float | None = None

    def seconds_back(self) -> float | None:
        """Return how many seconds ago a look may start; None: it has to look at all events."""
        now = self._clock()
        if self._all_at is None or now - self._all_at >= _ALL_SECONDS:
            return None
        return now - self._lowest_at + _BACK_SECONDS

    def set(self, seconds: float | None, back: float | None = None) -> None:
        """Record in how many seconds it is due, as found by a look that started ``back`` seconds ago.

        None: nothing is scheduled; or, as ``back``, it was a look at all.
        """
        now = self._clock()
        self._at = None if seconds is None else now + seconds
        self._lowest_at = now + min(seconds or 0.0, 0.0)
        if back is None:
            self._all_at = now

    @property
    def seconds(self) -> float | None:
        """Return in how many seconds it is due, negative if it is; None if nothing is scheduled."""
        at = self._at
        return None if at is None else at - self._clock()


class ScheduledEvents:
    """Moves the events that are due. Call ``look`` from time to time, from one thread."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], schema: str, due: NextDue) -> None:
        self._connect = connect
        names = names_of(schema)
        self._move_query = sql.SQL(_MOVE).format(**names, since=_SINCE)
        self._next_query = sql.SQL("SELECT {}").format(next_due(names, since=True))
        self._lock = f"outbox scheduled {schema}"
        self._due = due
        self._connection: psycopg.Connection[Any] | None = None

    def look(self) -> None:
        seconds = self._due.seconds
        if seconds is None or seconds > 0:
            if seconds is None or seconds > _KEEP_SECONDS:
                self.close()
            return
        try:
            with unavailable_on_error("moving scheduled events"):
                if self._connection is None:
                    self._connection = self._connect()
                    begin_session(self._connection)
                moved = self._move(self._connection)
        except BaseException:
            self.close()
            raise
        if moved:
            log.info("scheduled events are due", events=moved)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _move(self, connection: psycopg.Connection[Any]) -> int:
        total, moved = 0, _AT_ONCE
        back, after = self._due.seconds_back(), ["-infinity", 0]
        while moved == _AT_ONCE:
            values = {"lock": self._lock, "most": _AT_ONCE, "back": back, "after": after[0], "after_id": after[1]}
            moved, *after, _ = self._one(connection, self._move_query, **values)
            total += moved
        back = self._due.seconds_back()
        self._due.set(self._one(connection, self._next_query, back=back)[0], back)
        return total

    def _one(self, connection: psycopg.Connection[Any], query: sql.Composed, **values: Any) -> Any:
        def once() -> Any:
            with one_write(connection):
                (row,) = connection.execute(query, values).fetchall()
            return row

        return again_if_left(connection, once)
