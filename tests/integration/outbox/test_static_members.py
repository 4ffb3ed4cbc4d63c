"""Members with a `group.instance.id` that another member takes: a fatal error of librdkafka's client.

A broker that has just restarted may say so of each member, too: Kafka's coordinator loads a group twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import TopicPartition
from inbox_support import Log
from support import wait_until
from transform_support import copied, place, running

from outbox.transform import Transformer

__all__ = ["place"]

STATIC = {"group.instance.id": "the-same"}
TAKEN_OVER = 2


@contextmanager
def namesake(servers: str, group: str, topics: Sequence[str], **options: Any) -> Iterator[Mapping[str, int]]:
    """Join the group with the same id, until it has partitions; yields how many. It never leaves by itself."""
    assigned: list[TopicPartition] = []
    named = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest", **STATIC, **options}
    with closing(KafkaConsumer(named | {"enable.auto.commit": False, "log_level": 0})) as consumer:
        consumer.subscribe(list(topics), on_assign=lambda _, given: assigned.extend(given))
        wait_until(lambda: (consumer.poll(0.1) and False) or assigned, 60, "the namesake's partitions")
        yield {"partitions": len(assigned)}


def test_an_inbox_that_is_fenced_joins_again(outbox_postgres, outbox_kafka, caplog):
    log = Log(outbox_postgres, outbox_kafka)

    def replaced() -> int:
        return sum("a new client goes on" in one.message for one in caplog.records)

    with log.consuming(kafka=STATIC) as member:
        for taken in range(TAKEN_OVER):
            log.produce(["k"])
            member.wait(lambda: log.count() == 2 * taken + 1, "the effect")  # noqa: B023  waits here
            with namesake(log.servers, log.group, [log.topic]) as found:
                assert found["partitions"] == 1
                # It may have fetched more, and apply it: its claim in Postgres holds.
                log.produce(["k"])
                member.wait(lambda: replaced() == taken + 1, "a new client")  # noqa: B023
                member.wait(lambda: log.count() == 2 * taken + 2, "the effect")  # noqa: B023
    log.check()


def test_a_transformer_that_is_fenced_joins_again(place):
    options = {**place.options, **STATIC}
    member = Transformer(copied(place), topics=[place.source], group=place.group, kafka=options)
    with running(member):
        for taken in range(TAKEN_OVER):
            place.feed(range(2 * taken, 2 * taken + 1))
            wait_until(lambda: place.position() == 2 * taken + 1, 60, "the first position")  # noqa: B023  waits here
            with namesake(place.options["bootstrap.servers"], place.group, [place.source]) as found:
                assert found["partitions"] == place.partitions
                place.feed(range(2 * taken + 1, 2 * taken + 2))
                wait_until(lambda: place.position() == 2 * taken + 2, 60, "the position of a new session")  # noqa: B023
    assert place.come(2 * TAKEN_OVER) == {f"k{number}": [number] for number in range(2 * TAKEN_OVER)}
