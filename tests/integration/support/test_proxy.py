"""The proxies: bytes both ways, and what a Kafka client makes of requests and answers that are lost or late."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from kafka_proxy import (
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    METADATA,
    PRODUCE,
    Fired,
    KafkaProxy,
    delay_request,
    drop_request,
    drop_response,
    edit_response,
)
from proxy import TcpProxy

from outbox.consumer.errors import ConsumerUnavailable, NotAuthorized
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.sandbox._ports import free_ports
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics, token

# -- bytes


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets, in capitals."""

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1000):
                connection.sendall(data.upper())

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            if done.is_set():
                connection.close()
                return
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    done = threading.Event()
    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accept)
        acceptor.start()
        yield listener.getsockname()[1]
        done.set()
        socket.create_connection(listener.getsockname()).close()
        for thread in (acceptor, *threads):
            thread.join()


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=30)


def ask(client: socket.socket, text: bytes) -> bytes:
    client.sendall(text)
    answer = b""
    while len(answer) < len(text):
        more = client.recv(1000)
        if not more:
            break
        answer += more
    return answer


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_bytes_go_both_ways_and_the_ports_stay_over_stop_and_start(echo: int) -> None:
    with TcpProxy("127.0.0.1", echo) as proxy:
        with connect(proxy) as one, connect(proxy) as two:
            assert ask(one, b"a" * 500) == b"A" * 500
            assert ask(two, b"b") == b"B"
            proxy.stop()
            assert is_closed(one)
            assert is_closed(two)
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        proxy.stop()
        proxy.start()
        with connect(proxy) as three, connect(proxy) as four:
            assert ask(three, b"c") == b"C"
            assert ask(four, b"d") == b"D"
            proxy.cut()
            assert proxy.connections == 0
            assert is_closed(three)
            assert is_closed(four)
        with connect(proxy) as five:
            assert ask(five, b"e") == b"E"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("proxy-")]
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)


def test_a_black_hole_swallows_and_closes_what_lost_something(echo: int) -> None:
    with TcpProxy("127.0.0.1", echo) as proxy, connect(proxy) as busy, connect(proxy) as idle:
        assert ask(busy, b"a") == b"A"
        assert ask(idle, b"a") == b"A"
        proxy.blackhole()
        with connect(proxy) as new:
            for client in (busy, new):
                client.sendall(b"x")
                client.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                client.settimeout(30)
            proxy.heal()
            assert is_closed(busy)
            assert is_closed(new)
        assert ask(idle, b"b") == b"B"
        with connect(proxy) as new:
            assert ask(new, b"c") == b"C"


# -- Kafka


@dataclass(frozen=True)
class Proxied:
    kafka: KafkaCluster
    proxy: KafkaProxy


@pytest.fixture(scope="module")
def proxied() -> Iterator[Proxied]:
    """A broker whose clients come through a proxy."""
    (port,) = free_ports(1)
    with (
        KafkaCluster(advertised_port=port) as kafka,
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


def test_clients_are_led_to_the_proxy_and_transactions_pass(proxy, proxied, topics) -> None:
    topic = topics.create_topic(topics.name("plain"))
    before = {key: proxy.seen(key) for key in (INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, PRODUCE, END_TXN)}
    fired = len(proxy.fired)
    producer = transactional(proxy)
    assert [broker.port for broker in producer.list_topics(timeout=30).brokers.values()] == [proxy.port]
    for value in (b"1", b"2", b"3"):
        producer.begin_transaction()
        send(producer, topic, value)
        producer.commit_transaction(30)
    producer.begin_transaction()
    send(producer, topic, b"4")
    producer.abort_transaction(30)
    assert values(topics.consume(topic)) == [b"1", b"2", b"3"]
    seen = {key: proxy.seen(key) - before[key] for key in before}
    assert (seen[PRODUCE], seen[END_TXN]) == (4, 4)
    # These are sent again while the coordinator loads, or still ends the transaction before.
    assert seen[INIT_PRODUCER_ID] >= 1
    assert seen[ADD_PARTITIONS_TO_TXN] >= 4
    assert len(proxy.fired) == fired
    assert not proxied.kafka.bootstrap_servers.endswith(str(proxy.port))


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
