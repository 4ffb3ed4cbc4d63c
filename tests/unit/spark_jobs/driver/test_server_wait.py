"""Waiting for servers: what is repeated, for how long, and what ends it. By a clock that the test turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import psycopg
import pytest

from outbox.consumer.errors import ConsumerUnavailable, EffectFailed
from outbox.consumer.patience import Patience
from spark_jobs.driver.server_wait import wait_for_servers

SECONDS = 10.0


class Clock(threading.Event):
    """An event that is waited for by turning the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.pauses: list[float] = []
        self.reports: list[tuple[str, Mapping[str, Any]]] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now += timeout
        self.pauses.append(timeout)
        return self.is_set()

    def run(self, step: Callable[[], int], **options: Any) -> int | None:
        return wait_for_servers(
            step,
            Patience(SECONDS, lambda: self.now),
            lambda text, figures: self.reports.append((text, figures)),
            then="run the job again",
            stop=self,
            **options,
        )


def away(seconds: float = 0.0, *, times: int = 1_000_000, clock: Clock) -> Callable[[], int]:
    """Return a step that works for so long and then fails so many times; after that it returns how often it ran."""
    runs: list[int] = []

    def step() -> int:
        runs.append(1)
        clock.now += seconds
        if len(runs) <= times:
            raise psycopg.OperationalError("the server is away")
        return len(runs)

    return step


def test_it_gives_up_when_patience_ends():
    clock = Clock()
    with pytest.raises(ConsumerUnavailable, match="gave up after 10 s; nothing is lost, run the job again"):
        clock.run(away(clock=clock))
    assert clock.now == pytest.approx(1000 + SECONDS)
    assert {text for text, _ in clock.reports} == {"waiting for a server"}
    assert clock.reports[0][1] == {"error": "OperationalError: the server is away", "wait_seconds": 0.2}


def test_work_that_took_longer_than_patience_is_repeated_all_the_same():
    """Until it failed, it was work: the servers answered."""
    clock = Clock()
    assert clock.run(away(5 * SECONDS, times=1, clock=clock)) == 2


def test_an_attempt_that_has_made_progress_starts_over():
    clock = Clock()
    assert clock.run(away(times=50, clock=clock), progressed=lambda _: True) == 51
    assert sum(clock.pauses) < 50 * 0.2


def test_other_errors_and_what_is_raised_for_an_error_end_it():
    clock = Clock()

    def refused(error: Exception) -> bool:
        raise error

    def broken() -> int:
        raise EffectFailed("no")

    with pytest.raises(psycopg.OperationalError):
        clock.run(away(clock=clock), progressed=refused)
    with pytest.raises(EffectFailed):
        clock.run(broken)
    assert clock.pauses == []


def test_it_ends_when_it_is_to_stop():
    clock = Clock()
    clock.set()
    assert clock.run(away(clock=clock)) is None
    assert len(clock.pauses) == 1
