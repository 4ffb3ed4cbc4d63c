"""What a small round costs, counted: how often the driver waits for Postgres, whatever the number of partitions."""

from __future__ import annotations

from types import SimpleNamespace

import psycopg
import pytest
from bench import Bench, ided
from counting import RoundTrips

from outbox.consumer.errors import Fenced, Interrupted
from spark_jobs.dedup.strategies import Dedup, OffsetsOnly
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.errors import InputCut
from spark_jobs.job import ConsumerJob
from spark_jobs.task import partition as task
from spark_jobs.task.input import TaskInput

pytestmark = pytest.mark.spark

PARTITIONS = 16
INSERT = Insert("seen", {"n": "n", "part": "message_part"})
UPSERT = Upsert("seen", ["n"], {"n": "n", "part": "message_part"})
SETUP = "CREATE TABLE IF NOT EXISTS seen (n int CHECK (n < 1000) PRIMARY KEY, part int)"


@pytest.fixture
def wide(spark, outbox_postgres, outbox_kafka) -> Bench:
    return Bench(spark, outbox_postgres, outbox_kafka, PARTITIONS)


def send(bench: Bench, first: int, parts: range = range(PARTITIONS)) -> None:
    bench.produce(({"n": first + part}, None, part) for part in parts)


@pytest.mark.parametrize(
    ("effect", "strategy", "most"), [(INSERT, Dedup(), 10), (INSERT, OffsetsOnly(), 10), (UPSERT, Dedup(), 25)]
)
def test_the_round_trips_of_a_warm_round(wide, effect, strategy, most):
    job = ConsumerJob("trips", (wide.topic,), effect, schema="n int", setup=SETUP, strategy=strategy)
    direct = wide.database
    with RoundTrips(direct.url) as proxy:
        wide.database = SimpleNamespace(url=proxy.url)
        with wide.runner(job) as runner:
            for first in (0, 100):
                send(wide, first)
                assert runner._round(None) is True
            send(wide, 200)
            before = proxy.round_trips
            assert runner._round(None) is True
            used = proxy.round_trips - before
            send(wide, 300, range(1))
            before = proxy.round_trips
            assert runner._round(None) is True
            alone = proxy.round_trips - before
    wide.database = direct
    assert wide.rows("SELECT count(*), count(DISTINCT xmin::text) FROM seen") == [(3 * PARTITIONS + 1, 4)]
    assert used <= most
    assert alone <= most + 2


@pytest.fixture
def together(monkeypatch) -> list[bool]:
    """Whether one transaction had all of a round, each time that this was tried."""
    tried: list[bool] = []
    real = task.apply_all_in_one

    def noted(plan, read):
        results = real(plan, read)
        tried.append(results is not None)
        return results

    monkeypatch.setattr(task, "apply_all_in_one", noted)
    return tried


@pytest.mark.parametrize("effect", [INSERT, UPSERT])
def test_what_one_transaction_can_not_take_each_partition_does(bench, together, effect):
    """A row that the table refuses, one that does not decode, and a repeat in another partition: beside good ones."""
    job = ConsumerJob("apart", (bench.topic,), effect, schema="n int", setup=SETUP)
    same = ided()
    bench.produce([({"n": 1}, None, 0, same), ({"n": 2}, None, 1), ({"n": 1000}, None, 1), ({"n": 1}, None, 1, same)])
    with bench.runner(job) as runner:
        assert runner._round(None) is True
        assert (runner.totals.applied, runner.totals.duplicates, runner.totals.dead) == (2, 1, 1)
        assert together == [False]
        for n in range(3, 10):
            bench.produce([({"n": n}, None, 0), ({"n": n + 10}, None, 1)])
            assert runner._round(None) is True
        # The partitions stay apart for some rounds, because what has happened comes in bursts.
        assert together == [False, True, True, True]
        bench.produce([({"n": 20}, None, 0), (b"no JSON", None, 1)])
        assert runner._round(None) is True
        assert together.pop() is False
    assert bench.rows("SELECT n, part FROM seen WHERE n IN (1, 2, 20, 1000) ORDER BY n") == [(1, 0), (2, 1), (20, 0)]
    assert bench.rows("SELECT count(*) FROM seen") == [(17,)]
    figures = "SELECT part, next_offset, applied, duplicates, dead FROM consumer.offsets ORDER BY part"
    assert bench.rows(figures) == [(0, 9, 9, 0, 0), (1, 11, 8, 1, 2)]


def test_a_locked_offset_holds_up_its_partition_alone(bench, together):
    job = ConsumerJob("locked", (bench.topic,), INSERT, schema="n int", setup=SETUP)
    with psycopg.connect(bench.database.url, autocommit=True) as connection, bench.runner(job) as runner:
        bench.limit("lock_timeout", "500ms")
        assert runner._round(None) is False
        send(bench, 1, range(2))
        with connection.transaction():
            connection.execute("SELECT FROM consumer.offsets WHERE part = 0 FOR UPDATE")
            with pytest.raises(Interrupted, match="-0 offsets 0 to 0: LockNotAvailable"):
                runner._round(None)
            assert bench.positions() == {0: 0, 1: 1}
            assert together == [False]
        assert runner._round(None) is True
    assert bench.rows("SELECT part, n FROM seen ORDER BY part") == [(0, 1), (1, 2)]


def test_a_commit_without_an_answer_is_found_by_each_partition(bench, monkeypatch):
    real = task.apply_all_in_one
    monkeypatch.setattr(task, "apply_all_in_one", lambda plan, read: real(plan, read) and None)
    job = ConsumerJob("unknown", (bench.topic,), INSERT, schema="n int", setup=SETUP)
    send(bench, 1, range(2))
    with bench.runner(job) as runner:
        assert runner._round(None) is True
        assert runner._round(None) is False
    assert bench.rows("SELECT part, n FROM seen ORDER BY part") == [(0, 1), (1, 2)]
    assert bench.rows("SELECT applied, duplicates, next_offset FROM consumer.offsets") == [(1, 0, 1)] * 2


@pytest.mark.parametrize("change", ["generation = generation + 1", "topic_id = 'another'"])
def test_one_transaction_is_fenced_by_any_of_its_partitions(bench, together, monkeypatch, change):
    job = ConsumerJob("fenced", (bench.topic,), INSERT, schema="n int", setup=SETUP)
    send(bench, 1, range(2))
    real = task.read_in_driver

    def changed(*arguments):
        bench.run(f"UPDATE consumer.offsets SET {change} WHERE part = 1")
        return real(*arguments)

    monkeypatch.setattr(task, "read_in_driver", changed)
    with bench.runner(job) as runner, pytest.raises(Fenced):
        runner._round(None)
    assert together == [False]
    assert 1 not in [part for (part,) in bench.rows("SELECT part FROM seen")]


def test_one_transaction_needs_the_proof_of_every_range(bench, together, monkeypatch):
    job = ConsumerJob("cut", (bench.topic,), INSERT, schema="n int", setup=SETUP)
    send(bench, 1, range(2))
    real = task.read_in_driver

    def cut(*arguments):
        read = dict(real(*arguments))
        last = max(read)

        def unproved() -> None:
            raise InputCut("cut")

        read[last] = TaskInput([], unproved)
        return read

    monkeypatch.setattr(task, "read_in_driver", cut)
    with bench.runner(job) as runner, pytest.raises(InputCut):
        runner._round(None)
    assert together == [False]
    assert bench.rows("SELECT part, n FROM seen") == [(0, 1)]
    assert bench.positions() == {0: 1, 1: 0}


def test_a_table_that_is_altered_between_rounds_is_noticed(bench):
    """What is known of it is kept from round to round, and compared in each transaction."""
    job = ConsumerJob("altered", (bench.topic,), INSERT, schema="n int", setup=SETUP)
    with bench.runner(job) as runner:
        for n, change in (
            (1, ""),
            (2, "ALTER TABLE seen ALTER n TYPE bigint"),
            (3, "ALTER TABLE seen ALTER n TYPE numeric(12,1) USING n + 0.5"),
        ):
            bench.run(change)
            bench.produce([({"n": n}, None, 0)])
            assert runner._round(None) is True
    assert bench.rows("SELECT n::text FROM seen ORDER BY n") == [("1.5",), ("2.5",), ("3.0",)]
    assert runner.totals.dead == 0
