"""Owned lanes whose take-over keeps failing; the others proceed without them."""

from __future__ import annotations

from collections.abc import Collection

import structlog

from relay.database import unavailable_on_error
from relay.wal.channel import Channel
from relay.wal.from_table import drop_visible
from relay.wal.lane import InTable, StreamLanes
from relay.wal.session import Stream

log = structlog.get_logger("relay")


class AbsentLanes:
    """Keeps owned lanes whose take-over keeps failing (for example with a lost state) from delaying the others.

    There is one stream: unfinished events of one channel are held, keep the slot from advancing, and finally fill the
    stream. So such a lane is put into the state ``table``, durably, and its events in the stream are dropped, as in
    that state: their rows stay in the table until they are settled. That is correct before the lane is taken over, too:
    then the marker settles what its former holder has published, by ids, and everything else is read from the table.
    """

    def __init__(self, lanes: StreamLanes, stream: Stream) -> None:
        self._lanes = lanes
        self._settlement = lanes.table.settlement
        self._stream = stream
        self.numbers: Collection[int] = ()
        """The lanes that the others must not wait for."""

    def see_to(self, present: Collection[int]) -> None:
        """Move absent lanes to the table, where possible. ``present`` are lanes that were just read."""
        for number in present:
            self._lanes[number].absent = False
        absent = [number for number in self.numbers if number in self._lanes and number not in present]
        if not absent:
            return
        self._stream.begin_without(absent)
        for number in absent:
            channel = self._stream.channel(number)
            # Published events must be settled before the lane changes its state; the loop does that first.
            if channel is not None and not self._settlement.lanes[number].pending and self._leave(number, channel):
                while drop_visible(self._lanes.table.connection, channel):
                    pass

    def _leave(self, number: int, channel: Channel) -> bool:
        """Put an absent lane into the state ``table``. Returns whether it is in that state."""
        lane = self._lanes[number]
        if lane.absent:
            return True
        with unavailable_on_error(f"recording the state of lane {number}"):
            row = self._lanes.table.connection.execute(self._lanes.queries.leave_unlocked, lane.key).fetchone()
        # None: the row is locked, or another relay has the lane. The stream holds the lane's events, and this is
        # retried.
        if row is not None:
            lane.absent, lane.state, lane.batch = True, InTable(), ()
            channel.rewind()
            self._lanes.table.reader.read_all_again(number)
            log.warning("the lane can't be read; its rows wait in the table, the others go on", lane=number)
        return row is not None
