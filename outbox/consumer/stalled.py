"""Which partitions of a consumer stand still, since when and why: for a readiness probe in the consumer's process."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace

from outbox.consumer.model import Partition

_UNKNOWN = "no error was reported: a message may take as long"


@dataclass(frozen=True, slots=True)
class StalledPartition:
    """A partition in which messages wait and that does not move. As text: a sentence.

    offset  of the first message that waits; None if the partition's position could not be read yet.
    since   when that was first so.
    why     the last error.
    """

    topic: str
    partition: int
    offset: int | None
    since: dt.datetime
    why: str

    def __str__(self) -> str:
        at = "" if self.offset is None else f" at offset {self.offset}"
        since = f"{self.since:%Y-%m-%d %H:%M:%S} UTC"
        return f"partition {self.partition} of topic {self.topic} stands still{at} since {since}: {self.why}"


class Watch:
    """Collects where a consumer's partitions are. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stalled: dict[Partition, StalledPartition] = {}

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

    def keep(self, partitions: Collection[Partition]) -> None:
        """Forget all partitions but these."""
        with self._lock:
            self._stalled = {partition: one for partition, one in self._stalled.items() if partition in partitions}

    def failed(self, partitions: Collection[Partition] | None, why: str) -> None:
        """Note an error that keeps these partitions from moving; None: all in which messages wait."""
        with self._lock:
            for partition in self._stalled.keys() & (self._stalled.keys() if partitions is None else set(partitions)):
                self._stalled[partition] = replace(self._stalled[partition], why=why)

    def stalled(self, seconds: float) -> list[StalledPartition]:
        """Return the partitions that stand for at least so long."""
        until = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds)
        with self._lock:
            return sorted(
                (one for one in self._stalled.values() if one.since <= until),
                key=lambda one: (one.topic, one.partition),
            )
