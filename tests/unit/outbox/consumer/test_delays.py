"""The histogram of applying: whatever a header says, it costs at most itself, and a sample counts as the whole."""

from __future__ import annotations

import datetime as dt

import pytest
from prometheus_client import CollectorRegistry

from outbox.consumer.delays import BUCKETS, MOST_TOPICS, SAMPLED, TopicDelays, WrittenAt, sampled, written_at
from outbox.event import CE_TIME, DEAD_LETTER, REPLAY
from outbox.inbox import ApplyDelays, Consumer

NOW = 1_800_000_000.0


class Shown:
    def __init__(self) -> None:
        self.delays, self.registry = TopicDelays(), CollectorRegistry()
        self.registry.register(self)  # type: ignore[arg-type]

    def collect(self):
        yield self.delays.family("applied", "of a test", {"group": "g"})

    def value(self, end: str, topic: str = "t", **labels: str) -> float | None:
        return self.registry.get_sample_value(f"applied_{end}", {"group": "g", "topic": topic, **labels})


def headers(delay: float, *more: tuple[str, bytes | None]) -> list[tuple[str, bytes | None]]:
    text = dt.datetime.fromtimestamp(NOW - delay, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return [("ce_id", b"x"), (CE_TIME, text.encode()), *more]


def test_each_event_is_in_its_bucket_and_in_the_sum():
    shown = Shown()
    middles = [limit * 0.9 for limit in BUCKETS]
    shown.delays.observe("t", written_at([headers(delay) for delay in [*middles, 90_000, -3_600]]), NOW)
    shown.delays.observe("t", written_at([headers(BUCKETS[0])]), NOW + 0.0001)
    found = [shown.value("bucket", le=str(float(limit))) for limit in BUCKETS]
    # The event of the future is done at once.
    assert found == [2, *(n + 3 for n in range(1, len(BUCKETS)))]
    assert shown.value("count") == shown.value("bucket", le="+Inf") == len(BUCKETS) + 3
    assert shown.value("sum") == pytest.approx(sum(middles) + 90_000.0051, abs=0.001)


def test_a_header_that_is_no_time_counts_for_nothing():
    bad = [None, b"", b"yesterday", b"\xff\xfe", b"2026-01-31T10:20:30", b"9999-12-31T23:59:59-23:59", b"x" * 100_000]
    named = [[(CE_TIME, value)] for value in bad]
    copies = [headers(5.0, (mark, b"x")) for mark in (DEAD_LETTER, REPLAY)]
    assert written_at([[], *named[:5], *named[6:], *copies, headers(1.0)]).seconds == pytest.approx((NOW - 1.0,))
    # Beyond what a time stamp of this system may be, on some; on others just a far one.
    assert len(written_at([named[5]]).seconds) <= 1


def test_without_the_sinks_time_nothing_is_counted():
    shown = Shown()
    shown.delays.observe("t", written_at([headers(1.0)]), None)
    shown.delays.observe("t", written_at([]), NOW)
    assert not list(shown.delays.family("applied", "of a test").samples)


@pytest.mark.parametrize("messages", [1, 2, SAMPLED - 1, SAMPLED, SAMPLED + 1, 1_000, 10_000, 1_234_567])
def test_a_sample_is_small_and_stands_for_all(messages):
    some = sampled(messages)
    looked_at = range(messages)[some]
    assert 0 < len(looked_at) <= SAMPLED
    if messages <= SAMPLED:
        assert len(looked_at) == messages
    assert abs(some.step * len(looked_at) - messages) <= some.step
    # In the order of time, a limit anywhere is off by less than one step.
    for limit in (0, messages // 7, messages // 2, messages - 1):
        assert abs(some.step * sum(one < limit for one in looked_at) - limit) <= some.step


def test_a_time_counts_for_all_that_it_stands_for():
    shown = Shown()
    shown.delays.observe("t", WrittenAt(20, (NOW - 2.0, NOW - 0.003)), NOW)
    assert (shown.value("count"), shown.value("bucket", le="0.005")) == (40, 20)
    assert shown.value("sum") == pytest.approx(20 * 2.003, abs=0.001)


def test_topics_are_bounded():
    shown = Shown()
    for number in range(MOST_TOPICS + 20):
        shown.delays.observe(f"t{number}", WrittenAt(1, (NOW,)), NOW)
    shown.delays.observe("t0", WrittenAt(1, (NOW,)), NOW)
    family = shown.delays.family("applied", "of a test")
    assert len({sample.labels["topic"] for sample in family.samples}) == MOST_TOPICS + 1
    assert (shown.value("count", "t0"), shown.value("count", "")) == (2, 20)


def test_consumers_of_one_process_are_one_family():
    """By the group; two members of one group, which have the same labels, are added up."""
    orders, twin, bills = (Consumer("postgresql://", ["t"], group=group, kafka={}) for group in ("o", "o", "b"))
    registry = CollectorRegistry(auto_describe=True)
    registry.register(ApplyDelays(orders, twin, bills))
    for consumer, delay in ((orders, 1.0), (twin, 2.0), (twin, 90_000.0), (bills, 4.0)):
        consumer._delays.observe("t", written_at([headers(delay)]), NOW)
    [family] = registry.collect()
    found = {
        (sample.name.removeprefix(family.name), *sample.labels.values()): sample.value for sample in family.samples
    }
    assert len(found) == len(family.samples)
    assert {key: value for key, value in found.items() if key[0] in {"_count", "_sum"}} == {
        ("_count", "o", "t"): 3,
        ("_sum", "o", "t"): 90_003.0,
        ("_count", "b", "t"): 1,
        ("_sum", "b", "t"): 4.0,
    }
    assert (found["_bucket", "o", "t", "1.0"], found["_bucket", "o", "t", "3600.0"]) == (1, 2)
    # One alone is shown as before, and by itself has the same name: a registry refuses both.
    [alone] = bills.collect()
    assert (alone.name, len(alone.samples)) == (family.name, len(BUCKETS) + 3)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(bills)
