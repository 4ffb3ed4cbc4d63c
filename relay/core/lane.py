"""A worker's lanes, as its loop knows them. No I/O."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from outbox._clients.backoff import doubled, jittered
from relay.core.lease import Lease
from relay.core.ports import NOTHING, UnsettledBatch

# A lane that has failed for this long, while others work, no longer delays these.
_LONG_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The size of turns, and the waits.

    ``batch_size``: the most events of one lane in a turn. ``delivery_seconds``: how long publishing may take.
    ``max_idle_seconds``: the longest wait for events. ``min_backoff_seconds``: the wait after a failure, which doubles
    with each, up to ``max_backoff_seconds``.
    """

    batch_size: int = 2000
    delivery_seconds: float = 0.0
    max_idle_seconds: float = 0.1
    min_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0

    def backoff(self) -> Backoff:
        return Backoff(self.min_backoff_seconds, self.max_backoff_seconds)


@dataclass(slots=True)
class Backoff:
    """Waits that double, with jitter, so that not all clients come back at the same moment after an outage."""

    min_seconds: float
    max_seconds: float
    failures: int = 0
    until: float = 0.0
    since: float | None = None
    failed_at: float = 0.0

    def failed(self, least_seconds: float = 0.0) -> float:
        """Record a failure. Returns how long to wait."""
        delay = max(doubled(self.failures, self.min_seconds, self.max_seconds), least_seconds)
        self.failures += 1
        self.failed_at = time.monotonic()
        self.since = self.since or self.failed_at
        self.until = time.monotonic() + jittered(delay)
        return delay

    def succeeded(self) -> bool:
        """Record a success. Returns whether it is the first after a failure."""
        first, self.failures, self.until, self.since = self.failures > 0, 0, 0.0, None
        return first

    def failed_for(self, seconds: float) -> bool:
        """Return whether the failed attempts since the last success span at least ``seconds``."""
        return self.since is not None and self.failed_at - self.since >= seconds

    @property
    def waits(self) -> bool:
        return time.monotonic() < self.until


@dataclass(slots=True)
class Lane:
    """One lane. A new lease begins a new record.

    ``unsettled``: what Kafka has acknowledged (without a transaction) and Postgres may not have settled. The source has
    the same as ``SettlementLane.unsettled``; this copy survives a source that is closed after a failure.

    For turn_sizes.py: ``taken`` is the number of its events in the last turn, ``full`` whether they were as many as it
    might have; ``suspected``: the number of its next events among which is the refused one, 0 if none is;
    ``limit``: how many of these its next turn has.
    """

    lease: Lease
    backoff: Backoff
    joined: bool = False
    paused: bool = False
    unsettled: UnsettledBatch = NOTHING
    taken: int = 0
    full: bool = False
    suspected: int = 0
    limit: int = 0


class Lanes(dict[int, Lane]):
    """A worker's lanes by number."""

    @property
    def has_unsettled(self) -> bool:
        """Whether events are published and may not be settled. Thread-safe."""
        return any(lane.unsettled for lane in list(self.values()))

    def note_settled(self, numbers: Collection[int]) -> None:
        for number in self.keys() & numbers:
            self[number].unsettled = NOTHING

    def succeeded(self, numbers: Collection[int]) -> list[int]:
        """Record a success of these lanes. Returns those that had failed."""
        return [number for number in numbers if number in self and self[number].backoff.succeeded()]

    def to_settle(self, *, last: bool) -> list[Lane]:
        """Return those that are due to be settled again, first those that failed longest ago.

        ``last``: also those that wait.
        """
        due = [
            lane for lane in self.values() if lane.unsettled and not lane.joined and (last or not lane.backoff.waits)
        ]
        return sorted(due, key=lambda lane: lane.backoff.failed_at)

    def to_join(self) -> list[Lease]:
        return [
            lane.lease
            for lane in self.values()
            if not (lane.joined or lane.backoff.waits or lane.unsettled) and lane.lease.secure
        ]

    def ready(self) -> list[int]:
        """Return those that may be published, unless they are paused."""
        return [number for number, lane in self.items() if lane.joined and lane.lease.secure]

    def outlast(self, numbers: Collection[int], seconds: float) -> bool:
        """Return whether the leases of these lanes last longer.

        Avoids repeats, and proves nothing: others take lanes before their leases end when a session in Postgres has
        ended (relay/lanes.py). Then the epoch and the fencing decide.
        """
        return all(self[number].lease.remaining_seconds > seconds for number in numbers)

    def failing_long(self) -> list[int]:
        """Return those that could not be taken over for long."""
        return [number for number, lane in self.items() if not lane.joined and lane.backoff.failed_for(_LONG_SECONDS)]


def listed(lanes: Collection[int]) -> str:
    """Return the numbers of lanes, or of partitions, as text: all of a few, the first of many."""
    some = sorted(lanes)
    return ", ".join(map(str, some[:8])) + (", …" if len(some) > 8 else "")
