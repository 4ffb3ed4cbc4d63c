"""What a Kafka client makes of requests and answers that are lost or late: what the product's guards rest on."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from kafka_proxy import (
    END_TXN,
    LIST_OFFSETS,
    METADATA,
    Fired,
    KafkaProxy,
    ProxiedKafka,
    delay_request,
    drop_request,
    drop_response,
    edit_response,
)

from outbox.consumer.errors import ConsumerUnavailable, NotAuthorized
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.sandbox._ports import free_ports
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics, token


@dataclass(frozen=True)
class Proxied:
    kafka: KafkaCluster
    proxy: KafkaProxy


@pytest.fixture(scope="module")
def proxied() -> Iterator[Proxied]:
    """A broker whose clients come through a proxy."""
    (port,) = free_ports(1)
    with (
        ProxiedKafka(port) as kafka,
        KafkaProxy("127.0.0.1", kafka.proxied_port, port) as proxy,
    ):
        yield Proxied(kafka, proxy)


@pytest.fixture
def topics(proxied: Proxied) -> Topics:
    """Past the proxy."""
    return Topics(proxied.kafka.bootstrap_servers)


@pytest.fixture
def proxy(proxied: Proxied) -> Iterator[KafkaProxy]:
    yield proxied.proxy
    proxied.proxy.clear()
    # Connections that a test broke, and what it held, are not the next one's.
    proxied.proxy.stop()
    proxied.proxy.start()


def transactional(proxy: KafkaProxy, transactional_id: str | None = None, **options: object) -> Producer:
    producer = Producer(
        {
            "bootstrap.servers": proxy.address,
            "transactional.id": transactional_id or f"t-{token()}",
            "linger.ms": 0,
            "log_level": 0,
            **options,
        }
    )
    producer.init_transactions(30)
    return producer


def send(producer: Producer, topic: str, *values: bytes, partition: int = 0) -> None:
    """Send and wait for the broker's answers."""
    for value in values:
        producer.produce(topic, value, partition=partition)
    assert producer.flush(30) == 0


def values(messages: list[Message]) -> list[bytes | None]:
    return [message.value() for message in messages]


def end_txn_error(fired: Fired) -> int:
    """The error code in the broker's answer to an EndTxn."""
    assert fired.api_key == END_TXN
    assert fired.response is not None
    # Correlation id, from version 3 on an empty set of tagged fields, throttle time, error code.
    (code,) = struct.unpack_from(">h", fired.response, 9 if fired.api_version >= 3 else 8)
    return int(code)


def late_commit(proxy: KafkaProxy, producer: Producer, topic: str) -> None:
    """Commit a transaction of one message, where the first EndTxn is held on the way and the client's retry goes well.

    It looks like any other commit to the caller: no error.
    """
    producer.begin_transaction()
    send(producer, topic, b"one")
    proxy.on(END_TXN, delay_request())
    producer.commit_transaction(30)


@pytest.mark.parametrize("action", [drop_request, drop_response], ids=lambda action: action.name)
def test_a_commit_outlives_the_loss_of_its_request_or_answer_and_takes_the_retrys_time(proxy, topics, action) -> None:
    """librdkafka sends EndTxn again, after retry.backoff.ms with 20 % of jitter either way: never before 80 % of it."""
    topic = topics.create_topic(topics.name("lost"))
    producer = transactional(proxy, **{"retry.backoff.ms": 1000})
    producer.begin_transaction()
    send(producer, topic, b"1")
    seen = proxy.seen(END_TXN)
    proxy.on(END_TXN, action)
    start = time.monotonic()
    producer.commit_transaction(30)
    assert time.monotonic() - start >= 0.8
    proxy.wait_seen(END_TXN, seen + 2, timeout=0)
    proxy.wait_done()
    assert proxy.fired[-1].action == action
    if action == drop_response:
        assert end_txn_error(proxy.fired[-1]) == 0
    else:
        assert proxy.fired[-1].response is None
    assert values(topics.consume(topic)) == [b"1"]


def test_a_late_commit_ends_the_next_transaction_of_a_producer_that_is_used_again(proxy, topics) -> None:
    """The hazard. librdkafka keeps its producer epoch from one transaction to the next, so the broker takes the late
    EndTxn for the end of the transaction that is open now: its first half is committed, its second half refused."""
    topic = topics.create_topic(topics.name("hazard"))
    producer = transactional(proxy)
    late_commit(proxy, producer, topic)
    producer.begin_transaction()
    send(producer, topic, b"two-a")
    (late,) = proxy.release()
    assert end_txn_error(late) == 0
    assert values(topics.consume(topic)) == [b"one", b"two-a"]
    # The partition is not part of a transaction any more, and the client does not add it twice.
    send(producer, topic, b"two-b")
    with pytest.raises(KafkaException) as failure:
        producer.commit_transaction(30)
    assert failure.value.args[0].code() == KafkaError.INVALID_TXN_STATE
    assert values(topics.consume(topic)) == [b"one", b"two-a"]


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


def test_a_look_at_a_topic_is_repeated_while_its_leader_moves(proxy, topics) -> None:
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
    # And none of the topic's partitions has a leader: then nobody can even be asked.
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
