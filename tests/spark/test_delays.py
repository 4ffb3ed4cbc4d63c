"""The delays of what a Spark consumer applies: each message once, by the sink's clock, wherever it is applied."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from bench import ided
from prometheus_client import CollectorRegistry
from pyspark.sql import functions as F  # noqa: N812

from outbox.consumer.delays import SAMPLED, TopicDelays
from outbox.event import REPLAY
from spark_jobs.driver.options import Totals
from spark_jobs.effects.mapped import Insert
from spark_jobs.job import ConsumerJob

pytestmark = pytest.mark.spark

SETUP = "CREATE TABLE IF NOT EXISTS seen (n int CHECK (n <> 13))"
DAY = 86_400.0
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "driver": ({}, {}),
    "tasks": ({}, {"driver_records": 0}),
    "transform": ({"transform": lambda rows: rows}, {}),
    "shuffle": ({"transform": lambda rows: rows.groupBy("n").agg(F.count("*").alias("x")), "atomic": "batch"}, {}),
}


class Shown:
    def __init__(self) -> None:
        self.delays, self.registry = TopicDelays(), CollectorRegistry()
        self.registry.register(self)  # type: ignore[arg-type]

    def collect(self):
        yield self.delays.family("applied", "of a test")

    def value(self, end: str, topic: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"applied_{end}", {"topic": topic, **labels})


def headers(bench: Any, delay: float) -> list[tuple[str, bytes]]:
    [(now,)] = bench.rows("SELECT extract(epoch FROM clock_timestamp())::float8")
    text = dt.datetime.fromtimestamp(now - delay, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return [*ided(), ("ce_time", text.encode())]


def test_each_message_counts_once_however_often_its_range_is_read(bench):
    bench.run(SETUP)
    shown = {way: Shown() for way in WAYS}

    def once(way: str) -> Totals:
        changes, options = WAYS[way]
        effect = "INSERT INTO seen SELECT n FROM batch" if way == "shuffle" else Insert("seen", {"n": "n"})
        job = ConsumerJob(way, (bench.topic,), effect, schema="n int", setup=SETUP, **changes)
        return bench.once(job, delays=shown[way].delays, **options)

    repeated = headers(bench, 2 * DAY)
    sent: list[tuple[Any, list[tuple[str, bytes]]]] = [
        # It does not decode, so that the range is read again without it: a dead letter has no effect.
        (b"no JSON", headers(bench, 5 * DAY)),
        ({"n": 1}, headers(bench, DAY)),
        ({"n": 2}, headers(bench, 0.0)),
        # What says no time, and a replay, are left out.
        ({"n": 3}, ided()),
        ({"n": 4}, [*headers(bench, DAY), (REPLAY, b"x")]),
        ({"n": 5}, repeated),
    ]
    bench.produce((value, "k", 0, given) for value, given in sent)
    for way, of_way in shown.items():
        totals = once(way)
        assert (totals.applied, totals.dead) == (5, 1), way
        found = [of_way.value(end, bench.topic, **le) for end, le in (("count", {}), ("bucket", {"le": "3600.0"}))]
        assert found == [3, 1], way
        assert 0 <= (of_way.value("sum", bench.topic) or 0) - 3 * DAY <= 3_000, way
    # Read again, of which nothing is new.
    bench.produce([({"n": 5}, "k", 0, repeated)])
    for way, of_way in shown.items():
        assert (once(way).duplicates, of_way.value("count", bench.topic)) == (1, 3), way


def test_a_sample_of_a_large_range_counts_as_the_whole(bench):
    bench.run(SETUP)
    messages = 10 * SAMPLED
    old, new = headers(bench, DAY)[-1:], headers(bench, 0.0)[-1:]
    bench.produce(({"n": 1}, "k", 0, [*ided(), *(old if number < messages / 4 else new)]) for number in range(messages))
    job = ConsumerJob("delays-sampled", (bench.topic,), Insert("seen", {"n": "n"}), schema="n int", setup=SETUP)
    shown = Shown()
    assert bench.once(job, delays=shown.delays, driver_records=0).applied == messages
    assert shown.value("count", bench.topic) == pytest.approx(messages, abs=10)
    assert shown.value("bucket", bench.topic, le="3600.0") == pytest.approx(messages * 3 / 4, abs=10)
