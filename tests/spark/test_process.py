"""A consumer whose servers fail, and what Kafka's tools see of its group."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from bench import Bench, expected, ided, order
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
from confluent_kafka.admin import AdminClient
from support import wait_until

from outbox._app import migrate

pytestmark = pytest.mark.spark

ORDERS = [f"o{number}" for number in range(50)]


def applied(bench: Bench) -> int:
    try:
        return bench.rows("SELECT coalesce(sum(events_applied), 0) FROM order_totals")[0][0]
    except (psycopg.errors.UndefinedTable, psycopg.OperationalError):
        return 0


@pytest.mark.chaos
def test_broker_and_postgres_restart_during_a_run(spark, private_postgres, private_kafka, drive):
    server, cluster = private_postgres(), private_kafka()
    database = private_postgres.database(server)
    migrate.upgrade_consumer(database.url)
    bench = Bench(spark, database, private_kafka.topics(cluster))
    # Enough rounds to be in the midst of them at both crashes; now and then an event comes twice.
    seqs = 100
    events = [(order(name, seq), name, None, ided()) for seq in range(1, seqs + 1) for name in ORDERS]
    total = len(events)
    bench.produce(one for number, event in enumerate(events) for one in [event] * (2 if number % 19 == 0 else 1))
    driver = drive(bench.runner(max_records=100))

    def until(condition: Callable[[], object], what: str) -> None:
        wait_until(lambda: driver.ended or condition(), 240, what)
        assert not driver.ended, driver.result()

    try:
        until(lambda: applied(bench) > 300, "progress before the crash of Postgres")
        server.kill()
        server.start()
        at = applied(bench)
        until(lambda: applied(bench) > at + 300, "progress after the crash of Postgres")
        assert applied(bench) < total
        cluster.kill_broker(0)
        cluster.start_broker(0)
        until(lambda: applied(bench) == total, "everything to be applied")
        # What tells Kafka's tools of the group's position finds the coordinator again, some round after it is back.
        end = sum(bench.positions().values())

        def shown() -> bool:
            bench.send("one more round", 1)
            return shown_to_kafka(bench) >= end

        until(shown, "the position to be shown")
        until(lambda: "one more round" in bench.totals(), "its effect")
    finally:
        driver.close()
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
