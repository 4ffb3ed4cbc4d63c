"""Partitions without leaders: a member applies the others, and these as soon as they have leaders."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from inbox_log import short_pauses
from inbox_support import Log, Running
from support import wait_until

from outbox.consumer import kafka_admin
from outbox.consumer.groups import GroupRows
from outbox.consumer.stalled import StalledPartition
from outbox.inbox import KafkaFailed, _member
from outbox.inbox._kafka import Admin
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics

__all__ = ["short_pauses"]


@pytest.fixture
def away(outbox_postgres, three_brokers) -> Iterator[tuple[KafkaCluster, Log]]:
    """A group that has read a topic whose second partition is only on the first of three brokers, which is killed.

    So is the third one, which was added since.
    """
    with Topics(three_brokers.bootstrap_servers) as topics:
        log = Log(outbox_postgres, topics)
        log.topic = topics.name("led")
        admin = AdminClient({"bootstrap.servers": log.servers})
        # By itself such a cluster wants two replicas in sync.
        topic = NewTopic(log.topic, 2, replica_assignment=[[2], [1]], config={"min.insync.replicas": "1"})
        admin.create_topics([topic])[log.topic].result(30)
        for partition in (0, 1):
            log.produce([f"k{partition}"] * 5, partition=partition)
        with log.consuming() as member:
            member.wait(lambda: log.count() == 10, "the effects")
        admin.create_partitions([NewPartitions(log.topic, 3, replica_assignment=[[1]])])[log.topic].result(30)
        # A client with one address asks that broker first.
        each = [AdminClient({"bootstrap.servers": one}) for one in log.servers.split(",")]
        wait_until(lambda: all(leaders(one, log) == [True] * 3 for one in each), 60, "all brokers to know it")
        for partition in (1, 2):
            log.produce([f"k{partition}"] * 5, partition=partition)
        three_brokers.kill_broker(0)
        wait_until(lambda: leaders(admin, log) == [True, False, False], 60, "no leader of them")
        yield three_brokers, log


def leaders(admin: AdminClient, log: Log) -> list[bool]:
    """Which partitions of the topic have leaders."""
    return [one.leader >= 0 for _, one in sorted(admin.list_topics(timeout=20).topics[log.topic].partitions.items())]


def stalled(*members: Running) -> list[StalledPartition]:
    return [one for member in members for one in member.stalled()]


@pytest.mark.usefixtures("short_pauses")
def test_the_others_are_applied_until_their_leader_is_back(away, monkeypatch):
    cluster, log = away
    # A new group needs all: one that it does not find would count as added to the topic later, and begin at 0.
    known, log.group = log.group, f"{log.group}-new"
    with monkeypatch.context() as patched, log.consuming() as new:
        patched.setattr(_member, "_CLAIM_ATTEMPTS", 1)
        patched.setattr(kafka_admin, "_UNHEARD_SECONDS", 0.3)
        error = new.error()
    assert isinstance(error, KafkaFailed)
    assert "Leader not available" in str(error)
    assert log.positions() == {}
    log.group = known
    log.produce(["k0"] * 5, partition=0)
    # The group knows the topic: of the added partition it begins with the first message all the same.
    with log.consuming(start="latest") as member:
        member.wait(lambda: log.count() == 15, "the effects of the other one")
        # One of them has only a partition without a leader, and does not disturb the other one.
        with log.consuming(start="latest") as other:
            log.produce(["k0"] * 5, partition=0)
            other.wait(lambda: log.count() == 20, "more of them")
            wait_until(lambda: {one.partition for one in stalled(member, other)} == {1, 2}, 60, "only these to wait")
            # Now and then it is that a claim is under way, or took long.
            leaderless = f"no leader of {log.topic}-"
            wait_until(lambda: all(leaderless in one.why for one in stalled(member, other)), 60, "the reason")
            assert log.positions().keys() == {0, 1}
            cluster.start_broker(0)
            member.wait(lambda: log.count() == 30, "their effects")
    log.check()


def test_all_that_have_leaders_again_are_claimed_together(outbox_postgres, outbox_kafka, monkeypatch):
    log = Log(outbox_postgres, outbox_kafka, 12)

    def produced() -> None:
        for partition in range(12):
            log.produce([f"k{partition}"], partition=partition)

    produced()
    with log.consuming() as member:
        member.wait(lambda: log.count() == 12, "the effects")
    produced()
    led = threading.Event()
    look, claim = Admin.look, GroupRows.claim
    whole: list[bool] = []
    claims: list[list[int]] = []

    def looked(admin: Admin, *arguments: Any) -> Any:
        whole.append(led.is_set())
        ids, bounds = look(admin, *arguments)
        return ids, {at: there for at, there in bounds.items() if whole[-1] or at[1] == 0}

    def claimed(group: GroupRows, connection: Any, partitions: Any, *more: Any) -> Any:
        claims.append(sorted(part for _, part in partitions))
        return claim(group, connection, partitions, *more)

    monkeypatch.setattr(Admin, "look", looked)
    monkeypatch.setattr(GroupRows, "claim", claimed)
    with log.consuming() as member:
        # Two for the first one, with the check of its log, and then one for each attempt.
        member.wait(lambda: len(whole) >= 4, "attempts")
        led.set()
        member.wait(lambda: log.count() == 24, "the effects of all")
    assert claims == [[0], list(range(1, 12))]
    assert whole.count(True) == 2
    log.check()
