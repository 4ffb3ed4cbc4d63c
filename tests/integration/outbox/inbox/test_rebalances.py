"""The inbox's consumer when Kafka takes a partition away and gives it back."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from inbox_support import Log, apply

from outbox.inbox import _member

QUEUED = 100
MESSAGES = 150
"""Of each partition: more than a member queues."""


# With Kafka's default of the heartbeat once, in one of the members.
@pytest.mark.parametrize(("strategy", "heartbeat"), [("range", 500), ("cooperative-sticky", 3000)])
def test_a_paused_partition_that_goes_and_comes_back_is_read_on(
    outbox_postgres, outbox_kafka, monkeypatch, strategy, heartbeat
):
    """librdkafka keeps a pause over an assignment (its issue 1849): what is queued waits, and none comes any more."""
    log = Log(outbox_postgres, outbox_kafka, 2)
    paused: set[tuple[object, int]] = set()

    class Pausing(KafkaConsumer):
        def pause(self, partitions):
            super().pause(partitions)
            paused.update((self, one.partition) for one in partitions)

    monkeypatch.setattr(_member.confluent_kafka, "Consumer", Pausing)
    monkeypatch.setattr(_member, "_MOST_QUEUED", QUEUED)
    monkeypatch.setattr(_member, "_TAKEN", QUEUED // 5)
    for partition in range(2):
        log.produce([f"k{partition}-{number % 50}" for number in range(MESSAGES)], partition=partition)
    released = threading.Event()

    def handle(connection, message):
        # Whatever the first messages are, they fail until the partitions have moved twice.
        if not released.is_set():
            raise ValueError("not yet")
        apply(connection, message)

    options = {
        "attempts": 1_000_000,
        "batch": 50,
        "wait": (0.1, 0.5),
        "kafka": {"partition.assignment.strategy": strategy},
    }

    def owners() -> int:
        return len(set(log.run("SELECT generation FROM consumer.offsets WHERE grp = %s", log.group)))

    first = options | {"kafka": {"partition.assignment.strategy": strategy, "heartbeat.interval.ms": heartbeat}}
    with log.consuming(handle, **first) as running:
        running.wait(lambda: len(paused) == 2, "both partitions to be paused")
        claims = "SELECT generation FROM consumer.groups WHERE grp = %s"
        with log.consuming(handle, **options) as other:
            other.wait(lambda: owners() == 2, "a partition for the other member")
        before = log.run(claims, log.group)
        running.wait(lambda: log.run(claims, log.group) > before, "the partition to come back")
        released.set()
        running.wait(lambda: log.count() >= 2 * MESSAGES, "the effects")
    log.check()
