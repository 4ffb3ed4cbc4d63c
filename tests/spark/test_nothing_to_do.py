"""``outbox consume --once`` with nothing to read: it does all else, without Spark, which takes seconds to start."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from bench import Bench, Consumer, expected, order
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from outbox.consumer import kafka_admin
from outbox.consumer.errors import DataLost
from outbox.consumer.kafka_admin import TopicMissing
from spark_jobs.driver.options import Totals
from spark_jobs.job import ConsumerJob

pytestmark = pytest.mark.spark


class Start:
    """What starts Spark for a run: the tests' own, or a Spark that does not start."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.broken = False
        self.then: Callable[[], object] = lambda: None
        self._started = False

    def __call__(self) -> SparkSession:
        self._started = True
        if self.broken:
            raise PySparkRuntimeError("Java gateway process exited")
        self.then()
        return self._spark

    def was_called(self) -> bool:
        """Return whether it was called since it was last asked."""
        called, self._started = self._started, False
        return called


def test_spark_is_started_only_for_what_is_there(spark, outbox_postgres, outbox_kafka):
    """And a run whose Spark does not start leaves the group to its driver. One test: what each run leaves, is there."""
    start = Start(spark)
    bench = Bench(start, outbox_postgres, outbox_kafka, partitions=1)

    def once() -> tuple[bool, Totals]:
        """Return whether Spark was started, and the figures."""
        totals = bench.once()
        return start.was_called(), totals

    def without_spark(job: ConsumerJob) -> int:
        """Return the group's generation after a run whose Spark did not start; 0: there is no group."""
        start.broken = True
        with pytest.raises(PySparkRuntimeError):
            bench.once(job)
        start.broken = False
        assert start.was_called()
        return bench.rows("SELECT coalesce(max(generation), 0)::int FROM consumer.groups")[0][0]

    another = bench.topics.create_topic(bench.topics.name("another"), 1)
    bench.produce([(b"no JSON",)], another)
    assert without_spark(bench.job.with_topics([another])) == 0

    # A new group: its tables are made, and it begins at the topic's start.
    started, totals = once()
    assert (started, totals.read, bench.positions(), bench.totals()) == (False, 0, {0: 0}, {})

    bench.send("a", 1)
    bench.send_raw(b"no JSON", [("ce_id", b"x")])
    started, totals = once()
    assert (started, totals.read, totals.applied, totals.dead) == (True, 2, 1, 1)
    started, totals = once()
    assert (started, totals.read) == (False, 0)
    assert bench.totals() == expected("a", 1)
    [(generation,)] = bench.rows("SELECT generation FROM consumer.groups")

    bench.command("dead-letters", "retry", "--side", "consumer", "--all", "--group", "order-totals")
    assert without_spark(bench.job) == generation
    assert bench.rows("SELECT state, attempts FROM consumer.dead_letters") == [("retry", 1)]
    bench.run("UPDATE consumer.dead_letters SET state = 'dead'")

    bench.send("a", 2)
    assert without_spark(bench.job) == generation
    # A signal that comes while Spark starts: no round begins.
    stop = threading.Event()
    start.then = stop.set
    with bench.runner() as runner:
        assert (runner.once(stop).read, start.was_called()) == (0, True)
    assert bench.positions() == {0: 2}

    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(bench.topic, 0, 3)]).values():
        future.result(30)
    with pytest.raises(DataLost, match=f"{bench.topic}-0: .*--to loss --reason"):
        bench.once()
    assert not start.was_called()
    assert bench.rows("SELECT count(*)::int FROM consumer.losses") == [(1,)]


def test_a_topic_that_comes_later(spark, outbox_postgres, outbox_kafka, monkeypatch):
    """A consumer that starts beside a relay which creates its topics ends, and works when it is started again."""
    start = Start(spark)
    bench = Bench(start, outbox_postgres, outbox_kafka)
    topic = bench.topics.name("later")
    job = bench.job.with_topics([topic])
    with monkeypatch.context() as patched:
        patched.setattr(kafka_admin, "_UNHEARD_SECONDS", 0.3)
        with pytest.raises(TopicMissing, match=f"there is no topic {topic}"):
            bench.once(job)
        with bench.runner(job) as runner, pytest.raises(TopicMissing, match=f"there is no topic {topic}"):
            runner.continuous(threading.Event())
    assert not start.was_called()
    assert bench.rows("SELECT count(*) FROM consumer.losses") == [(0,)]
    bench.topics.create_topic(topic, 1)
    bench.produce([(order("a", 1), "a")], topic)
    bench.once(job)
    assert bench.totals() == expected("a", 1)


class Java:
    """A JAVA_HOME whose java leaves a trace, and waits until it is let go, which ends it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.started = home / "started"
        self._gate = home / "gate"
        (home / "bin").mkdir(parents=True)
        program = home / "bin" / "java"
        program.write_text(f'#!/bin/sh\ntouch "{self.started}"\ncat "{self._gate}"\n')
        program.chmod(0o755)
        os.mkfifo(self._gate)

    def let_go(self) -> None:
        self._gate.write_text("")


def test_the_command_starts_spark_once_there_is_something_and_hears_a_signal_meanwhile(
    bench: Bench, consumer: Consumer, tmp_path: Path
):
    """What it prints of a run: tests/unit/spark_jobs/cli. To the end: the README's quickstart, in tests/acceptance."""
    java = Java(tmp_path / "java")
    consumer.start("--once", JAVA_HOME=str(java.home), PYTHONPROFILEIMPORTTIME="1")
    consumer.ended(0, '"generation": 1', '"messages": 0, "partitions": 2', "read 0, applied 0, duplicates 0 in ")
    assert not java.started.exists()
    imported = set(re.findall(r"^import time: .* (\w+)$", consumer.log(), re.MULTILINE))
    assert "psycopg" in imported
    assert not imported & {"pyspark", "pyarrow", "numpy", "pandas", "sqlalchemy"}

    bench.send("a", 1, part=0)
    consumer.start("--once", JAVA_HOME=str(java.home))
    consumer.until(java.started.exists, "Spark to start")
    consumer.signal(signal.SIGTERM)
    consumer.until(lambda: "outbox: stopping after this round" in consumer.log(), "the signal to be heard")
    consumer.kill()
    java.let_go()
