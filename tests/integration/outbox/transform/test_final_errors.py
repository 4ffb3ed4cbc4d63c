"""Errors that do not pass by themselves end a transformer; it neither waits for good nor skips anything."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message, Producer
from kafka_proxy import ADD_PARTITIONS_TO_TXN, FETCH, KafkaProxy, corrupted, edit_response
from support import wait_until
from transform_support import Place, _soon, copied, running

from outbox.testing.fixtures import Topics
from outbox.transform import KafkaRefused, Record, Transformer, _output

__all__ = ["_soon"]

MESSAGES = 3000


@pytest.fixture
def between(mortal_network) -> Iterator[tuple[Place, KafkaProxy]]:
    """An input of one partition, and a proxy for the member."""
    cluster, proxy = mortal_network
    with Topics(cluster.bootstrap_servers) as topics, closing(Place(topics, 1)) as place:
        yield place, proxy


def behind(proxy: KafkaProxy, place: Place, transform: Callable[[Message], Any], **options: Any) -> Transformer:
    """A member that has its connections by the proxy."""
    kafka = place.options | options | {"bootstrap.servers": proxy.address}
    return Transformer(transform, topics=[place.source], group=place.group, kafka=kafka)


def ends(member: Transformer) -> None:
    """Run a member until it ends by itself, with its error."""
    with running(member) as ended:
        wait_until(ended.is_set, 60, "its end")


@pytest.mark.parametrize("kind", ["checksum", "compression"])
def test_a_corrupt_batch_is_neither_skipped_nor_waited_for(between, kind):
    """librdkafka reads on behind a wrong checksum; what it can't decompress it fetches again, for good."""
    place, proxy = between
    plain = place.options
    # Where checksums are compared, nothing is decompressed that is corrupt.
    unchecked = {} if kind == "checksum" else {"check.crcs": False}
    place.options = plain if kind == "checksum" else plain | {"compression.type": "gzip"}
    place.feed(range(MESSAGES), partition=0)
    place.options = plain
    proxy.on(FETCH, edit_response(corrupted), times=1_000_000)
    member = behind(proxy, place, copied(place), **unchecked)
    with pytest.raises(KafkaRefused, match=rf"{place.source}-0: .*(CRC|[Dd]ecompress).*Nothing was skipped"):
        ends(member)
    committed = member.committed
    proxy.clear()
    member = behind(proxy, place, copied(place))
    with running(member):
        wait_until(lambda: committed + member.committed == MESSAGES, 60, "all messages")
    found = [json.loads(message.value())["n"] for message in place.kafka.consume(place.target, MESSAGES, timeout=60)]
    assert sorted(found) == list(range(MESSAGES))


@pytest.fixture
def purged(monkeypatch) -> Iterator[Callable[[], None]]:
    """Waits until librdkafka has dropped a record of the last producer, because its transaction is to be aborted."""
    made: list[Any] = []

    class Watched(Producer):
        def __init__(self, options: dict[str, Any]) -> None:
            super().__init__(options)
            self.dropped = False
            made.append(self)

        def produce(self, *args: Any, on_delivery: Callable[..., None], **more: Any) -> None:
            def delivered(error: Any, message: Message) -> None:
                self.dropped |= error is not None and error.code() == KafkaError._PURGE_QUEUE
                on_delivery(error, message)

            super().produce(*args, on_delivery=delivered, **more)

    def wait() -> None:
        wait_until(lambda: (made[-1].poll(0), made[-1].dropped)[1], 60, "the record to be dropped")

    monkeypatch.setattr(_output, "Producer", Watched)
    yield wait
    # They end now.
    made.clear()


def forbidden(answer: bytes) -> bytes:
    """Change what the broker answers for the last partition into TOPIC_AUTHORIZATION_FAILED."""
    return answer[:-2] + struct.pack(">h", KafkaError.TOPIC_AUTHORIZATION_FAILED)


def test_a_missing_right_shows_behind_a_producer_that_takes_no_more(between, purged):
    """From the refusal on, produce() says "Erroneous state" only."""
    place, proxy = between
    place.target = place.kafka.create_topic(place.kafka.name("wide"), 2)
    place.feed(range(2))
    proxy.on(ADD_PARTITIONS_TO_TXN, edit_response(forbidden), times=1_000_000)

    def transform(message: Message) -> Iterator[Record]:
        # Each is the first one of its partition: it waits for no other.
        partition = json.loads(message.value() or b"")["n"]
        if partition:
            purged()
        yield Record(place.target, message.key(), message.value(), partition=partition)

    member = behind(proxy, place, transform)
    with pytest.raises(KafkaRefused, match=r"[Aa]uthorization failed"):
        ends(member)
    assert (member.committed, place.position()) == (0, 0)
