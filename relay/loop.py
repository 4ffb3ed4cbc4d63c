"""One lane's loop: fetch, publish, settle. Knows neither SQL nor Kafka.

| what happens                                   | what follows                                                       |
|------------------------------------------------|--------------------------------------------------------------------|
| killed before publishing                       | nothing was sent; the next holder of the lane reads the same rows  |
| killed while publishing                        | some may stand in Kafka; they are sent again (at most one batch)   |
| killed after the acknowledgement, not settled  | the batch is sent again                                            |
| killed after settling                          | nothing to repeat                                                  |
| Kafka fails                                    | what was acknowledged is settled, the rest is read again later     |
| Postgres fails while fetching                  | nothing was sent                                                   |
| Postgres fails while settling                  | unknown whether the rows went: read again, sent again if they stand|
| the lane is lost while publishing              | settling is refused; the new holder sends the batch again          |
| an event is refused                            | those before it are settled; the lane waits with backoff, and says |
|                                                | which event and why; other lanes go on                             |
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outbox.errors import SchemaError
from relay.ports import Claim, LaneLost, Published, Publisher, Receipt, Refused, Source, Unavailable


class Observer(Protocol):
    """Told what the loop does. Must not raise and must not wait."""

    def published(self, count: int) -> None:
        """``count`` events were acknowledged and settled."""
        ...

    def refused(self, claim: Claim, reason: str) -> None:
        """The lane waits because of this event."""
        ...

    def unavailable(self, error: Exception, wait_seconds: float) -> None:
        """A server is away; the loop tries again after the wait."""
        ...

    def recovered(self) -> None:
        """The first success after ``unavailable`` or ``refused``."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How many events a batch has, and how long to wait: in seconds."""

    batch_size: int = 2000
    min_idle_seconds: float = 0.002
    max_idle_seconds: float = 0.1
    min_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0


class LaneLoop:
    """Publishes one lane until told to stop or until the lane is lost.

    source and publisher are made afresh after every failure. ``secure`` says whether the lease still holds by this
    process's own clock; while it does not, nothing is fetched. ``stop`` ends the loop after the batch in hand.
    """

    def __init__(
        self,
        source: Callable[[], Source],
        publisher: Callable[[], Publisher],
        *,
        stop: threading.Event,
        secure: Callable[[], bool],
        observer: Observer,
        pace: Pace,
    ) -> None:
        self._new_source = source
        self._new_publisher = publisher
        self._stop = stop
        self._secure = secure
        self._observer = observer
        self._pace = pace
        self._source: Source | None = None
        self._publisher: Publisher | None = None
        self._failures = 0

    def run(self) -> None:
        """Run until stopped. Raises LaneLost when another relay has the lane."""
        idle = self._pace.min_idle_seconds
        try:
            while not self._stop.is_set():
                try:
                    moved = self._turn()
                except LaneLost:
                    raise
                except (Unavailable, SchemaError) as error:
                    self._back_off(error)
                    continue
                if moved:
                    idle = self._pace.min_idle_seconds
                else:
                    self._stop.wait(idle)
                    idle = min(idle * 2, self._pace.max_idle_seconds)
        finally:
            self._close()

    def _turn(self) -> bool:
        """Move one batch; say whether there was anything to move."""
        if self._source is None:
            self._source = self._new_source()
        if not self._secure():
            return False
        claims = self._source.fetch(self._pace.batch_size)
        if not claims:
            self._succeeded()
            return False
        if self._publisher is None:
            self._publisher = self._new_publisher()
        receipt = self._publisher.publish(claims)
        self._source.settle(receipt.results)
        self._report(receipt)
        return True

    def _report(self, receipt: Receipt) -> None:
        published = sum(isinstance(outcome, Published) for _, outcome in receipt.results)
        if published:
            self._observer.published(published)
        refused = _refusal(receipt)
        if refused is not None:
            claim, reason = refused
            self._observer.refused(claim, reason)
            self._wait()
            if receipt.failure is not None:
                self._close()
            return
        if receipt.failure is not None:
            raise receipt.failure
        self._succeeded()

    def _succeeded(self) -> None:
        if self._failures:
            self._failures = 0
            self._observer.recovered()

    def _back_off(self, error: Exception) -> None:
        self._close()
        self._observer.unavailable(error, self._delay())
        self._wait()

    def _wait(self) -> None:
        delay = self._delay()
        self._failures += 1
        # Jitter: after an outage the lanes must not all come back in the same moment.
        self._stop.wait(delay * random.uniform(0.5, 1.0))  # noqa: S311

    def _delay(self) -> float:
        doubled: float = self._pace.min_backoff_seconds * 2.0 ** float(min(self._failures, 20))
        return min(doubled, self._pace.max_backoff_seconds)

    def _close(self) -> None:
        source, self._source = self._source, None
        publisher, self._publisher = self._publisher, None
        try:
            if publisher is not None:
                publisher.close()
        finally:
            if source is not None:
                source.close()


def _refusal(receipt: Receipt) -> tuple[Claim, str] | None:
    results: Sequence[tuple[Claim, object]] = receipt.results
    for claim, outcome in results:
        if isinstance(outcome, Refused):
            return claim, outcome.reason
    return None
