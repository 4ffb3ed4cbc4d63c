"""Reads the lanes that stream: the contents of events that the stream announces are read from their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from typing import Any, Final

from psycopg.rows import tuple_row

from outbox.errors import OutboxError
from relay.core.ports import Claim, WalPosition
from relay.database import unavailable_on_error
from relay.failpoints import failpoint
from relay.settle.settlement import lanes_text
from relay.settle.statements import array
from relay.wal.channel import Channel, StreamEvent
from relay.wal.lane import StreamLane, StreamLanes
from relay.wal.slot import Snapshot

_MOST_ROWS: Final = 50_000


class StreamReader:
    def __init__(self, lanes: StreamLanes) -> None:
        self._lanes = lanes
        self._queries = lanes.queries
        self._connection = lanes.table.connection
        self._settlement = lanes.table.settlement
        self._turn_bytes = lanes.table.turn_bytes
        # Cursors return rows, not claims: the position in the stream is added later.
        self._rows = self._connection.cursor(binary=True, row_factory=tuple_row)
        self._first = 0

    def read(self, limits: Mapping[int, int], failed: dict[int, OutboxError]) -> dict[int, Sequence[Claim]]:
        """Settle what is pending, and return the next events of these lanes; adds lost lanes to ``failed``."""
        announced = self._announced(limits)
        batches: dict[int, Sequence[Claim]] = {}
        with unavailable_on_error(f"reading {lanes_text(limits)}"):
            rows, cuts, lost = self._read(announced)
            failed |= lost

            def fill(lane: StreamLane, _channel: Channel) -> None:
                number = lane.lease.lane
                lane.batch = self._filled(lane, announced[number], rows.get(number, {}), cuts.get(number))
                self._note_size(lane, len(announced[number]))
                if lane.batch:
                    batches[number] = lane.batch

            self._lanes.each([number for number in announced if number not in lost], failed, fill)
            for number in lost.keys() & announced.keys():
                # For example, the lane's row is locked. The announced events come again.
                channel = self._lanes[number].channel
                assert channel is not None
                channel.put_back(announced[number])
        if batches:
            failpoint("batch.fetched")
        return batches

    def _announced(self, limits: Mapping[int, int]) -> dict[int, Sequence[StreamEvent]]:
        """Take the next events of as many lanes as a turn has room for, estimated by the size of their last events.

        Each of them gives at least one event, however large. So with large events the lanes alternate.
        """
        announced: dict[int, Sequence[StreamEvent]] = {}
        expected = 0.0
        after, self._first = self._first, 0
        for number in sorted(limits, key=lambda number: (number < after, number)):
            lane = self._lanes[number]
            assert lane.channel is not None
            if expected >= self._turn_bytes:
                self._first = number
                break
            if taken := lane.channel.take(min(limits[number], lane.rows)):
                announced[number] = taken
                expected += lane.row_bytes
        return announced

    def _read(
        self, announced: Mapping[int, Sequence[StreamEvent]]
    ) -> tuple[dict[int, dict[int, Sequence[Any]]], dict[int, int], dict[int, OutboxError]]:
        """Settle what is pending, and return the existing rows, by lane and id.

        If there is nothing to settle, this only reads: events from the WAL are durable, and a commit could wait for a
        standby.
        """
        settled = sorted({*self._settlement.unsettled, *filter(self._settlement.prolongs, announced)})
        checked = [lane for lane in announced if lane not in set(settled)]
        named = [(lane, event.id, n) for lane, events in announced.items() for n, event in enumerate(events)]
        going = {lane: {c.position for c in self._settlement.lanes[lane].pending.rows} for lane in announced}
        checking = self._connection.cursor()
        with self._connection.pipeline() if named or checked else nullcontext():
            if named:
                values = {
                    "lanes": array([each[0] for each in named]),
                    "ids": array([each[1] for each in named]),
                    "numbers": array([each[2] for each in named]),
                    "max_bytes": max(self._turn_bytes // max(len(announced), 1), 1),
                }
                self._rows.execute(self._queries.by_ids, values)
            if checked:
                checking.execute(*self._settlement.still_held(checked))
        found = self._rows.fetchall() if named else []
        failed: dict[int, OutboxError] = {}
        if checked:
            failed |= self._settlement.lost_of(checked, checking.fetchall())
        if settled:
            # Not in the pipeline: it would lock the lanes' rows until the Sync, which is another message to the server.
            failpoint("batch.settling")
            failed |= self._settlement.answered(self._settlement.send(settled))
            failpoint("batch.settled")
        rows: dict[int, dict[int, Sequence[Any]]] = {}
        cuts: dict[int, int] = {}
        for row in found:
            lane = row[8]
            # Rows that this turn settles were still there when they were read.
            if row[0] not in going[lane]:
                rows.setdefault(lane, {})[row[0]] = row
            if row[9] is not None:
                cuts[lane] = row[9]
        return rows, cuts, failed

    def _filled(
        self, lane: StreamLane, announced: Sequence[StreamEvent], rows: dict[int, Sequence[Any]], cut: int | None
    ) -> Sequence[Claim]:
        """Return the events to publish, up to the first that is not visible yet. Those without their rows are done."""
        channel, number_of_lane = lane.channel, lane.lease.lane
        assert channel is not None
        if cut is not None:
            # The rest did not fit.
            channel.put_back(announced[cut:])
            announced = announced[:cut]
        if len(rows) == len(announced):
            # All rows exist, and none is announced twice.
            return [Claim._make((*rows[event.id][:8], event.at, number_of_lane)) for event in announced]
        kept: list[Claim] = []
        gone: list[WalPosition] = []
        again: tuple[AbstractSet[int], Snapshot] | None = None
        for number, event in enumerate(announced):
            row = rows.pop(event.id, None)
            if row is not None:
                kept.append(Claim._make((*row[:8], event.at, number_of_lane)))
                continue
            if again is None:
                again = self._look_again(lane, announced[number:])
            if event.id in again[0] or not again[1].sees(event.at.xid):
                channel.put_back(announced[number:])
                if not kept:
                    self._lanes.delays.await_visibility()
                break
            gone.append(event.at)
        channel.done(gone)
        return kept

    def _note_size(self, lane: StreamLane, asked: int) -> None:
        """Adapt the number of rows of the next turn to the size of these."""
        if not lane.batch:
            return
        total = sum(claim.size for claim in lane.batch)
        lane.row_bytes = total / len(lane.batch)
        fitting = int(self._turn_bytes / 4 / max(lane.row_bytes, 1.0))
        if asked >= lane.rows or fitting < lane.rows:
            lane.rows = max(min(lane.rows * 4, fitting, _MOST_ROWS), 1)

    def _look_again(self, lane: StreamLane, events: Sequence[StreamEvent]) -> tuple[AbstractSet[int], Snapshot]:
        """Return the events whose rows exist now, and a snapshot of the same moment."""
        ids = array([event.id for event in events])
        row = self._connection.execute(self._queries.which, {"next_ids": ids, **lane.key}).fetchone()
        if row is None:
            raise self._lanes.lost(lane)
        return set(row[0]), Snapshot(row[1])
