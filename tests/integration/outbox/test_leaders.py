"""Partitions without leaders: members of an inbox and transformers use the others, and these as soon as they have some.

One broker is killed for all groups: to start it again is what takes long.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from inbox_log import short_pauses
from inbox_support import Log, Running
from support import wait_until
from transform_support import Place, copied, running

from outbox.consumer import kafka_admin
from outbox.consumer.model import Partition
from outbox.consumer.stalled import StalledPartition
from outbox.inbox import KafkaFailed, _member
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics
from outbox.transform import _positions, _session

__all__ = ["short_pauses"]


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    """A transformer soon asks again for leaders."""
    monkeypatch.setattr(_session, "_LEADER_SECONDS", 0.5)


class Brokers:
    """Three of them, and topics of which each partition but the first is only on the first broker."""

    def __init__(self, cluster: KafkaCluster, topics: Topics) -> None:
        self.cluster, self.topics = cluster, topics
        self._admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
        self._made: list[str] = []

    def create(self) -> str:
        """Create a topic with two partitions."""
        name = self.topics.name(f"led{len(self._made)}")
        # By itself such a cluster wants two replicas in sync.
        topic = NewTopic(name, 2, replica_assignment=[[2], [1]], config={"min.insync.replicas": "1"})
        self._admin.create_topics([topic])[name].result(30)
        self._made.append(name)
        return name

    def add(self, topic: str) -> None:
        """Add a third partition."""
        self._admin.create_partitions([NewPartitions(topic, 3, replica_assignment=[[1]])])[topic].result(30)
        # A client with one address asks that broker first.
        each = [AdminClient({"bootstrap.servers": one}) for one in self.cluster.bootstrap_servers.split(",")]
        wait_until(lambda: all(leaders(one, topic) == [True] * 3 for one in each), 60, "all brokers to know it")

    def kill(self) -> None:
        """Kill the first broker, and wait until no partition of it has a leader."""
        self.cluster.kill_broker(0)

        def gone(topic: str) -> bool:
            first, *others = leaders(self._admin, topic)
            return first and not any(others)

        wait_until(lambda: all(map(gone, self._made)), 60, "no leader of them")

    def restart(self) -> None:
        """Start the first broker, and wait until all partitions have leaders."""
        self.cluster.start_broker(0)
        wait_until(lambda: all(all(leaders(self._admin, topic)) for topic in self._made), 120, "the leaders")


def leaders(admin: AdminClient, topic: str) -> list[bool]:
    """Which partitions of a topic have leaders."""
    return [one.leader >= 0 for _, one in sorted(admin.list_topics(timeout=20).topics[topic].partitions.items())]


@pytest.fixture
def brokers(three_brokers) -> Iterator[Brokers]:
    with Topics(three_brokers.bootstrap_servers) as topics:
        yield Brokers(three_brokers, topics)


@pytest.mark.usefixtures("short_pauses")
def test_the_others_are_used_until_their_leader_is_back(outbox_postgres, brokers, monkeypatch, caplog):
    caplog.set_level("INFO", "outbox")
    log = Log(outbox_postgres, brokers.topics)
    with ExitStack() as opened:
        # Each with names of its own.
        topics = [opened.enter_context(Topics(log.servers)) for _ in range(3)]
        known, grown, new = (opened.enter_context(closing(Place(each, 2))) for each in topics)
        has_read(brokers, log)
        have_read(brokers, known, grown)
        fill(brokers, new)
        brokers.kill()
        with (
            an_inbox_applies_the_others(log, monkeypatch),
            one_member_has_nothing_else(known),
            one_was_added(grown),
            the_group_begins_at_the_end(new, monkeypatch),
        ):
            brokers.restart()
        assert f"group {grown.group}: a new client goes on" not in caplog.text


def has_read(brokers: Brokers, log: Log) -> None:
    """Have an inbox's group read both partitions of its topic. More comes, also in a third one, which is added."""
    log.topic = brokers.create()
    for partition in (0, 1):
        log.produce([f"k{partition}"] * 5, partition=partition)
    with log.consuming() as member:
        member.wait(lambda: log.count() == 10, "the effects")
    brokers.add(log.topic)
    for partition in (1, 2):
        log.produce([f"k{partition}"] * 5, partition=partition)


def stalled(*members: Running) -> list[StalledPartition]:
    return [one for member in members for one in member.stalled()]


@contextmanager
def an_inbox_applies_the_others(log: Log, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The others are applied by two members, of which one has only a partition without a leader."""
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
        # It does not disturb the other one.
        with log.consuming(start="latest") as other:
            log.produce(["k0"] * 5, partition=0)
            other.wait(lambda: log.count() == 20, "more of them")
            wait_until(lambda: {one.partition for one in stalled(member, other)} == {1, 2}, 60, "only these to wait")
            # Now and then it is that a claim is under way, or took long.
            leaderless = f"no leader of {log.topic}-"
            wait_until(lambda: all(leaderless in one.why for one in stalled(member, other)), 60, "the reason")
            assert log.positions().keys() == {0, 1}
            yield
            member.wait(lambda: log.count() == 30, "their effects")
    log.check()


def fill(brokers: Brokers, place: Place) -> None:
    """Create a transformer's topic, with five messages in each of two partitions."""
    place.source = brokers.create()
    for partition in (0, 1):
        place.feed(range(10 * partition, 10 * partition + 5), partition=partition)


def have_read(brokers: Brokers, known: Place, grown: Place) -> None:
    """Have two groups of transformers read theirs. More comes: to the one a third partition, which is added."""
    for place in (known, grown):
        fill(brokers, place)
    with pytest.MonkeyPatch.context() as patched:
        # As in transform_support: no broker is away yet.
        patched.setattr(_positions, "NEW_SECONDS", 0.0)
        with running(known.member(copied(known))), running(grown.member(copied(grown))):
            wait_until(lambda: known.position() == grown.position() == 10, 60, "the positions")
    brokers.add(grown.source)
    grown.partitions = 3
    known.feed(range(15, 20), partition=1)
    grown.feed(range(15, 20), partition=2)


@contextmanager
def one_member_has_nothing_else(place: Place) -> Iterator[None]:
    """A transformer that has only the partition without a leader does not disturb the other one."""
    member, other = place.member(copied(place)), place.member(copied(place))
    with running(member):
        place.feed(range(5, 10), partition=0)
        wait_until(lambda: place.positions()[0].offset == 10, 120, "the messages of the other one")
        with running(other):
            place.feed(range(20, 25), partition=0)
            wait_until(lambda: place.positions()[0].offset == 15, 120, "more of them")
            assert place.positions()[1].offset == 5
            yield
            wait_until(lambda: [each.offset for each in place.positions()] == [15, 10], 120, "its messages")
    assert sum(map(len, place.come(25).values())) == 25


@contextmanager
def one_was_added(place: Place) -> Iterator[None]:
    """It disturbs neither the others nor the group. Only a leader can say where it begins."""
    place.feed(range(5, 10), partition=0)
    member = place.member(copied(place))
    with running(member):
        wait_until(lambda: place.positions()[0].offset == 10, 60, "the messages of the others")
        waits = {2: "it has no leader"}
        # A commit can be seen before the member has its answer.
        wait_until(lambda: {one.partition: one.why for one in member.stalled(0)} == waits, 60, "only the third to wait")
        yield
        wait_until(lambda: [each.offset for each in place.positions()] == [10, 5, 5], 120, "its messages")
        wait_until(lambda: member.stalled(0) == [], 60, "nothing to wait")
    assert sum(map(len, place.come(20).values())) == 20


@contextmanager
def the_group_begins_at_the_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As it was when the group began: what is written before the member hears of the leader is not skipped."""
    fed = threading.Event()
    has_leader = _session.has_leader

    def in_time(kafka: Any, partitions: Collection[Partition], *more: Any) -> bool:
        if not fed.is_set() and any(topic == place.source for topic, _ in partitions):
            return False
        return has_leader(kafka, partitions, *more)

    # For all members of this process, but it matters only to this one: no other begins at the latest.
    monkeypatch.setattr(_positions, "_SLACK_SECONDS", 0.0)
    monkeypatch.setattr(_session, "has_leader", in_time)
    member = place.member(copied(place), start="latest")
    with running(member):
        wait_until(lambda: place.positions()[0].offset == 5, 120, "its beginning in the first")
        yield
        place.feed(range(15, 20), partition=1)
        fed.set()
        wait_until(lambda: place.positions()[1].offset == 10, 120, "its messages")
    assert member.committed == 5
    assert sorted(n for numbers in place.come(5).values() for n in numbers) == list(range(15, 20))


def test_asking_for_leaders_creates_no_topic(three_brokers, monkeypatch):
    """By default a broker creates what a producer's request for metadata names."""
    asked: list[bool] = []
    has_leader = _session.has_leader

    def never(*args: Any) -> bool:
        asked.append(has_leader(*args))
        return False

    monkeypatch.setattr(_positions, "NEW_SECONDS", 0.0)
    monkeypatch.setattr(_session, "_LEADER_SECONDS", 0.0)
    monkeypatch.setattr(_session, "has_leader", never)
    monkeypatch.setattr(_session, "beginnings", lambda *_: ([], {(place.source, 0)}))
    with Topics(three_brokers.bootstrap_servers) as topics, closing(Place(topics, 1)) as place:
        admin = AdminClient(place.options)
        with running(place.member(copied(place))):
            wait_until(lambda: asked, 60, "the first question")
            admin.delete_topics([place.source], operation_timeout=30)[place.source].result(60)
            count = len(asked) + 3
            wait_until(lambda: len(asked) >= count, 60, "more questions")
        assert place.source not in admin.list_topics(timeout=30).topics
    assert (asked[0], asked[-1]) == (True, False)
