"""A lane of the WAL source: where its events come from, and its current batch. See source.py."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg import sql

from outbox.errors import OutboxError
from relay.core.lease import LOCKED_SECONDS, Lease
from relay.core.ports import Claim, LaneLocked
from relay.database import one_write, unavailable_on_error
from relay.failpoints import failpoint
from relay.polling.source import PollingSource
from relay.settle.settlement import lanes_text
from relay.settle.statements import array, lease_values
from relay.wal.channel import Channel
from relay.wal.queries import StreamQueries

# Rows are requested by their ids before anything is known about their size.
_FIRST_ROWS: Final = 64
_FIRST_SECONDS: Final = 0.005
_LAST_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Streaming:
    """The lane's events come from the stream. If it ``must_leave``, none does until it is in the table."""

    must_leave: bool = False


@dataclass(frozen=True, slots=True)
class InTable:
    """The lane's events come from the table; those in the stream are dropped.

    ``target_lsn`` is the position up to which the stream must be read before the lane may catch up, once it is known.
    """

    target_lsn: int | None = None


@dataclass(frozen=True, slots=True)
class CatchingUp:
    """The lane's events come from the table up to the id ``horizon``, and then from the stream."""

    horizon: int


LaneState = Streaming | InTable | CatchingUp
"""Closed: every match over it ends in assert_never."""


@dataclass(slots=True)
class StreamLane:
    """One lane. It starts in the table: ``lanes.streaming`` is read when it joins the stream."""

    lease: Lease
    published_lsn: int = 0
    """The position in the WAL up to which its marker says that it is published."""
    channel: Channel | None = None
    state: LaneState = field(default_factory=InTable)
    swept_at: float = field(default_factory=time.monotonic)
    orphan: tuple[int, int] | None = None
    batch: Sequence[Claim] = ()
    rows: int = _FIRST_ROWS
    row_bytes: float = 0.0
    left_as_failing: bool = False

    @property
    def streaming(self) -> bool:
        return isinstance(self.state, Streaming)

    @property
    def must_leave(self) -> bool:
        return isinstance(self.state, Streaming) and self.state.must_leave


class Delays:
    """Delays that double until events come: until a row is visible, and between two reads of a table."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._visibility = self._read = _FIRST_SECONDS
        self._invisible = False

    def note_invisible(self) -> None:
        """Note that a lane's next event is not visible yet."""
        self._invisible = True

    def await_visibility(self) -> None:
        """Sleep if there was such an event: once for all lanes, whose turn is empty.

        With synchronous replication, rows may stay invisible as long as a standby is unavailable.
        """
        if self._invisible:
            self._invisible = False
            time.sleep(self._visibility)
            self._visibility = min(self._visibility * 2, _LAST_SECONDS)

    def before_read(self, most: float) -> float:
        """Return how many seconds to wait before a table is read again, at most ``most``."""
        seconds = min(self._read, most)
        self._read = min(seconds * 2, most)
        return seconds


class StreamLanes(dict[int, StreamLane]):
    """The lanes of a source by number, and what its readers share. ``table`` reads rows, on the same connection."""

    def __init__(self, table: PollingSource, queries: StreamQueries) -> None:
        super().__init__()
        self.table = table
        self.queries = queries
        self.delays = Delays()

    def ask_all(self, query: sql.Composed, numbers: Collection[int], **more: str) -> dict[int, Any]:
        """Return the answer of a query for each of these lanes."""
        with unavailable_on_error(f"looking at {lanes_text(numbers)}"):
            rows = self.table.connection.execute(query, {"lanes": array(list(numbers)), **more}).fetchall()
        return dict(rows)

    def enter_stream(self, lanes: Sequence[StreamLane]) -> None:
        """Switch these lanes to the stream, durably, except those whose rows are locked, or that are lost.

        Those stay as they are, and the next turn tells which are lost. The others must not wait for them, with their
        rows locked and their leases not renewed.
        """
        if lanes:
            self.set_state(lanes, Streaming())
            failpoint("stream.entered")

    def leave_stream(self, lanes: Sequence[StreamLane]) -> dict[int, OutboxError]:
        """Switch these lanes to the table, durably. Returns lost ones, and those that stay locked for a moment."""
        if not lanes:
            return {}
        left = lanes
        for seconds in (0.0, *LOCKED_SECONDS):
            time.sleep(seconds)
            self.set_state(left, InTable())
            left = [lane for lane in left if lane.streaming]
            if not left:
                break
        if len(left) < len(lanes):
            failpoint("stream.left")
        if not left:
            return {}
        numbers = [lane.lease.lane for lane in left]
        lost = self.find_lost(numbers)
        return {number: lost.get(number) or LaneLocked(number) for number in numbers}

    def set_state(self, lanes: Sequence[StreamLane], state: Streaming | InTable) -> bool:
        """Record the state of the lanes whose rows are not locked. Returns whether that of all."""
        values = {"streaming": isinstance(state, Streaming), **lease_values([lane.lease for lane in lanes])}
        doing = f"recording the state of {lanes_text([lane.lease.lane for lane in lanes])}"
        with unavailable_on_error(doing), one_write(self.table.session.connection):
            done = {row[0] for row in self.table.connection.execute(self.queries.set_streaming, values)}
        for lane in lanes:
            if lane.lease.lane in done:
                lane.state = state
        return len(done) == len(lanes)

    def find_lost(self, numbers: Collection[int]) -> dict[int, OutboxError]:
        """Return which of these lanes another relay has taken."""
        settlement = self.table.settlement
        with unavailable_on_error(f"looking at {lanes_text(numbers)}"):
            held = self.table.connection.execute(*settlement.still_held_query(numbers)).fetchall()
            return settlement.lost_lanes(numbers, held)
