"""Source over ``outbox.events``: the lanes of a worker, read by polling, settled row by row.

Every read starts from the lowest id that may still be unpublished, not from the last one seen: so the next read finds
the rows of a transaction that drew a low id and committed late, before later ones of its key. Published rows are
deleted, so there is no position to keep.

A turn reads all lanes, and then settles the previous turn, in one statement (settlement.py). Its commit makes the rows
that were read durable, and its result tells which lanes are still held and may be published. Both are of one session,
so a crash of the server in between is noticed. Behind a pooler they are one transaction, which is of one session there.

Postgres works while the relay waits for Kafka (background.py). What is read and when it is settled is a ``TurnPlan``:

| the previous turn is settled | this applies                      | and what makes publishing safe                    |
|------------------------------|-----------------------------------|---------------------------------------------------|
| first                        | unless one of the others does     | the settling statement, by its result and commit  |
| first, and the next turn is  | while a backlog is drained        | the same: that statement comes after the read     |
| read while this is published |                                   |                                                   |
| while this is published      | at-least-once, while two turns    | another statement after the read. It checks which |
|                              | are at most a batch, and no lease | leases are valid, and that all WAL up to that     |
|                              | has to be renewed                 | moment is flushed, briefly waiting for commits of |
|                              |                                   | others and the WAL writer. If that takes too long,|
|                              |                                   | or a standby must have the WAL: settled first     |
| before this is committed in  | exactly-once, while no backlog is | the Kafka transaction is committed after          |
| Kafka                        | drained                           | ``confirm``, when the settling statement is done  |

Waiting
    An idle worker runs one long statement on the server. Every few milliseconds it compares snapshots to see whether
    any transaction has committed, and only then looks for events. So an event is noticed within milliseconds, at a few
    statements a second. Behind a pooler it would keep a server connection busy; there the client polls instead. The
    server measures it by its wall clock, so the client cancels it if that has gone back.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, assert_never

import psycopg
import structlog

from outbox.errors import OutboxError
from relay.background import run_within
from relay.core.lease import Lease
from relay.core.marker import Marker
from relay.core.ports import Batches, Claim, Fetched, Kind, Receipt, Refusal, Source, UnsettledBatch
from relay.database import unavailable_on_error
from relay.failpoints import failpoint
from relay.polling.kept_marks import KeptMarks
from relay.polling.queries import Queries
from relay.polling.reader import LaneReader
from relay.polling.session import ReadTurn, Session, TurnPlan
from relay.polling.sweep import Sweep
from relay.polling.takeover import RowTakeover
from relay.settle.retries import Failures
from relay.settle.settlement import RENEW_PART, Settlement, Settling, lanes_text

log = structlog.get_logger("relay")

_WAIT_SECONDS: Final = 0.2
_MAX_WAIT_SECONDS: Final = 1.0
# How late the waiting statement may end: its last look may have to skip many dead rows.
_LATE_SECONDS: Final = 10.0
_CLIENT_STEP_SECONDS: Final = 0.002
# The most payloads and headers in a turn. With the driver's and librdkafka's copies they take three times as much
# memory.
TURN_BYTES: Final = 16 << 20


class PollingSource(Source):
    """The rows of a worker's lanes. Holds one connection, in autocommit. See ports.Source for the contract.

    ``connect`` opens a new connection. With ``archive`` published events are kept in ``published``. ``watch_seconds``
    is how often an idle worker's statement checks, inside the server, whether anything was committed; with 0 the client
    polls instead, as it does behind PgBouncer in transaction mode. ``kept``: what one source of a worker leaves to the
    next; see kept_marks.py.
    """

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        schema: str,
        failures: Failures,
        *,
        archive: bool = False,
        on_dead: Callable[[int, Claim], None] = lambda _lane, _claim: None,
        on_settled: Callable[[int, UnsettledBatch], None] = lambda _lane, _batch: None,
        on_adopted: Callable[[int, Marker | None], None] = lambda _lane, _marker: None,
        renew_part: float = RENEW_PART,
        lock_seconds: float = math.inf,
        watch_seconds: float = 0.003,
        turn_bytes: int = TURN_BYTES,
        overlap: bool = True,
        kept: KeptMarks | None = None,
    ) -> None:
        self._failures = failures
        self._on_dead = on_dead
        self._on_settled = on_settled
        self.turn_bytes = turn_bytes
        self._queries = Queries(schema, archive=archive)
        self.session = Session(
            connect,
            schema,
            self._queries,
            archive=archive,
            renew_part=renew_part,
            lock_seconds=lock_seconds,
            on_settled=self._note_settled,
        )
        self._connection = self.session.connection
        self.settlement: Settlement = self.session.settlement
        self.reader = LaneReader(
            self.session, self._queries, turn_bytes, sweep=Sweep(connect, self._queries), kept=kept
        )
        self.store = RowTakeover(self.session, self._queries, failures, on_adopted)
        self._watch_seconds = 0.0 if self.session.pooled else watch_seconds
        self._overlaps = overlap and not self.session.pooled
        # Whether the statement that settles after a read is needed to check the leases, and to flush what was read:
        # at_most_once.py turns it off.
        self._settles_with_read = True
        self._step = _CLIENT_STEP_SECONDS
        self._unconfirmed: Collection[int] = ()

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The connection, with nothing in progress on it."""
        self.session.free()
        return self._connection

    def hold(self, lease: Lease) -> None:
        self.settlement.hold(lease)
        self.reader.hold(lease)
        self._discard_ahead()

    def drop(self, lane: int) -> None:
        self.settlement.wait()
        self.settlement.drop(lane)
        self.reader.drop(lane)
        self._discard_ahead()

    def fetch(self, limits: Mapping[int, int]) -> Fetched:
        failed = self.settlement.collect()
        with unavailable_on_error(f"reading {lanes_text(limits)}"):
            turn = self._run(limits)
        failed |= turn.failed
        batches = {lane: batch for lane, batch in turn.batches.items() if lane not in failed}
        if batches:
            self._step = _CLIENT_STEP_SECONDS
            failpoint("batch.fetched")
        self._unconfirmed = ()
        match turn.settling:
            case Settling.FIRST:
                if self._overlaps and turn.backlog and not failed:
                    with unavailable_on_error("reading ahead"):
                        # Includes lanes that have joined since.
                        self.session.read_ahead(self.reader.plan_ahead(limits, batches))
                return Fetched(batches, failed, retried=turn.retried)
            case Settling.MEANWHILE:
                if turn.to_settle:
                    self.settlement.begin(turn.to_settle)
                return Fetched(batches, failed, settling=turn.to_settle, retried=turn.retried)
            case Settling.BEFORE_COMMIT:
                self._unconfirmed = batches.keys()
                self.settlement.begin(turn.to_settle)
                return Fetched(batches, failed, unconfirmed=True, retried=turn.retried)
            case _:
                assert_never(turn.settling)

    def confirm(self, deadline: float) -> dict[int, OutboxError]:
        """Wait until the previous turn is settled; then the leases are checked and the rows that were read are durable.

        Returns failures only for lanes with events in this turn; ``settle`` returns those of other lanes.
        """
        self.settlement.wait(deadline)
        return self.settlement.collect_of(self._unconfirmed)

    def leave_out(self, kinds: frozenset[Kind]) -> None:
        if kinds != self.reader.left_out:
            self.session.free()
            self.reader.leave_out(kinds)

    def go_on_without(self, lanes: Collection[int]) -> None:
        """Do nothing: rows of different lanes do not wait for each other."""

    def settle(self, receipts: Mapping[int, Receipt]) -> dict[int, OutboxError]:
        failed = self.settlement.collect()
        for lane, receipt in receipts.items():
            if published := receipt.published:
                held = self.settlement.lanes[lane]
                if lane in failed:
                    held.unsettled = held.unsettled.then(published)
                # A lane alone may have failed: the loop then settles its events again.
                elif not held.unsettled.covers(published):
                    held.unsettled = published
            if receipt.count:
                self.reader.note_due(lane, refused=bool(receipt.refused))
            if receipt.refused and (error := self._settle_with(lane, receipt.refused)) is not None:
                failed[lane] = error
        return failed

    def flush(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        failed = self.settlement.collect()
        unsettled = [lane for lane in self.settlement.unsettled_lanes if lane in set(lanes) and lane not in failed]
        if not unsettled:
            return failed
        self.session.free()
        return failed | self.settlement.settle(unsettled)

    def wait(self, lanes: Collection[int], seconds: float, stop: threading.Event) -> bool:
        if not lanes:
            stop.wait(seconds)
            return False
        if self.session.ahead is not None:
            return True
        self.settlement.wait()
        if self.reader.may_become_due(lanes) or self._watch_seconds == 0.0:
            stop.wait(min(self._step, seconds))
            self._step = min(self._step * 2, seconds)
            return True
        seconds = min(max(seconds, _WAIT_SECONDS), _MAX_WAIT_SECONDS)
        began = time.monotonic()
        with unavailable_on_error(f"waiting for events of {lanes_text(lanes)}"):
            watch = self._queries.watch(self._connection, self.reader.marks(lanes), seconds, self._watch_seconds)
            if not run_within(self._connection, watch, seconds + _LATE_SECONDS):
                log.warning("a wait for events that did not end is cancelled; has the database's clock gone back?")
                return True
        if time.monotonic() - began < seconds:
            return True
        return self.reader.failure_check_due()

    def close(self) -> None:
        self.reader.close(self._unsettled())
        self.session.close()

    # One turn

    def _plan(self, limits: Mapping[int, int]) -> TurnPlan:
        """Return what was read ahead, if it is the next turn of these lanes, or else what to read now."""
        ahead = self.session.ahead
        if ahead is not None and self._comes_next(ahead, limits):
            self.session.ahead = None
            return ahead
        self.session.free()
        plan = self.reader.plan_turn(limits, self._unsettled())
        if self._latest_settling(limits) is Settling.MEANWHILE:
            plan.checked = self.settlement.with_version(limits)
        return plan

    def _latest_settling(self, lanes: Collection[int]) -> Settling:
        """Return how late the previous turn may be settled when one of these lanes comes next.

        MEANWHILE only without transactions: the next marker would imply that rows are settled that may still be there.
        And not while a lease has to be renewed, which must come before its events are published. BEFORE_COMMIT only
        with transactions: readers do not see events before the commit.
        """
        if not self._overlaps:
            return Settling.FIRST
        about = [held for lane, held in self.settlement.lanes.items() if held.unsettled or lane in lanes]
        if all(held.own_id is not None for held in about):
            return Settling.BEFORE_COMMIT
        if any(held.own_id is not None or held.unsettled.number is not None for held in about):
            return Settling.FIRST
        renews = any(self.settlement.prolongs(held.lease.lane) for held in about)
        return Settling.FIRST if renews else Settling.MEANWHILE

    def _run(self, limits: Mapping[int, int]) -> ReadTurn:
        """Read, and settle the previous turn, unless that comes later."""
        plan = self._plan(limits)
        with self.settlement.one_session(limits):
            turn = self._choose_settling(plan, self.reader.read(plan, limits), limits)
            if turn.settling is not Settling.FIRST or not turn.to_settle or not self._settles_with_read:
                return turn
            failpoint("batch.settling")
            with unavailable_on_error(f"settling {lanes_text(turn.to_settle)}"):
                sent = self.settlement.send(turn.to_settle, by_number=self.session.pooled)
        with unavailable_on_error(f"settling {lanes_text(turn.to_settle)}"):
            # After the commit: a rollback would not renew the leases.
            failed = self.settlement.finish_sent(sent)
        failpoint("batch.settled")
        # Behind a pooler, a transaction that has locked nothing proves nothing by its commit: these are read again.
        proven = not self.session.pooled or sent.cursor.rowcount
        return turn._replace(batches=turn.batches if proven else {}, failed=failed)

    def _choose_settling(self, plan: TurnPlan, turn: ReadTurn, limits: Mapping[int, int]) -> ReadTurn:
        """Return the turn with when to settle the previous one, now that it is known what this one has."""
        batches = turn.batches
        # Of exactly-once, a lane that was given up is settled by its marker when it is taken over again.
        held = self.settlement.lanes
        unsettled = {lane for lane in self.settlement.unsettled_lanes if lane in limits or held[lane].own_id is None}
        first = turn._replace(to_settle=sorted(batches.keys() | unsettled))
        latest = Settling.FIRST if plan.ahead or turn.backlog or not batches else self._latest_settling(limits)
        match latest:
            case Settling.FIRST:
                return first
            case Settling.MEANWHILE:
                # A crash may repeat at most a batch of a lane.
                small = all(
                    len(each) + len(plan.unsettled.get(lane, ())) <= limits[lane] for lane, each in batches.items()
                )
                lost = self.settlement.find_lost(batches.keys(), plan.check) if small else None
                if lost is None:
                    return first
                return turn._replace(settling=Settling.MEANWHILE, to_settle=sorted(unsettled), failed=lost)
            case Settling.BEFORE_COMMIT:
                return first._replace(settling=Settling.BEFORE_COMMIT)
            case _:
                assert_never(latest)

    def _unsettled(self) -> Batches:
        return {lane: self.settlement.lanes[lane].unsettled.rows for lane in self.settlement.unsettled_lanes}

    # Reading ahead

    def _discard_ahead(self) -> None:
        if self.session.ahead is not None:
            self.session.ahead.stale = True

    def _comes_next(self, ahead: TurnPlan, lanes: Mapping[int, int]) -> bool:
        """Return whether the events that were read ahead are the next turn of these lanes, or of some of them.

        They are not if a lane is gone or must not be published now, nor if an event of the turn before was not
        published because the broker refused the batch or the topic can't be written to: that event is read again, and
        comes first.
        """
        held = self.settlement.lanes
        return (
            not ahead.stale
            and ahead.limits.keys() <= lanes.keys()
            and all(lane in held and held[lane].unsettled.rows == batch for lane, batch in ahead.unsettled.items())
        )

    def _note_settled(self, lane: int, batch: UnsettledBatch) -> None:
        self.reader.note_settled(lane, batch)
        self._on_settled(lane, batch)

    def _settle_with(self, lane: int, refused: Sequence[Refusal]) -> OutboxError | None:
        """Settle a lane's unsettled events, and record refused events in the same transaction."""
        dead: list[Claim] = []
        error = self.session.settle_with(
            lane,
            f"settling lane {lane}",
            lambda: dead.extend(self._failures.record(self._connection, lane, refused)),
        )
        if error is not None:
            return error
        self.reader.recheck_failures(lane, [claim.position for claim, _ in refused])
        for claim in dead:
            self._on_dead(lane, claim)
        return None
