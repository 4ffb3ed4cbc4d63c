"""``outbox consume --once`` with nothing to read: it does all else, without Spark, which takes seconds to start."""

from __future__ import annotations

import os
import shutil
import signal
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
        program = home / "bin" / "java"
        held = f'if [ -p "{self._gate}" ]; then cat "{self._gate}"; fi'
        program.write_text(f'#!/bin/sh\ntouch "{self.started}"\n{held}\nexec "{own}" "$@"\n')
        program.chmod(0o755)

    def break_down(self) -> None:
        """Let Spark fail to start."""
        (self.home / "bin" / "java").write_text(f'#!/bin/sh\ntouch "{self.started}"\nexit 1\n')

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
    java = Java(tmp_path / "java")

    def once(status: int, *said: str) -> None:
        consumer.start("--once", JAVA_HOME=str(java.home))
        consumer.ended(status, *said)

    # A new group: its tables are made, and it begins at the topic's start.
    once(0, '"generation": 1', '"messages": 0, "partitions": 1', "order-totals: read 0, applied 0, duplicates 0 in ")
    assert not java.was_started()
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

    once(0, '"messages": 2, "partitions": 1', "order-totals: read 2, applied 1, duplicates 0, dead letters 1 in ")
    assert java.was_started()
    assert bench.totals() == expected("a", 1)

    once(0, '"messages": 0', "order-totals: read 0, applied 0, duplicates 0 in ")
    assert not java.was_started()

    bench.command("dead-letters", "retry", "--side", "consumer", "--all", "--group", "order-totals")
    once(0, '"messages": 0', "order-totals: read 0, ")
    assert java.was_started()
    assert bench.rows("SELECT state, attempts FROM consumer.dead_letters") == [("dead", 2)]

    bench.send("a", 2)
    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(bench.topic, 0, 3)]).values():
        future.result(30)
    once(1, f"outbox: {bench.topic}-0: ", "--to loss --reason")
    assert not java.was_started()
    assert bench.rows("SELECT count(*)::int FROM consumer.losses") == [(1,)]


@pytest.mark.timeout(600)
def test_a_run_whose_spark_does_not_start_leaves_the_group_to_its_driver(
    bench: Bench, consumer: Consumer, tmp_path: Path
):
    java = Java(tmp_path / "java")
    java.break_down()

    def started() -> tuple[bool, int]:
        consumer.start("--once", JAVA_HOME=str(java.home))
        assert consumer.process is not None
        failed = consumer.process.wait(240) != 0
        assert failed == java.was_started(), consumer.log()
        return failed, bench.rows("SELECT coalesce(max(generation), 0)::int FROM consumer.groups")[0][0]

    bench.send_raw(b"no JSON", [("ce_id", b"x")])
    assert started() == (True, 0)

    consumer.start("--once")
    consumer.ended(0, "order-totals: read 1, applied 0, duplicates 0, dead letters 1 in ")
    assert started() == (False, 2)

    bench.command("dead-letters", "retry", "--side", "consumer", "--all", "--group", "order-totals")
    assert started() == (True, 2)

    bench.run("UPDATE consumer.dead_letters SET state = 'dead'")
    bench.send("a", 1)
    assert started() == (True, 2)
    assert bench.positions() == {0: 1}
