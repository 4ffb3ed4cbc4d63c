"""A lane held by this relay, and the handover of lanes between the control loop and the worker's loop. No I/O."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Final

from outbox._clients.clock import uptime

LOCKED_SECONDS: Final = (0.01, 0.02, 0.04)
"""The waits before a lane whose row is locked is given up for this turn: a renewal of our own locks it for a moment."""


@dataclass(eq=False)
class Lease:
    """One lane held by this relay. ``renewed`` and ``secure`` may be called from any thread.

    ``ttl_seconds`` counts from when the renewal was requested, by ``uptime()``, so the lease always ends here before it
    ends in the database. ``former_id`` is the prefix of the transactional ids under which the lane may
    have been written before it was taken, None if its row names none; ``last_batch`` is the lane's last settled batch
    at that time. ``owner`` is the relay: a failover can lose the commit of a take-over, and then the next taker gets
    the same epoch, so an epoch without its owner identifies nothing.
    """

    lane: int
    epoch: int
    ttl_seconds: float = field(repr=False)
    asked_at: InitVar[float]
    former_id: str | None = field(default=None, repr=False)
    last_batch: int | None = field(default=None, repr=False)
    owner: str = ""

    def __post_init__(self, asked_at: float) -> None:
        self._lock = threading.Lock()
        self._until = asked_at + self.ttl_seconds

    def renewed(self, asked_at: float) -> None:
        """Record that Postgres renewed the lease; ``asked_at`` is ``uptime()`` before the request."""
        with self._lock:
            self._until = max(self._until, asked_at + self.ttl_seconds)

    @property
    def secure(self) -> bool:
        """Return whether the lease can't have expired yet. If not, nothing may be published before it is renewed."""
        return self.remaining_seconds > 0

    @property
    def remaining_seconds(self) -> float:
        """The number of seconds that the lease is still valid, at least."""
        with self._lock:
            return self._until - uptime()


@dataclass(frozen=True, slots=True)
class LetGo:
    """A lane that the worker's loop has stopped working on.

    ``lost``: another relay has it, so there is nothing to release. ``clean``: its last batch is settled and no Kafka
    transaction can still hold events of it, so the next holder need not fence this worker.
    """

    lease: Lease
    clean: bool
    lost: bool = False


class HeldLanes:
    """The lanes of one worker: the control loop gives and recalls them, its own loop publishes them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        # Until when the loop may keep them to settle what it has published, by uptime().
        self._recalled: dict[int, float] = {}
        self._lost: set[int] = set()
        self._let_go: list[LetGo] = []

    def give(self, leases: Collection[Lease]) -> None:
        """Give leases to the loop. A new lease of a lane that it has replaces the old one and cancels its recall."""
        with self._lock:
            for lease in leases:
                self._leases[lease.lane] = lease
                self._recalled.pop(lease.lane, None)
                self._lost.discard(lease.lane)

    def recall(self, lanes: Collection[int], *, lost: bool = False, settle_seconds: float = math.inf) -> None:
        """Recall lanes; the loop lets go of each after its batch in flight. ``lost``: other relays have them.

        What is published of a lane is settled first, unless that fails for ``settle_seconds``.
        """
        with self._lock:
            known = self._leases.keys() & set(lanes)
            self._recall(known, settle_seconds)
            if lost:
                self._lost |= known

    def recall_up_to(self, count: int) -> None:
        """Recall more lanes, until ``count`` are recalled and not let go of. No more if that many are already."""
        with self._lock:
            left = sorted(self._leases.keys() - self._recalled.keys())
            self._recall(left[: max(count - len(self._recalled), 0)], math.inf)

    def recall_all(self, *, settle_seconds: float = math.inf) -> None:
        with self._lock:
            self._recall(self._leases, settle_seconds)

    def _recall(self, lanes: Collection[int], settle_seconds: float) -> None:
        until = uptime() + settle_seconds
        for lane in lanes:
            self._recalled[lane] = min(until, self._recalled.get(lane, until))

    def take_let_go(self) -> list[LetGo]:
        """Return the lanes that the loop has let go of since the last call."""
        with self._lock:
            gone, self._let_go = self._let_go, []
            return gone

    @property
    def leases(self) -> Sequence[Lease]:
        """The leases of lanes that the loop has not let go of, by lane."""
        with self._lock:
            return [self._leases[lane] for lane in sorted(self._leases)]

    @property
    def recalled(self) -> Collection[int]:
        """The recalled lanes that the loop has not let go of yet."""
        with self._lock:
            return set(self._recalled)

    @property
    def overdue(self) -> Collection[int]:
        """The recalled lanes that the loop was to let go of by now, settled or not."""
        with self._lock:
            now = uptime()
            return {lane for lane, until in self._recalled.items() if until <= now}

    @property
    def ours(self) -> Sequence[Lease]:
        """The leases of lanes that, as far as is known, no other relay has."""
        with self._lock:
            return [self._leases[lane] for lane in sorted(self._leases.keys() - self._lost)]

    def let_go(self, lease: Lease, *, clean: bool, lost: bool = False) -> None:
        """Record that the loop no longer works on the lane, unless it was given another lease of it meanwhile."""
        with self._lock:
            if self._leases.get(lease.lane) is lease:
                del self._leases[lease.lane]
                self._recalled.pop(lease.lane, None)
                lost |= lease.lane in self._lost
                self._lost.discard(lease.lane)
                self._let_go.append(LetGo(lease, clean, lost))
