"""From topic to topic: what can't be transformed, read or produced, and topics that are not there."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.cimpl import TopicPartition
from raw_kafka import produce
from support import wait_until
from transform_support import Place, _soon, copied, place, running

from outbox import ConfigurationError
from outbox.consumer import member_clients
from outbox.consumer.stalled import StalledPartition
from outbox.sandbox._process import patience
from outbox.transform import (
    DEAD_LETTER,
    PLACE,
    KafkaRefused,
    Record,
    Transformer,
    TransformFailed,
    _session,
    _topics,
)
from outbox.transform._session import Session
from relay.kafka.offsets import Offsets, Partition

__all__ = ["_soon", "place"]


def test_a_message_that_can_not_be_transformed_ends_it_and_commits_nothing_of_its_transaction(place):
    place.feed(range(10), bad=7)
    member = place.member(copied(place))
    with pytest.raises(TransformFailed, match="JSONDecodeError") as caught:
        member.run()
    assert caught.value.topic == place.source
    assert place.position() == member.committed
    ends = Offsets(place.options).stable([Partition(place.target, number) for number in range(place.partitions)])
    assert member.committed == 0 or sum(ends.values()) >= member.committed


def test_a_topic_that_is_not_there(place, outbox_kafka, monkeypatch):
    monkeypatch.setattr(_topics, "MISSING_TOPIC_SECONDS", 2.0)
    absent = outbox_kafka.name("absent")
    with pytest.raises(KafkaRefused, match=f"topic {absent} does not exist"):
        Transformer(copied(place), topics=[absent], group=place.group, kafka=place.options).run()


def test_a_topic_that_is_there_a_little_later(place, outbox_kafka, caplog):
    """As after the start of brokers. The consumer hears of it in the poll that assigns it the other topic."""
    caplog.set_level("INFO", "outbox")
    later = outbox_kafka.name("later")
    member = Transformer(
        copied(place), topics=[place.source, later], group=place.group, kafka=place.options, start="latest"
    )
    with running(member):
        wait_until(lambda: f"waits: topic {later}" in caplog.text, 60, "it to miss the topic")
        outbox_kafka.create_topic(later, 1)
        wait_until(lambda: all(each.offset >= 0 for each in place.positions()), 60, "it to begin")
        place.feed(range(10))
        wait_until(lambda: member.committed == 10, 60, "it to go on")


def test_an_assignment_that_fails_ends_the_session_and_not_the_member(place, monkeypatch, caplog):
    """As the first commit of a new group's positions does while another member comes or goes."""
    caplog.set_level("INFO", "outbox")
    go_on = Session._go_to_committed
    failed: list[int] = []

    def fails_once(session: Session, partitions: list[TopicPartition]) -> None:
        if not failed:
            failed.append(len(partitions))
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer in time"))
        go_on(session, partitions)

    monkeypatch.setattr(Session, "_go_to_committed", fails_once)
    place.feed(range(10))
    member = place.member(copied(place))
    with running(member):
        wait_until(lambda: member.committed == 10, 60, "it to go on")
    assert failed == [4]
    assert f"group {place.group}: a new client goes on: " in caplog.text


def test_a_stop_while_partitions_are_assigned_ends_it(place, monkeypatch):
    """Left alone, the client would assign them by itself, and read on from what is committed."""
    place.feed(range(10))
    with running(place.member(copied(place))):
        wait_until(lambda: place.position() == 10, 60, "the position")
    place.feed(range(10, 20))
    ask = _session.committed

    def stopped(*args: Any) -> list[TopicPartition]:
        stop.set()
        return ask(*args)

    class Watched(_session.Consumer):
        def poll(self, *args: Any) -> Message | None:
            found = super().poll(*args)
            reads.append(self.assignment())
            return found

    monkeypatch.setattr(_session, "committed", stopped)
    monkeypatch.setattr(_session, "Consumer", Watched)
    reads: list[list[TopicPartition]] = []
    stop = threading.Event()
    member = place.member(copied(place))
    member.run(stop)
    # A message may take longer than the poll that assigns: none can come if nothing is assigned behind it.
    assert reads[-1] == []
    assert (member.committed, place.position()) == (0, 10)


def records(place: Place, *wrong: Any) -> Callable[[Message], Iterator[Any]]:
    """Copies; the message with n = 7 becomes what is wrong, behind a record that is right."""

    def transform(message: Message) -> Iterator[Any]:
        yield Record(place.target, message.key(), message.value())
        if json.loads(message.value() or b"")["n"] == 7:
            yield from wrong

    return transform


def test_records_that_can_not_be_produced(place, outbox_kafka):
    """Nothing of the transaction is committed, and the error says which message it was."""
    narrow = outbox_kafka.create_topic(outbox_kafka.name("narrow"), 1, {"max.message.bytes": "1000"})
    wrongs = (
        (Record(place.target, b"k", bytes(2_000_000)), TransformFailed, "too large"),
        (Record(narrow, b"k", bytes(5_000)), TransformFailed, "too large.*raise max"),
        (Record(place.target, b"k", b"", partition=99), TransformFailed, "Unknown partition"),
        (Record("Order Events", b"k", b""), TransformFailed, "no name of a topic: .*[Ii]nvalid topic"),
        (Record(outbox_kafka.name("absent"), b"k", b""), KafkaRefused, "can't produce to .*[Uu]nknown topic"),
        ((b"k", b"v"), TransformFailed, "returned a tuple, not a Record"),
        (Record(place.target, b"k", 7), TransformFailed, "TypeError"),
        (Record(None, b"k", b""), TransformFailed, "TypeError.*topic"),
    )
    place.feed(range(10))
    for wrong, error, problem in wrongs:
        # All in one transaction: it waits for a batch that is full.
        member = place.member(records(place, wrong), batch=10, batch_seconds=30.0, transaction_seconds=10.0)
        with pytest.raises(error, match=problem) as caught:
            member.run()
        assert (place.position(), member.committed) == (0, 0), problem
        if error is TransformFailed:
            assert (caught.value.partition, caught.value.offset) == place.where[7], problem
    with running(place.member(copied(place))):
        wait_until(lambda: place.position() == 10, 60, "the end")
    assert place.come(10) == {f"k{n}": [n] for n in range(10)}


@pytest.mark.parametrize("keyless", [{7}, {7, 8}], ids=["one", "two"])
def test_the_message_is_named_whose_record_is_invalid_and_not_one_of_its_batch(place, outbox_kafka, keyless, caplog):
    """librdkafka says INVALID_RECORD of all if there is one, and _INVALID_DIFFERENT_RECORD of the others if not."""
    caplog.set_level("INFO", "outbox")
    compacted = outbox_kafka.create_topic(outbox_kafka.name("compacted"), 1, {"cleanup.policy": "compact"})
    place.options |= {"linger.ms": 200}
    place.feed(range(10), partition=0)

    def transform(message: Message) -> Iterator[Record]:
        yield Record(compacted, None if message.offset() in keyless else message.key(), message.value())

    member = place.member(transform, batch=10, batch_seconds=30.0)
    with pytest.raises(TransformFailed, match="failed to validate record") as caught, running(member) as ended:
        wait_until(ended.is_set, 60, "its end")
    assert (caught.value.partition, caught.value.offset) == place.where[7]
    assert (place.position(), member.committed) == (0, 0)
    assert "is repeated" not in caplog.text, "a step waited for reports that were not served"


def test_a_record_larger_than_the_producers_queue(place):
    place.options |= {"queue.buffering.max.kbytes": 1}
    place.feed(range(3), partition=0)
    member = place.member(lambda message: [Record(place.target, message.key(), bytes(1500))])
    with pytest.raises(TransformFailed, match=r"raise queue\.buffering") as caught, running(member) as ended:
        wait_until(ended.is_set, 60, "its end")
    assert (caught.value.partition, caught.value.offset) == place.where[0]


@pytest.fixture
def pauses(monkeypatch) -> list[int]:
    """The pauses of members, which there are none of."""
    found: list[int] = []
    for module in (_session, member_clients):
        monkeypatch.setattr(module, "pause", lambda _stop, failures: found.append(failures))
    return found


def test_the_broker_refuses_a_batch_and_only_what_is_too_large_by_itself_is_cut(outbox_kafka, pauses):
    with closing(Place(outbox_kafka, 1)) as place:
        dead = outbox_kafka.create_topic(outbox_kafka.name("dead"), 1, {"max.message.bytes": "20000"})
        values = [os.urandom(30_000 if number in {0, 20, 21, 22, 44} else 5_000) for number in range(45)]
        produce(outbox_kafka.bootstrap_servers, place.source, 0, [(b"k", value, {}) for value in values])
        member = place.member(copied(place), dead_letter_topic=dead)
        with running(member):
            wait_until(lambda: member.committed == len(values), 60, "all messages")
        letters = outbox_kafka.consume(dead, len(values))
    assert [letter.value() for letter in letters] == [value if len(value) == 5_000 else None for value in values]
    omitted = [dict(letter.headers()).get("outbox-payload-omitted") for letter in letters]
    assert omitted == [None if len(value) == 5_000 else b"true" for value in values]
    assert pauses == []


def test_many_letters_larger_than_any_topic_takes(outbox_kafka, pauses, caplog):
    """Each costs at most an abort, and neither a pause nor a new session."""
    caplog.set_level("INFO", "outbox")
    with closing(Place(outbox_kafka, 1)) as place:
        place.source = outbox_kafka.create_topic(outbox_kafka.name("large"), 1, {"max.message.bytes": "3000000"})
        dead = outbox_kafka.create_topic(outbox_kafka.name("dead"), 1)
        values = [os.urandom(1_200_000) for _ in range(6)]
        producer = Producer({**place.options, "message.max.bytes": 3_000_000})
        for value in values:
            producer.produce(place.source, value, b"k")
        assert producer.flush(60) == 0
        member = place.member(copied(place), dead_letter_topic=dead)
        with running(member):
            wait_until(lambda: member.committed == len(values), 60, "all messages")
        assert [letter.value() for letter in outbox_kafka.consume(dead, len(values))] == [None] * len(values)
    assert pauses == []
    assert "a new client goes on" not in caplog.text
    assert caplog.text.count("go on apart") <= len(values) + 1


@pytest.mark.parametrize(("each", "seconds", "refused"), [(10, 60.0, 1), (1, 0.0, 2)])
def test_records_that_fit_by_themselves_and_not_together(
    outbox_kafka, pauses, caplog, monkeypatch, each, seconds, refused
):
    """Later they go together again: without a minute in between, the next five are refused, too."""
    caplog.set_level("INFO", "outbox")
    monkeypatch.setattr(_session, "_APART_SECONDS", seconds)
    with closing(Place(outbox_kafka, 1)) as place:
        narrow = outbox_kafka.create_topic(outbox_kafka.name("narrow"), 1, {"max.message.bytes": "1000"})
        place.feed(range(10))
        member = place.member(
            lambda message: [Record(narrow, message.key(), os.urandom(500))] * each, batch=5, batch_seconds=30.0
        )
        with running(member):
            wait_until(lambda: member.committed == 10, 60, "all messages")
        keys = [message.key() for message in outbox_kafka.consume(narrow, 10 * each)]
    assert keys == [f"k{number}".encode() for number in range(10) for _ in range(each)]
    assert caplog.text.count("go on apart") == refused
    assert pauses == []


@pytest.mark.parametrize("option", [{}, {"message.max.bytes": 900_000}], ids=["for the topic", "for this client"])
def test_a_message_whose_copy_is_too_large_costs_only_its_value(place, outbox_kafka, option):
    dead = outbox_kafka.create_topic(outbox_kafka.name("dead"))
    place.options |= option
    # As large as the topic takes: nothing can be added to it.
    produce(outbox_kafka.bootstrap_servers, place.source, 0, [(b"k", bytes(1_048_500), {b"id": b"1"})])
    place.feed(range(5), partition=0)
    member = place.member(copied(place), dead_letter_topic=dead)
    with running(member):
        wait_until(lambda: member.committed == 6, 60, "all messages")
    assert place.come(5) == {f"k{n}": [n] for n in range(5)}
    [letter] = outbox_kafka.consume(dead, 1)
    headers = dict(letter.headers())
    assert (letter.key(), letter.value(), headers["id"]) == (b"k", None, b"1")
    assert headers[DEAD_LETTER].endswith(b"; without its value, as this topic takes no message of that size")
    assert headers[PLACE] == f"{place.source}-0@0".encode()


def test_a_topic_of_records_that_is_missing_is_found_within_a_transaction(place, outbox_kafka):
    """With the options that a user gives."""
    place.options = {"bootstrap.servers": outbox_kafka.bootstrap_servers}
    place.feed(range(3))
    absent = outbox_kafka.name("absent")
    member = place.member(lambda message: [Record(absent, message.key(), b"")], transaction_seconds=6.0)
    stop = threading.Event()
    too_late = threading.Timer(20.0 * patience(), stop.set)
    too_late.start()
    try:
        with pytest.raises(KafkaRefused, match=r"can't produce to .*[Uu]nknown topic"):
            member.run(stop)
    finally:
        too_late.cancel()
    assert (place.position(), member.committed) == (0, 0)


@pytest.mark.parametrize(
    ("options", "kafka"),
    [
        ({"topics": []}, {}),
        ({"group": ""}, {}),
        ({"batch": 0}, {}),
        ({"start": "first"}, {}),
        ({"transaction_seconds": 0}, {}),
        ({"topics": "orders"}, {}),
        ({}, {"isolation.level": "read_uncommitted"}),
        ({}, {"transactional.id": "mine"}),
        ({}, {"enable.ssl.certificate.verification": "false"}),
    ],
)
def test_what_does_not_fit_is_refused(options, kafka):
    given: dict[str, Any] = {"topics": ["t"], "group": "g", **options}
    with pytest.raises(ConfigurationError):
        Transformer(lambda _: (), kafka={"bootstrap.servers": "x:1", **kafka}, **given)


def standing(member: Transformer) -> list[StalledPartition]:
    """Return the partitions that stand, without the entry of a session that has none yet."""
    return [each for each in member.stalled(0) if each.partition is not None]


def test_a_partition_that_stands_is_named_since_when_and_why(outbox_kafka, monkeypatch):
    """Through sessions that begin anew, too; and not any more when it has moved."""
    place = Place(outbox_kafka, 1)
    place.feed(range(3))
    tries: list[int] = []
    blocked, healthy = threading.Event(), threading.Event()
    send = Session._send_positions

    def fails(session: Session, positions: list[TopicPartition]) -> None:
        tries.append(1)
        if not healthy.is_set():
            raise KafkaException(KafkaError(KafkaError._FAIL, "no luck"))
        send(session, positions)

    def transform(message: Message) -> Iterator[Record]:
        assert blocked.wait(60)
        yield Record(place.target, message.key(), message.value())

    monkeypatch.setattr(Session, "_send_positions", fails)
    member = Transformer(transform, topics=[place.source], group=place.group, kafka=place.options)
    assert member.stalled(0) == []
    stop = threading.Event()
    thread = threading.Thread(target=member.run, args=(stop,), daemon=True)
    thread.start()
    try:
        wait_until(lambda: standing(member), what="the partition to wait")
        (first,) = standing(member)
        assert (first.topic, first.partition, first.offset) == (place.source, 0, 0)
        assert "no error was reported" in str(first)
        assert member.stalled(3600) == []
        blocked.set()
        wait_until(lambda: len(tries) > 2, what="another session")
        (later,) = standing(member)
        assert (later.since, later.why) == (first.since, "no luck")
        assert str(later).startswith(f"partition 0 of topic {place.source} stands still at offset 0 since 2")
        healthy.set()
        wait_until(lambda: member.committed == 3, what="the commit")
        wait_until(lambda: member.stalled(0) == [], what="the partition to move")
    finally:
        healthy.set()
        blocked.set()
        stop.set()
        thread.join(60)
