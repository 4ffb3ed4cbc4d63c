"""A task commits only what it has seen the end of: three batches in a partition, and a fault behind the first one.

Spark hands rows over in batches, here of 1,000. When something upstream of the task fails, the task sees the end of its
rows at the next border between two of them, as if they had all come (spark_jobs.task.input). A task that reads Kafka
itself (spark_jobs.task.reader) has parts of 10,000; its own faults, on a real broker, are in
tests/integration/spark_jobs/task/test_reader_failures.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from bench import Bench, produce
from faults import Transform, by_map, fault_at, reading
from pyspark.sql import functions

from outbox.consumer.errors import EffectFailed, JobError
from outbox.testing.fixtures import Topics
from spark_jobs.driver import partition_attempts as partitions
from spark_jobs.driver import staged_rows
from spark_jobs.effects.mapped import Insert
from spark_jobs.job import ConsumerJob
from spark_jobs.spark import session
from spark_jobs.task import input as task_input

pytestmark = pytest.mark.spark

MESSAGES = 25_000
FEW = 3_000
"""Of a topic whose rows Spark hands over."""


def bad_of(messages: int) -> int:
    """Return the place of the fault in the second batch."""
    return messages * 60 // 100


def in_the_third(messages: int) -> int:
    """Return one in the third batch: the task gets the first one when Spark has the first row of the second."""
    return messages * 88 // 100


@pytest.fixture(scope="module")
def topics(outbox_kafka_cluster) -> Iterator[dict[tuple[str, int], str]]:
    """Topics of one partition with the same numbers: ``good``, and ``bad``, where one message is no JSON."""
    with Topics(outbox_kafka_cluster.bootstrap_servers) as made:
        kinds = itertools.product(("good", "bad"), (MESSAGES, FEW))
        names = {(name, count): made.create_topic(made.name(f"{name}-{count}"), 1) for name, count in kinds}
        for (name, count), topic in names.items():
            values = (b"no JSON" if (name, n) == ("bad", bad_of(count)) else {"n": n} for n in range(count))
            produce(made.bootstrap_servers, topic, ((value, str(n % 100)) for n, value in enumerate(values)))
        yield names


WAYS: dict[str, dict[str, Any]] = {
    "partition": {"effect": "INSERT INTO seen SELECT n, message_offset FROM batch ORDER BY message_offset"},
    "direct": {"effect": Insert("seen", {"n": "n", "at": "message_offset"})},
    "batch": {
        "effect": "INSERT INTO seen SELECT n, message_offset FROM batch ORDER BY message_offset",
        "atomic": "batch",
    },
}


def job(bench: Bench, topic: str, way: str, transform: Transform | None, schema: Any = "n int") -> ConsumerJob:
    # No constraint on ``seen``: whatever is applied twice shows.
    setup = "CREATE TABLE IF NOT EXISTS seen (n int, at bigint)"
    return ConsumerJob("input", (topic,), schema=schema, setup=setup, transform=transform, **WAYS[way])


def check(bench: Bench, messages: int, *, dead: int) -> None:
    """Every message has one effect or is a dead letter, and the group stands at the end."""
    applied = messages - dead
    counted = bench.rows("SELECT count(*), count(DISTINCT n), count(*) FILTER (WHERE n <> at) FROM seen")
    assert counted == [(applied, applied, 0)]
    assert bench.rows("SELECT next_offset, applied, duplicates, dead FROM consumer.offsets") == [
        (messages, applied, 0, dead)
    ]
    letters = bench.rows("SELECT message_offset, reason FROM consumer.dead_letters")
    assert letters == [(bad_of(messages), "undecodable")] * dead


def nothing_moved(bench: Bench) -> None:
    assert bench.rows("SELECT next_offset FROM consumer.offsets") == [(0,)]
    assert bench.rows("SELECT count(*) FROM seen") == [(0,)]


@pytest.mark.parametrize(("way", "transform", "messages"), [("direct", None, MESSAGES), ("partition", "same", FEW)])
def test_a_message_that_does_not_decode_costs_one_row(bench, small_batches, topics, way, transform, messages):
    made = job(bench, topics["bad", messages], way, (lambda rows: rows) if transform else None)
    totals = bench.once(made)
    assert (totals.applied, totals.dead) == (messages - 1, 1)
    check(bench, messages, dead=1)


def by_udf(passed: Callable[[Any], Any]) -> Transform:
    return lambda rows: rows.withColumn("n", functions.udf(lambda n: passed(n), "int", useArrow=True)("n"))


def ending_the_session(number: int, once: Path, url: str) -> Callable[[Any], Any]:
    """Return a function of a number that ends the task's own session of the database at this one, the first time."""

    def passed(n: Any) -> Any:
        if n == number and not once.exists():
            once.touch()
            with psycopg.connect(url, autocommit=True) as connection:
                ended = connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE application_name = 'outbox consumer input' AND datname = current_database() "
                    "AND state <> 'idle'"
                ).fetchall()
            assert ended == [(True,)]
        return n

    return passed


def elsewhere() -> Callable[[Any], task_input.TaskInput]:
    """Return a function that looks for the proof outside of the worker's own thread, where there is none."""

    def from_spark(batches: Any) -> task_input.TaskInput:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(task_input.from_spark, batches).result()

    return from_spark


def announcing(seen: Path) -> Callable[[Any], task_input.TaskInput]:
    """Return a function that takes a task's rows as it should, and makes a file when the first ones have come."""

    def from_spark(batches: Any) -> task_input.TaskInput:
        def passed() -> Iterator[Any]:
            for one in batches:
                seen.touch()
                yield one

        return task_input.from_spark(passed())

    return from_spark


def given_by(monkeypatch: pytest.MonkeyPatch, from_spark: Callable[[Any], task_input.TaskInput]) -> None:
    """Let tasks get their rows from another function, which travels to the executors with the code of a round."""
    for module in (partitions, staged_rows):
        monkeypatch.setattr(module, "task_input", SimpleNamespace(from_spark=from_spark))


def test_a_running_session_has_what_the_consumer_counts_on(spark):
    """Where Spark's own configuration has another list of sources, a job with a transform would be refused."""
    assert {name: spark.conf.get(name) for name in session.REQUIRED_CONF} == session.REQUIRED_CONF
    assert "kafka" in spark.conf.get("spark.sql.sources.useV1SourceList").split(",")


@pytest.mark.parametrize("way", ["direct", "batch"])
def test_where_the_end_can_not_be_checked_nothing_is_committed(bench, small_batches, topics, monkeypatch, way):
    given_by(monkeypatch, elsewhere())
    with pytest.raises(JobError, match=r"can't be checked.*remove spark\.python\.worker\.module"):
        bench.once(job(bench, topics["good", FEW], way, lambda rows: rows))
    nothing_moved(bench)


@pytest.mark.parametrize("way", ["direct", "batch"])
def test_a_transform_that_fails_moves_nothing_and_the_next_run_completes(
    bench, small_batches, topics, monkeypatch, tmp_path, way
):
    """All tries of the task fail and end the job; in the next run one try does, and the next try has all rows.

    A worker that is killed: test_offsets_only.py.
    """
    broken, failed, seen = (tmp_path / name for name in ("broken", "failed", "seen"))
    broken.touch()
    topic = topics["good", FEW]
    with pytest.raises(EffectFailed, match="RuntimeError: the transform fails here"):
        bench.once(job(bench, topic, way, by_udf(fault_at(in_the_third(FEW), while_there=broken))))
    nothing_moved(bench)
    broken.unlink()
    given_by(monkeypatch, announcing(seen))
    totals = bench.once(job(bench, topic, way, by_map(fault_at(in_the_third(FEW), once=failed, seen=seen))))
    assert (failed.exists(), totals.applied) == (True, FEW)
    check(bench, FEW, dead=0)


def test_a_task_that_reads_kafka_itself_fails_in_its_third_part(bench, topics, tmp_path):
    """All tries of it, in the first run. Then one does, in the middle of its transaction, and the next has all rows."""
    broken, once = tmp_path / "broken", tmp_path / "once"
    broken.touch()
    topic, at = topics["good", MESSAGES], in_the_third(MESSAGES)
    with pytest.raises(EffectFailed, match="RuntimeError: the transform fails here"):
        bench.once(job(bench, topic, "direct", None, reading(fault_at(at, while_there=broken))))
    nothing_moved(bench)
    passed = ending_the_session(at, once, bench.database.url)
    totals = bench.once(job(bench, topic, "direct", None, reading(passed)))
    assert (once.exists(), totals.applied) == (True, MESSAGES)
    check(bench, MESSAGES, dead=0)
