"""Messages that make a round fail again and again, though both servers answer: found, named, and the others applied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from bench import Bench, produce
from support import wait_until

from outbox.consumer.errors import EffectFailed
from outbox.testing.fixtures import Topics
from spark_jobs.errors import BadMessage
from spark_jobs.job import ConsumerJob
from spark_jobs.spark.errors import understood

pytestmark = pytest.mark.spark

# The fault where most halves pass, as each that fails costs four workers. The search itself, in 25,000 messages:
# tests/unit/spark_jobs/driver/test_poison_search.py.
MESSAGES = 750
FAULT = 654
OTHERS = 190
SETUP = "CREATE TABLE IF NOT EXISTS seen (part int, n int)"
PLAIN = "INSERT INTO seen SELECT message_part, n FROM batch"


@pytest.fixture(scope="module")
def topic(outbox_kafka_cluster) -> Iterator[str]:
    """Two partitions: 750 messages in the first one, 190 in the second. Each says which it is."""
    with Topics(outbox_kafka_cluster.bootstrap_servers) as made:
        name = made.create_topic(made.name("poison"), 2)
        for part, count in enumerate((MESSAGES, OTHERS)):
            produce(made.bootstrap_servers, name, (({"n": n, "part": part}, None, part) for n in range(count)))
        yield name


def job(topic: str, effect: Any = PLAIN, **more: Any) -> ConsumerJob:
    return ConsumerJob("poison", (topic,), schema="n int, part int", effect=effect, setup=SETUP, **more)


def ends_the_worker(cursor: psycopg.Cursor[Any], table: Any) -> None:
    """An effect in whose hands a message ends the process, as a library that crashes does."""
    rows = list(zip(table["message_part"].to_pylist(), table["n"].to_pylist(), strict=True))
    if (0, FAULT) in rows:
        os._exit(3)
    with cursor.copy("COPY seen FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def waits(bench: Bench) -> list[str]:
    """Return the errors for which the driver has waited."""
    return [figures["error"] for text, figures in list(bench.reports) if text == "waiting for a server"]


def applied(bench: Bench, *, without: int = 0) -> None:
    """What stands before the fault and all of the other partition has been applied once, nothing else."""
    end = FAULT if not without else MESSAGES
    counted = "SELECT part, count(*), count(DISTINCT n), max(n) FROM seen GROUP BY 1 ORDER BY 1"
    assert bench.rows(counted) == [(0, end - without, end - without, end - 1), (1, OTHERS, OTHERS, OTHERS - 1)]
    assert bench.positions() == {0: end, 1: OTHERS}


def test_a_message_that_ends_the_worker_is_named(bench, topic):
    """750 messages, one of which ends every worker: the job says which, and what to do."""
    made = job(topic, ends_the_worker)
    with pytest.raises(
        BadMessage, match=f"{topic}-0 offset {FAULT} can't be applied: by itself it failed 3 times"
    ) as bad:
        bench.once(made, driver_records=0, verdict_seconds=0.1, max_backoff_seconds=0.1)
    assert "Python worker exited unexpectedly" in str(bad.value)
    assert f"outbox offsets set poison {topic} 0 {FAULT + 1} --skip" in str(bad.value)
    applied(bench)
    bench.run(f"UPDATE consumer.offsets SET next_offset = {FAULT + 1} WHERE part = 0")
    bench.once(made, driver_records=0)
    applied(bench, without=1)


def test_an_error_that_passes_is_waited_for_and_not_blamed_on_a_message(bench, drive, topic):
    """A lock on the sink's table, and a lock_timeout: ever less is tried, nobody is blamed, and then all is applied."""
    bench.run(SETUP)
    with psycopg.connect(bench.database.url) as holder:
        holder.execute("LOCK TABLE seen IN ACCESS EXCLUSIVE MODE")
        bench.limit("lock_timeout", "20ms")
        driver = drive(bench.runner(job(topic), driver_records=0, max_backoff_seconds=0.1))
        # More than it takes to come down to single messages.
        wait_until(lambda: len(waits(bench)) > 20, 120, "many failures")
        holder.rollback()
    wait_until(lambda: bench.positions() == {0: MESSAGES, 1: OTHERS}, 120, "all to be applied")
    driver.stop()
    assert all("LockNotAvailable" in error for error in waits(bench))
    counted = "SELECT part, count(*), count(DISTINCT n) FROM seen GROUP BY 1 ORDER BY 1"
    assert bench.rows(counted) == [(0, MESSAGES, MESSAGES), (1, OTHERS, OTHERS)]


def test_a_message_that_always_runs_into_the_statement_limit_is_named_and_the_others_move(bench, drive, topic):
    """It is no dead letter, as the limit may be met because of a lock; its partition is reported as standing.

    A limit that only a whole range exceeds is kept by parts of it in the same way.
    """
    slow = f"{PLAIN}; SELECT pg_sleep(20) FROM batch WHERE message_part = 0 AND n = {FAULT}"
    bench.limit("statement_timeout", "1s")
    behind: list[dict[tuple[str, int], int]] = []
    runner = bench.runner(job(topic, slow), driver_records=0, verdict_seconds=0.1, max_backoff_seconds=0.1)
    runner._lagging = lambda offsets, _turn: behind.append(offsets)
    driver = drive(runner)
    report = "a partition stands still"
    found = wait_until(lambda: dict(bench.reports).get(report), 240, "the message to be named")
    driver.stop()
    assert (found["topic"], found["partition"], found["offset"]) == (topic, 0, FAULT)
    assert "QueryCanceled" in found["error"]
    assert f"`outbox offsets set poison {topic} 0 {FAULT + 1} --skip" in found["error"]
    # What /readyz is made from.
    assert behind[-1] == {(topic, 0): FAULT}
    applied(bench)


def test_a_dead_letter_that_ends_the_worker_keeps_nothing_waiting(bench, topic):
    """Tried again it fails by itself, and the others are applied."""
    refused = f"{PLAIN}; INSERT INTO refusals SELECT n FROM batch WHERE n BETWEEN 104 AND 107 AND message_part = 1"
    bench.run(f"{SETUP}; CREATE TABLE refusals (n int CHECK (n < 0))")
    bench.once(job(topic, refused), driver_records=0)
    assert bench.rows("SELECT count(*) FROM consumer.dead_letters") == [(4,)]
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")

    def ending(cursor: psycopg.Cursor[Any], table: Any) -> None:
        if 105 in table["n"].to_pylist():
            os._exit(3)
        cursor.executemany("INSERT INTO seen VALUES (1, %s)", [(n,) for n in table["n"].to_pylist()])

    totals = bench.once(job(topic, ending), driver_records=0)
    assert totals.applied == 3
    ((n, state, error),) = bench.rows("SELECT message_offset, state, error FROM consumer.dead_letters")
    assert (n, state) == (105, "dead")
    assert "Python worker exited unexpectedly" in error
    assert bench.rows("SELECT count(*), count(DISTINCT n) FROM seen WHERE part = 1") == [(OTHERS - 1, OTHERS - 1)]


def test_an_error_of_the_transform_s_own_ends_the_job_at_once(bench, topic):
    def failing(batches: Any) -> Any:
        for batch in batches:
            raise ZeroDivisionError(f"{batch.num_rows} rows")
        yield from ()

    with pytest.raises(EffectFailed, match="ZeroDivisionError: "):
        bench.once(job(topic, transform=lambda rows: rows.mapInArrow(failing, rows.schema)))
    assert not waits(bench)


def test_an_error_of_a_server_in_a_transform_is_waited_for(bench, topic):
    """Which errors these are: tests/unit/spark_jobs/spark/test_errors.py."""

    def failing(batches: Any) -> Any:
        for batch in batches:
            if batch["part"][0].as_py() == 0:
                raise ConnectionRefusedError("no")
            yield batch

    made = job(topic, transform=lambda rows: rows.mapInArrow(failing, rows.schema))
    bench.once_waits(made, "ConnectionRefusedError: no")


def test_a_network_error_is_not_taken_for_the_end_of_spark(spark):
    with pytest.raises(ConnectionResetError), understood():
        raise ConnectionResetError
