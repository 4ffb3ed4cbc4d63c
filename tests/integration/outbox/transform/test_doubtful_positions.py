"""Positions that a coordinator has not read back yet: it answers that there is none, or an earlier one."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, Message
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import TopicPartition
from kafka_proxy import OFFSET_FETCH, edit_response
from support import wait_until
from transform_support import Place, _soon, copied, running

from outbox.consumer import topic_ids
from outbox.testing.fixtures import Topics
from outbox.transform import InputLost, Record, _positions
from outbox.transform._session import Session

__all__ = ["_soon"]


@pytest.fixture
def place(mortal_network) -> Iterator[Place]:
    """One partition."""
    cluster, _ = mortal_network
    with Topics(cluster.bootstrap_servers) as topics, closing(Place(topics, 1)) as made:
        yield made


def instead(offset: int, of: int) -> Callable[[bytes], bytes]:
    """Edit an answer about partition 0, whatever its version: partition and offset follow each other."""

    def edit(answer: bytes) -> bytes:
        before = struct.pack(">iq", 0, of)
        assert answer.count(before) == 1
        return answer.replace(before, struct.pack(">iq", 0, offset))

    return edit


@pytest.fixture
def abort(monkeypatch) -> threading.Event:
    """Set, the next transaction is aborted, and its member stays in the group."""
    due = threading.Event()
    send = Session._send_positions

    def fails(session: Session, positions: list[TopicPartition]) -> None:
        if due.is_set():
            due.clear()
            raise KafkaException(KafkaError(KafkaError._FAIL, "no luck", False, False, True))
        send(session, positions)

    monkeypatch.setattr(Session, "_send_positions", fails)
    return due


def test_after_an_abort(place, mortal_network, abort):
    """None, which would be the end for the first member, and then an earlier one."""
    _, proxy = mortal_network
    for start, there, offset in (("latest", 0, -1), ("earliest", 10, 3)):
        member = place.member(copied(place), by=proxy, start=start)
        with running(member):
            wait_until(lambda n=there: place.positions()[0].offset == n, 60, "the beginning")
            place.feed(range(there, there + 5))
            wait_until(lambda member=member: member.committed == 5, 60, "the first messages")
            earlier = len(proxy.fired)
            # Only what is edited twice was asked for again.
            proxy.on(OFFSET_FETCH, edit_response(instead(offset, of=there + 5)), times=2)
            abort.set()
            place.feed(range(there + 5, there + 10))
            wait_until(lambda n=there: place.position() == n + 10, 60, "the others")
            assert len(proxy.fired) == earlier + 2
    assert sorted(json.loads(message.value())["n"] for message in place.kafka.consume(place.target)) == list(range(20))


def test_what_kafka_has_lost_is_not_read_again(place, mortal_network, abort, monkeypatch, caplog):
    """As an operator can't set back a group with members, this process knows better."""
    monkeypatch.setattr(_positions, "DOUBT_SECONDS", 1.0)
    _, proxy = mortal_network
    member = place.member(copied(place), by=proxy)
    with running(member):
        place.feed(range(5))
        wait_until(lambda: member.committed == 5, 60, "the first messages")
        proxy.on(OFFSET_FETCH, edit_response(instead(-1, of=5)), times=100)
        abort.set()
        place.feed(range(5, 10))
        wait_until(lambda: place.position() == 10, 60, "the others")
    assert "where this process had it at 5, and goes on from there" in caplog.text
    assert sorted(json.loads(message.value())["n"] for message in place.kafka.consume(place.target)) == list(range(10))


def test_a_process_that_has_just_started(place, mortal_network, monkeypatch):
    """It knows no position, so a missing one is not taken for that of a new group at once."""
    _, proxy = mortal_network
    place.feed(range(5))
    with running(place.member(copied(place))):
        wait_until(lambda: place.position() == 5, 60, "the first messages")
    monkeypatch.setattr(_positions, "NEW_SECONDS", 3.0)
    member = place.member(copied(place), by=proxy)
    place.feed(range(5, 10))
    earlier = len(proxy.fired)
    proxy.on(OFFSET_FETCH, edit_response(instead(-1, of=5)), times=2)
    with running(member):
        wait_until(lambda: place.position() == 10, 60, "the others")
    assert len(proxy.fired) == earlier + 2
    assert sorted(json.loads(message.value())["n"] for message in place.kafka.consume(place.target)) == list(range(10))


def test_what_an_operator_has_set_is_taken(place, caplog, monkeypatch):
    monkeypatch.setattr(_positions, "DOUBT_SECONDS", 1.0)
    place.feed(range(10))
    member = place.member(copied(place))
    with running(member):
        wait_until(lambda: member.committed == 10, 60, "the messages")
    admin = AdminClient(place.options)

    def set_back() -> Any:
        """Kafka refuses it while the group has members."""
        wanted = ConsumerGroupTopicPartitions(place.group, [TopicPartition(place.source, 0, 4)])
        [answer] = admin.alter_consumer_group_offsets([wanted]).values()
        return answer.exception(60) is None

    wait_until(set_back, 60, "the group to be empty")
    with running(member):
        wait_until(lambda: member.committed == 16, 60, "the messages from there on")
    assert f"{place.source}-0 at offset 4, where this process had it at 10" in caplog.text


def test_its_own_position_is_not_that_of_a_topic_that_was_created_again(place, mortal_network, abort, monkeypatch):
    """Kafka deletes a group's positions with their topic."""
    # Only the first look at the id is in time.
    monkeypatch.setattr(topic_ids, "_SECONDS", 1000.0)
    monkeypatch.setattr(_positions, "DOUBT_SECONDS", 1.0)
    place.feed(range(5))
    began, go_on = threading.Event(), threading.Event()

    def transform(message: Message) -> Iterator[Record]:
        if abort.is_set():
            began.set()
            assert go_on.wait(60)
        yield from copied(place)(message)

    _, proxy = mortal_network
    member = place.member(transform, by=proxy)
    admin = AdminClient(place.options)

    def again() -> None:
        with running(member) as ended:
            wait_until(lambda: member.committed == 5, 60, "the messages")
            wait_until(lambda: member._progress.topic_ids, 60, "the topic's id")
            abort.set()
            place.feed(range(5, 6))
            assert began.wait(60)
            # It sees the new topic when that has what is at its position.
            proxy.stop()
            admin.delete_topics([place.source], operation_timeout=30)[place.source].result(60)
            wait_until(lambda: place.source not in admin.list_topics(timeout=10).topics, 60, "the topic to go")
            place.kafka.create_topic(place.source)
            wait_until(lambda: place.position() == 0, 60, "the position to go")
            place.feed(range(10, 20))
            proxy.start()
            go_on.set()
            wait_until(lambda: ended.is_set() or place.position(), 60, "its end")

    with pytest.raises(InputLost, match="was deleted and created again"):
        again()
    assert (member.committed, place.position()) == (5, 0)


def test_a_topic_that_is_created_again_while_it_runs(place, monkeypatch):
    """librdkafka would read it on from the former position."""
    monkeypatch.setattr(topic_ids, "_SECONDS", 0.1)
    place.feed(range(5))
    member = place.member(copied(place))
    admin = AdminClient(place.options)

    def again() -> None:
        with running(member) as ended:
            wait_until(lambda: member.committed == 5, 60, "the messages")
            wait_until(lambda: member._progress.topic_ids, 60, "the topic's id")
            admin.delete_topics([place.source], operation_timeout=30)[place.source].result(60)
            wait_until(lambda: place.source not in admin.list_topics(timeout=10).topics, 60, "the topic to go")
            place.kafka.create_topic(place.source)
            place.feed(range(10, 20))
            wait_until(ended.is_set, 60, "its end")

    with pytest.raises(InputLost, match="was deleted and created again"):
        again()
    # Once that is said, it goes on.
    monkeypatch.setattr(_positions, "DOUBT_SECONDS", 1.0)
    with running(member):
        wait_until(lambda: place.position() == 10, 60, "what the new one has")
