"""Move scheduled events into ``events`` when they are due. From then on they are events like any other.

A scheduled event is a row of ``scheduled``, which no lane and no stream reads, so that it delays nothing. When its time
has come by the database's clock, a relay deletes the row and inserts it into ``events``, in one statement: it gets an
id, a lane and its ``created_at`` at that moment, as if a writer had just written it. So neither the order of other
events nor the low-water mark of polling relays nor a position in the WAL depends on it.

Each control loop reads with its census when the next event is due, so a relay without scheduled events sends no
statement for them. Any relay moves; one at a time, by an advisory lock, because two could give later events lower ids.

| what happens                                | what follows                                                           |
|---------------------------------------------|------------------------------------------------------------------------|
| the relay is killed before the COMMIT       | the rows are still scheduled; another relay moves them                 |
| the relay is killed after it                | they are events, and are published as such                             |
| COMMIT succeeds, but its answer is lost     | the next look finds no such rows                                       |
| two relays look at the same time            | one has the lock; the other moves nothing, and looks again             |
| an event is cancelled at the same moment    | who has the row first: it is gone, or the cancellation finds none. A   |
|                                             | row that is locked is passed over, and moved by a later look           |
| the transaction that schedules commits late | the event is moved then                                                |
| no relay of this version runs               | they wait; `outbox status` and `outbox doctor` name them               |
| the database's clock goes back              | what is moved stays moved; the rest waits for its time                 |
| a role sets synchronous_commit off, and the | relays publish only what is flushed (see polling/source.py); an |
| database crashes after the move             | event that was not is scheduled again by the crash, and moved again    |
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql

from relay.database import begin_session, unavailable_on_error
from relay.statements import names_of

log = structlog.get_logger("relay")

_AT_ONCE: Final = 500
# A session costs more than a statement: one that is needed again within this time stays open.
_KEEP_SECONDS: Final = 5.0

_NEXT: Final = "(SELECT extract(epoch FROM min(not_before) - clock_timestamp())::float8 FROM {scheduled})"
"""SQL: in how many seconds the next event is due, negative if it is; NULL without any."""

# now(), which is this statement's time: the index can't be asked for clock_timestamp(), which changes row by row. The
# rows are locked, so their places stay.
_MOVE: Final = """
WITH mover AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(hashtextextended(%(lock)s, 0)) AS ours),
due AS MATERIALIZED (
    SELECT s.ctid AS place FROM {scheduled} AS s WHERE s.not_before <= now() AND (SELECT ours FROM mover)
     ORDER BY s.not_before, s.id LIMIT %(most)s FOR UPDATE SKIP LOCKED),
gone AS (
    DELETE FROM {scheduled} AS s WHERE s.ctid = ANY(ARRAY(SELECT place FROM due)) RETURNING s.*),
moved AS (
    INSERT INTO {events} (event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers)
    SELECT event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers
      FROM gone ORDER BY not_before, id
    RETURNING 1)
SELECT count(*) FROM moved"""


def next_due(names: dict[str, sql.Composable]) -> sql.Composed:
    """Return a subquery: in how many seconds the next event is due; NULL without any."""
    return sql.SQL(_NEXT).format(**names)


class NextDue:
    """When the next scheduled event is due, as this relay knows it. The control loop writes, the mover reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at: float | None = None

    def set(self, seconds: float | None) -> None:
        """Record in how many seconds it is due; None: nothing is scheduled."""
        self._at = None if seconds is None else self._clock() + seconds

    @property
    def seconds(self) -> float | None:
        """Return in how many seconds it is due, negative if it is; None if nothing is scheduled."""
        at = self._at
        return None if at is None else at - self._clock()


class ScheduledEvents:
    """Moves the events that are due. Call ``look`` from time to time, from one thread."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], schema: str, due: NextDue) -> None:
        self._connect = connect
        self._names = names_of(schema)
        self._lock = f"outbox scheduled {schema}"
        self._due = due
        self._connection: psycopg.Connection[Any] | None = None

    def look(self) -> None:
        """Move what is due now. Raises Unavailable or SchemaError."""
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
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _move(self, connection: psycopg.Connection[Any]) -> int:
        total, moved = 0, _AT_ONCE
        while moved == _AT_ONCE:
            moved = int(self._one(connection, _MOVE, lock=self._lock, most=_AT_ONCE))
            total += moved
        self._due.set(self._one(connection, f"SELECT {_NEXT}"))
        return total

    def _one(self, connection: psycopg.Connection[Any], query: str, **values: Any) -> Any:
        row = connection.execute(sql.SQL(query).format(**self._names), values).fetchone()
        assert row is not None
        return row[0]
