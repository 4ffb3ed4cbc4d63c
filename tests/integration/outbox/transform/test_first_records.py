"""A record waits until the first one of its partition is acknowledged; without that, librdkafka takes one for two."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka.cimpl import TopicPartition
from support import wait_until
from transform_support import Place, _soon, place, running

from outbox._clients import first_messages
from outbox.transform import KafkaRefused, Record, TransformFailed, _output
from outbox.transform._first_records import FirstRecords
from outbox.transform._session import Session

__all__ = ["_soon", "place"]

EACH = 100
"""Records of each kind that a message becomes: more than there are partitions."""


@pytest.fixture
def waits(monkeypatch) -> list[str]:
    """For each record that waited for the first one of its partition, the topic."""
    found: list[str] = []
    wait = FirstRecords._await

    def counted(first: FirstRecords, topic: str, partition: int) -> None:
        found.append(topic)
        wait(first, topic, partition)

    monkeypatch.setattr(FirstRecords, "_await", counted)
    return found


@pytest.fixture
def early(monkeypatch) -> list[tuple[str, int]]:
    """The partitions in which a producer sent its second record before the first one was acknowledged."""
    found: list[tuple[str, int]] = []

    class Watched(Producer):
        def __init__(self, options: dict[str, Any]) -> None:
            super().__init__(options)
            self.acknowledged: set[tuple[str, int]] = set()

        def produce(self, topic: str, *args: Any, on_delivery: Callable[..., None], **more: Any) -> None:
            before = set(self.acknowledged)

            def delivered(error: Any, message: Message) -> None:
                if error is None:
                    at = message.topic(), message.partition()
                    # Another one was the first, and had no acknowledgement when this one was sent.
                    if at in self.acknowledged and at not in before:
                        found.append(at)
                    self.acknowledged.add(at)
                on_delivery(error, message)

            super().produce(topic, *args, on_delivery=delivered, **more)

    monkeypatch.setattr(_output, "Producer", Watched)
    return found


def fed(place: Place, count: int) -> Place:
    place.feed(range(count))
    return place


KINDS: tuple[tuple[Callable[[int], bytes | None], Callable[[int], int | None]], ...] = (
    (lambda n: b"k%d" % (n % 4000), lambda n: None),
    (lambda n: None, lambda n: None),
    (lambda n: b"k", lambda n: n % 64),
)
"""Records with keys, without them, and with partitions: by number, the key and the partition."""


def test_a_second_record_of_a_partition_waits_for_the_first_once(place, outbox_kafka, waits, early):
    """10,000 records of a kind: a wait at most for each partition, as acknowledgements come one by one or together."""
    topics = [outbox_kafka.create_topic(outbox_kafka.name(f"many{kind}"), 64) for kind, _ in enumerate(KINDS)]
    numbers = iter(range(0, 1_000_000, EACH))

    def transform(message: Message) -> Iterator[Record]:
        first = next(numbers)
        for topic, (key, partition) in zip(topics, KINDS, strict=True):
            for n in range(first, first + EACH):
                yield Record(topic, key(n), b"%d" % n, partition=partition(n))

    member = fed(place, 100).member(transform, batch=20, transaction_seconds=120.0)
    with running(member):
        wait_until(lambda: member.committed == 100, 120, "the end")
    assert early == []
    for topic in topics:
        assert 1 <= waits.count(topic) <= 64
        found = outbox_kafka.consume(topic, 100 * EACH, timeout=60)
        assert sorted(int(message.value()) for message in found) == list(range(100 * EACH))
        assert len({message.partition() for message in found}) == 64


def test_waits_come_again_after_a_minute_and_not_before(place, outbox_kafka, waits, early, monkeypatch):
    monkeypatch.setattr(first_messages, "_KNOWN_SECONDS", 0.5)
    topic = outbox_kafka.create_topic(outbox_kafka.name("many"), 16)
    numbers = iter(range(1_000_000))

    def transform(message: Message) -> Iterator[Record]:
        time.sleep(0.05)
        for n in range(50):
            yield Record(topic, b"k%d" % (n % 40), b"%d" % next(numbers))

    began = time.monotonic()
    member = fed(place, 40).member(transform, batch=1)
    with running(member):
        wait_until(lambda: member.committed == 40, 120, "the end")
    assert early == []
    periods = int((time.monotonic() - began) / 0.5) + 1
    assert periods >= 3
    assert 2 <= len(waits) <= 16 * periods


def test_a_record_in_each_transaction_waits_for_none(place, waits):
    member = fed(place, 30).member(lambda message: [Record(place.target, b"k", message.value())], batch=1)
    with running(member):
        wait_until(lambda: member.committed == 30, 60, "the end")
    assert waits == []


def test_a_topic_whose_partitions_are_not_known_has_one_first_record(place, waits, early, monkeypatch):
    ask = _output.output_partitions
    asked: list[str] = []

    def unknown_once(producer: Producer, topic: str) -> tuple[int, list[int]]:
        asked.append(topic)
        return (0, []) if len(asked) == 1 else ask(producer, topic)

    monkeypatch.setattr(_output, "output_partitions", unknown_once)
    member = fed(place, 20).member(lambda message: [Record(place.target, None, message.value())] * 10, batch=20)
    with running(member):
        wait_until(lambda: member.committed == 20, 60, "the end")
    assert early == []
    assert len(asked) == 2
    # For the first one of all, and at most one for each of four partitions.
    assert len(waits) <= 5


def test_the_first_record_of_a_partition_is_refused_while_another_waits_for_it(place, outbox_kafka, waits):
    """The error is that of the record, as if no other one had waited; nothing is committed."""
    narrow = outbox_kafka.create_topic(outbox_kafka.name("narrow"), 1, {"max.message.bytes": "1000"})
    wrong = Record(narrow, b"k", os.urandom(5_000)), Record(narrow, b"k", b"")
    fed(place, 3)
    member = place.member(lambda _message: wrong)
    with pytest.raises(TransformFailed, match=r"too large.*raise max"):
        member.run()
    absent = outbox_kafka.name("absent")
    with pytest.raises(KafkaRefused, match=r"can't produce to .*[Uu]nknown topic"):
        place.member(lambda _message: [Record(absent, b"k", b"")] * 2).run()
    assert len(waits) >= 2
    assert (place.position(), member.committed) == (0, 0)
    assert outbox_kafka.consume(narrow) == []


def test_a_first_record_that_is_not_acknowledged_in_time_aborts_the_transaction(place, waits, monkeypatch, caplog):
    """And the messages are transformed again."""
    give_up = FirstRecords.place
    failed: list[str] = []

    def lost_once(first: FirstRecords, record: Record) -> tuple[int | None, int | None]:
        found = give_up(first, record)
        if not failed:
            failed.append(record.topic)
            # As if it were on its way and had no acknowledgement.
            first.sent(record.topic, found[1])
            first._flush = lambda: 0
        return found

    monkeypatch.setattr(FirstRecords, "place", lost_once)
    positions: list[list[TopicPartition]] = []
    send = Session._send_positions
    monkeypatch.setattr(
        Session, "_send_positions", lambda session, sent: (positions.append(sent), send(session, sent))[1]
    )
    member = fed(place, 10).member(
        lambda message: [Record(place.target, b"k", message.value())], batch=10, batch_seconds=30.0
    )
    with running(member):
        wait_until(lambda: member.committed == 10, 60, "the end")
    assert "the first record of a partition is not acknowledged" in caplog.text
    assert "a new client goes on" not in caplog.text
    assert len(positions) == 2
    assert sum(map(len, place.come(10).values())) == 10
