"""Kafka's client gives an offset that it does not know without an error, where a broker ended before it answered.

Taken for a number it is an end before everything: a loss of the whole log to a consumer, and to a relay a state topic
without markers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import KafkaException, Producer
from kafka_proxy import LIST_OFFSETS, KafkaProxy, ProxiedKafka, edit_response

from outbox.consumer import kafka_admin
from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.model import OffsetBounds
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics
from relay.kafka import offsets
from relay.kafka.offsets import Offsets, Partition

MESSAGES = 40


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[KafkaCluster, KafkaProxy]]:
    """A broker that clients reach through a proxy only."""
    with KafkaProxy("127.0.0.1", None) as proxy, ProxiedKafka(proxy.port) as cluster:
        proxy.lead_to(cluster.proxied_port)
        yield cluster, proxy


@pytest.fixture
def place(network) -> Iterator[tuple[str, KafkaProxy]]:
    """A topic of two partitions with messages, and the proxy."""
    cluster, proxy = network
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


@pytest.mark.parametrize("which", ["high", "stable"])
def test_a_relay_asks_again_and_overlooks_no_marker(place, unanswered, monkeypatch, which):
    topic, proxy = place
    both = [Partition(topic, number) for number in range(2)]
    asking = Offsets({"bootstrap.servers": proxy.address})
    unanswered(2)
    assert getattr(asking, which)(both) == dict.fromkeys(both, MESSAGES)
    unanswered(2)
    assert asking.low(both) == dict.fromkeys(both, 0)
    unanswered(2)
    # Later than all messages: there is none, which is an answer.
    assert asking.since(both, 2**41) == dict.fromkeys(both, -1)
    # Time enough for each question by itself, also where the machine is slow.
    monkeypatch.setattr(offsets, "_SECONDS", 5.0)
    unanswered(1_000)
    with pytest.raises(KafkaException, match=f"no answer for {topic}-"):
        getattr(asking, which)(both)
