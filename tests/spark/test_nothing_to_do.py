"""``outbox consume --once`` with nothing to read: it does all else, without Spark, which takes seconds to start."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench import Bench, Consumer, expected
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

pytestmark = pytest.mark.spark


@pytest.fixture
def bench(outbox_postgres, outbox_kafka) -> Bench:
    return Bench(None, outbox_postgres, outbox_kafka, partitions=1)


class Java:
    """A JAVA_HOME whose java leaves a trace, and can be held up."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.started = home / "started"
        self._gate = home / "gate"
        own = Path(os.environ["JAVA_HOME"]) / "bin" / "java" if "JAVA_HOME" in os.environ else shutil.which("java")
        (home / "bin").mkdir(parents=True)
        self._program = home / "bin" / "java"
        held = f'if [ -p "{self._gate}" ]; then cat "{self._gate}"; fi'
        self._program.write_text(f'#!/bin/sh\ntouch "{self.started}"\n{held}\nexec "{own}" "$@"\n')
        self._program.chmod(0o755)

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Let Spark fail to start."""
        whole = self._program.read_text()
        self._program.write_text(f'#!/bin/sh\ntouch "{self.started}"\nexit 1\n')
        yield
        self._program.write_text(whole)

    def hold(self) -> None:
        os.mkfifo(self._gate)

    def let_go(self) -> None:
        with self._gate.open("w"):
            self._gate.unlink()

    def was_started(self) -> bool:
        """Return whether it was started since it was last asked."""
        there = self.started.exists()
        self.started.unlink(missing_ok=True)
        return there


@pytest.mark.timeout(600)
def test_spark_is_started_only_for_what_is_there(bench: Bench, consumer: Consumer, tmp_path: Path):
    """And a run whose Spark does not start leaves the group to its driver. One test: what each run leaves, is there."""
    java = Java(tmp_path / "java")

    def once(status: int, *said: str) -> bool:
        """Return whether Spark was started."""
        consumer.start("--once", JAVA_HOME=str(java.home))
        consumer.ended(status, *said)
        return java.was_started()

    def without_spark(topic: str) -> int:
        """Return the group's generation after a run whose Spark did not start; 0: there is no group."""
        with java.broken():
            consumer.start("--once", JAVA_HOME=str(java.home), topic=topic)
            assert consumer.process is not None
            assert consumer.process.wait(240) != 0
        assert java.was_started(), consumer.log()
        return bench.rows("SELECT coalesce(max(generation), 0)::int FROM consumer.groups")[0][0]

    another = bench.topics.create_topic(bench.topics.name("another"), 1)
    bench.produce([(b"no JSON",)], another)
    assert without_spark(another) == 0

    # A new group: its tables are made, and it begins at the topic's start.
    began = '"generation": 1', '"messages": 0, "partitions": 1', "order-totals: read 0, applied 0, duplicates 0 in "
    assert not once(0, *began)
    assert bench.positions() == {0: 0}
    assert bench.totals() == {}

    bench.send("a", 1)
    bench.send_raw(b"no JSON", [("ce_id", b"x")])
    # A signal while Spark starts: no round begins.
    java.hold()
    consumer.start("--once", JAVA_HOME=str(java.home))
    consumer.until(java.started.exists, "Spark to start")
    consumer.signal(signal.SIGTERM)
    consumer.until(lambda: "outbox: stopping after this round" in consumer.log(), "the signal to be heard")
    java.let_go()
    consumer.ended(0, "order-totals: read 0, ")
    assert bench.positions() == {0: 0}
    assert java.was_started()

    read = "order-totals: read 2, applied 1, duplicates 0, dead letters 1 in "
    look = "see outbox dead-letters list --side consumer --group order-totals"
    assert once(0, '"messages": 2, "partitions": 1', read, look)
    assert bench.totals() == expected("a", 1)

    assert not once(0, '"messages": 0', "order-totals: read 0, applied 0, duplicates 0 in ")
    [(generation,)] = bench.rows("SELECT generation FROM consumer.groups")

    bench.command("dead-letters", "retry", "--side", "consumer", "--all", "--group", "order-totals")
    assert without_spark(bench.topic) == generation
    assert bench.rows("SELECT state, attempts FROM consumer.dead_letters") == [("retry", 1)]
    bench.run("UPDATE consumer.dead_letters SET state = 'dead'")

    bench.send("a", 2)
    assert without_spark(bench.topic) == generation
    assert bench.positions() == {0: 2}

    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(bench.topic, 0, 3)]).values():
        future.result(30)
    assert not once(1, f"outbox: {bench.topic}-0: ", "--to loss --reason")
    assert bench.rows("SELECT count(*)::int FROM consumer.losses") == [(1,)]
