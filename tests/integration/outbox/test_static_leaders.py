"""What changes while all members of a static group are away: its leader comes back without a rebalance.

Partitions are added, or the members read another topic: the group gives them what they had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions
from inbox_support import Log
from support import wait_until
from transform_support import Place, _soon, copied, place, running

from outbox.consumer import static_groups
from outbox.transform import Transformer

__all__ = ["_soon", "place"]

# Of a rebalance a member hears by a heartbeat. One that does not come back counts until its session is over.
NAMES = [
    {"group.instance.id": name, "heartbeat.interval.ms": "500", "session.timeout.ms": "3000"} for name in ("a", "b")
]
PARTITIONS = 7


@pytest.fixture(autouse=True)
def _often(monkeypatch) -> None:
    """A member compares twice a second: it takes two looks to see that no member has a partition."""
    monkeypatch.setattr(static_groups, "_SECONDS", 0.5)


def add_partitions(servers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_partitions([NewPartitions(topic, PARTITIONS)])[topic].result(30)


def await_all(servers: str, group: str, count: int = len(NAMES)) -> None:
    """Wait until each of so many members has partitions."""
    admin = AdminClient({"bootstrap.servers": servers})

    def all_have() -> bool:
        members = admin.describe_consumer_groups([group])[group].result(30).members
        return len(members) == count and all(one.assignment.topic_partitions for one in members)

    wait_until(all_have, 60, "the members' partitions")


@pytest.mark.parametrize(
    ("strategy", "partitions", "names", "deleted"),
    [
        ("range", 3, NAMES[:1], True),
        ("range", PARTITIONS, NAMES[1:], False),
        ("cooperative-sticky", PARTITIONS, NAMES[::-1], True),
    ],
    ids=["range, the first", "range, the second, the topic is kept", "cooperative, both"],
)
def test_an_inbox_reads_what_was_added_and_goes_on_with_other_topics(
    outbox_postgres, outbox_kafka, strategy, partitions, names, deleted
):
    """Of the former topic, which may be gone, nothing is applied any more."""
    log = Log(outbox_postgres, outbox_kafka, partitions=3)

    def consume(names: Sequence[Mapping[str, str]], partitions: int = 3) -> None:
        with ExitStack() as members:
            options = ({"partition.assignment.strategy": strategy, **name} for name in names)
            first, *_ = [members.enter_context(log.consuming(kafka=given)) for given in options]
            effects = log.count() + partitions
            for part in range(partitions):
                log.produce([f"k{part}"], partition=part)
            first.wait(lambda: log.count() == effects, "the effects")
            await_all(log.servers, log.group, len(names))

    consume(NAMES)
    if partitions > 3:
        add_partitions(log.servers, log.topic)
        consume(NAMES, partitions)
    former, log.topic = log.topic, outbox_kafka.create_topic(outbox_kafka.name("moved"), 3)
    if deleted:
        admin = AdminClient({"bootstrap.servers": log.servers})
        admin.delete_topics([former])[former].result(30)
    else:
        producer = Producer({"bootstrap.servers": log.servers})
        for part in range(partitions):
            producer.produce(former, b'{"n": 0}', b"late", partition=part)
        assert producer.flush(30) == 0
    consume(names)
    log.check()


@contextmanager
def transformers(place: Place) -> Iterator[None]:
    with ExitStack() as members:
        for name in NAMES:
            options = {**place.options, **name}
            member = Transformer(copied(place), topics=[place.source], group=place.group, kafka=options)
            members.enter_context(running(member))
        yield


def test_a_transformer_reads_what_was_added_and_goes_on_with_another_topic(place):
    servers = place.options["bootstrap.servers"]
    with transformers(place):
        place.feed(range(1), partition=0)
        wait_until(lambda: place.position() == 1, 60, "the first position")
        await_all(servers, place.group)
    add_partitions(servers, place.source)
    place.partitions = PARTITIONS
    with transformers(place):
        for part in range(PARTITIONS):
            place.feed(range(part + 1, part + 2), partition=part)
        wait_until(lambda: place.position() == 1 + PARTITIONS, 90, "the positions")
        await_all(servers, place.group)
    former, place.source = place.source, place.kafka.create_topic(place.kafka.name("moved"), PARTITIONS)
    admin = AdminClient(place.options)
    admin.delete_topics([former])[former].result(30)
    with transformers(place):
        for part in range(PARTITIONS):
            place.feed(range(part, part + 1), partition=part)
        wait_until(lambda: place.position() == PARTITIONS, 60, "the positions in the other topic")
