"""One lane's part of the stream: what was read for it and is not settled yet."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from relay.ports import Claim
from relay.position import WalPosition

Position = tuple[int, int]


class ChannelSession(Protocol):
    """What a channel knows of the session that reads for it."""

    running: threading.Event
    error: Exception | None
    read_lsn: int
    ends: Mapping[int, int]

    def told_up_to(self, lsn: int) -> bool:
        """Return whether all lanes have settled all that stands before ``lsn``, and have it found out if unknown."""
        ...

    def freed(self, claims: Sequence[Claim]) -> None:
        """Record that these are held no more."""
        ...


class Channel:
    """One lane's part of a session: what was read for it and is not settled yet, in commit order.

    ``resume`` is the last position (commit_lsn, number) that is done with already, and ``repeated`` are the ids of
    events without a row behind it that are. The session's thread puts, the lane's thread does the rest.
    """

    def __init__(self, session: ChannelSession, resume: Position, repeated: Collection[str]) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._waiting: deque[Claim] = deque()
        self._taken: deque[Claim] = deque()
        self._settled: set[WalPosition | None] = set()
        self._resume = resume
        self._repeated = frozenset(repeated)
        self.put_count = 0
        self.done_count = 0

    @property
    def running(self) -> bool:
        """Return whether the stream is being read: who read it before does so no more."""
        return self._session.running.is_set()

    @property
    def read_lsn(self) -> int:
        """Up to where the stream was read and shared out."""
        return self._session.read_lsn

    def settled_up_to(self, lsn: int) -> bool:
        """Return whether all lanes have settled all that stands before ``lsn``, and have it found out if unknown."""
        return self._session.told_up_to(lsn)

    def ended(self, timeline: int) -> int | None:
        """Where another timeline ended in the history of this server; None when it is none of that, or goes on."""
        return self._session.ends.get(timeline)

    def check(self) -> None:
        """Raise what ended the session, if it has ended."""
        if self._session.error is not None:
            raise self._session.error

    def wants(self, claim: Claim) -> bool:
        """Return whether the event is new to this lane."""
        assert claim.at is not None
        # A row may bear the id of an event that was published before: a replay does.
        return claim.at[:2] > self._resume and (claim.has_row or claim.event_id not in self._repeated)

    def put(self, claims: Sequence[Claim]) -> None:
        """Add events, in order."""
        with self._lock:
            self._waiting.extend(claims)
            self.put_count += len(claims)

    @property
    def waiting(self) -> bool:
        """Return whether there is something to take."""
        return bool(self._waiting)

    def take(self, limit: int) -> list[Claim]:
        """Return the next events in order, up to ``limit``. Raises what ended the session."""
        with self._lock:
            self.check()
            claims = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
            self._taken.extend(claims)
            if self._settled:
                claims = [claim for claim in claims if claim.at not in self._settled]
                popped = self._pop_settled()
            else:
                popped = []
        self._session.freed(popped)
        return claims

    def put_back(self, claims: Sequence[Claim]) -> None:
        """Put back the last events that were taken: they come again."""
        with self._lock:
            while claims:
                claim = self._taken.pop()
                self._waiting.appendleft(claim)
                if claim.at == claims[0].at:
                    return

    def rewind(self, resume: Position, repeated: Collection[str]) -> None:
        """Begin again with the first event that is not done with."""
        with self._lock:
            self._resume = max(self._resume, resume)
            self._repeated |= frozenset(repeated)
            self._taken.extend(self._waiting)
            self._settled.update(claim.at for claim in self._taken if not self.wants(claim))
            popped = self._pop_settled()
            self._waiting, self._taken = self._taken, deque()
        self._session.freed(popped)

    def done(self, claims: Sequence[Claim]) -> None:
        """Record that these are settled, durably; of those that were recorded before, nothing.

        A lane's events can be settled twice: when another lane of their turn was suspected, and with the turn itself. A
        note about one that is gone would stay for ever, and keep this from the short way.
        """
        with self._lock:
            held = self._taken or self._waiting
            claims = [claim for claim in claims if held and _at(claim) >= _at(held[0])]
            if not claims:
                return
            taken, count, first, last = self._taken, len(claims), claims[0], claims[-1]
            if not self._settled and len(taken) >= count and (taken[0].at, taken[count - 1].at) == (first.at, last.at):
                popped = [taken.popleft() for _ in range(count)]
                self.done_count += count
            else:
                self._settled.update(claim.at for claim in claims)
                popped = self._pop_settled()
        self._session.freed(popped)

    def _pop_settled(self) -> list[Claim]:
        taken, settled = self._taken, self._settled
        popped = []
        while taken and taken[0].at in settled:
            claim = taken.popleft()
            settled.discard(claim.at)
            popped.append(claim)
        self.done_count += len(popped)
        return popped


def _at(claim: Claim) -> WalPosition:
    assert claim.at is not None
    return claim.at
