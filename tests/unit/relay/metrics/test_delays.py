"""The histogram of publishing: by the database's clock, with every event in its bucket, whatever its time is."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from outbox._clients import clock as clock_module
from outbox._clients.clock import DatabaseClock
from outbox.consumer.delays import BUCKETS, MOST_TOPICS
from outbox.event import DEAD_LETTER, REPLAY
from relay.core.ports import Claim
from relay.kafka.routing import Route, Router
from relay.metrics.delays import PublishDelays

NAME = "outbox_relay_publish_delay_seconds"
AHEAD = 86_400.0
"""The database's clock is a day ahead of this process's."""


class Measured:
    def __init__(self, router: Router | None = None) -> None:
        self.registry, clock = CollectorRegistry(), DatabaseClock()
        self.at = time.monotonic()
        self.now = time.time() + AHEAD
        clock.note(self.now, self.at)
        # As of the middle between question and answer.
        self.now = clock.at(self.at) or 0.0
        self.delays = PublishDelays(self.registry, clock, router or Router())

    def event(self, delay: float, kind: str = "Order", headers: dict[str, str] | None = None) -> Claim:
        when = dt.datetime.fromtimestamp(self.now - delay, dt.UTC)
        return self.raw(when.strftime("%Y-%m-%dT%H:%M:%S.%fZ"), kind, headers)

    def raw(self, when: str, kind: str = "Order", headers: dict[str, str] | None = None) -> Claim:
        return Claim(1, "id", kind, "k", "T", when, b"", headers)

    def observe(self, *batches: Sequence[Claim]) -> None:
        self.delays.observe(batches, self.at)

    def within(self, limit: float, topic: str = "order-events") -> float | None:
        return self.registry.get_sample_value(f"{NAME}_bucket", {"topic": topic, "le": str(float(limit))})

    def value(self, end: str, topic: str = "order-events") -> float | None:
        return self.registry.get_sample_value(f"{NAME}_{end}", {"topic": topic})


def test_each_event_is_in_its_bucket_and_in_the_sum():
    measured = Measured()
    # One in the middle of each bucket, and two that are later than any limit. The lanes of a turn overlap.
    middles = [limit * 0.9 for limit in BUCKETS]
    measured.observe([measured.event(delay) for delay in middles], [measured.event(5_000), measured.event(90_000)])
    measured.observe([measured.event(0.0)])
    assert [measured.within(limit) for limit in BUCKETS] == [n + 2 for n in range(len(BUCKETS))]
    assert measured.value("count") == len(BUCKETS) + 3
    assert measured.value("sum") == pytest.approx(sum(middles) + 95_000, abs=0.01)


def test_times_that_are_none_cost_at_most_themselves():
    """A writer may set created_at: to the future, to infinity, which has no text, or to what Python has no time for."""
    measured = Measured()
    strange = [measured.raw(when) for when in ("0044-03-15T00:00:00.000000Z", "294276-12-31T00:00:00.000000Z", "")]
    infinite = measured.raw("")._replace(time=None)  # type: ignore[arg-type]
    measured.observe([measured.event(2.0), *strange, infinite, measured.event(-3_600.0)])
    assert (measured.within(2.5), measured.within(0.005)) == (3, 2)
    assert measured.value("count") == 4


def test_what_was_published_before_is_left_out():
    measured = Measured()
    copies = [measured.event(100.0, headers={mark: "x"}) for mark in (DEAD_LETTER, REPLAY)]
    measured.observe([measured.event(1.0, headers={"tenant": "a"}), *copies, measured.event(1.0)])
    assert (measured.value("count"), measured.within(1.0)) == (2, 2)
    measured.observe(copies)
    assert measured.value("count") == 2


def test_topics_are_bounded_and_those_without_a_route_share_one():
    measured = Measured(Router({f"K{n}": Route(f"t{n}") for n in range(MOST_TOPICS + 20)}))
    measured.observe([measured.event(1.0, f"K{n}") for n in range(MOST_TOPICS + 20)])
    measured.observe([measured.event(1.0, "Unknown"), measured.event(1.0, "K0")])
    samples = [sample for family in measured.registry.collect() for sample in family.samples]
    assert len({sample.labels["topic"] for sample in samples}) == MOST_TOPICS + 1
    assert (measured.value("count", "t0"), measured.value("count", "")) == (2, 21)


def test_nothing_is_counted_before_the_clock_is_known():
    registry = CollectorRegistry()
    PublishDelays(registry, DatabaseClock(), Router()).observe([[Measured().event(1.0)]], time.monotonic())
    assert not [sample for family in registry.collect() for sample in family.samples]


def test_a_slow_answer_does_not_move_the_clock(monkeypatch):
    clock, now = DatabaseClock(), [100.0]
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock.note(1_000.0, 100.0)
    now[0] = 110.0
    # The statement waited for a lock, and read the clock at the end.
    clock.note(1_010.0, 101.0)
    assert clock.at(110.0) == 1_010.0
    # A minute later any answer is better than the old one.
    now[0] = 170.0
    clock.note(1_080.0, 169.0)
    assert clock.at(170.0) == 1_080.5
