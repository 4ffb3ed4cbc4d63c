"""Errors that do not pass by themselves end a transformer; it neither waits for good nor skips anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Message
from kafka_proxy import FETCH, KafkaProxy, corrupted, edit_response
from support import wait_until
from transform_support import Place, copied, running

from outbox.testing.fixtures import Topics
from outbox.transform import KafkaRefused, Transformer

MESSAGES = 8000


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
    if kind == "compression":
        place.options = plain | {"compression.type": "gzip"}
    place.feed(range(MESSAGES), partition=0)
    place.options = plain
    proxy.on(FETCH, edit_response(corrupted), times=1_000_000)
    member = behind(proxy, place, copied(place), **({"check.crcs": True} if kind == "checksum" else {}))
    with pytest.raises(KafkaRefused, match=rf"{place.source}-0: .*(CRC|[Dd]ecompress).*Nothing was skipped"):
        ends(member)
    committed = member.committed
    proxy.clear()
    member = behind(proxy, place, copied(place))
    with running(member):
        wait_until(lambda: committed + member.committed == MESSAGES, 60, "all messages")
    found = [json.loads(message.value())["n"] for message in place.kafka.consume(place.target, MESSAGES, timeout=60)]
    assert sorted(found) == list(range(MESSAGES))
