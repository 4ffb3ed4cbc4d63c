"""Source over ``outbox.events``: the lanes of a worker, read by polling, settled row by row.

Every read starts from the lowest id that may still be unpublished, not from the last one seen: so the next read finds
the rows of a transaction that drew a low id and committed late. Published rows are deleted, so there is no position to
keep.

A turn takes one round trip: a statement that reads all lanes, and the one that settles the turn before (settlement.py).
The commit of the latter makes the rows that were read durable, and its result tells which lanes are still held and may
be published. They are two transactions of one session, so a crash of the server in between is noticed. Behind a pooler
it is not: there the settling statement checks the rows once more.

Postgres works while the relay waits for Kafka (background.py), in one of three ways:

- While a backlog is drained, the next turn's rows are read while this turn's are published. They are checked in the
same way: the settling statement comes after their read. - At-least-once, while two turns are at most a batch, the turn
before is settled while this one is published. Then another statement after the read checks which leases are valid, and
that all WAL up to that moment is flushed, so that the rows that were read can't be lost. It waits briefly, because
commits of other sessions and the WAL writer flush the WAL. If that takes too long, or if a synchronous standby must
have the WAL as well, the settling statement comes first after all. - Exactly-once, while no backlog is drained, the
turn before is settled while this one is sent. The Kafka transaction is committed after ``confirm``, when the settling
statement is done: its result tells which leases are valid, and its commit makes the rows that were read durable.

Waiting
    An idle worker runs one long statement on the server. Every few milliseconds it compares snapshots to see whether
    any transaction has committed, and only then looks for events. So an event is noticed within milliseconds, at a few
    statements a second. Behind a pooler it would keep a server connection busy; there the client polls instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, assert_never

import psycopg

from outbox.errors import OutboxError
from relay.core.lease import Lease
from relay.core.ports import Claim, DatabaseUnavailable, Fetched, Kind, Published, Receipt, Refused
from relay.database import unavailable_on_error
from relay.failpoints import failpoint
from relay.polling.kept_marks import KeptMarks
from relay.polling.queries import Queries
from relay.polling.reader import LaneReader
from relay.polling.session import ReadAhead, Session, receive
from relay.polling.sweep import Sweep
from relay.polling.takeover import RowTakeover
from relay.settle.retries import Failures
from relay.settle.settlement import RENEW_PART, Settlement, UnsettledBatch, by_lane, lanes_text

_WAIT_SECONDS: Final = 0.2
_CLIENT_STEP_SECONDS: Final = 0.002
# How long to wait for a flush by other sessions, how often to check for it, and when to try again after it did not
# come: no other session may be writing.
_FLUSH_SECONDS: Final = 0.005
_FLUSH_STEP_SECONDS: Final = 0.0003
_FLUSH_AGAIN_SECONDS: Final = 1.0
# The most payloads and headers in a turn. With the driver's and librdkafka's copies they take three times as much
# memory.
TURN_BYTES: Final = 16 << 20
# Up to this many lanes, a turn's statement settles all of them, whether or not they had events recently.
_FEW_LANES: Final = 16

# Visible rows are in the WAL, but with synchronous_commit = off it may not be flushed. Once the WAL up to this position
# is flushed, so are all rows that were read before.
_WRITTEN: Final = """
SELECT pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn(),
       current_setting('synchronous_standby_names') = ''"""

_FLUSHED: Final = "SELECT pg_current_wal_flush_lsn() >= %(lsn)s::pg_lsn"


class PollingSource:
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
        on_settled: Callable[[int, UnsettledBatch], None] = lambda _lane, _pending: None,
        renew_part: float = RENEW_PART,
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
            connect, schema, self._queries, archive=archive, renew_part=renew_part, on_settled=self._note_settled
        )
        self._connection = self.session.connection
        self.settlement: Settlement = self.session.settlement
        self.reader = LaneReader(
            self.session, self._queries, turn_bytes, sweep=Sweep(connect, self._queries), kept=kept
        )
        self.store = RowTakeover(self.session, self._queries, failures)
        self._watch_seconds = 0.0 if self.session.pooled else watch_seconds
        self._overlaps = overlap and not self.session.pooled
        self._step = _CLIENT_STEP_SECONDS
        self._unconfirmed: Collection[int] = ()
        self._flush_in_vain_at = -_FLUSH_AGAIN_SECONDS

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The connection, with nothing in progress on it."""
        self.session.free()
        return self._connection

    def hold(self, lease: Lease) -> None:
        """Start reading a lane."""
        self.settlement.hold(lease)
        self.reader.hold(lease)
        self._discard_ahead()

    def drop(self, lane: int) -> None:
        """Forget a lane."""
        self.session.end_settling()
        self.settlement.drop(lane)
        self.reader.drop(lane)
        self._discard_ahead()

    def fetch(self, limits: Mapping[int, int]) -> Fetched:
        """Settle what is pending, and return the lowest unpublished events of these lanes."""
        failed_behind = self.session.finish_settling()
        if self.session.ahead is not None and not self._comes_next(self.session.ahead, limits):
            self.session.free()
        ahead, self.session.ahead = self.session.ahead, None
        lanes = list(ahead.lanes) if ahead is not None else self.reader.turn_lanes(limits)
        limited = {lane: limits[lane] for lane in lanes}
        settling: Collection[int] = ()
        unconfirmed: Collection[int] = ()
        with unavailable_on_error(f"reading {lanes_text(lanes)}"):
            if ahead is not None:
                claims, failed = self._settle_after(ahead, limited)
            else:
                self.reader.look_first(self._in_hand())
                if self._overlaps and self.settlement.overlaps(lanes):
                    claims, failed, settling = self._read_and_check(limited)
                elif self._overlaps and self.settlement.precedes_commit(lanes):
                    claims, failed, unconfirmed = self._read_before_settling(limited)
                else:
                    claims, failed = self._read_and_settle(limited)
        failed = failed_behind | failed
        batches = {lane: batch for lane, batch in by_lane(claims).items() if lane not in failed}
        self.reader.note_sizes(batches)
        if batches:
            self._step = _CLIENT_STEP_SECONDS
            failpoint("batch.fetched")
        self._unconfirmed = batches.keys() if unconfirmed else ()
        if settling or unconfirmed:
            self.settlement.begin(settling or unconfirmed)
        elif self._overlaps and self.reader.worth_reading_ahead(batches, limits) and not failed:
            # Includes lanes that have joined since.
            with unavailable_on_error("reading ahead"):
                self._read_ahead({lane: limits[lane] for lane in self.reader.turn_lanes(limits)}, batches)
        retried = self.reader.retried(batches)
        return Fetched(batches, failed, settling=settling, unconfirmed=bool(unconfirmed), retried=retried)

    def confirm(self, deadline: float) -> dict[int, OutboxError]:
        """Wait until the turn before is settled; then the leases are checked and the rows that were read are durable.

        Returns failures only for lanes with events in this turn; ``settle`` returns those of other lanes.
        """
        self.session.end_settling(deadline)
        return self.session.failed_of(self._unconfirmed)

    def leave_out(self, kinds: frozenset[Kind]) -> None:
        """Do not fetch events of these kinds: their topics can't be written to."""
        if kinds != self.reader.left_out:
            self.session.free()
            self.reader.leave_out(kinds)

    def go_on_without(self, lanes: Collection[int]) -> None:
        """Do nothing: rows of different lanes do not wait for each other."""

    def pause(self, lanes: Collection[int]) -> dict[int, OutboxError]:  # noqa: ARG002
        """Return no failures: rows of a lane that is not fetched stay in the table."""
        return {}

    def settle(self, receipts: Mapping[int, Receipt]) -> dict[int, OutboxError]:
        """Remember published events, which the next fetch settles. Refused events are recorded at once."""
        failed = self.session.finish_settling()
        for lane, receipt in receipts.items():
            refused = refused_of(receipt)
            if len(refused) < len(receipt.results) or receipt.batch is not None:
                held, published = self.settlement.lanes[lane], UnsettledBatch.of(receipt)
                if lane in failed:
                    held.pending = held.pending.then(published)
                elif not held.pending.covers(published):
                    held.pending = published
            if receipt.results:
                self.reader.note_due(lane, refused=bool(refused))
            if refused and (error := self._settle_with(lane, refused)) is not None:
                failed[lane] = error
        return failed

    def flush(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        """Settle what is pending of these lanes."""
        failed = self.session.finish_settling()
        unsettled = [lane for lane in self.settlement.unsettled if lane in set(lanes) and lane not in failed]
        if not unsettled:
            return failed
        self.session.free()
        return failed | self.settlement.settle(unsettled)

    def wait(self, lanes: Collection[int], seconds: float, stop: threading.Event) -> bool:
        """Wait until these lanes may have events, for at most ``seconds``. Returns whether a fetch is worth it."""
        if not lanes:
            stop.wait(seconds)
            return False
        if self.session.ahead is not None:
            return True
        self.session.end_settling()
        if self.reader.may_become_due(lanes) or self._watch_seconds == 0.0:
            stop.wait(min(self._step, seconds))
            self._step = min(self._step * 2, seconds)
            return True
        seconds = max(seconds, _WAIT_SECONDS) if seconds <= 1.0 else 1.0
        began = time.monotonic()
        with unavailable_on_error(f"waiting for events of {lanes_text(lanes)}"):
            watch = self._queries.watch(self._connection, self.reader.above(lanes), seconds, self._watch_seconds)
            self._connection.execute(watch, prepare=False)
        if time.monotonic() - began < seconds:
            self.reader.note_busy(lanes)
            return True
        return self.reader.must_look()

    def close(self) -> None:
        """Close the connections."""
        self.reader.close(self._in_hand())
        self.session.close()

    # One turn

    def _read_and_settle(self, limits: Mapping[int, int]) -> tuple[list[Claim], dict[int, OutboxError]]:
        lanes = list(limits)
        in_hand = self._in_hand()
        reads = self.reader.reads(limits, in_hand)
        looks = self.reader.looks()
        settled = [lane for lane in lanes if self._expects(lane)]
        settled += [lane for lane in self.settlement.unsettled if lane not in set(settled)]
        if self.session.pooled:
            looked = self.session.read_pooled(reads, looks)
            claims = self.reader.collect(reads)
            # Before the failures of what is settled are removed: they were counted.
            self.reader.note_counts(looked)
            found = {claim.lane for claim in claims}
            settled = [lane for lane in self.settlement.lanes if lane in found or lane in in_hand]
            failed: dict[int, OutboxError] = {}
            there = 0
            if settled:
                there, failed = self.settlement.settle_and_count(settled, claims)
            alive = sum(claim.lane not in failed for claim in claims)
            if alive and there != len(claims):
                raise self._gone(len(claims) - there, len(claims))
            return claims, failed
        asked_at = time.monotonic()
        settling = self._connection.cursor()
        with self._connection.pipeline() as pipeline:
            looking = self.session.send(reads, looks)
            pipeline.sync()
            if settled:
                failpoint("batch.settling")
                self.settlement.send(settling, settled)
                pipeline.sync()
        receive(reads)
        claims = self.reader.collect(reads)
        self.reader.note_counts(looking.fetchall() if looking is not None else None)
        failed = {}
        if settled:
            failed = self.settlement.answered(settling, settled, asked_at)
            failpoint("batch.settled")
        # Lanes that were not expected to have events.
        late = {claim.lane for claim in claims} - set(settled)
        if late:
            failed |= self.settlement.settle(sorted(late))
        return claims, failed

    def _read_and_check(self, limits: Mapping[int, int]) -> tuple[list[Claim], dict[int, OutboxError], Collection[int]]:
        """Read, and check whether the events may be published before the turn before is settled.

        Returns the lanes of that turn, to be settled meanwhile. If they may not, it is settled at once, which makes the
        events durable.
        """
        unsettled = self.settlement.unsettled
        in_hand = self._in_hand()
        claims = self._read_only(limits, in_hand)
        batches = by_lane(claims)
        # A crash may repeat at most a batch of a lane.
        small = all(len(batch) + len(in_hand.get(lane, ())) <= limits[lane] for lane, batch in batches.items())
        small = small and not self.reader.worth_reading_ahead(batches, limits)
        if claims and small and (lost := self._check(batches.keys())) is not None:
            return claims, lost, unsettled
        settled = sorted(batches.keys() | set(unsettled))
        return claims, self.settlement.settle(settled), ()

    def _read_before_settling(
        self, limits: Mapping[int, int]
    ) -> tuple[list[Claim], dict[int, OutboxError], Collection[int]]:
        """Read. Returns also the lanes to settle before these events are committed in Kafka.

        None in a backlog: there the turn before is settled at once, so that the next turn's rows can be read meanwhile.
        """
        claims = self._read_only(limits, self._in_hand())
        batches = by_lane(claims)
        # A lane that was given up is settled by its marker when it is taken over again.
        settled = sorted(batches.keys() | (set(self.settlement.unsettled) & limits.keys()))
        if claims and not self.reader.worth_reading_ahead(batches, limits):
            return claims, {}, settled
        return claims, self.settlement.settle(settled), ()

    def _in_hand(self) -> dict[int, Sequence[Claim]]:
        """Return the published but unsettled rows, by lane."""
        return {lane: self.settlement.lanes[lane].pending.rows for lane in self.settlement.unsettled}

    def _read_only(self, limits: Mapping[int, int], in_hand: Mapping[int, Sequence[Claim]]) -> list[Claim]:
        reads = self.reader.reads(limits, in_hand)
        looks = self.reader.looks()
        looked = self.session.read(reads, looks)
        claims = self.reader.collect(reads)
        self.reader.note_counts(looked)
        return claims

    def _check(self, lanes: Collection[int]) -> dict[int, OutboxError] | None:
        """Return the lanes that another relay has taken; None if Postgres may still lose the rows that were read."""
        with self._connection.pipeline():
            written = self._connection.execute(_WRITTEN)
            holding = self._connection.execute(*self.settlement.still_held(lanes))
        row = written.fetchone()
        assert row is not None
        lsn, flushed, alone = row
        if not alone:
            return None
        began = time.monotonic()
        if not flushed and began - self._flush_in_vain_at < _FLUSH_AGAIN_SECONDS:
            return None
        while not flushed:
            if time.monotonic() - began >= _FLUSH_SECONDS:
                self._flush_in_vain_at = began
                return None
            time.sleep(_FLUSH_STEP_SECONDS)
            row = self._connection.execute(_FLUSHED, {"lsn": lsn}).fetchone()
            flushed = row is not None and row[0]
        return self.settlement.lost_of(lanes, holding.fetchall())

    def _settle_after(self, ahead: ReadAhead, limits: Mapping[int, int]) -> tuple[list[Claim], dict[int, OutboxError]]:
        """Return the events that were read ahead, and settle the turn before: its commit comes after that read."""
        claims = [claim for claim in self._finish(ahead) if claim.lane in limits]
        settled = sorted({claim.lane for claim in claims} | set(self.settlement.unsettled))
        failed: dict[int, OutboxError] = {}
        if settled:
            failed = self.settlement.settle(settled)
        return claims, failed

    def _expects(self, lane: int) -> bool:
        """Return whether to settle the lane in the same round trip in which it is read."""
        return (
            len(self.settlement.lanes) <= _FEW_LANES
            or bool(self.settlement.lanes[lane].pending)
            or self.reader.is_busy(lane)
        )

    def _gone(self, gone: int, read: int) -> DatabaseUnavailable:
        return DatabaseUnavailable(
            f"Postgres: {gone} of {read} events that were there a moment ago are gone: it has crashed, or somebody "
            "deletes events"
        )

    # Reading ahead

    def _read_ahead(self, limits: Mapping[int, int], in_hand: Mapping[int, Sequence[Claim]]) -> None:
        if self.reader.must_look():
            # The next turn has to read the failures.
            return
        self.session.read_ahead(ReadAhead(self.reader.reads(limits, in_hand), list(limits), in_hand))

    def _discard_ahead(self) -> None:
        if self.session.ahead is not None:
            self.session.ahead.stale = True

    def _comes_next(self, ahead: ReadAhead, lanes: Collection[int]) -> bool:
        """Return whether the events that were read ahead are the next turn of these lanes, or of some of them.

        They are not if a lane is gone or must not be published now, nor if an event of the turn in hand was not
        published because the broker refused the batch or the topic can't be written to: that event is read again, and
        comes first.
        """
        pending = self.settlement.lanes
        return (
            not ahead.stale
            and set(ahead.lanes) <= set(lanes)
            and all(lane in pending and pending[lane].pending.rows == batch for lane, batch in ahead.in_hand.items())
        )

    def _finish(self, ahead: ReadAhead) -> list[Claim]:
        self.settlement.background.wait()
        return self.reader.collect(ahead.reads)

    def _note_settled(self, lane: int, pending: UnsettledBatch) -> None:
        self.reader.note_settled(lane, pending)
        self._on_settled(lane, pending)

    def _settle_with(self, lane: int, refused: Sequence[tuple[Claim, str]]) -> OutboxError | None:
        """Settle what is pending of a lane, and record refused events in the same transaction."""
        dead: list[Claim] = []
        error = self.session.settle_with(
            lane,
            f"settling lane {lane}",
            lambda: dead.extend(self._failures.record(self._connection, lane, refused)),
        )
        if error is not None:
            return error
        self.reader.look_again(lane, [claim.position for claim, _ in refused])
        for claim in dead:
            self._on_dead(lane, claim)
        return None


def refused_of(receipt: Receipt) -> list[tuple[Claim, str]]:
    """Return the refused events of a receipt, with the reasons."""
    refused = []
    for claim, outcome in receipt.results:
        match outcome:
            case Published():
                pass
            case Refused():
                refused.append((claim, outcome.reason))
            case _:
                assert_never(outcome)
    return refused
