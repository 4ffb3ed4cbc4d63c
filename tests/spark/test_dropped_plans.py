"""A plan that Spark does not run, because it sees that the transform lets nothing through, hides no bad message."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from bench import ided, order
from pyspark.sql import functions

from spark_jobs.spark import rows as rows_of_spark
from spark_jobs.task import partition as task

pytestmark = pytest.mark.spark

MESSAGES = 1_200
BAD = 600


def with_nobody(rows):
    """A join with a table that is empty: of all messages nothing is left."""
    nobody = rows.sparkSession.createDataFrame([], "customer string")
    return rows.join(functions.broadcast(nobody), "customer")


def nothing(rows):
    return rows.filter(functions.lit(False))


@pytest.mark.parametrize(("atomic", "transform"), [("partition", nothing), ("batch", with_nobody)])
def test_what_does_not_decode_is_a_dead_letter_all_the_same(bench, small_batches, atomic, transform):
    numbers = range(MESSAGES)
    bench.produce((b"{" if n == BAD else order("a", n), "a", part) for part in range(2) for n in numbers)
    job = replace(bench.job, atomic=atomic, transform=transform, max_dead=10)
    totals = bench.once(job, max_records=2 * MESSAGES)
    # Behind a join, one transaction remembers messages before it knows what the transform leaves of them.
    remembered = 2 * MESSAGES - 2 if atomic == "batch" else 0
    assert (totals.applied, totals.dead) == (remembered, 2)
    assert bench.positions() == {0: MESSAGES, 1: MESSAGES}
    dead = "SELECT part, message_offset, reason, attempts, state FROM consumer.dead_letters ORDER BY part"
    assert bench.rows(dead) == [(part, BAD, "undecodable", 1, "dead") for part in range(2)]
    # One that is tried again is read by Spark too, and nothing of it gets through either.
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")
    assert bench.once(job).applied == 0
    assert bench.rows(dead) == [(part, BAD, "undecodable", 2, "dead") for part in range(2)]


def test_a_task_whose_rows_were_all_filtered_says_so(bench, monkeypatch):
    """Then nothing is read a second time: only where no task has run is there something to look for."""
    job = replace(bench.job, transform=lambda rows: rows.filter("amount_cents < 0"))
    for part in range(2):
        bench.send_raw(b"{", ided(), partition=part)
        bench.send("a", 1, customer="x")
    assert bench.once(job).dead == 2
    looked = []
    with bench.runner(job) as runner:
        monkeypatch.setattr(runner._context, "undecoded", looked.append)
        bench.send("b", 1)
        bench.send("c", 1)
        runner.once(threading.Event())
    assert not looked
    assert sum(bench.positions().values()) == 6


@pytest.mark.parametrize("transform", [None, lambda rows: rows.filter("seq > 0")], ids=["reads Kafka", "of Spark"])
def test_a_task_that_does_not_report_is_not_taken_for_a_plan_that_was_dropped(bench, monkeypatch, transform):
    """Where Spark was going to run tasks, only their word counts: the range must not be stepped over."""
    statement = bench.job.effect
    # A function is never run in the driver, however few messages there are.
    job = replace(bench.job, effect=lambda cursor, _: cursor.execute(statement), transform=transform)
    bench.send("a", 1)
    real = rows_of_spark.in_tasks

    def cut(rows, function, schema, **options):
        made = real(rows, function, schema, **options)
        return made.limit(0) if schema == task.REPORT else made

    monkeypatch.setattr(rows_of_spark, "in_tasks", cut)
    bench.once_waits(job, "a task did not report what became of")
    assert bench.positions() in ({}, {0: 0, 1: 0})
    monkeypatch.undo()
    assert bench.once(job).applied == 1
