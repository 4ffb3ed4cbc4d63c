"""Partitions that are added while all members of a static group are away: its leader comes back without a rebalance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions
from inbox_support import Log
from support import wait_until
from transform_support import Place, copied, place, running

from outbox.transform import Transformer

__all__ = ["place"]

NAMES = [{"group.instance.id": name} for name in ("a", "b")]
PARTITIONS = 7


def add_partitions(servers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_partitions([NewPartitions(topic, PARTITIONS)])[topic].result(30)


def await_all(servers: str, group: str) -> None:
    """Wait until each member has partitions."""
    admin = AdminClient({"bootstrap.servers": servers})

    def all_have() -> bool:
        members = admin.describe_consumer_groups([group])[group].result(30).members
        return len(members) == len(NAMES) and all(one.assignment.topic_partitions for one in members)

    wait_until(all_have, 60, "the members' partitions")


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_an_inbox_reads_what_was_added(outbox_postgres, outbox_kafka, strategy):
    log = Log(outbox_postgres, outbox_kafka, partitions=3)

    def consume(partitions: int, effects: int) -> None:
        with ExitStack() as members:
            chosen = {"partition.assignment.strategy": strategy}
            first, _ = (members.enter_context(log.consuming(kafka={**chosen, **name})) for name in NAMES)
            for part in range(partitions):
                log.produce([f"k{part}"], partition=part)
            first.wait(lambda: log.count() == effects, "the effects")
            await_all(log.servers, log.group)

    consume(3, 3)
    add_partitions(log.servers, log.topic)
    consume(PARTITIONS, 3 + PARTITIONS)
    log.check()


@contextmanager
def transformers(place: Place) -> Iterator[None]:
    with ExitStack() as members:
        for name in NAMES:
            options = {**place.options, **name}
            member = Transformer(copied(place), topics=[place.source], group=place.group, kafka=options)
            members.enter_context(running(member))
        yield


def test_a_transformer_reads_what_was_added(place):
    with transformers(place):
        place.feed(range(1), partition=0)
        wait_until(lambda: place.position() == 1, 60, "the first position")
        await_all(place.options["bootstrap.servers"], place.group)
    add_partitions(place.options["bootstrap.servers"], place.source)
    place.partitions = PARTITIONS
    with transformers(place):
        for part in range(PARTITIONS):
            place.feed(range(part + 1, part + 2), partition=part)
        wait_until(lambda: place.position() == 1 + PARTITIONS, 90, "the positions")
