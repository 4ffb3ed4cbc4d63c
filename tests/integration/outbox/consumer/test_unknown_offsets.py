"""Kafka's client gives an offset that it does not know without an error, where a broker ended before it answered.

Taken for a number it is an end before everything: a loss of the whole log to a consumer, and to a relay a state topic
without markers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from kafka_proxy import LIST_OFFSETS, METADATA, KafkaProxy, edit_response

from outbox.consumer import kafka_admin
from outbox.consumer.errors import ConsumerUnavailable, NotAuthorized
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.model import OffsetBounds
from outbox.testing.fixtures import Topics
from relay.kafka import offsets
from relay.kafka.offsets import Offsets, Partition

MESSAGES = 40


@pytest.fixture
def place(mortal_network) -> Iterator[tuple[str, KafkaProxy]]:
    """A topic of two partitions with messages, and the proxy."""
    cluster, proxy = mortal_network
    with Topics(cluster.bootstrap_servers) as topics:
        topic = topics.create_topic(topics.name("t"), 2)
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
        for number in range(2 * MESSAGES):
            producer.produce(topic, b"x", partition=number % 2)
        assert producer.flush(30) == 0
        yield topic, proxy
        proxy.clear()


def about_no_partition(answer: bytes) -> bytes:
    """Return an answer without topics (ListOffsets 6 and later): the request's number, no throttling, nothing else."""
    return answer[:5] + b"\0\0\0\0" + b"\1" + b"\0"


@pytest.fixture
def unanswered(place) -> Callable[[int], None]:
    """Have so many of the next questions for offsets left without an answer to them."""
    _, proxy = place
    return lambda times: proxy.on(LIST_OFFSETS, edit_response(about_no_partition), times=times)


def test_a_consumer_asks_again_and_finds_no_loss(place, unanswered, monkeypatch):
    topic, proxy = place
    view = KafkaAdmin({"bootstrap.servers": proxy.address})
    whole = {(topic, part): OffsetBounds(0, MESSAGES, None, 0) for part in range(2)}
    # Both ends are asked for each time.
    for times in (1, 2, 3):
        unanswered(times)
        assert view.look([topic])[1] == whole
    unanswered(1)
    with pytest.raises(ConsumerUnavailable, match=f"no answer for {topic}-"):
        view.ends(whole)
    assert view.ends(whole) == dict.fromkeys(whole, MESSAGES)
    monkeypatch.setattr(kafka_admin, "_UNHEARD_SECONDS", 0.5)
    unanswered(1_000)
    with pytest.raises(ConsumerUnavailable, match=f"no answer for {topic}-"):
        view.look([topic])


def test_a_relay_asks_again_and_overlooks_no_marker(place, unanswered, monkeypatch):
    topic, proxy = place
    both = [Partition(topic, number) for number in range(2)]
    asking = Offsets({"bootstrap.servers": proxy.address})
    for end in (asking.high, asking.stable):
        unanswered(2)
        assert end(both) == dict.fromkeys(both, MESSAGES)
    unanswered(2)
    assert asking.low(both) == dict.fromkeys(both, 0)
    unanswered(2)
    # Later than all messages: there is none, which is an answer.
    assert asking.since(both, 2**41) == dict.fromkeys(both, -1)
    # Time enough for each question by itself, also where the machine is slow.
    monkeypatch.setattr(offsets, "_SECONDS", 3.0)
    # Each time with a new client.
    monkeypatch.setattr(offsets, "_ASK_AGAIN_SECONDS", 1.0)
    unanswered(1_000)
    with pytest.raises(KafkaException, match=f"no answer for {topic}-"):
        asking.high(both)


LEADER_MOVES = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
)


def test_a_look_at_a_topic_is_repeated_while_its_leader_moves(mortal_network):
    cluster, proxy = mortal_network
    topics = Topics(cluster.bootstrap_servers)
    topic = topics.create_topic(topics.name("moving"))
    view = KafkaAdmin({"bootstrap.servers": proxy.address})
    expected = view.look([topic])

    def refuse(code: int) -> None:
        """Answer the next question for offsets with an error of the one partition."""

        def edit(answer: bytes) -> bytes:
            # After the topic's name: how many partitions, the partition's number, its error code.
            at = answer.index(topic.encode()) + len(topic) + 1 + 4
            return answer[:at] + struct.pack(">h", code) + answer[at + 2 :]

        proxy.on(LIST_OFFSETS, edit_response(edit))

    def leaderless(answer: bytes) -> bytes:
        # After the topic's name: its id, whether it is internal, how many partitions, error code, number, leader.
        at = answer.index(topic.encode()) + len(topic) + 16 + 1 + 1
        here = struct.pack(">hii", KafkaError.LEADER_NOT_AVAILABLE, 0, -1)
        return answer[:at] + here + answer[at + len(here) :]

    wrong = {}
    for code in LEADER_MOVES:
        refuse(code)
        try:
            wrong[code] = view.look([topic]) != expected
        except ConsumerUnavailable as error:
            wrong[code] = str(error)
    assert wrong == dict.fromkeys(LEADER_MOVES, False)
    # And none of the topic's partitions has a leader: then there is no broker to ask.
    proxy.on(METADATA, edit_response(leaderless))
    assert view.look([topic]) == expected
    assert proxy.fired[-1].api_key == METADATA
    refuse(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    seen = proxy.seen(LIST_OFFSETS)
    with pytest.raises(NotAuthorized, match="authorization"):
        view.look([topic])
    # Both ends, once.
    proxy.wait_seen(LIST_OFFSETS, seen + 2)
    assert proxy.seen(LIST_OFFSETS) == seen + 2
