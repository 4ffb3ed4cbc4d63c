"""Reads the lanes in the state ``table``, and returns them to the stream. See source.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, assert_never

import structlog

from outbox.errors import OutboxError
from relay.core.ports import Batches, Fetched
from relay.database import unavailable_on_error
from relay.polling.low_water_mark import LOWEST
from relay.settle.settlement import lanes_text
from relay.settle.statements import array
from relay.wal.channel import Channel
from relay.wal.lane import CatchingUp, InTable, Streaming, StreamLane, StreamLanes
from relay.wal.session import Stream
from relay.wal.slot import current_snapshot

log = structlog.get_logger("relay")

_DROPPED_AT_ONCE: Final = 5000


class TableReader:
    """Reads turns from the table. ``leaves_out``: events of some kinds stay there.

    ``failing`` are owned lanes whose take-over keeps failing (for example with a lost state); the others go on without
    them. There is one stream: unfinished events of one channel are held, keep the slot from advancing, and finally fill
    the stream. So such a lane is put into the state ``table``, durably, and its events in the stream are dropped, as in
    that state: their rows stay in the table until they are settled. That is correct before the lane is taken over, too:
    then the marker settles what its former holder has published, by ids, and everything else is read from the table.
    """

    def __init__(self, lanes: StreamLanes, stream: Stream) -> None:
        self._lanes = lanes
        self._stream = stream
        self._table = lanes.table
        self._settlement = lanes.table.settlement
        self._queries = lanes.queries
        self.leaves_out = False
        self.failing: Collection[int] = ()

    def read(self, limits: Mapping[int, int], failed: dict[int, OutboxError]) -> Fetched:
        """Settle the turn before, and return the next events of these lanes; adds lanes that fail to ``failed``.

        All lanes together take a few statements: with some for each, hundreds of them would stand still for seconds.
        """
        self._make_room(limits)
        fetched = self._table.fetch(limits)
        failed |= fetched.failed
        batches = dict(fetched.batches)
        # Only lanes with events were settled. The stream's reader ends for all lanes if one of them is lost.
        idle = [number for number in limits if number not in failed and number not in batches]
        if idle:
            failed |= self._lanes.find_lost(idle)
        for number in self._advance([number for number in limits if number not in failed], batches, limits):
            batches.pop(number, None)
        return replace(fetched, batches={number: rows for number, rows in batches.items() if number not in failed})

    def _advance(self, numbers: Collection[int], batches: Batches, limits: Mapping[int, int]) -> Collection[int]:
        """Change the states of lanes whose rows allow that. Returns the lanes whose rows must not be published."""
        last_ids: dict[int, int] = {}
        horizons: dict[int, int] = {}
        for number in numbers:
            lane, rows = self._lanes[number], batches.get(number, ())
            if self._table.reader.has_failures(number) or self.leaves_out:
                # Some events stay in the table, and others must not wait for them.
                lane.state = InTable()
                continue
            match lane.state:
                case InTable():
                    # Fewer rows than requested prove nothing: large ones are limited by their bytes.
                    if len(rows) < limits[number]:
                        last_ids[number] = rows[-1].position if rows else LOWEST
                case CatchingUp(horizon):
                    if not rows or rows[0].position > horizon:
                        horizons[number] = horizon
                case Streaming():
                    raise AssertionError("a lane that streams is not read from the table")
                case _:
                    assert_never(lane.state)
        if last_ids:
            most = [limits[number] for number in last_ids]
            more = self._lanes.ask_all(
                self._queries.more, last_ids, ids=array(list(last_ids.values())), most=array(most)
            )
            # Few other rows are left. Events kept from now on take room in the stream.
            few = [number for number in last_ids if len(batches.get(number, ())) + more[number] < limits[number]]
            self._catch_up([self._lanes[number] for number in few])
        if horizons:
            self._end_catching_up(horizons)
        return horizons.keys()

    def _make_room(self, numbers: Collection[int]) -> None:
        room: list[Channel] = []
        for lane in map(self._lanes.__getitem__, numbers):
            assert lane.channel is not None
            if isinstance(lane.state, CatchingUp):
                # A session starts when all lanes have joined: the others must not wait for our table.
                lane.channel.check()
            else:
                room.append(lane.channel)
        self.drop(room)

    def _catch_up(self, lanes: Sequence[StreamLane]) -> None:
        """Stop dropping, if our session reads the stream and has nearly reached its end.

        Our session: an earlier reader may have dropped unpublished events. Nearly its end: while a slot that was not
        read for long catches up, events are published from the table without delay.
        """
        lanes = [lane for lane in lanes if lane.channel is not None and lane.channel.session.running.is_set()]
        if not lanes:
            return
        with unavailable_on_error(f"looking at the end of {lanes_text([lane.lease.lane for lane in lanes])}"):
            ((end_lsn, old_ended),) = self._table.connection.execute(self._queries.end).fetchall()
        ready: list[StreamLane] = []
        for lane in lanes:
            assert lane.channel is not None
            assert isinstance(lane.state, InTable)
            if lane.state.target_lsn is None:
                lane.state = InTable(end_lsn)
            if lane.channel.session.read_lsn >= (lane.state.target_lsn or 0) and old_ended:
                ready.append(lane)
        if ready:
            highest = self._lanes.ask_all(self._queries.highest_ids, [lane.lease.lane for lane in ready])
            for lane in ready:
                lane.state = CatchingUp(highest[lane.lease.lane])

    def _end_catching_up(self, horizons: Mapping[int, int]) -> None:
        """Switch lanes to the stream whose table has nothing up to the horizon.

        The rows just read come again from the stream, or after rows that may be below the mark.
        """
        left = self._lanes.ask_all(self._queries.any_up_to, horizons, ids=array(list(horizons.values())))
        self._lanes.enter_stream([self._lanes[number] for number in horizons if not left[number]])
        for number in horizons:
            if not self._lanes[number].streaming:
                self._table.reader.read_all_again(number)

    def drop(self, channels: Collection[Channel]) -> None:
        if self._drop_visible(channels):
            self._lanes.delays.reset()
        elif any(channel.waiting for channel in channels):
            self._lanes.delays.note_invisible()

    def leave_failing(self, present: Collection[int]) -> None:
        """Move failing lanes to the table, where possible. ``present`` are lanes that were just read."""
        for number in present:
            self._lanes[number].left_as_failing = False
        failing = [number for number in self.failing if number in self._lanes and number not in present]
        session = self._stream.session
        if not failing or session is None:
            return
        session.begin_without(failing)
        for number in failing:
            channel = session.channel(number)
            # Published events must be settled before the lane changes its state; the loop does that first.
            if channel is not None and not self._settlement.lanes[number].unsettled and self._leave(number, channel):
                while self._drop_visible([channel]):
                    pass

    def _leave(self, number: int, channel: Channel) -> bool:
        """Put a failing lane into the state ``table``. Returns whether it is in that state."""
        lane = self._lanes[number]
        if lane.left_as_failing:
            return True
        if not self._lanes.set_state([lane], InTable()):
            # The row is locked, or another relay has the lane. The stream holds the lane's events, and this is retried.
            return False
        lane.left_as_failing, lane.batch = True, ()
        channel.rewind()
        self._table.reader.read_all_again(number)
        log.warning("the lane can't be read; its rows wait in the table, the others go on", lane=number)
        return True

    def _drop_visible(self, channels: Collection[Channel]) -> bool:
        """Drop the next events whose rows are visible in the table, of each channel up to the first that is not.

        Returns whether any is.
        """
        taken = [(channel, events) for channel in channels if (events := channel.take(_DROPPED_AT_ONCE))]
        if not taken:
            return False
        snapshot = current_snapshot(self._table.connection)
        dropped = False
        for channel, events in taken:
            visible = next((n for n, event in enumerate(events) if not snapshot.sees(event.at.xid)), len(events))
            channel.put_back(events[visible:])
            channel.done([event.at for event in events[:visible]])
            dropped = dropped or visible > 0
        return dropped
