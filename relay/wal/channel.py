"""One lane's part of the stream: its unsettled events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from relay.core.ports import WalPosition

if TYPE_CHECKING:
    from relay.wal.session import StreamSession


class StreamEvent(NamedTuple):
    """An inserted row of ``events``, by its id, and its position in the stream. Its contents are in the table."""

    id: int
    at: WalPosition


class Channel:
    """One lane's part of a session: its unsettled events, in commit order.

    The session's thread calls ``put``, the lane's thread everything else.
    """

    def __init__(self, session: StreamSession) -> None:
        self.session = session
        self._lock = threading.Lock()
        self._waiting: deque[StreamEvent] = deque()
        self._taken: deque[StreamEvent] = deque()
        self._settled: set[WalPosition] = set()
        self.put_count = 0
        self.done_count = 0

    def check(self) -> None:
        if self.session.error is not None:
            raise self.session.error

    def put(self, events: Sequence[StreamEvent]) -> None:
        with self._lock:
            self._waiting.extend(events)
            self.put_count += len(events)

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def next(self, limit: int) -> list[StreamEvent]:
        """Return what ``take`` would return now, without taking it."""
        with self._lock:
            self.check()
            return [event for event in islice(self._waiting, limit) if event.at not in self._settled]

    def take(self, limit: int) -> list[StreamEvent]:
        """Return the next events in order, up to ``limit``. Raises the error that ended the session."""
        with self._lock:
            self.check()
            events = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
            self._taken.extend(events)
            popped = 0
            if self._settled:
                events = [event for event in events if event.at not in self._settled]
                popped = self._pop_settled()
        self.session.freed(popped)
        return events

    def put_back(self, events: Sequence[StreamEvent]) -> None:
        """Put back the last events that were taken, so that they come again."""
        with self._lock:
            while events:
                event = self._taken.pop()
                self._waiting.appendleft(event)
                if event.at == events[0].at:
                    return

    def rewind(self) -> None:
        """Start again with the first unfinished event."""
        with self._lock:
            self._taken.extend(self._waiting)
            popped = self._pop_settled()
            self._waiting, self._taken = self._taken, deque()
        self.session.freed(popped)

    def done(self, positions: Sequence[WalPosition]) -> None:
        """Record that the events at these positions are durably settled. Ignores those that were recorded before.

        A lane's events can be settled twice: when another lane of their turn was suspected, and with the turn itself.
        An entry for one that is gone would stay for ever, and prevent the fast path.
        """
        with self._lock:
            held = self._taken or self._waiting
            positions = [at for at in positions if held and at >= held[0].at]
            if not positions:
                return
            taken, count = self._taken, len(positions)
            ends = positions[0], positions[-1]
            if not self._settled and len(taken) >= count and (taken[0].at, taken[count - 1].at) == ends:
                for _ in range(count):
                    taken.popleft()
                self.done_count += count
                popped = count
            else:
                self._settled.update(positions)
                popped = self._pop_settled()
        self.session.freed(popped)

    def _pop_settled(self) -> int:
        taken, settled = self._taken, self._settled
        popped = 0
        while taken and taken[0].at in settled:
            settled.discard(taken.popleft().at)
            popped += 1
        self.done_count += popped
        return popped
