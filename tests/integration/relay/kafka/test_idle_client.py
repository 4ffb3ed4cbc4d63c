"""librdkafka's statistics of an idle exactly-once worker: it queues a report each interval, until somebody serves it.

A report has some 4 KB a broker. At one a second, those of two producers that nobody takes are a gigabyte a day.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import takeover_support
from support import wait_until
from takeover_support import LANES, Worker, place

from outbox.sandbox._process import patience
from relay.core.lease import HeldLanes
from relay.core.loop import LoopSettings, WorkerLoop
from relay.core.ports import Source
from relay.kafka.producer import BatchProducer
from relay.kafka.transactional import TransactionalPublisher, _TransactionalProducer

__all__ = ["place"]

# Of one producer: those of two seconds, at a report a millisecond.
_WAITING = 2_000


def as_it_is(_: pytest.MonkeyPatch) -> None:
    pass


def an_empty_serve(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchProducer, "serve", lambda _: None)


def an_idle_loop_that_serves_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerLoop, "_serve", lambda _: None)


def one_producer_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransactionalPublisher, "serve", lambda self: self._senders[0].serve())


class Silent:
    """An observer that nothing is to be reported to."""

    def published(self, count: int) -> None: ...
    def turn(self, *_: float) -> None: ...

    def recovered(self, lanes: Any) -> None: ...
    def unavailable(self, lanes: Any, error: Exception, wait_seconds: float) -> None:
        raise error

    def refused(self, lane: int, claim: Any, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize(
    ("mutate", "reports"),
    [
        (as_it_is, 20_000),
        (an_empty_serve, 6_000),
        (an_idle_loop_that_serves_nothing, 6_000),
        (one_producer_served, 6_000),
    ],
)
def test_an_idle_worker_takes_every_report(place, monkeypatch, mutate: Callable[[pytest.MonkeyPatch], None], reports):
    real_options, real_taking = takeover_support.producer_options, _TransactionalProducer._on_statistics
    # The usual thousandfold.
    monkeypatch.setattr(
        takeover_support, "producer_options", lambda settings: real_options(settings) | {"statistics.interval.ms": "1"}
    )
    taken = 0

    def taking(self: Any, text: str) -> None:
        nonlocal taken
        taken += 1
        real_taking(self, text)

    monkeypatch.setattr(_TransactionalProducer, "_on_statistics", taking)
    mutate(monkeypatch)
    worker = place.worker("a")
    stop, held = threading.Event(), HeldLanes()
    held.give(worker.leases)
    loop = WorkerLoop(
        lambda: place.tables.source(()),
        lambda source: publisher(worker, source),
        held=held,
        stop=stop,
        observer=Silent(),
        settings=LoopSettings(),
    )

    def waiting() -> list[int]:
        """Return what each producer has queued."""
        return [len(sender.producer) for sender in worker.publisher._senders]

    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        # There is nothing to publish: all that is queued are reports.
        wait_until(lambda: taken + sum(waiting()) >= reports, 60, f"{reports:,} reports")
        left = waiting()
        assert loop.has_succeeded
        assert len(held.leases) == LANES
    finally:
        stop.set()
        thread.join(60 * patience())
    assert not thread.is_alive()
    assert (max(left) < _WAITING) == (mutate is as_it_is), f"{left} reports wait, {taken} were taken"


def publisher(worker: Worker, source: Source) -> Any:
    """Return the publisher of a source of the loop's own."""
    worker.source = source  # type: ignore[assignment]
    worker.publisher = worker.new_publisher()
    return worker.publisher
