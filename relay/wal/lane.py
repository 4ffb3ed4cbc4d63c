"""A lane of the source over the WAL: where its events come from, and what is under way. See source.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg import sql

from outbox.errors import OutboxError
from relay.database import unavailable_on_error
from relay.failpoints import failpoint
from relay.lease import Lease
from relay.marker import Marker
from relay.polling.source import PollingSource
from relay.ports import Claim, LaneLost
from relay.wal.channel import Channel
from relay.wal.queries import StreamQueries

# Rows are asked for by their ids, before anything is known of their size.
_FIRST_ROWS: Final = 64
_FIRST_PAUSE_SECONDS: Final = 0.005
_LAST_PAUSE_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Streaming:
    """The lane's events come from the stream."""


@dataclass(frozen=True, slots=True)
class InTable:
    """They come from the table; what the stream gives of them is dropped.

    ``target_lsn`` is up to where the stream must have been read before the lane may catch up, once that is known.
    """

    target_lsn: int | None = None


@dataclass(frozen=True, slots=True)
class CatchingUp:
    """They come from the table up to ``horizon``, an id; what the stream gives is kept, and comes after that."""

    horizon: int


LaneState = Streaming | InTable | CatchingUp
"""Closed: every match over it ends in assert_never."""


@dataclass(slots=True)
class StreamLane:
    """One lane. It begins in the table: what ``lanes.streaming`` says is read when it joins the stream."""

    lease: Lease
    marker: Marker | None = None
    unplaced: bool = False
    # Events without a row that are published, and whose place may not be settled.
    published: list[str] = field(default_factory=list)
    channel: Channel | None = None
    state: LaneState = field(default_factory=InTable)
    swept_at: float = field(default_factory=time.monotonic)
    orphan: tuple[int, int] | None = None
    batch: Sequence[Claim] = ()
    rows: int = _FIRST_ROWS
    row_bytes: float = 0.0
    absent: bool = False

    @property
    def streaming(self) -> bool:
        """Return whether its events come from the stream."""
        return isinstance(self.state, Streaming)

    @property
    def key(self) -> dict[str, int]:
        """What statements bind that concern the lane for as long as it is ours."""
        return {"lane": self.lease.lane, "epoch": self.lease.epoch}


class Pauses:
    """How long to wait for what is not visible yet, and between two looks at a table: longer each time."""

    def __init__(self) -> None:
        self._visibility = _FIRST_PAUSE_SECONDS
        self._step = _FIRST_PAUSE_SECONDS

    def reset(self) -> None:
        """Begin with short ones: something has come."""
        self._visibility = self._step = _FIRST_PAUSE_SECONDS

    def wait_for_visibility(self) -> None:
        """Sleep. With synchronous replication it may take as long as a standby is away."""
        time.sleep(self._visibility)
        self._visibility = min(self._visibility * 2, _LAST_PAUSE_SECONDS)

    def step(self, seconds: float) -> float:
        """Return how long to wait before a table is looked at again, ``seconds`` at most."""
        step = min(self._step, seconds)
        self._step = min(self._step * 2, seconds)
        return step


class LaneStates:
    """What the database knows of the lanes' states. ``table`` reads their rows, on the same connection."""

    def __init__(self, table: PollingSource, queries: StreamQueries) -> None:
        self._table = table
        self._queries = queries
        self._connection = table.connection

    def ask(self, lane: StreamLane, query: sql.Composed, **more: int) -> Any:
        """Return the only row of a statement about a lane."""
        with unavailable_on_error(f"looking at lane {lane.lease.lane}"):
            row = self._connection.execute(query, lane.key | more).fetchone()
        assert row is not None
        return row

    def change(self, lane: StreamLane, query: sql.Composed, **values: Any) -> None:
        """Write to a lane's row. Raises LaneLost."""
        with unavailable_on_error(f"noting the state of lane {lane.lease.lane}"):
            row = self._connection.execute(query, {**values, **lane.key}).fetchone()
        if row is None:
            raise self.lost(lane)

    def enter_stream(self, lane: StreamLane) -> None:
        """Go on with the stream, durably. Raises LaneLost."""
        self.change(lane, self._queries.set_streaming, streaming=True)
        lane.state = Streaming()
        failpoint("stream.entered")

    def leave_stream(self, lane: StreamLane) -> None:
        """Go on with the table, durably. Raises LaneLost."""
        self.change(lane, self._queries.set_streaming, streaming=False)
        lane.state = InTable()
        failpoint("stream.left")

    def flush(self, lane: StreamLane) -> None:
        """Settle what is pending of a lane. Raises what is wrong with it."""
        for error in self._table.flush([lane.lease.lane]).values():
            raise error

    def lost(self, lane: StreamLane) -> LaneLost:
        """Return the error of a lane that is another relay's now."""
        return self._table.settlement.lost(lane.lease.lane)


def each(
    lanes: Mapping[int, StreamLane],
    numbers: Collection[int],
    failed: dict[int, OutboxError],
    step: Callable[[StreamLane, Channel], None],
) -> list[int]:
    """Take a step with each of these lanes; return those that are not lost, by what is in ``failed`` then."""
    for number in numbers:
        lane = lanes[number]
        assert lane.channel is not None
        try:
            step(lane, lane.channel)
        except LaneLost as error:
            failed[number] = error
    return [number for number in numbers if number not in failed]
