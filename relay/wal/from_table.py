"""Reads the lanes in the state ``table``, and returns them to the stream. See source.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, assert_never

import structlog

from outbox.errors import OutboxError
from relay.core.ports import Claim, Fetched
from relay.database import unavailable_on_error
from relay.polling.low_water_mark import LOWEST
from relay.settle.settlement import lanes_text
from relay.wal.channel import Channel
from relay.wal.lane import CatchingUp, InTable, Streaming, StreamLane, StreamLanes
from relay.wal.session import Stream
from relay.wal.slot import current_snapshot

log = structlog.get_logger("relay")

_DROPPED_AT_ONCE: Final = 5000


class TableReader:
    """Reads turns from the table. ``leaves_out``: events of some kinds stay there.

    ``absent`` are owned lanes whose take-over keeps failing (for example with a lost state); the others go on without
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
        self.absent: Collection[int] = ()

    def read(self, limits: Mapping[int, int], failed: dict[int, OutboxError]) -> Fetched:
        """Settle what is pending, and return the next events of these lanes; adds lanes that fail to ``failed``."""
        left = self._lanes.each(limits, failed, self._make_room)
        fetched = self._table.fetch({number: limits[number] for number in left})
        failed |= fetched.failed
        batches = dict(fetched.batches)
        # Only lanes with events were settled. The stream's reader ends for all lanes if one of them is lost.
        idle = [number for number in left if number not in failed and number not in batches]
        if idle:
            with unavailable_on_error(f"looking at {lanes_text(idle)}"):
                held = self._table.connection.execute(*self._settlement.still_held(idle)).fetchall()
                failed |= self._settlement.lost_of(idle, held)

        def step(lane: StreamLane, channel: Channel) -> None:
            number = lane.lease.lane
            if not self._stays(lane, channel, batches.get(number, ()), limits[number]):
                batches.pop(number, None)

        ours = self._lanes.each([number for number in left if number not in failed], failed, step)
        return replace(fetched, batches={number: batch for number, batch in batches.items() if number in set(ours)})

    def _stays(self, lane: StreamLane, channel: Channel, rows: Sequence[Claim], limit: int) -> bool:
        """Change the lane's state if its rows allow that. Returns whether they may be published."""
        number = lane.lease.lane
        if self._table.reader.has_failures(number) or self.leaves_out:
            # Some events stay in the table, and others must not wait for them.
            lane.state = InTable()
            return True
        match lane.state:
            case InTable() as state:
                if self._nearly_empty(lane, rows, limit):
                    self._catch_up(lane, channel, state)
                return True
            case CatchingUp(horizon):
                if rows and rows[0].position <= horizon:
                    return True
                # The rows just read come again from the stream, or after rows that may be below the mark.
                if self._lanes.ask(lane, self._queries.any_up_to, id=horizon)[0]:
                    self._table.reader.read_all_again(number)
                else:
                    self._lanes.enter_stream(lane)
                return False
            case Streaming():
                raise AssertionError("a lane that streams is not read from the table")
            case _:
                assert_never(lane.state)

    def _make_room(self, lane: StreamLane, channel: Channel) -> None:
        if isinstance(lane.state, CatchingUp):
            # A session starts when all lanes have joined: the others must not wait for our table.
            channel.check()
        else:
            self.drop(channel)

    def _nearly_empty(self, lane: StreamLane, rows: Sequence[Claim], limit: int) -> bool:
        """Return whether the table has few other rows. Events kept from then on take room in the stream.

        Fewer rows than requested prove nothing: large ones are limited by their bytes.
        """
        if len(rows) >= limit:
            return False
        last = rows[-1].position if rows else LOWEST
        return bool(len(rows) + self._lanes.ask(lane, self._queries.more, id=last, most=limit)[0] < limit)

    def _catch_up(self, lane: StreamLane, channel: Channel, state: InTable) -> None:
        """Stop dropping, if our session reads the stream and has nearly reached its end.

        Our session: an earlier reader may have dropped unpublished events. Nearly its end: while a slot that was not
        read for long catches up, events are published from the table without delay.
        """
        if not channel.session.running.is_set():
            return
        target_lsn = state.target_lsn
        if target_lsn is None:
            target_lsn = self._lanes.ask(lane, self._queries.lowest)[1]
            lane.state = InTable(target_lsn)
        if channel.session.read_lsn >= (target_lsn or 0) and self._lanes.ask(lane, self._queries.old_ended)[0]:
            lane.state = CatchingUp(int(self._lanes.ask(lane, self._queries.highest_id)[0]))

    def drop(self, channel: Channel) -> None:
        if self._drop_visible(channel):
            self._lanes.delays.reset()
        elif channel.waiting:
            self._lanes.delays.await_visibility()

    def leave_absent(self, present: Collection[int]) -> None:
        """Move absent lanes to the table, where possible. ``present`` are lanes that were just read."""
        for number in present:
            self._lanes[number].absent = False
        absent = [number for number in self.absent if number in self._lanes and number not in present]
        session = self._stream.session
        if not absent or session is None:
            return
        session.begin_without(absent)
        for number in absent:
            channel = session.channel(number)
            # Published events must be settled before the lane changes its state; the loop does that first.
            if channel is not None and not self._settlement.lanes[number].pending and self._leave(number, channel):
                while self._drop_visible(channel):
                    pass

    def _leave(self, number: int, channel: Channel) -> bool:
        """Put an absent lane into the state ``table``. Returns whether it is in that state."""
        lane = self._lanes[number]
        if lane.absent:
            return True
        with unavailable_on_error(f"recording the state of lane {number}"):
            row = self._table.connection.execute(self._queries.leave_unlocked, lane.key).fetchone()
        # None: the row is locked, or another relay has the lane. The stream holds the lane's events, and this is
        # retried.
        if row is not None:
            lane.absent, lane.state, lane.batch = True, InTable(), ()
            channel.rewind()
            self._table.reader.read_all_again(number)
            log.warning("the lane can't be read; its rows wait in the table, the others go on", lane=number)
        return row is not None

    def _drop_visible(self, channel: Channel) -> bool:
        """Drop the next events whose rows are visible in the table, up to the first that is not.

        Returns whether any is.
        """
        events = channel.take(_DROPPED_AT_ONCE)
        if not events:
            return False
        snapshot = current_snapshot(self._table.connection)
        visible = next((n for n, event in enumerate(events) if not snapshot.sees(event.at.xid)), len(events))
        channel.put_back(events[visible:])
        channel.done([event.at for event in events[:visible]])
        return visible > 0
