"""The connection of a polling source.

It does one thing at a time, possibly in the background: it settles the previous turn (see settlement.py), or reads the
next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, LiteralString, NamedTuple

import orjson
import psycopg
from psycopg import sql
from psycopg.types.json import set_json_loads

from outbox._clients.postgres import pipeline
from outbox.errors import OutboxError, SchemaError
from relay.core.lease import Lease
from relay.core.ports import Batches, Claim, DatabaseUnavailable, LaneLocked, StatementCutShort, UnsettledBatch
from relay.database import begin_session, unavailable_on_error
from relay.polling.kept_marks import Server
from relay.polling.low_water_mark import Marks
from relay.polling.queries import SERVER, Queries
from relay.row_access import require_all_rows
from relay.settle.settlement import Check, Settlement, Settling
from relay.settle.statements import KEEP_TO_THE_INDEX

# Postgres takes plans for the arrays' known lengths for cheaper, and would make them anew for each turn: half of the
# processor time of small turns.
_KEEP_PLANS: Final = "SET plan_cache_mode = force_generic_plan"


@dataclass(slots=True)
class Read:
    """One reading statement. ``due``: it reads due events of its only lane; ``late``: those that a sweep has found.
    With ``last``, an empty result means that none of these is left.
    """

    query: sql.Composed
    values: dict[str, Any]
    lanes: Collection[int]
    marks: Marks
    due: bool = False
    late: bool = False
    last: bool = False
    cursor: psycopg.Cursor[Claim] | None = None
    rows: Sequence[Claim] = ()


@dataclass(slots=True)
class TurnPlan:
    """What a turn reads.

    ``unsettled`` are events that must not be read again: those that are published, or with ``ahead`` the turn that is
    being published while this one is read. Then it is the next turn only if all of them were published: other events
    come first. ``counted`` are the lanes whose failures are counted with the read, ``checked`` those whose leases are
    checked after it.
    """

    limits: Mapping[int, int]
    unsettled: Batches
    reads: Sequence[Read]
    counted: Collection[int] = ()
    checked: Collection[int] = ()
    check: Check | None = None
    ahead: bool = False
    stale: bool = False


class ReadTurn(NamedTuple):
    """What was read, and when the previous turn is settled.

    ``retried`` are the lanes that have due events, and nothing else. ``backlog``: there are more events, and no
    failures: the next turn is worth reading ahead. ``to_settle`` are the lanes of the settling statement: those with
    unsettled events, and, unless that runs MEANWHILE, those of this turn, whose leases it checks. Of lanes in
    ``failed`` nothing may be published.
    """

    batches: Batches
    retried: Collection[int]
    backlog: bool
    settling: Settling = Settling.FIRST
    to_settle: Collection[int] = ()
    failed: Mapping[int, OutboxError] = {}


class Session:
    """One connection, in autocommit. ``settlement`` settles on it; ``ahead`` is the read in progress, if any.

    ``connect`` opens a new connection. Its statements wait at most ``lock_seconds`` for a lock: while one that settles
    waits, no lease can be renewed. ``pooled``: it goes through PgBouncer in transaction mode, so session state and
    prepared plans are not used. Raises StandingError if rows are hidden; see row_access.py.
    """

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        schema: str,
        queries: Queries,
        *,
        archive: bool,
        renew_part: float,
        lock_seconds: float,
        on_settled: Callable[[int, UnsettledBatch], None],
    ) -> None:
        self._queries = queries
        self.connection = connect()
        """Use it only while nothing is in progress; see ``free``."""
        try:
            set_json_loads(orjson.loads, self.connection)
            with unavailable_on_error("beginning a session"):
                self.pooled = not begin_session(self.connection, lock_seconds)
                if not self.pooled:
                    self.connection.execute(KEEP_TO_THE_INDEX, {"local": False})
                    self.connection.execute(_KEEP_PLANS)
                require_all_rows(self.connection, schema)
        except BaseException:
            self.connection.close()
            raise
        self.settlement = Settlement(
            self.connection,
            schema,
            archive=archive,
            pooled=self.pooled,
            renew_part=renew_part,
            on_settled=on_settled,
        )
        self.ahead: TurnPlan | None = None
        self._server: Server | None = None
        self._no_waits_until = 0.0

    def accept(self, server: Server) -> Server:
        """Return the server. Raises DatabaseUnavailable if it is not the one before, later.

        Behind a pooler this session outlives its server: another one, or a restored one, gives ids out again that are
        below the marks.
        """
        if self._server is not None and not self._server.has_become(server):
            raise DatabaseUnavailable(
                "the pooler leads to another server, or to one that was started again: lanes are read from the start"
            )
        self._server = server
        return server

    # What is in progress

    def free(self) -> None:
        """Free the connection. Events that were read ahead are discarded, and read again."""
        self.settlement.wait()
        self.ahead = None
        with unavailable_on_error("reading ahead"):
            self.settlement.background.wait()

    @contextmanager
    def transaction(self, lease: Lease, doing: str) -> Iterator[None]:
        """Open a multi-statement transaction; Postgres ends the session if it idles longer than the lease."""
        self.free()
        with unavailable_on_error(doing), self.connection.transaction():
            self.connection.execute(self._queries.several, {"ttl_ms": str(int(lease.ttl_seconds * 1000))})
            if self.pooled:
                self.connection.execute(KEEP_TO_THE_INDEX, {"local": True})
            yield

    def settle_with(self, lane: int, doing: str, more: Callable[[], None]) -> OutboxError | None:
        """Settle a lane's unsettled events, and call ``more`` in the same transaction.

        Returns the reason unless ``more`` was called and that is committed. They may be settled all the same. Raises
        only what concerns all lanes.
        """
        began = time.monotonic()
        if began < self._no_waits_until:
            # Each of them might wait as long, and so would all the rest.
            return DatabaseUnavailable(f"Postgres, {doing}: not tried, as another lane has just waited for a lock")
        try:
            return self._settle_with(lane, doing, more)
        except StatementCutShort as error:
            now = time.monotonic()
            self._no_waits_until = now + (now - began)
            return error
        except SchemaError as error:
            return error

    def _settle_with(self, lane: int, doing: str, more: Callable[[], None]) -> OutboxError | None:
        settlement = self.settlement
        for _ in range(2):
            with self.transaction(settlement.lanes[lane].lease, doing):
                sent = settlement.send([lane], by_number=True)
                held = sent.cursor.rowcount > 0
                if held:
                    more()
            # Not before the commit: a rollback would not renew the lease.
            with unavailable_on_error(doing):
                error = settlement.finish_sent(sent).get(lane)
            if held or error is not None:
                return error
            # A renewal had locked the lane's row, and it is settled without ``more``.
        return LaneLocked(lane)

    def close(self) -> None:
        self.ahead = None
        self.settlement.background.close()
        self.connection.close()

    # Reading

    def read_turn(self, plan: TurnPlan) -> Sequence[Any]:
        """Receive the rows of a turn, in one round trip, unless they are being read. Returns the counted failures."""
        if plan.ahead:
            self.settlement.background.wait()
            return ()
        return self._read(plan)

    def read_ahead(self, plan: TurnPlan | None) -> None:
        """Start to read in the background, if there is something. Nothing else may use the connection meanwhile."""
        if plan is not None:
            self.ahead = plan
            self.settlement.background.start(partial(self._read, plan))

    def rows(self, query: LiteralString | sql.Composed, **values: Any) -> list[Any]:
        """Return the rows of a query. Nothing may be in progress."""
        return self.connection.execute(query, values).fetchall()

    def _read(self, plan: TurnPlan) -> Sequence[Any]:
        counting: psycopg.Cursor[Any] | None = None
        with pipeline(self.connection):
            for read in plan.reads:
                read.cursor = self.connection.cursor(binary=True, row_factory=_claim_row)
                read.cursor.execute(read.query, read.values, prepare=not self.pooled)
            if plan.counted:
                counting = self.connection.execute(self._queries.failure_sums, {"lanes": list(plan.counted)})
            plan.check = self.settlement.send_check(plan.checked) if plan.checked else None
            server = self.connection.execute(SERVER) if self.pooled else None
        if server is not None:
            self.accept(Server(*server.fetchall()[0]))
        for read in plan.reads:
            assert read.cursor is not None
            read.rows = read.cursor.fetchall()
        return counting.fetchall() if counting is not None else ()


def _claim_row(_cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], Claim]:
    return Claim._make
