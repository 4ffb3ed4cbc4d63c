"""Whether a consumer is ready, for ``/readyz`` on the port of its metrics. No I/O.

A consumer is ready when its last round ended without an error, or it found nothing to apply, within ``ready_seconds``.

| what                                                    | shown as              | ready                         |
|---------------------------------------------------------|-----------------------|-------------------------------|
| the process has just started                            | ``rounds``            | not yet                       |
| a round has ended, or there was nothing to apply        |                       | yes                           |
| a round takes longer than ``ready_seconds``             | ``rounds``            | no: raise the setting         |
| a server is away, or refuses                            | ``servers``, with why | until ``ready_seconds`` after |
|                                                         |                       | the last round                |
| messages become dead letters                            |                       | yes: others are applied       |
| messages wait in a partition, and its offset has not    | ``partitions``, each  | no                            |
| moved for ``ready_seconds`` since its turn to be read;  | with offset and time  |                               |
| others may move. The same without a leader              |                       |                               |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outbox._app.prometheus import Check
from outbox.consumer.model import Partition


@dataclass(frozen=True, slots=True)
class ConsumerReadiness:
    """The state of a consumer at one moment. ``round_seconds``: since its last round ended; None before the first.

    ``waiting`` is why it waits for a server, and ``waiting_seconds`` for how long; None while it does not.
    """

    ready: bool
    round_seconds: float | None
    waiting: str | None
    waiting_seconds: float | None
    checks: Sequence[Check] = ()


class ConsumerHealth:
    """Collects the runner's reports. Thread-safe."""

    def __init__(self, ready_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = ready_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._succeeded_at: float | None = None
        self._waits: tuple[float, str] | None = None
        self._lagging: dict[Partition, tuple[int, float | None]] = {}

    def observe(self, text: str, figures: Mapping[str, Any]) -> None:
        """Record a round, or a wait for a server; other reports are ignored."""
        if text == "round":
            self.succeeded()
        elif text == "waiting for a server":
            with self._lock:
                began = self._clock() if self._waits is None else self._waits[0]
                self._waits = (began, str(figures["error"]))

    def succeeded(self, _began: float = 0.0) -> None:
        """Record that a round ended well, or that there was nothing to apply."""
        with self._lock:
            self._succeeded_at, self._waits = self._clock(), None

    def lagging(self, offsets: Mapping[Partition, int], turn: Collection[Partition]) -> None:
        """Record the next offset of each partition in which messages wait, as a round begins.

        turn  those that the round reads. Of many partitions each waits for its turn, and until then it does not stand.
        """
        with self._lock:
            now, before = self._clock(), self._lagging
            self._lagging = {}
            for partition, offset in offsets.items():
                seen, since = before.get(partition, (offset, None))
                if since is None or seen != offset:
                    since = now if partition in turn else None
                self._lagging[partition] = (offset, since)

    def look(self) -> ConsumerReadiness:
        """Return whether the consumer is ready, and what was looked at."""
        with self._lock:
            now, succeeded_at, waits, lagging = self._clock(), self._succeeded_at, self._waits, self._lagging
        since = None if succeeded_at is None else now - succeeded_at
        ready = since is not None and since < self._limit
        last = "none has ended yet" if since is None else f"the last one ended {since:.0f} s ago"
        standing = [
            f"{topic}-{part} stands at offset {offset} for {now - began:.0f} s"
            for (topic, part), (offset, began) in sorted(lagging.items())
            if began is not None and now - began >= self._limit
        ]
        checks = [Check("rounds", ready, last), Check("partitions", not standing, ", ".join(standing))]
        ready = ready and not standing
        if waits is None:
            checks.append(Check("servers", passed=True))
            return ConsumerReadiness(ready, since, None, None, checks)
        waited = now - waits[0]
        checks.append(Check("servers", passed=False, text=f"waiting for {waited:.0f} s: {waits[1]}", counts=False))
        return ConsumerReadiness(ready, since, waits[1], waited, checks)
