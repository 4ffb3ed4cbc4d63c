"""An input partition without a leader: the others are read, and it is as soon as it has one, if its log is whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from support import wait_until
from transform_support import Place, copied, place, running

from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics
from outbox.transform import InputLost, _positions, _session

__all__ = ["place"]


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    """A member soon asks again for leaders."""
    monkeypatch.setattr(_session, "_LEADER_SECONDS", 0.5)


@pytest.fixture
def away(three_brokers) -> Iterator[tuple[KafkaCluster, Place]]:
    """A group that has read both partitions of a topic, of which the second is only on the first of three brokers."""
    with Topics(three_brokers.bootstrap_servers) as topics, closing(Place(topics, 2)) as place:
        admin = AdminClient(place.options)
        place.source = topics.name("led")
        topic = NewTopic(place.source, 2, replica_assignment=[[2], [1]], config={"min.insync.replicas": "1"})
        admin.create_topics([topic])[place.source].result(30)
        for partition in (0, 1):
            place.feed(range(10 * partition, 10 * partition + 5), partition=partition)
        with pytest.MonkeyPatch.context() as patched:
            # As in transform_support: no broker is away yet.
            patched.setattr(_positions, "NEW_SECONDS", 0.0)
            with running(place.member(copied(place))):
                wait_until(lambda: place.position() == 10, 60, "the position")
        yield three_brokers, place


def test_the_others_are_read_until_its_leader_is_back(away):
    cluster, place = away
    place.feed(range(15, 20), partition=1)
    cluster.kill_broker(0)
    member, other = place.member(copied(place)), place.member(copied(place))
    with running(member):
        place.feed(range(5, 10), partition=0)
        wait_until(lambda: place.positions()[0].offset == 10, 120, "the messages of the other one")
        # One of them has only the partition without a leader, and does not disturb the other one.
        with running(other):
            place.feed(range(20, 25), partition=0)
            wait_until(lambda: place.positions()[0].offset == 15, 120, "more of them")
            assert place.positions()[1].offset == 5
            cluster.start_broker(0)
            wait_until(lambda: [each.offset for each in place.positions()] == [15, 10], 120, "its messages")
    assert sum(map(len, place.come(25).values())) == 25


def test_one_that_was_added_and_has_no_leader_disturbs_neither_the_others_nor_the_group(away, caplog):
    """Only a leader can say where it begins."""
    caplog.set_level("INFO", "outbox")
    cluster, place = away
    place.partitions = 3
    admin = AdminClient(place.options)
    admin.create_partitions([NewPartitions(place.source, 3, replica_assignment=[[1]])])[place.source].result(30)
    wait_until(lambda: leaders(admin, place) == [True] * 3, 60, "the third partition")
    place.feed(range(15, 20), partition=2)
    cluster.kill_broker(0)
    wait_until(lambda: leaders(admin, place) == [True, False, False], 60, "no leader of it")
    place.feed(range(5, 10), partition=0)
    member = place.member(copied(place))
    with running(member):
        wait_until(lambda: place.positions()[0].offset == 10, 60, "the messages of the others")
        waits = {2: "it has no leader"}
        # A commit can be seen before the member has its answer.
        wait_until(lambda: {one.partition: one.why for one in member.stalled(0)} == waits, 60, "only the third to wait")
        cluster.start_broker(0)
        wait_until(lambda: [each.offset for each in place.positions()] == [10, 5, 5], 120, "its messages")
        wait_until(lambda: member.stalled(0) == [], 60, "nothing to wait")
    assert "a new client goes on" not in caplog.text
    assert sum(map(len, place.come(20).values())) == 20


def test_from_the_end_means_from_the_groups_start_where_a_partition_had_no_leader(away, monkeypatch):
    """What is written before the member hears of the leader is not skipped."""
    fed = threading.Event()
    has_leader = _session.has_leader
    monkeypatch.setattr(_positions, "_SLACK_SECONDS", 0.0)
    monkeypatch.setattr(_session, "has_leader", lambda *args: fed.is_set() and has_leader(*args))
    cluster, place = away
    admin = AdminClient(place.options)
    with Topics(cluster.bootstrap_servers) as topics, closing(Place(topics, 2)) as other:
        other.source = place.source
        cluster.kill_broker(0)
        wait_until(lambda: leaders(admin, place) == [True, False], 60, "no leader of the second")
        member = other.member(copied(other), start="latest")
        with running(member):
            wait_until(lambda: other.positions()[0].offset == 5, 120, "its beginning in the first")
            cluster.start_broker(0)
            wait_until(lambda: leaders(admin, place) == [True, True], 120, "the leader")
            place.feed(range(15, 20), partition=1)
            fed.set()
            wait_until(lambda: other.positions()[1].offset == 10, 120, "its messages")
        assert member.committed == 5
        assert sorted(n for numbers in other.come(5).values() for n in numbers) == list(range(15, 20))


def test_one_whose_session_fails_as_it_begins_is_not_said_to_stand_still(place, monkeypatch):
    """Nothing comes in it that would say so."""
    begin, check = _session.beginnings, _session.require_whole
    left = [(place.source, 1)]
    failed: list[int] = []

    def later(*args: Any) -> Any:
        begun, leaderless = begin(*args)
        late = {left.pop()} if left else set()
        return [each for each in begun if (each.topic, each.partition) not in late], leaderless | late

    def fails_once(consumer: Any, positions: Any, *more: Any) -> Any:
        if not failed and len(positions) == 4:
            failed.extend(one.partition for one in member.stalled(0))
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return check(consumer, positions, *more)

    monkeypatch.setattr(_positions, "NEW_SECONDS", 0.0)
    monkeypatch.setattr(_session, "beginnings", later)
    monkeypatch.setattr(_session, "require_whole", fails_once)
    member = place.member(copied(place))
    with running(member):
        wait_until(lambda: failed, 60, "the session to fail")
        place.feed(range(3), partition=0)
        wait_until(lambda: member.committed == 3, 60, "the next one")
        wait_until(lambda: member.stalled(0) == [], 60, "nothing to wait")
        assert failed == [1]


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


def leaders(admin: AdminClient, place: Place) -> list[bool]:
    """Which partitions of the source have leaders."""
    found = admin.list_topics(timeout=20).topics[place.source].partitions
    return [one.leader >= 0 for _, one in sorted(found.items())]


def test_its_log_is_checked_before_its_messages_are_used(place, monkeypatch):
    monkeypatch.setattr(_positions, "NEW_SECONDS", 0.0)
    require_whole = _session.require_whole
    asked: list[set[int]] = []

    def without_a_leader(consumer: Any, positions: Any, *more: Any) -> set[Any]:
        asked.append({each.partition for each in positions})
        if len(asked) > 1:
            raise InputLost("it was cut")
        return require_whole(consumer, positions, *more) | {(place.source, 1)}

    for partition in range(4):
        place.feed(range(partition, partition + 1), partition=partition)
    with running(place.member(copied(place))):
        wait_until(lambda: place.position() == 4, 60, "the position")
    monkeypatch.setattr(_session, "require_whole", without_a_leader)
    place.feed(range(4, 8), partition=1)

    def checked() -> None:
        with running(place.member(copied(place))):
            wait_until(lambda: len(asked) > 1, 60, "the check")

    with pytest.raises(InputLost, match="it was cut"):
        checked()
    assert asked == [{0, 1, 2, 3}, {1}]
    assert place.positions()[1].offset == 1
