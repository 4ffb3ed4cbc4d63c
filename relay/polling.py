"""Source over outbox.events: one lane, read by polling, settled row by row.

Every fetch starts from the lowest id that may still be unpublished, not from the last one seen: a transaction that
drew a low id and committed late is found by the next fetch. A row leaves by DELETE, so there is no position to keep.

The floor
    Deleted rows leave dead index entries at the low end. Postgres steps over them quickly unless some old snapshot
    (a forgotten session, a long dump) forbids it to forget them; then each fetch would visit them all. So fetches
    start above a floor, which rises to an id M only when no transaction can still commit an id up to M:
      1. M is the last id settled; some seconds pass (``_SETTLE_SECONDS``), in which every INSERT that had drawn an id
         up to M got its transaction id; then a transaction id of our own is drawn, X. (A snapshot's xmax would not do:
         it is the last completed id plus one, and transactions beyond it may be running already.)
      2. once the snapshot's xmin has reached X, all those transactions have ended;
      3. a fetch after that, still from the old floor, found nothing up to M.
    A snapshot held by a reader has no transaction id and does not hold the floor back; a forgotten writer does, as it
    must. (An INSERT that stands still for longer than the wait in 1, between drawing its id and writing, as in a BEFORE
    trigger that sleeps, is found by the full sweep every ``_SWEEP_SECONDS``.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, LiteralString, assert_never

import orjson
import psycopg
from psycopg import sql
from psycopg.types.json import set_json_loads

from relay.database import unavailable_on_error
from relay.lanes import Lease
from relay.ports import Claim, LaneLost, Published, Refused, Result

_LOWEST: Final = -(2**63)
_SETTLE_SECONDS: Final = 5.0
_SWEEP_SECONDS: Final = 60.0

_FETCH: Final = """
SELECT id, event_id::text, aggregate_type, aggregate_id, event_type,
       to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
       coalesce(payload_bytes, convert_to(payload::text, 'UTF8')), headers
  FROM {events} WHERE lane = %s AND id > %s ORDER BY id LIMIT %s"""

# One statement, one round trip, one transaction: the lease is checked and prolonged, and only under it rows go.
_SETTLE: Final = """
WITH lease AS (
    UPDATE {lanes} SET lease_until = clock_timestamp() + make_interval(secs => %(ttl)s), last_batch = last_batch + 1
     WHERE lane = %(lane)s AND epoch = %(epoch)s RETURNING lane),
gone AS (
    DELETE FROM {events} WHERE lane = (SELECT lane FROM lease) AND id = ANY(%(ids)s::bigint[]))
SELECT lane FROM lease"""

# The index gives a lane in id order. Without fresh statistics the planner may sort the whole backlog for each batch
# instead; a new outbox has none, and a relay has no right to ANALYZE.
KEEP_TO_THE_INDEX: Final = (
    "SELECT set_config('enable_sort', 'off', true), set_config('enable_bitmapscan', 'off', true), "
    "set_config('enable_seqscan', 'off', true)"
)

_DRAW_XID: Final = "SELECT pg_current_xact_id()::text::bigint"
_XMIN: Final = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"


def fetch_query(schema: str) -> sql.Composed:
    """The hot query, for the source and for the test that guards its plan. Binds lane, floor, limit."""
    return sql.SQL(_FETCH).format(events=sql.Identifier(schema, "events"))


def settle_query(schema: str) -> sql.Composed:
    """The settling write, for the source and for the test that guards its plan. Binds ttl, lane, epoch, ids."""
    return sql.SQL(_SETTLE).format(events=sql.Identifier(schema, "events"), lanes=sql.Identifier(schema, "lanes"))


def _claim_row(_cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], Claim]:
    return Claim._make


class PollingSource:
    """One lane of outbox.events. Holds one connection, in autocommit: no transaction is open between calls.

    ``connect`` gives a fresh connection; ``lease`` is the lane's and carries the epoch that fences settling.
    Works behind PgBouncer in transaction mode: no session state, no prepared statements.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], schema: str, lease: Lease) -> None:
        self._lease = lease
        self._fetch = fetch_query(schema)
        self._settle = settle_query(schema)
        self._connection = connect()
        set_json_loads(orjson.loads, self._connection)
        self._cursor = self._connection.cursor(binary=True, row_factory=_claim_row)
        self._floor = _Floor()

    def fetch(self, limit: int) -> Sequence[Claim]:
        """Give up to ``limit`` unpublished events of the lane, lowest id first."""
        with unavailable_on_error(f"reading lane {self._lease.lane}"):
            floor = self._floor.start(draw_xid=self._draw_xid, xmin=self._xmin)
            # A pipeline: four messages, one round trip; SET LOCAL's reach ends with the transaction (PgBouncer).
            with self._connection.pipeline(), self._connection.transaction():
                self._connection.execute(KEEP_TO_THE_INDEX)
                self._cursor.execute(self._fetch, (self._lease.lane, floor, limit))
            rows = self._cursor.fetchall()
        self._floor.seen(rows[0].position if rows else None)
        return rows

    def settle(self, results: Sequence[Result]) -> None:
        """Delete what was published, if the lease still holds. Raises LaneLost when it does not."""
        done: list[int] = []
        for claim, outcome in results:
            match outcome:
                case Published():
                    done.append(claim.position)
                case Refused():
                    pass
                case _:
                    assert_never(outcome)
        if not done:
            return
        asked_at = time.monotonic()
        with unavailable_on_error(f"settling lane {self._lease.lane}"), self._connection.cursor() as cursor:
            held = cursor.execute(
                self._settle,
                {
                    "ttl": self._lease.ttl_seconds,
                    "lane": self._lease.lane,
                    "epoch": self._lease.epoch,
                    "ids": done,
                },
            ).fetchone()
        if held is None:
            raise LaneLost(
                f"lane {self._lease.lane}: epoch {self._lease.epoch} is over, another relay has taken the lane; "
                f"the {len(done)} events just published will be published again by it"
            )
        self._lease.renewed(asked_at)
        self._floor.settled(done[-1])

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _draw_xid(self) -> int:
        return self._number(_DRAW_XID)

    def _xmin(self) -> int:
        return self._number(_XMIN)

    def _number(self, query: LiteralString) -> int:
        row = self._connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])


class _Floor:
    """Where a fetch may start. See the module's docstring for why each step is needed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._floor = _LOWEST
        self._last_settled: int | None = None
        self._candidate: int | None = None
        self._candidate_at = 0.0
        self._xid: int | None = None
        self._ended = False
        self._looked_at = clock()
        self._swept_at = clock()

    def start(self, *, draw_xid: Callable[[], int], xmin: Callable[[], int]) -> int:
        """Give the id to start above. Asks the database at most once a second."""
        now = self._clock()
        if now - self._swept_at >= _SWEEP_SECONDS:
            self._swept_at = now
            return _LOWEST
        if now - self._looked_at >= 1.0:
            self._looked_at = now
            self._look(now, draw_xid, xmin)
        return self._floor

    def _look(self, now: float, draw_xid: Callable[[], int], xmin: Callable[[], int]) -> None:
        if self._candidate is None:
            if self._last_settled is not None and self._last_settled > self._floor:
                self._candidate, self._candidate_at, self._xid = self._last_settled, now, None
        elif self._xid is None:
            if now - self._candidate_at >= _SETTLE_SECONDS:
                self._xid = draw_xid()
        elif not self._ended:
            self._ended = xmin() >= self._xid

    def seen(self, lowest: int | None) -> None:
        """Take note of the lowest id that a fetch gave."""
        if self._ended and self._candidate is not None and (lowest is None or lowest > self._candidate):
            self._floor, self._candidate, self._ended = self._candidate, None, False

    def settled(self, last: int) -> None:
        """Take note of the last id that was settled."""
        self._last_settled = last if self._last_settled is None else max(last, self._last_settled)
