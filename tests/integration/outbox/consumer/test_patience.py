"""Questions that nobody answers: a port that accepts and says nothing. By themselves they take 10 and 20 seconds."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from proxy import TcpProxy

from outbox.consumer import connections, kafka_admin
from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.model import Range
from outbox.consumer.patience import LEAST_SECONDS, NoTimeLeft, Patience
from outbox.consumer.postgres_errors import connect
from outbox.external import External
from outbox.external.caller import Caller
from spark_jobs.task.reader import RangeReader, ReaderSettings, close_kept, kept


@pytest.fixture
def nobody() -> Iterator[str]:
    with TcpProxy("127.0.0.1", 9) as proxy:
        proxy.blackhole()
        yield proxy.address


def of_kafka(question: Callable[[KafkaAdmin], object]) -> Callable[[str], Callable[[], object]]:
    def asking(address: str) -> Callable[[], object]:
        view = KafkaAdmin({"bootstrap.servers": address})
        return lambda: question(view)

    return asking


ASKING: dict[str, Callable[[str], Callable[[], object]]] = {
    "Postgres": lambda address: lambda: connections.connect(f"postgresql://{address}/sink", "test"),
    # Each host, and each address of a host, has connect_timeout for itself.
    "two hosts": lambda address: lambda: connections.connect(f"postgresql://{address},{address}/sink", "test"),
    "topics": of_kafka(lambda view: view.look(["orders"])),
    "ends": of_kafka(lambda view: view.ends([("orders", 0)])),
    "a time": of_kafka(lambda view: view.at_time([("orders", 0)], dt.datetime.now(dt.UTC))),
    # Without an answer to the first it goes on to the second, which has nothing left.
    "configuration and ends": of_kafka(lambda view: view.compacted(["orders"]) and view.ends([("orders", 0)])),
}


def test_a_question_without_an_answer_takes_what_patience_is_left_and_no_more(nobody):
    def patiently(asking: str) -> None:
        ask = ASKING[asking](nobody)
        waited = Patience(5.0)
        began = time.monotonic()
        with pytest.raises((psycopg.errors.ConnectionTimeout, ConsumerUnavailable)), waited.attempt():
            ask()
        waited.failed()
        assert waited.left <= 0, asking
        # That, and a margin for a busy machine, but less than for two such questions.
        assert time.monotonic() - began < 10, asking
        # And then none is asked.
        with pytest.raises(NoTimeLeft), waited.attempt():
            ask()

    with ThreadPoolExecutor(len(ASKING)) as together:
        list(together.map(patiently, ASKING))


def test_reading_in_the_driver_waits_for_messages_no_longer_than_patience_is_left(nobody):
    """By itself a reader waits for 30 s, and what it has waited is a part of the patience."""
    reader = RangeReader(ReaderSettings({"bootstrap.servers": nobody}, "g"))
    waited = Patience(LEAST_SECONDS)
    try:
        with pytest.raises(ConsumerUnavailable, match=r"orders-0 from offset 0 came for \d+ s"), waited.attempt():
            list(reader.range(("orders", 0), Range("topic-id", 0, 5)))
        waited.failed()
        assert waited.left <= 0
    finally:
        reader.close()


def test_a_reader_that_is_kept_has_the_patience_of_the_round_that_uses_it(nobody):
    settings = ReaderSettings({"bootstrap.servers": nobody}, "g")
    try:
        with kept(settings) as first:
            assert first.patience_seconds == 30
        with kept(replace(settings, patience_seconds=1.5)) as second:
            assert (second is first, second.patience_seconds) == (True, 1.5)
        with kept(settings) as third:
            assert (third is first, third.patience_seconds) == (True, 30)
    finally:
        close_kept("g")


def test_a_caller_gives_up_with_its_first_question_when_that_takes_all_its_patience(nobody):
    external = External("payments", "orders", "'{}'::jsonb", call=lambda _: None)
    reports: list[str] = []

    def open_session() -> psycopg.Connection[Any]:
        return connect(f"postgresql://{nobody}/sink", "test")

    caller = Caller(external, open_session, lambda text, _: reports.append(text), patience=LEAST_SECONDS)
    with pytest.raises(ConsumerUnavailable, match="gave up after 2 s without the database; nothing is lost"):
        caller.run(threading.Event())
    assert reports == []


def test_a_topic_that_is_not_heard_of_yet_is_asked_for_again_with_little_patience_too(outbox_kafka, monkeypatch):
    """What is called missing is taken for lost by a group that has read it. So long, whatever the patience is."""
    monkeypatch.setattr(kafka_admin, "_UNHEARD_SECONDS", 30.0)
    view = KafkaAdmin({"bootstrap.servers": outbox_kafka.bootstrap_servers})
    name = outbox_kafka.name("later")
    # It is connected: what little patience is left must not go for that.
    view.snapshot([outbox_kafka.create_topic(outbox_kafka.name("first"))])
    made = threading.Timer(3.0, outbox_kafka.create_topic, [name])
    # Something has failed a second ago, so two are left.
    passed = 0.0
    waited = Patience(3.0, lambda: time.monotonic() + passed)
    waited.failed()
    passed = 1.0
    made.start()
    with waited.attempt():
        snapshot = view.snapshot([name])
    made.join()
    assert (snapshot.missing, set(snapshot.bounds)) == ((), {(name, 0)})
