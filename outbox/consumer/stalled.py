"""Which partitions of a consumer stand still, since when and why: for a readiness probe in the consumer's process."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace

from outbox.consumer.model import Partition

_UNKNOWN = "no error was reported: a message may take as long"
_UNANSWERED = "the group has not answered: it may wait for its members for max.poll.interval.ms, or Kafka is away"


@dataclass(frozen=True, slots=True)
class StalledPartition:
    """A partition in which messages wait and that does not move, or a member without an assignment.

    As text it is a sentence.

    topic      without an assignment: all topics, separated by commas.
    partition  None: the member is in no group, or has not heard which partitions it gets.
    offset     of the first message that waits; None if the partition's position could not be read yet.
    since      when that was first so.
    why        the last error.
    """

    topic: str
    partition: int | None
    offset: int | None
    since: dt.datetime
    why: str

    def __str__(self) -> str:
        since = f"{self.since:%Y-%m-%d %H:%M:%S} UTC"
        if self.partition is None:
            return f"the group assigns nothing of {self.topic} to this member since {since}: {self.why}"
        at = "" if self.offset is None else f" at offset {self.offset}"
        return f"partition {self.partition} of topic {self.topic} stands still{at} since {since}: {self.why}"


class Watch:
    """Collects where a consumer's partitions are. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # None is the member itself, as long as it has no assignment.
        self._stalled: dict[Partition | None, StalledPartition] = {}

    def unassigned(self, topics: Collection[str]) -> None:
        """Note that the group has not assigned anything to this member yet, or has taken all away."""
        now = dt.datetime.now(dt.UTC)
        with self._lock:
            self._stalled.setdefault(None, StalledPartition(", ".join(topics), None, None, now, _UNANSWERED))

    def assigned(self, partitions: Collection[Partition]) -> None:
        """Note which partitions are assigned to this member, perhaps none; forget all others."""
        with self._lock:
            self._stalled = {at: one for at, one in self._stalled.items() if at in partitions}

    def waits(self, partition: Partition, offset: int | None) -> None:
        """Note that messages wait in a partition, the first of them at an offset."""
        with self._lock:
            known = self._stalled.get(partition)
            if known is None or known.offset != offset:
                self._stalled[partition] = StalledPartition(*partition, offset, dt.datetime.now(dt.UTC), _UNKNOWN)

    def moved(self, partitions: Collection[Partition]) -> None:
        """Note that nothing waits in these partitions, or that they are another member's."""
        with self._lock:
            for partition in partitions:
                self._stalled.pop(partition, None)

    def failed(self, partitions: Collection[Partition | None] | None, why: str) -> None:
        """Note an error that keeps these partitions from moving; None: all.

        The partition None is the member itself, if it has no assignment.
        """
        with self._lock:
            for at in self._stalled.keys() & (self._stalled.keys() if partitions is None else set(partitions)):
                self._stalled[at] = replace(self._stalled[at], why=why)

    def stalled(self, seconds: float) -> list[StalledPartition]:
        """Return the partitions that stand for at least so long."""
        until = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds)
        with self._lock:
            found = list(self._stalled.values())
        return sorted(
            (one for one in found if one.since <= until),
            key=lambda one: (one.topic, -1 if one.partition is None else one.partition),
        )
