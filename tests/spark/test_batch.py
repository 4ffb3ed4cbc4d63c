"""``atomic="batch"`` at the size of a round: repeats in a transform that shuffles, and the tables of a round."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from bench import Bench, ided
from psycopg import sql
from support import wait_until

from outbox.consumer.errors import EffectFailed, Fenced
from outbox.consumer.messages import Headers
from outbox.consumer.model import Range
from spark_jobs.driver import batch_attempts as batch
from spark_jobs.driver.round_context import OffsetRanges
from spark_jobs.job import ConsumerJob
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.spark import rows
from spark_jobs.task.reader import ReaderSettings

pytestmark = pytest.mark.spark

REPEATS = 3_000
SETUP = "CREATE TABLE IF NOT EXISTS sums (kind int, n bigint, messages bigint, round int GENERATED ALWAYS AS IDENTITY)"
STAGED = "SELECT relname FROM pg_class WHERE relname LIKE 'staged%' AND relkind = 'r'"


def sums(bench: Bench) -> ConsumerJob:
    """Return a job whose transform groups messages of all partitions."""
    from pyspark.sql import functions as F  # noqa: N812

    return ConsumerJob(
        "sums",
        [bench.topic],
        "INSERT INTO sums (kind, n, messages) SELECT kind, n, messages FROM batch ORDER BY kind",
        schema="kind int, n bigint",
        atomic="batch",
        setup=SETUP,
        transform=lambda rows: rows.groupBy("kind").agg(F.sum("n").alias("n"), F.count("*").alias("messages")),
    )


def send(bench: Bench, numbered: Iterable[tuple[int, Headers]]) -> None:
    """Send numbers with the headers of their ids."""
    bench.produce(({"kind": n % 2, "n": n}, str(n), n % 2, headers) for n, headers in numbered)


@pytest.fixture
def plans(monkeypatch) -> list[int]:
    """How many characters the plans have of what is staged, with each literal in them."""
    sizes: list[int] = []
    real = batch.stage

    def measured(rows: Any, *arguments: Any, **options: Any) -> Any:
        sizes.append(len(rows._jdf.queryExecution().analyzed().toString()))
        return real(rows, *arguments, **options)

    monkeypatch.setattr(batch, "stage", measured)
    return sizes


def test_very_many_repeats_cost_a_round_that_shuffles_no_plan_of_their_number(bench, plans):
    ids = [ided() for _ in range(REPEATS)]
    send(bench, enumerate(ids))
    job = sums(bench)
    assert bench.once(job).applied == REPEATS
    small = max(plans)
    plans.clear()
    # The producer sends all of it again, with a few others in between.
    send(bench, enumerate(ids[: REPEATS // 2]))
    send(bench, [(number, ided()) for number in (1, 2, 3)])
    send(bench, enumerate(ids[REPEATS // 2 :], REPEATS // 2))
    totals = bench.once(job)
    assert (totals.read, totals.applied, totals.duplicates) == (REPEATS + 3, 3, REPEATS)
    assert len(plans) == 2
    # The table of what is left out is one node, whatever its rows are.
    assert max(plans) < small + 10_000
    # And the group is set back: nothing is new then, and nothing is summed up.
    plans.clear()
    bench.run("UPDATE consumer.offsets SET next_offset = 0")
    totals = bench.once(job)
    assert (totals.read, totals.applied, totals.duplicates) == (2 * REPEATS + 3, 0, 2 * REPEATS + 3)
    by_kind = [(kind, sum(range(kind, REPEATS, 2)), REPEATS // 2) for kind in range(2)]
    assert bench.rows("SELECT kind, n, messages FROM sums ORDER BY round") == [*by_kind, (0, 2, 1), (1, 4, 2)]


def test_what_is_left_out_of_a_range_are_these_messages_and_no_others(bench, spark):
    send(bench, [(number, ided()) for number in range(2_000)])
    whole = {(bench.topic, part): Range("", 0, 1_000) for part in range(2)}
    # Some offsets of one partition, another one of the other, one of another topic, and one that is not there.
    out = {(bench.topic, 0): list(range(0, 1_000, 2)), (bench.topic, 1): [7, 5_000], (f"{bench.topic}x", 1): [8]}
    expected = [(0, offset) for offset in range(1, 1_000, 2)] + [(1, offset) for offset in range(1_000) if offset != 7]
    job = sums(bench)
    reading = ReaderSettings({"bootstrap.servers": bench.topics.bootstrap_servers}, job.group)
    source = rows.of_ranges(spark, job, rows.task_decoder(job), whole, out, reading)
    # In their partitions, and in their order.
    assert list(source.tasks(source.rows).values()) == sorted(whole)
    assert [tuple(row) for row in source.rows.select("message_part", "message_offset").collect()] == expected
    assert not rows.moves_rows(source.rows.select("message_offset"), source.rows)


def test_a_round_leaves_no_table(bench):
    """Whatever becomes of it; what is locked then goes with the next round, and a dead driver's with the next one's."""
    job = replace(
        sums(bench), effect=lambda cursor, rows: seen.append((cursor.execute(STAGED).fetchall(), rows.num_rows))
    )
    seen: list[tuple[list[tuple[str]], int]] = []
    fresh = ((number, ided()) for number in range(1_000))
    send(bench, [next(fresh), next(fresh)])
    runner = bench.runner(job)
    assert runner.once(threading.Event()).applied == 2
    # One for the messages and one for what the transform made of them.
    assert [(len(tables), rows) for tables, rows in seen] == [(2, 2)]
    assert bench.rows(STAGED) == []
    send(bench, [next(fresh)])
    with pytest.raises(EffectFailed, match="nowhere"):
        bench.once(replace(job, effect="INSERT INTO nowhere SELECT 1"))
    assert bench.rows(STAGED) == []

    # pg_dump reads the tables, or a task that nobody waits for writes into one: the round is done all the same.
    with psycopg.connect(bench.database.url) as reading:

        def locks(cursor: Any, rows: Any) -> None:
            tables = cursor.execute(STAGED).fetchall()
            for (name,) in set(tables) - set(held):
                reading.execute(sql.SQL("SELECT FROM {}").format(sql.Identifier("consumer", name)))
            held[:] = tables

        held: list[tuple[str]] = []
        locking = bench.runner(replace(job, effect=locks))
        assert locking.once(threading.Event()).applied == 1
        assert sorted(bench.rows(STAGED)) == sorted(held)
        reading.rollback()
        send(bench, [next(fresh)])
        first = set(held)
        assert locking.once(threading.Event()).applied == 2
        assert len(held) == 4
        assert set(bench.rows(STAGED)) == set(held) - first
        # The driver is gone, and what it has left is still read by somebody.
        send(bench, [next(fresh)])
        last = bench.runner(job)
        assert last.once(threading.Event()).applied == 1
        assert len(bench.rows(STAGED)) == 2
        reading.rollback()
        send(bench, [next(fresh)])
        assert last.once(threading.Event()).applied == 2
    assert bench.rows(STAGED) == []

    # Who was superseded makes no table that its successor would not find.
    send(bench, [next(fresh)])
    with pytest.raises(Fenced, match="taken over"):
        locking._rounds.apply(OffsetRanges({(bench.topic, 0): Range("", 0, 1)}, {}), locking._generation)
    assert bench.rows(STAGED) == []
    assert last.once(threading.Event()).applied == 3


def test_a_take_over_in_the_midst_of_a_round_waits_for_it(bench):
    """It holds the group's row and waits for the offsets; the round's second table must not wait for that row."""
    job = sums(bench)
    calls: list[int] = []
    taken: list[int] = []
    successor = PostgresGroupStore(bench.database.url, "consumer", job.group, "successor")
    thread = threading.Thread(target=lambda: taken.append(successor.take_over()), daemon=True)
    waiting = (
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)"
        " WHERE NOT granted AND datname = current_database()"
    )

    def transform(rows: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            # Once to see what it is, before the offsets move; and now over what is no repeat.
            thread.start()
            wait_until(lambda: bench.rows(waiting)[0][0] > 0, what="the take-over to wait")
        assert job.transform is not None
        return job.transform(rows)

    send(bench, [(number, ided()) for number in range(10)])
    # Whoever waits for longer gives up, and the test fails.
    bench.limit("lock_timeout", "20s")
    with bench.runner(replace(job, transform=transform)) as runner:
        assert runner._round(None) is True
        thread.join(30)
        assert taken == [runner._generation + 1]
        send(bench, [(10, ided())])
        with pytest.raises(Fenced, match="taken over"):
            runner._round(None)
    successor.close()
    assert (len(calls), bench.rows("SELECT sum(messages)::int FROM sums"), bench.rows(STAGED)) == (2, [(10,)], [])
