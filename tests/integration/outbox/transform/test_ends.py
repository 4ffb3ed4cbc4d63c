"""Which positions a transformer commits behind transactions' markers, and when its producer is used again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import TopicPartition
from kafka_proxy import END_TXN, TXN_OFFSET_COMMIT, delay_request
from support import wait_until
from transform_support import Place, _soon, copied, place, running

from outbox.testing.fixtures import Topics
from outbox.transform import Record, _output, _session
from outbox.transform._session import Session

__all__ = ["_soon", "place"]


def test_a_position_passes_the_markers_of_transactions(outbox_kafka):
    """Retention may delete up to a marker: a position at it would look like a loss. So of an aborted transaction."""
    with closing(Place(outbox_kafka, 3)) as place:
        place.feed(range(5), partition=0, transactional=True)
        member = place.member(copied(place), start="latest")
        with running(member):
            wait_until(lambda: place.position() == 6, 60, "the beginning")
            place.feed(range(5, 10), partition=0, transactional=True)
            place.feed(range(10, 15), partition=1, transactional=True)
            place.feed(range(20, 25), partition=2, transactional=True, commit=False)
            wait_until(lambda: [each.offset for each in place.positions()] == [12, 6, 6], 60, "them to be passed")
        assert member.committed == 10
        # What the group knows of the topic is kept, and the leader by whose epoch a cut log is found.
        assert [each.metadata for each in place.positions()] == ["partitions=3"] * 3
        assert all(each.leader_epoch is not None for each in place.positions())
        # A client that is gone answers never.
        admin = AdminClient(place.options)
        deleted = admin.delete_records(place.positions())
        assert [each.result(60).low_watermark for each in deleted.values()] == [12, 6, 6]
        for partition in (0, 2):
            place.feed(range(30 + 10 * partition, 35 + 10 * partition), partition=partition, transactional=True)
        later = place.member(copied(place), start="latest")
        with running(later):
            wait_until(lambda: later.committed == 10, 60, "what came later")
        assert sum(map(len, place.come(20).values())) == 20


def test_what_latest_skips_is_said(place, caplog):
    """Also when Kafka has forgotten the positions of a group that had no members for long."""
    with running(place.member(copied(place), start="latest")):
        wait_until(lambda: [each.offset for each in place.positions()] == [0] * 4, 60, "the beginnings")
        place.feed(range(5), partition=0)
        wait_until(lambda: place.position() == 5, 60, "the first messages")
    assert "skips" not in caplog.text
    admin = AdminClient(place.options)

    def forgotten() -> bool:
        return admin.delete_consumer_groups([place.group])[place.group].exception(60) is None

    wait_until(forgotten, 60, "the group to be empty")
    place.feed(range(5, 8), partition=1)
    with running(place.member(copied(place), start="latest")):
        wait_until(lambda: place.position() == 8, 60, "the beginnings")
    assert sorted(record.message for record in caplog.records if "skips" in record.message) == [
        f"group {place.group} has no position in {place.source}-{part}, and skips what is before offset {end}"
        for part, end in ((0, 5), (1, 3))
    ]


def test_markers_are_passed_beside_the_messages_of_other_partitions(outbox_kafka, monkeypatch):
    """A member that is never idle passes them, too, and where no leader answers it goes on."""
    with closing(Place(outbox_kafka, 2)) as place:
        place.feed(range(5), partition=0, transactional=True)
        fed = threading.Event()
        producer = Producer(place.options)

        def transform(message: Message) -> Iterator[Record]:
            if message.partition() == 1 and not fed.wait(0.02):
                # Another one before this one is behind: there are always as many.
                producer.produce(place.source, b'{"n": 100}', b"k", partition=1)
                assert producer.flush(60) == 0
            yield Record(place.target, message.key(), message.value())

        place.feed(range(10, 20), partition=1)
        member = place.member(transform, batch=2)
        with running(member):
            wait_until(lambda: place.positions()[0].offset == 6, 60, "the marker to be passed")
            fed.set()
            monkeypatch.setattr(_session, "_END_SECONDS", 0.0)
            place.feed(range(5, 10), partition=0, transactional=True)
            wait_until(lambda: place.positions()[0].offset >= 11, 60, "the messages")


def test_a_transaction_of_large_messages_has_fewer(place, monkeypatch):
    """Else five hundred of them, and what they become, would be in memory."""
    counts = [0]

    class Counting(Producer):
        def produce(self, *given, **more):
            counts[-1] += 1
            super().produce(*given, **more)

        def commit_transaction(self, *given):
            super().commit_transaction(*given)
            counts.append(0)

    monkeypatch.setattr(_output, "Producer", Counting)
    monkeypatch.setattr(_session, "_BATCH_BYTES", 60)
    place.feed(range(100, 200))
    member = place.member(copied(place))
    with running(member):
        wait_until(lambda: member.committed == 100, 60, "all")
    # Of 10 bytes each.
    assert (sum(counts), max(counts)) == (100, 6)


@pytest.fixture
def producers(monkeypatch) -> list[dict[str, Any]]:
    """The options of the producers that were made."""
    made: list[dict[str, Any]] = []

    def watched(options: dict[str, Any]) -> Producer:
        made.append(options)
        return Producer(options)

    monkeypatch.setattr(_output, "Producer", watched)
    return made


def within(monkeypatch, positions: float, commit: float) -> None:
    """Set how long a request may take that was sent once."""
    monkeypatch.setattr(_session, "CLEAN_OFFSETS_SECONDS", positions)
    monkeypatch.setattr(_session, "clean_seconds", lambda _options: commit)


def test_a_producer_is_used_again_only_after_positions_and_a_commit_that_were_sent_once(place, producers, monkeypatch):
    within(monkeypatch, 3600.0, 3600.0)
    place.feed(range(3), partition=0)
    member = place.member(copied(place), batch=1)
    with running(member):
        wait_until(lambda: member.committed == 3, 60, "the first ones")
        assert len(producers) == 1
        within(monkeypatch, 0.0, 3600.0)
        place.feed(range(3, 6), partition=0)
        wait_until(lambda: member.committed == 6, 60, "the next ones")
    assert len(producers) == 4
    within(monkeypatch, 3600.0, 0.0)
    place.feed(range(6, 9), partition=0)
    with running(member):
        wait_until(lambda: member.committed == 9, 60, "the last ones")
    assert len(producers) == 8
    assert place.come(9) == {f"k{n}": [n] for n in range(9)}


def test_nor_after_one_that_was_asked_for_again_or_an_abort(place, producers, monkeypatch):
    within(monkeypatch, 3600.0, 3600.0)
    until_known, send = Session._until_known, Session._send_positions
    steps: list[str] = []

    def twice(session: Session, *step: Any) -> bool:
        return until_known(session, *step) and len(steps) != 1

    def fails_once(session: Session, positions: list[TopicPartition]) -> None:
        steps.append("")
        if len(steps) == 2:
            raise KafkaException(KafkaError(KafkaError._FAIL, "no luck", False, False, True))
        send(session, positions)

    monkeypatch.setattr(Session, "_until_known", twice)
    monkeypatch.setattr(Session, "_send_positions", fails_once)
    place.feed(range(2), partition=0)
    member = place.member(copied(place), batch=1)
    with running(member):
        wait_until(lambda: member.committed == 2, 60, "the end")
    assert len(producers) == 3


@pytest.mark.parametrize("arrives", [True, False])
def test_a_producer_that_gets_no_answers_is_replaced(place, monkeypatch, arrives):
    """Its requests may have been lost, or only their answers: as it begins, and of the next one when it commits."""
    steps = "init_transactions", "commit_transaction"
    made: list[Producer] = []

    def unanswered(producer: Producer, step: str, *given: Any) -> None:
        if arrives and producer not in asked:
            getattr(Producer, step)(producer, *given)
        asked.append(producer)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer", False, True))

    class Silent(Producer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

        def __getattribute__(self, name: str) -> Any:
            lost = (self, name) in zip(made, steps, strict=False)
            return partial(unanswered, self, name) if lost else super().__getattribute__(name)

    asked: list[Producer] = []
    monkeypatch.setattr(_output, "Producer", Silent)
    monkeypatch.setattr(_session, "_SILENT_SECONDS", 0.5)
    place.feed(range(20))
    member = place.member(copied(place), batch=10, batch_seconds=0.1, transaction_seconds=1.0)
    with running(member):
        wait_until(lambda: place.position() == 20, 60, "the end")
    assert list(dict.fromkeys(asked)) == made[:2]
    assert place.come(20) == {f"k{number}": [number] for number in range(20)}


def test_a_commit_that_arrives_late_ends_no_part_of_the_next_transaction(mortal_network):
    """The first request was lost with its connection, and librdkafka has sent it again."""
    cluster, proxy = mortal_network
    with Topics(cluster.bootstrap_servers) as topics, closing(Place(topics, 1)) as place:
        place.feed(range(20))
        released: list[Any] = []

        def transform(message: Message) -> Iterator[Record]:
            if message.offset() == 15 and not released:
                # By now the first records of this transaction are on the broker.
                time.sleep(0.5)
                released.extend(proxy.release())
            yield Record(place.target, b"k", message.value())

        proxy.on(END_TXN, delay_request())
        member = place.member(transform, by=proxy, batch=10, batch_seconds=30.0)
        with running(member):
            wait_until(lambda: member.committed == 20, 60, "the end")
        assert len(released) == 1
        place.kafka.await_transactions([place.target])
        assert [json.loads(message.value())["n"] for message in topics.consume(place.target)] == list(range(20))


def test_positions_that_arrive_late_set_back_none_that_the_next_transactions_have_moved(mortal_network, monkeypatch):
    """The first request was lost with its connection, and librdkafka has sent it again."""
    cluster, proxy = mortal_network
    with Topics(cluster.bootstrap_servers) as topics, closing(Place(topics, 2)) as place:
        send = Session._send_positions
        quiet = threading.Event()
        released: list[Any] = []

        def then_released(session: Session, positions: list[TopicPartition]) -> None:
            send(session, positions)
            if quiet.is_set() and not released:
                # By now the group takes part in this transaction.
                released.extend(proxy.release())

        monkeypatch.setattr(Session, "_send_positions", then_released)
        proxy.on(TXN_OFFSET_COMMIT, delay_request())
        member = place.member(copied(place), by=proxy, batch=10, batch_seconds=30.0)
        with running(member):
            for there, partition in ((10, 0), (20, 0), (30, 1)):
                if partition:
                    quiet.set()
                place.feed(range(there - 10, there), partition=partition)
                wait_until(lambda there=there: member.committed == there, 60, f"{there} messages to be committed")
        assert len(released) == 1
        assert [each.offset for each in place.positions()] == [20, 10]
