"""Every kind of client of Kafka, each as a function that raises what an operator reads if it is not let in.

Each takes the address of an outbox's database, librdkafka's options, and a topic.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import psycopg
import pytest
from sender_support import AllThere, events

from outbox._clients.checks import Level
from outbox.consumer.admin.offsets import Offsets
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.model import Range
from outbox.errors import OutboxError
from relay.config import load, producer_options
from relay.kafka import offsets, transactional
from relay.kafka import topics as relay_topics
from relay.kafka.fencing import fence
from relay.kafka.open_transactions import OpenTransactions
from relay.kafka.producer import BatchProducer, Sending
from relay.kafka.routing import Route, Router
from relay.kafka.state_topic import StateTopic
from relay.kafka.takeover import Takeover
from relay.kafka.topics import Topics
from relay.kafka.transactional import TransactionalPublisher
from relay.operations.doctor import examine
from relay.operations.doctor import kafka as doctor_kafka
from relay.pipeline import topics as pipeline
from spark_jobs.task.reader import RangeReader, ReaderSettings

SECONDS = 8.0
"""How long they try: enough for several connections, on a busy machine too."""


def limit(patch: pytest.MonkeyPatch) -> None:
    """Let requests that take no limit end after SECONDS, too."""
    for module, name in (
        (relay_topics, "_METADATA_SECONDS"),
        (offsets, "_SECONDS"),
        (transactional, "_INIT_SECONDS"),
        (doctor_kafka, "_SECONDS"),
        (pipeline, "_SECONDS"),
    ):
        patch.setattr(module, name, SECONDS)


def by_relay(database_url: str, options: dict[str, str], topic: str) -> None:
    Topics(options, create=False).require(topic)


def by_takeover(database_url: str, options: dict[str, str], topic: str) -> None:
    fence(options, f"{topic}.0", SECONDS, 1.0)


def by_state_topic(database_url: str, options: dict[str, str], topic: str) -> None:
    StateTopic(options, topic).last_markers([0])


def by_publisher(database_url: str, options: dict[str, str], topic: str) -> None:
    """In exactly-once, where a producer asks for its id first."""
    known = producer_options(load(kafka=options, delivery="exactly-once"))
    TransactionalPublisher(
        Sending(known, Router(), AllThere(options, create=False), "/shop", SECONDS),
        base_id=topic,
        takeover=cast("Takeover", None),
        lane_count=1,
        state=StateTopic(options, topic),
    )


def by_sender(database_url: str, options: dict[str, str], topic: str) -> None:
    """With a topic that was there before the credentials were changed."""
    known = producer_options(load(kafka=options))
    router = Router({"Order": Route(topic)})
    topics = AllThere(options, create=False)
    sender = BatchProducer(Sending(known, router, topics, "/shop", SECONDS))
    sender.send({0: events(0, 1)}, time.monotonic() + SECONDS)
    sender.drain(time.monotonic() + SECONDS)
    if sender.left_out:
        # The producer had the broker's answer before the event.
        raise OutboxError(topics.reasons()[topic])
    raise sender.failure(SECONDS)[0]


def by_transactions(database_url: str, options: dict[str, str], topic: str) -> None:
    OpenTransactions(options, lambda _: True, topic, 60.0).look()


def by_page(database_url: str, options: dict[str, str], topic: str) -> None:
    _, away = pipeline.topics(load(kafka=options), [])
    raise OutboxError(away)


def by_doctor(database_url: str, options: dict[str, str], topic: str) -> None:
    settings = load(kafka=options, database_url=database_url, routes={"Order": topic}, create_topics=False)
    found = "; ".join(
        f"{each.about}: {each.found}; {each.do}" for each in examine(settings) if each.level is Level.FAILURE
    )
    raise OutboxError(found)


def by_driver(database_url: str, options: dict[str, str], topic: str) -> None:
    KafkaAdmin(options, seconds=SECONDS).look([topic])


def by_task(database_url: str, options: dict[str, str], topic: str) -> None:
    reader = RangeReader(ReaderSettings(options, "g", patience_seconds=SECONDS))
    try:
        list(reader.range((topic, 0), Range("id", 0, 1)))
    finally:
        reader.close()


def by_offsets(database_url: str, options: dict[str, str], topic: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        view = KafkaAdmin(options, seconds=SECONDS)
        Offsets(connection, "consumer", view).reset("g", topic, "earliest", "a test", dry_run=True, new=True)


CLIENTS: dict[str, Callable[[str, dict[str, str], str], None]] = {
    "relay": by_relay,
    "takeover": by_takeover,
    "state topic": by_state_topic,
    "publisher": by_publisher,
    "sender": by_sender,
    "transactions": by_transactions,
    "page": by_page,
    "doctor": by_doctor,
    "driver": by_driver,
    "task": by_task,
    "offsets": by_offsets,
}
