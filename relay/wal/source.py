"""The WAL source: reads a worker's lanes from the stream, or from the table where the stream can't serve a lane.

The stream has the events and their order; their contents are read from their rows. So an event of the stream is
published only when its row is visible in Postgres. A commit is in the WAL before it is visible, and with synchronous
replication it stays invisible until a standby has it: until then a failover could undo it. A row that does not exist
although its transaction is visible has been published, or deleted. So events that the stream repeats, or that were
published from the table, are sent once.

| state     | events come from                       | events of the stream are                                       |
|-----------|----------------------------------------|----------------------------------------------------------------|
| streaming | the stream, in commit order            | published, and settled by their rows                           |
| table     | the table, as polling reads it         | dropped when visible: their rows are in the table              |
| catching  | the table, up to the highest id that   | kept; the first of them follows when the table has nothing up  |
| up        | was visible when dropping stopped      | to that id                                                     |

A lane is in ``table`` after a switch from polling, after the slot was recreated, while it has failures (events of a key
that waits stay in the table, and are published from there, with the attempts, the backoff and the dead letters of
polling), and while it is paused: then the table is not read either. ``lanes.streaming`` has the state, and is written
durably before the first event is dropped and after the lane has caught up, so the next holder of the lane goes on in
the same state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import structlog

from outbox.errors import OutboxError
from relay.core.lease import Lease
from relay.core.marker import Marker
from relay.core.ports import Claim, Fetched, Kind, Receipt, Source, UnsettledBatch, WalPosition
from relay.database import unavailable_on_error
from relay.polling.source import PollingSource
from relay.settle.retries import Failures
from relay.settle.settlement import lanes_text
from relay.settle.statements import lease_values
from relay.wal.from_stream import StreamReader
from relay.wal.from_table import TableReader
from relay.wal.lane import CatchingUp, InTable, Streaming, StreamLane, StreamLanes
from relay.wal.queries import StreamQueries
from relay.wal.session import Stream

log = structlog.get_logger("relay")

_LOOK_SECONDS: Final = 1.0
_SWEEP_SECONDS: Final = 60.0
_LOG_SECONDS: Final = 10.0


class StreamSource(Source):
    """The lanes of a worker that reads the WAL; see ports.Source. A polling source beside it reads the table."""

    def __init__(self, connect: Any, schema: str, failures: Failures, *, stream: Stream, on_dead: Any, **options: Any):
        self._stream = stream
        self._failures = failures
        self._on_dead = on_dead
        self._table = PollingSource(
            connect,
            schema,
            failures,
            on_dead=on_dead,
            on_settled=self._note_settled,
            on_adopted=self._note_adopted,
            watch_seconds=0.0,
            overlap=False,
            **options,
        )
        self.store = self._table.store
        self._queries = StreamQueries(schema)
        self._lanes = StreamLanes(self._table, self._queries)
        self._stream_reader = StreamReader(self._lanes)
        self._table_reader = TableReader(self._lanes, stream)
        self._looked_at = 0.0
        self._fetched_at = 0.0
        self._paused: Collection[int] = ()
        self._warned_at = time.monotonic()

    def hold(self, lease: Lease) -> None:
        self._table.hold(lease)
        self._stream_reader.forget_ahead()
        self._lanes[lease.lane] = StreamLane(lease)

    def drop(self, lane: int) -> None:
        self._table.drop(lane)
        self._stream_reader.forget_ahead()
        self._lanes.pop(lane, None)

    def leave_out(self, kinds: frozenset[Kind]) -> None:
        """Do not fetch events of these kinds; in the stream a kind is known only after reading."""
        self._table.leave_out(kinds)
        self._table_reader.leaves_out = bool(kinds)

    def go_on_without(self, lanes: Collection[int]) -> None:
        self._table_reader.failing = lanes

    def pause(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        """Leave these lanes to the table, and drop their events from the stream, so that the slot can advance."""
        self._paused = lanes
        failed: dict[int, OutboxError] = {}
        if not lanes:
            return failed
        try:
            failed = self._join([lane for lane in lanes if self._lanes[lane].channel is None])
            self._leave_to_table([lane for lane in lanes if lane not in failed], failed)
            left = [lane for lane in lanes if lane not in failed]
            self._table_reader.drop([channel for lane in left if (channel := self._lanes[lane].channel) is not None])
            self._lanes.delays.await_visibility()
            self._table_reader.leave_failing(left)
        except Exception:
            self.flush(list(self._lanes))
            raise
        return failed

    def fetch(self, limits: Mapping[int, int]) -> Fetched:
        self._fetched_at = time.monotonic()
        try:
            return self._fetch(limits)
        except Exception:
            # The stream may have ended while Postgres and Kafka work: published events must not be sent again.
            self.flush(list(self._lanes))
            raise

    def settle(self, receipts: Mapping[int, Receipt]) -> dict[int, OutboxError]:
        """Record published events. Refused events move the lane to the table; so do events that were left out."""
        failed: dict[int, OutboxError] = {}
        from_table: dict[int, Receipt] = {}
        for number, lane in self._lanes.items():
            batch, lane.batch = lane.batch, ()
            receipt = receipts.get(number)
            if batch:
                error = self._settle_batch(lane, batch, receipt or Receipt())
                if error is not None:
                    failed[number] = error
            elif receipt is not None:
                from_table[number] = receipt
        return failed | self._table.settle(from_table)

    def flush(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        return self._table.flush(lanes)

    def wait(self, lanes: Collection[int], seconds: float, stop: threading.Event) -> bool:
        if not lanes:
            stop.wait(seconds)
            return False
        session = self._stream.session
        # Only a read shows what the table has.
        reads_table = any(not self._lanes[lane].streaming for lane in lanes)
        if reads_table:
            seconds = self._lanes.delays.before_read(seconds)
        # Events of paused lanes are dropped in the next turn.
        arrived = session is None or session.wait([*lanes, *self._paused], seconds)
        return arrived or reads_table or time.monotonic() - self._fetched_at >= _LOOK_SECONDS

    def close(self) -> None:
        self._table.close()

    # One turn

    def _fetch(self, limits: Mapping[int, int]) -> Fetched:
        failed = self._join([lane for lane in limits if self._lanes[lane].channel is None])
        ready = [number for number in limits if number not in failed]
        known = all(
            lane.channel is not None and lane.channel.session.running.is_set()
            for lane in map(self._lanes.__getitem__, ready)
        )
        if not known:
            self._log_not_joined()
        troubled = self._troubled([number for number in ready if self._lanes[number].streaming])
        for lane in map(self._lanes.__getitem__, ready):
            if lane.streaming and (lane.lease.lane in troubled or self._skipped_by_stream(lane)):
                lane.state = Streaming(must_leave=True)
        self._leave_stream([number for number in ready if self._lanes[number].must_leave], failed)
        ready = [number for number in ready if number not in failed]
        batches: dict[int, Sequence[Claim]] = {}
        streaming = {number: limits[number] for number in ready if self._lanes[number].streaming}
        if streaming:
            batches |= self._stream_reader.read(streaming, failed)
        else:
            self._stream_reader.forget_ahead()
        table = {number: limits[number] for number in ready if number not in streaming}
        fetched = self._table_reader.read(table, failed) if table else Fetched()
        batches |= fetched.batches
        if batches:
            self._lanes.delays.reset()
        self._lanes.delays.await_visibility()
        self._table_reader.leave_failing(limits.keys() - failed.keys())
        if batches and not table and not failed:
            self._stream_reader.read_ahead(streaming)
        return Fetched(batches, failed, known or bool(batches), retried=fetched.retried)

    def _log_not_joined(self) -> None:
        """Log from time to time the lanes that the stream waits for: meanwhile only tables are read."""
        now = time.monotonic()
        session = self._stream.session
        missing = () if session is None else session.not_joined()
        if missing and now - self._warned_at >= _LOG_SECONDS:
            self._warned_at = now
            log.warning("the stream is not read yet: lanes have not joined it", absent=lanes_text(missing))

    def _troubled(self, numbers: Collection[int]) -> Collection[int]:
        """Return, from time to time, which lanes have failures: an operator may retry a dead letter."""
        now = time.monotonic()
        if not numbers or now - self._looked_at < _LOOK_SECONDS:
            return ()
        self._looked_at = now
        return self._table.reader.lanes_with_failures(numbers)

    def _skipped_by_stream(self, lane: StreamLane) -> bool:
        """Return whether the stream has skipped an event of the table, which should never happen.

        Without this check, such an event would wait for ever, unnoticed.
        """
        now = time.monotonic()
        if now - lane.swept_at < _SWEEP_SECONDS:
            return False
        lane.swept_at = now
        assert lane.channel is not None
        session = lane.channel.session
        settled = lane.orphan is not None and session.has_flushed(lane.orphan[1])
        number, lowest_of = lane.lease.lane, self._queries.lowest
        with unavailable_on_error(f"looking at lane {number}"):
            ((lowest, lsn),) = self._table.connection.execute(lowest_of, {"lane": number}).fetchall()
        if lowest is None:
            lane.orphan = None
        elif lane.orphan is None or lane.orphan[0] != lowest:
            lane.orphan = lowest, lsn
        elif settled:
            log.error("the stream has skipped an event; the table is read", lane=number, id=lowest)
            lane.orphan = None
            return True
        if lane.orphan is not None:
            # Of a known one too: the session may be a new one.
            session.request_flush(lane.orphan[1])
        return False

    # Settling

    def _settle_batch(self, lane: StreamLane, batch: Sequence[Claim], receipt: Receipt) -> OutboxError | None:
        """Record the result of a batch from the stream. Returns the lane's error, if it has one."""
        if receipt.refused or receipt.left_out:
            return self._move_to_table(lane, batch, receipt)
        number = lane.lease.lane
        held = self._table.settlement.lanes[number]
        if receipt.published:
            held.unsettled = receipt.published
        if receipt.count == len(batch):
            return None
        # Events not known to be published come again. The published ones have to be settled before that.
        failed = self._table.flush([number])
        if lane.channel is not None:
            lane.channel.rewind()
        return failed.get(number)

    def _move_to_table(self, lane: StreamLane, batch: Sequence[Claim], receipt: Receipt) -> OutboxError | None:
        """Settle published events, record refused ones, and leave the rest of the batch to the table."""
        number = lane.lease.lane
        dead: list[Claim] = []

        def leave() -> None:
            if receipt.refused:
                dead.extend(self._failures.record(self._table.connection, number, receipt.refused))
            values = {"streaming": False, **lease_values([lane.lease])}
            self._table.connection.execute(self._queries.set_streaming, values)

        held = self._table.settlement.lanes[number]
        before, held.unsettled = held.unsettled, receipt.published
        try:
            error = self._table.session.settle_with(number, f"settling lane {number}", leave)
        except BaseException:
            held.unsettled = before
            raise
        assert lane.channel is not None
        if error is not None:
            held.unsettled = before
            # Refused events come again, before later ones of their keys.
            lane.channel.rewind()
            return error
        lane.state = InTable()
        self._table.reader.read_all_again(number)
        lane.channel.done(_positions(batch))
        for claim in dead:
            self._on_dead(number, claim)
        return None

    # Between stream and table

    def _join(self, numbers: Collection[int]) -> dict[int, OutboxError]:
        if not numbers:
            return {}
        lanes = [self._lanes[number] for number in numbers]
        with unavailable_on_error(f"looking at {lanes_text(numbers)}"):
            rows = self._table.connection.execute(
                self._queries.state, lease_values([lane.lease for lane in lanes])
            ).fetchall()
        states = {row[0]: row[1:] for row in rows}
        failed: dict[int, OutboxError] = {}
        for number, lane in zip(numbers, lanes, strict=True):
            state = states.get(number)
            if state is None:
                failed[number] = self._table.settlement.lane_lost(number)
                continue
            streaming, commit_lsn, failures, timeline = state
            lane.state = Streaming(must_leave=failures or lane.must_leave) if streaming else InTable()
            lane.channel = self._stream.join(number, max(commit_lsn or 0, lane.published_lsn), timeline)
        return failed

    def _leave_stream(self, numbers: Collection[int], failed: dict[int, OutboxError]) -> None:
        """Move these lanes to the table, in a few statements for all of them; adds those that can't be moved."""
        if not numbers:
            return
        failed |= self._table.flush(numbers)
        lanes = [self._lanes[number] for number in numbers if number not in failed]
        failed |= self._lanes.leave_stream(lanes)
        for lane in lanes:
            if not lane.streaming:
                assert lane.channel is not None
                lane.channel.rewind()
                self._table.reader.read_all_again(lane.lease.lane)

    def _leave_to_table(self, numbers: Collection[int], failed: dict[int, OutboxError]) -> None:
        """Keep paused lanes' events in the table; adds lanes for which that fails."""
        for number in numbers:
            if isinstance(self._lanes[number].state, CatchingUp):
                # What was kept for it is dropped as well: its rows are still in the table.
                self._lanes[number].state = InTable()
        self._leave_stream([number for number in numbers if self._lanes[number].streaming], failed)

    def _note_adopted(self, number: int, marker: Marker | None) -> None:
        lane = self._lanes[number]
        self._stream_reader.forget_ahead()
        lane.published_lsn = 0 if marker is None else marker.commit_lsn or 0
        # Events that were taken from the channel are read again.
        lane.channel, lane.batch = None, ()
        if not lane.streaming:
            lane.state = InTable()

    def _note_settled(self, lane: int, batch: UnsettledBatch) -> None:
        known = self._lanes.get(lane)
        if known is not None and known.channel is not None:
            known.channel.done(_positions(batch.rows))


def _positions(claims: Sequence[Claim]) -> list[WalPosition]:
    return [claim.at for claim in claims if claim.at is not None]
