"""One lane's part of the stream: its unsettled events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from relay.ports import Claim
from relay.position import WalPosition

Position = tuple[int, int]


class ChannelSession(Protocol):
    """The part of a session that its channels use."""

    running: threading.Event
    error: Exception | None
    read_lsn: int
    ends: Mapping[int, int]

    def told_up_to(self, lsn: int) -> bool:
        """Return whether all lanes have settled everything before ``lsn``; if unknown, make the session find out."""
        ...

    def freed(self, claims: Sequence[Claim]) -> None:
        """Record that these events are no longer held."""
        ...


class Channel:
    """One lane's part of a session: its unsettled events, in commit order.

    ``resume`` is the last finished position (commit_lsn, number), and ``repeated`` are the ids of finished events
    without a row behind it. The session's thread calls ``put``, the lane's thread everything else.
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
        """Return whether the session reads the stream: no other reader does any more."""
        return self._session.running.is_set()

    @property
    def read_lsn(self) -> int:
        """The position up to which the stream was read and distributed to the channels."""
        return self._session.read_lsn

    def settled_up_to(self, lsn: int) -> bool:
        """Return whether all lanes have settled everything before ``lsn``; if unknown, make the session find out."""
        return self._session.told_up_to(lsn)

    def ended(self, timeline: int) -> int | None:
        """Return where another timeline ended in this server's history; None if it is not in it, or has not ended."""
        return self._session.ends.get(timeline)

    def check(self) -> None:
        """Raise the error that ended the session, if it has ended."""
        if self._session.error is not None:
            raise self._session.error

    def wants(self, claim: Claim) -> bool:
        """Return whether the event is new to this lane."""
        assert claim.at is not None
        # A row may have the event id of one that was published before: a replay does.
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
        """Return the next events in order, up to ``limit``. Raises the error that ended the session."""
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
        """Put back the last events that were taken, so that they come again."""
        with self._lock:
            while claims:
                claim = self._taken.pop()
                self._waiting.appendleft(claim)
                if claim.at == claims[0].at:
                    return

    def rewind(self, resume: Position, repeated: Collection[str]) -> None:
        """Start again with the first unfinished event."""
        with self._lock:
            self._resume = max(self._resume, resume)
            self._repeated |= frozenset(repeated)
            self._taken.extend(self._waiting)
            self._settled.update(claim.at for claim in self._taken if not self.wants(claim))
            popped = self._pop_settled()
            self._waiting, self._taken = self._taken, deque()
        self._session.freed(popped)

    def done(self, claims: Sequence[Claim]) -> None:
        """Record that these are durably settled. Ignores those that were recorded before.

        A lane's events can be settled twice: when another lane of their turn was suspected, and with the turn itself.
        An entry for one that is gone would stay for ever, and prevent the fast path.
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
