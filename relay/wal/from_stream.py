"""Reads the lanes that stream: the contents of events that the stream announces are read from their rows.

While a turn is published, the rows of the next one are read. Its events are not taken from their channels before that
turn begins, so nothing has to be put back if something else comes first: then the rows are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

from psycopg.rows import tuple_row

from outbox._clients.postgres import pipeline
from outbox.errors import OutboxError
from relay.core.ports import Claim, LaneLost, WalPosition
from relay.database import unavailable_on_error
from relay.failpoints import failpoint
from relay.settle.settlement import lanes_text
from relay.settle.statements import array, lease_values
from relay.wal.channel import Channel, StreamEvent
from relay.wal.lane import StreamLane, StreamLanes
from relay.wal.slot import Snapshot

_MOST_ROWS: Final = 50_000


@dataclass(slots=True)
class _Ahead:
    """Events whose rows are read while a turn is published, which are still in their channels.

    ``unsettled`` are the ids, by lane, whose rows are there only because that turn is not settled yet.
    """

    announced: Mapping[int, Sequence[StreamEvent]]
    unsettled: Mapping[int, AbstractSet[int]]
    rows: Sequence[Any] = ()

    def cut(self, limits: Mapping[int, int]) -> _Ahead:
        """Return the same without the events beyond these limits, which come again."""
        announced = {lane: events[: limits[lane]] for lane, events in self.announced.items()}
        left = {(lane, event.id) for lane, events in announced.items() for event in events}
        return _Ahead(announced, self.unsettled, [row for row in self.rows if (row[8], row[0]) in left])


@dataclass(frozen=True, slots=True)
class _LookedAgain:
    """The events whose rows exist now, by lane, and a snapshot of the same moment. Lost lanes are absent."""

    ids: Mapping[int, AbstractSet[int]]
    snapshot: Snapshot


_NOTHING_MISSING: Final = _LookedAgain({}, Snapshot("0:0:"))


class StreamReader:
    def __init__(self, lanes: StreamLanes) -> None:
        self._lanes = lanes
        self._queries = lanes.queries
        self._settlement = lanes.table.settlement
        self._turn_bytes = lanes.table.turn_bytes
        # Cursors return rows, not claims: the position in the stream is added later.
        self._rows = lanes.table.connection.cursor(binary=True, row_factory=tuple_row)
        self._first = 0
        self._backlog = False
        self._ahead: _Ahead | None = None

    def read(self, limits: Mapping[int, int], failed: dict[int, OutboxError]) -> dict[int, Sequence[Claim]]:
        """Settle the turn before, and return the next events of these lanes; adds lost lanes to ``failed``."""
        ahead = self._taken_ahead(limits)
        announced = self._announced(limits, Channel.take) if ahead is None else ahead.announced
        batches: dict[int, Sequence[Claim]] = {}
        with unavailable_on_error(f"reading {lanes_text(limits)}"):
            rows, cuts, lost = self._read(announced, ahead)
            failed |= lost

            left = [number for number in announced if number not in lost]
            looked = self._look_again(left, announced, rows, cuts)
            for number in left:
                lane = self._lanes[number]
                found = rows.get(number, {})
                try:
                    lane.batch = self._filled(lane, announced[number], found, cuts.get(number), looked)
                except LaneLost as error:
                    failed[number] = error
                    continue
                self._note_size(lane, len(announced[number]))
                if lane.batch:
                    batches[number] = lane.batch
            for number in lost.keys() & announced.keys():
                # For example, the lane's row is locked. The announced events come again.
                self._channel(number).put_back(announced[number])
        if batches:
            failpoint("batch.fetched")
        return batches

    def read_ahead(self, limits: Mapping[int, int]) -> None:
        """Start to read the rows of these lanes' next events, if the lanes had more than was just read."""
        if not self._backlog or self._lanes.table.session.pooled:
            return
        self._lanes.table.session.free()
        announced = self._announced(limits, Channel.next)
        if not announced:
            return
        ahead = self._ahead = _Ahead(announced, self._unsettled(announced))
        values = {
            "lanes": array(list(announced)),
            # Not a list of texts: the driver would search each of them for what to escape.
            "ids": array([f'"{array([event.id for event in events])}"' for events in announced.values()]),
            "rooms": array(list(self._rooms(announced).values())),
        }

        def read() -> None:
            ahead.rows = self._rows.execute(self._queries.all_by_ids, values).fetchall()

        self._settlement.background.start(read)

    def forget_ahead(self) -> None:
        """Do not use what was read ahead: the lanes are read again."""
        self._ahead = None

    def _taken_ahead(self, limits: Mapping[int, int]) -> _Ahead | None:
        """Take the events whose rows were read ahead, if they are the next ones of these lanes."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not ahead.announced.keys() <= limits.keys():
            return None
        self._lanes.table.session.free()
        if any(row[0] is None for row in ahead.rows):
            # A lane's rows do not fit, or are gone.
            return None
        if any(len(events) > limits[lane] for lane, events in ahead.announced.items()):
            ahead = ahead.cut(limits)
        taken = {lane: self._channel(lane).take(len(events)) for lane, events in ahead.announced.items()}
        if taken == ahead.announced:
            return ahead
        # An event of the turn before was not published, for example, and comes first.
        for lane, events in taken.items():
            self._channel(lane).put_back(events)
        return None

    def _channel(self, lane: int) -> Channel:
        channel = self._lanes[lane].channel
        assert channel is not None
        return channel

    def _announced(
        self, limits: Mapping[int, int], take: Callable[[Channel, int], Sequence[StreamEvent]]
    ) -> dict[int, Sequence[StreamEvent]]:
        """Take the next events of as many lanes as a turn has room for, estimated by the size of their last events.

        Each of them gives at least one event, however large. So with large events the lanes alternate.
        """
        self._backlog = False
        announced: dict[int, Sequence[StreamEvent]] = {}
        expected = 0.0
        after, self._first = self._first, 0
        for number in sorted(limits, key=lambda number: (number < after, number)):
            lane = self._lanes[number]
            if expected >= self._turn_bytes:
                self._first, self._backlog = number, True
                break
            most = min(limits[number], lane.rows)
            if taken := take(self._channel(number), most):
                announced[number] = taken
                expected += lane.row_bytes
                self._backlog = self._backlog or len(taken) == most
        return announced

    def _unsettled(self, lanes: Iterable[int]) -> dict[int, AbstractSet[int]]:
        """Return the ids that are published, or being published, and not settled. Their rows are still there."""
        return {
            lane: {claim.position for claim in (*self._lanes[lane].batch, *self._settlement.lanes[lane].unsettled.rows)}
            for lane in lanes
        }

    def _rooms(self, announced: Mapping[int, Sequence[StreamEvent]]) -> dict[int, int]:
        """Return the bytes that each lane may have: an equal share, or more if its events are expected to need more.

        If the others' events are suddenly larger, a turn has at most twice its bytes.
        """
        needs = {lane: len(events) * self._lanes[lane].row_bytes for lane, events in announced.items()}
        part = self._turn_bytes / max(sum(needs.values()), 1.0)
        return {lane: max(self._turn_bytes // len(needs), int(need * part), 1) for lane, need in needs.items()}

    def _send(self, announced: Mapping[int, Sequence[StreamEvent]]) -> None:
        """Execute the statement that reads as many rows of events as fit."""
        room = self._rooms(announced)
        named = [(lane, event.id, n, room[lane]) for lane in announced for n, event in enumerate(announced[lane])]
        lanes, ids, numbers, rooms = map(array, zip(*named, strict=True))
        values = {"lanes": lanes, "ids": ids, "numbers": numbers, "rooms": rooms}
        self._rows.execute(self._queries.by_ids, values)

    def _read(
        self, announced: Mapping[int, Sequence[StreamEvent]], ahead: _Ahead | None
    ) -> tuple[dict[int, dict[int, Sequence[Any]]], dict[int, int], dict[int, OutboxError]]:
        """Settle the turn before, and return the existing rows, by lane and id.

        If there is nothing to settle, this only reads: events from the WAL are durable, and a commit could wait for a
        standby.
        """
        settled = sorted({*self._settlement.unsettled_lanes, *filter(self._settlement.prolongs, announced)})
        checked = [lane for lane in announced if lane not in set(settled)]
        going = self._unsettled(announced) if ahead is None else ahead.unsettled
        reads = bool(announced) and ahead is None
        # What was read ahead has arrived: the leases are checked after the rows were read.
        connection = self._lanes.table.connection
        checking = connection.cursor()
        with pipeline(connection) if reads or checked else nullcontext():
            if reads:
                self._send(announced)
            if checked:
                checking.execute(*self._settlement.still_held_query(checked))
        found = ahead.rows if ahead is not None else self._rows.fetchall() if reads else []
        failed: dict[int, OutboxError] = {}
        if checked:
            failed |= self._settlement.lost_lanes(checked, checking.fetchall())
        # Not in the pipeline: it would lock the lanes' rows until the Sync, which is another message to the server.
        failed |= self._settlement.settle(settled)
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
        self,
        lane: StreamLane,
        announced: Sequence[StreamEvent],
        rows: dict[int, Sequence[Any]],
        cut: int | None,
        looked: _LookedAgain,
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
        if number_of_lane not in looked.ids:
            raise self._settlement.lane_lost(number_of_lane)
        for number, event in enumerate(announced):
            row = rows.pop(event.id, None)
            if row is not None:
                kept.append(Claim._make((*row[:8], event.at, number_of_lane)))
                continue
            if event.id in looked.ids[number_of_lane] or not looked.snapshot.sees(event.at.xid):
                channel.put_back(announced[number:])
                if not kept:
                    self._lanes.delays.note_invisible()
                break
            gone.append(event.at)
        channel.done(gone)
        if len(gone) == len(announced) >= lane.rows:
            # A stream that begins again repeats what is published, perhaps much of a transaction.
            lane.rows = min(lane.rows * 4, _MOST_ROWS)
        return kept

    def _note_size(self, lane: StreamLane, asked: int) -> None:
        """Adapt the number of rows of the next turn to the size of these."""
        if not lane.batch:
            return
        total = sum([len(claim.value) for claim in lane.batch if claim.value is not None])
        lane.row_bytes = total / len(lane.batch)
        fitting = int(self._turn_bytes / 4 / max(lane.row_bytes, 1.0))
        if asked >= lane.rows or fitting < lane.rows:
            lane.rows = max(min(lane.rows * 4, fitting, _MOST_ROWS), 1)

    def _look_again(
        self,
        numbers: Collection[int],
        announced: Mapping[int, Sequence[StreamEvent]],
        rows: Mapping[int, Mapping[int, Sequence[Any]]],
        cuts: Mapping[int, int],
    ) -> _LookedAgain:
        """Look at the events of lanes with missing rows, in one statement: a stream that begins again repeats many."""
        missing: dict[int, str] = {}
        for number in numbers:
            events = announced[number][: cuts.get(number)]
            if len(rows.get(number, ())) != len(events):
                # Not a list of texts: the driver would search each of them for what to escape.
                missing[number] = f'"{array([event.id for event in events])}"'
        if not missing:
            return _NOTHING_MISSING
        leases = [self._lanes[number].lease for number in missing]
        values = {**lease_values(leases), "ids": array(list(missing.values()))}
        found = self._lanes.table.connection.execute(self._queries.which, values).fetchall()
        if not found:
            return _NOTHING_MISSING
        return _LookedAgain({row[0]: set(row[1]) for row in found}, Snapshot(found[0][2]))
