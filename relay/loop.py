"""One lane's loop: fetch, publish, settle. Knows neither SQL nor Kafka.

| what happens                            | at-least-once                          | exactly-once                      |
|-----------------------------------------|----------------------------------------|-----------------------------------|
| killed before publishing                | nothing was sent; the next holder of   | the same                          |
|                                         | the lane reads the same rows           |                                   |
| killed while publishing                 | some may stand in Kafka; they are sent | aborted: no reader saw them       |
|                                         | again (at most one batch)              |                                   |
| killed when acknowledged, not settled   | the batch is sent again                | its marker settles it             |
| killed after settling                   | nothing to repeat                      | the same                          |
| Kafka fails                             | what was acknowledged is settled, the  | all of the batch is read again,   |
|                                         | rest is read again later               | unless the marker has it          |
| Postgres fails while fetching           | nothing was sent                       | the same                          |
| Postgres fails while settling           | unknown whether the rows went: settled | its marker settles it             |
|                                         | again before anything else is read     |                                   |
| the lane is lost while publishing       | settling is refused; the new holder    | fenced in Kafka: not committed,   |
|                                         | sends the batch again                  | or the marker settles it          |
| an event is refused                     | its key waits or it is skipped, as its route says; other keys go on      |
| a batch is refused, and not why         | it is halved until one event is left: that one is refused                  |
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from outbox.errors import SchemaError
from relay.marker import StateLost
from relay.ports import (
    BatchRefused,
    Claim,
    LaneLost,
    Published,
    Publisher,
    Receipt,
    Refused,
    Result,
    Source,
    Unavailable,
)

# Clean batches after which a batch size that the broker's refusal had halved is doubled again.
_GROW_AFTER: Final = 8


class Observer(Protocol):
    """Told what the loop does. Must not raise and must not wait."""

    def published(self, count: int) -> None:
        """``count`` events were acknowledged."""
        ...

    def refused(self, claim: Claim, reason: str) -> None:
        """The event can't be published as it is."""
        ...

    def unavailable(self, error: Exception, wait_seconds: float) -> None:
        """A server is away, or a person is needed; the loop tries again after the wait."""
        ...

    def recovered(self) -> None:
        """The first success after ``unavailable``."""
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

    source and publisher are made afresh after every failure, the publisher after the source and before anything is
    fetched: a transactional one fences its predecessor and lets the source settle what that one committed.
    What was acknowledged is settled, again if need be, before anything more is published: where settling never succeeds
    the lane stands still, and does not send its batch again and again.
    ``secure`` says whether the lease still holds by this process's own clock; while it does not, nothing is fetched.
    ``stop`` ends the loop after the batch in hand.
    """

    def __init__(
        self,
        source: Callable[[], Source],
        publisher: Callable[[Source], Publisher],
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
        self._unsettled: list[Result] = []
        self._failures = 0
        self._limit = pace.batch_size
        self._clean = 0

    def run(self) -> None:
        """Run until stopped. Raises LaneLost when another relay has the lane."""
        idle = self._pace.min_idle_seconds
        try:
            while not self._stop.is_set():
                try:
                    moved = self._turn()
                except LaneLost:
                    raise
                except (Unavailable, SchemaError, StateLost) as error:
                    self._back_off(error)
                    continue
                if moved:
                    idle = self._pace.min_idle_seconds
                else:
                    self._stop.wait(idle)
                    idle = min(idle * 2, self._pace.max_idle_seconds)
            self._finish()
        finally:
            self._close()

    def _turn(self) -> bool:
        """Move one batch; say whether there was anything to move."""
        if self._source is None:
            self._source = self._new_source()
            self._settle_again(self._source)
        if not self._secure():
            return False
        if self._publisher is None:
            self._publisher = self._new_publisher(self._source)
        claims = self._source.fetch(self._limit)
        self._forget_rows()
        if claims is None:
            return False
        if not claims:
            self._succeeded()
            return False
        receipt = self._publisher.publish(claims)
        if isinstance(receipt.failure, BatchRefused):
            receipt = self._narrow(claims[0], len(claims), receipt)
        if receipt.batch is None:
            published = [result for result in receipt.results if isinstance(result[1], Published)]
            self._unsettled = published or self._unsettled
        self._source.settle(receipt)
        self._report(receipt)
        return True

    def _settle_again(self, source: Source) -> None:
        """Settle what another source may not have. Rows that are gone already are no trouble, and by its id the source
        passes by an event without a row.

        If there is an event that can't be settled, those before it are, and the error names it.
        """
        left = self._unsettled
        size = len(left)
        while left:
            part = left[:size]
            try:
                source.settle(Receipt(part))
                source.flush()
            except SchemaError as error:
                if len(part) == 1:
                    text = f"event {part[0][0].event_id} is published, and stays behind: {error}"
                    raise type(error)(text) from error
                size = len(part) // 2
            else:
                left = left[size:]
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Take note that what was published is settled. Of events without a row the next source must still hear."""
        self._unsettled = [result for result in self._unsettled if result[0].position < 0]

    def _narrow(self, first: Claim, size: int, receipt: Receipt) -> Receipt:
        """Try half of a refused batch next; a refused batch of one names its event."""
        if size > 1:
            self._clean = 0
            self._limit = size // 2
            return receipt
        return Receipt([(first, Refused(str(receipt.failure)))], spent=True)

    def _report(self, receipt: Receipt) -> None:
        published = 0
        for claim, outcome in receipt.results:
            if isinstance(outcome, Published):
                published += 1
            else:
                self._observer.refused(claim, outcome.reason)
        if published:
            self._observer.published(published)
        if receipt.failure is not None or receipt.spent:
            # What Kafka has acknowledged must not be sent again only because something else failed.
            assert self._source is not None
            self._source.flush()
            self._forget_rows()
            self._close()
        if isinstance(receipt.failure, BatchRefused):
            return
        if receipt.failure is not None:
            raise receipt.failure
        self._widen()
        self._succeeded()

    def _widen(self) -> None:
        if self._limit < self._pace.batch_size:
            self._clean += 1
            if self._clean >= _GROW_AFTER:
                self._clean = 0
                self._limit = min(self._limit * 2, self._pace.batch_size)

    def _finish(self) -> None:
        """Settle the last batch before the lane is given up. If that fails, it is as after a kill."""
        try:
            if self._source is not None:
                self._source.flush()
            elif any(claim.position > 0 for claim, _ in self._unsettled):
                self._source = self._new_source()
                self._settle_again(self._source)
        except (Unavailable, SchemaError) as error:
            self._observer.unavailable(error, 0.0)

    def _succeeded(self) -> None:
        if self._failures:
            self._failures = 0
            self._observer.recovered()

    def _back_off(self, error: Exception) -> None:
        self._close()
        delay = self._delay()
        self._observer.unavailable(error, delay)
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
