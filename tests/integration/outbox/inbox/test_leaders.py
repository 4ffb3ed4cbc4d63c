"""A partition without a leader: a member applies the others, and it as soon as it has one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from inbox_support import Log, Running
from support import wait_until

from outbox.consumer.stalled import StalledPartition
from outbox.inbox import KafkaFailed, _member
from outbox.sandbox.kafka import KafkaCluster


@pytest.fixture
def away(outbox_postgres, private_kafka) -> Iterator[tuple[KafkaCluster, Log]]:
    """A group that has read a topic whose second partition is only on the first of three brokers, which is killed."""
    cluster = private_kafka(brokers=3)
    with private_kafka.topics(cluster) as topics:
        log = Log(outbox_postgres, topics)
        log.topic = topics.name("led")
        admin = AdminClient({"bootstrap.servers": log.servers})
        admin.create_topics([NewTopic(log.topic, 2, replica_assignment=[[2], [1]])])[log.topic].result(30)
        for partition in (0, 1):
            log.produce([f"k{partition}"] * 5, partition=partition)
        with log.consuming() as member:
            member.wait(lambda: log.count() == 10, "the effects")
        log.produce(["k1"] * 5, partition=1)
        cluster.kill_broker(0)
        wait_until(
            lambda: admin.list_topics(timeout=20).topics[log.topic].partitions[1].leader < 0, 60, "no leader of it"
        )
        yield cluster, log


def stalled(*members: Running) -> list[StalledPartition]:
    return [one for member in members for one in member.stalled()]


def test_the_others_are_applied_until_its_leader_is_back(away, monkeypatch):
    cluster, log = away
    # A new group needs all: one that it does not find would count as added to the topic later, and begin at 0.
    known, log.group = log.group, f"{log.group}-new"
    with monkeypatch.context() as patched, log.consuming() as new:
        patched.setattr(_member, "_CLAIM_ATTEMPTS", 1)
        error = new.error()
    assert isinstance(error, KafkaFailed)
    assert "Leader not available" in str(error)
    assert log.positions() == {}
    log.group = known
    log.produce(["k0"] * 5, partition=0)
    with log.consuming() as member:
        member.wait(lambda: log.count() == 15, "the effects of the other one")
        # One of them has only the partition without a leader, and does not disturb the other one.
        with log.consuming() as other:
            log.produce(["k0"] * 5, partition=0)
            other.wait(lambda: log.count() == 20, "more of them")
            wait_until(lambda: [one.partition for one in stalled(member, other)] == [1], 60, "only that one to wait")
            assert f"no leader of {log.topic}-1" in stalled(member, other)[0].why
            cluster.start_broker(0)
            member.wait(lambda: log.count() == 25, "its effects")
    log.check()
