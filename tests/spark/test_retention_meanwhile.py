"""Kafka's retention passes a range while a task reads it: recorded as a loss, and never stepped over."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from bench import Bench, produce
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from faults import at, reading, stalling
from support import wait_until

from outbox.consumer.admin.offsets import Offsets
from outbox.consumer.errors import DataLost
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.testing.fixtures import Topics
from spark_jobs.job import ConsumerJob

pytestmark = pytest.mark.spark

MESSAGES = 2_500
SIZE = 20_000
"""Bytes of a message: 50 MB are more than what anybody reads ahead of a task that stands still, sockets included."""
LEFT = 2_450
"""The first message that retention leaves."""


@pytest.fixture
def topic(outbox_kafka_cluster) -> Iterator[str]:
    with Topics(outbox_kafka_cluster.bootstrap_servers) as made:
        name = made.create_topic(made.name("short"), 1)
        sent = (({"n": n, "pad": "x" * SIZE}, str(n % 100)) for n in range(MESSAGES))
        produce(made.bootstrap_servers, name, sent)
        yield name


def test_retention_passes_a_range_while_it_is_read(bench: Bench, topic, tmp_path):
    seen, go = tmp_path / "seen", tmp_path / "go"
    job = ConsumerJob(
        "short",
        [topic],
        "INSERT INTO seen SELECT n, message_offset FROM batch ORDER BY message_offset",
        schema=reading(at(0, stalling(seen, go))),
        setup="CREATE TABLE IF NOT EXISTS seen (n int, at bigint)",
    )
    view = KafkaAdmin({"bootstrap.servers": bench.topics.bootstrap_servers})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bench.once, job)
        try:
            wait_until(lambda: running.done() or seen.exists(), 120, "a task to read")
            admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
            for future in admin.delete_records([TopicPartition(topic, 0, LEFT)]).values():
                future.result(30)
            wait_until(lambda: view.look([topic])[1][topic, 0].first == LEFT, what="the messages to go")
        finally:
            go.touch()
        with pytest.raises(DataLost, match=rf"retention removed messages 0 to {LEFT - 1} before the group read them"):
            running.result(240)
    assert bench.rows("SELECT kind, first_offset, end_offset FROM consumer.losses") == [("retention", 0, LEFT)]
    assert bench.rows("SELECT next_offset, applied FROM consumer.offsets") == [(0, 0)]
    assert bench.rows("SELECT count(*) FROM seen") == [(0,)]

    Offsets(bench.database.connect(autocommit=True), "consumer", view).reset("short", topic, "loss", "accounted for")
    assert bench.once(job).applied == MESSAGES - LEFT
    assert bench.rows("SELECT count(*), min(n), count(DISTINCT n) FROM seen") == [
        (MESSAGES - LEFT, LEFT, MESSAGES - LEFT)
    ]
    assert bench.rows("SELECT next_offset, applied FROM consumer.offsets") == [(MESSAGES, MESSAGES - LEFT)]
