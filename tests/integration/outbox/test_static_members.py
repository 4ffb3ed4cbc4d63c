"""Members with a `group.instance.id` that another member takes: a fatal error of librdkafka's client.

A broker that has just restarted may say so of each member, too: Kafka's coordinator loads a group twice.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import TopicPartition
from inbox_member import apply
from inbox_support import Log
from support import wait_until
from transform_support import _soon, copied, place, running

from outbox.transform import Transformer

__all__ = ["_soon", "place"]

ONE, TWO = ({"group.instance.id": name, "heartbeat.interval.ms": 500} for name in ("one", "two"))
TAKEN_OVER = 2
MESSAGES = [f"k{number % 50}" for number in range(150)]


@contextmanager
def namesake(servers: str, group: str, topics: Sequence[str], static: Mapping[str, str]) -> Iterator[Mapping[str, int]]:
    """Join the group with the same id, until it has partitions; yields how many. It never leaves by itself."""
    assigned: list[TopicPartition] = []
    named = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest", **static}
    with closing(KafkaConsumer(named | {"enable.auto.commit": False, "log_level": 0})) as consumer:
        consumer.subscribe(list(topics), on_assign=lambda _, given: assigned.extend(given))
        wait_until(lambda: (consumer.poll(0.1) and False) or assigned, 60, "the namesake's partitions")
        yield {"partitions": len(assigned)}


def neighbour(log: Log, kafka: Any, partitions: int) -> Log:
    """Another group, of another topic, over the same tables."""
    near = copy.copy(log)
    near.topic, near.group = kafka.create_topic(kafka.name("others"), partitions), kafka.name("neighbour")
    near.written = defaultdict(list)
    return near


def test_an_inbox_that_is_fenced_joins_again_and_no_other_member_is_disturbed(outbox_postgres, outbox_kafka, caplog):
    """Neither the other one of its group, nor one of a neighbour's that has the same id."""
    log = Log(outbox_postgres, outbox_kafka, 4)
    near = neighbour(log, outbox_kafka, 12)

    def replaced() -> int:
        return sum("a new client goes on" in one.message for one in caplog.records)

    def applied(*logs: Log) -> None:
        """Write messages, and wait until they are applied."""
        for one in logs:
            one.produce(MESSAGES)
        for one in logs:
            wanted = sum(map(len, one.written.values()))
            query = "SELECT count(*)::int FROM effects WHERE topic = %s"
            for member in members:
                member.wait(lambda: one.run(query, one.topic) == [(wanted,)], "the effects")  # noqa: B023  waits here

    def working() -> set[str]:
        """Which members apply what is written now."""
        applied(log)
        newest = "SELECT DISTINCT member FROM (SELECT * FROM effects ORDER BY id DESC LIMIT %s) AS newest"
        return {member for (member,) in log.run(newest, len(MESSAGES))}

    with (
        near.consuming(partial(apply, member="near"), kafka=ONE) as beside,
        log.consuming(partial(apply, member="one"), kafka=ONE, batch=20) as one,
        log.consuming(partial(apply, member="two"), kafka=TWO, batch=20) as two,
    ):
        members = beside, one, two
        wait_until(lambda: working() == {"one", "two"}, 60, "both members")
        applied(near)
        for taken, static in enumerate([ONE, TWO, ONE]):
            with namesake(log.servers, log.group, [log.topic], static) as found:
                assert found["partitions"] == 2
                # It may have fetched more, and apply it: its claim in Postgres holds.
                applied(log, near)
                wait_until(lambda: replaced() == taken + 1, 60, "a new client")  # noqa: B023  waits here
                assert working() == {"one", "two"}
        assert replaced() == 3
    for each in (log, near):
        order = "SELECT key, array_agg(n ORDER BY id) FROM effects WHERE topic = %s GROUP BY 1"
        assert dict(log.run(order, each.topic)) == each.written


def test_a_transformer_that_is_fenced_joins_again(place):
    options = {**place.options, **ONE}
    member = Transformer(copied(place), topics=[place.source], group=place.group, kafka=options)
    with running(member):
        for taken in range(TAKEN_OVER):
            place.feed(range(2 * taken, 2 * taken + 1))
            wait_until(lambda: place.position() == 2 * taken + 1, 60, "the first position")  # noqa: B023  waits here
            with namesake(place.options["bootstrap.servers"], place.group, [place.source], ONE) as found:
                assert found["partitions"] == place.partitions
                place.feed(range(2 * taken + 1, 2 * taken + 2))
                wait_until(lambda: place.position() == 2 * taken + 2, 60, "the position of a new session")  # noqa: B023
    assert place.come(2 * TAKEN_OVER) == {f"k{number}": [number] for number in range(2 * TAKEN_OVER)}
