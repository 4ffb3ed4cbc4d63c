"""Certificates that are renewed while clients run. A client of librdkafka reads them once: another one is needed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Message, Producer
from confluent_kafka.admin import AclOperation, AdminClient, NewTopic, ResourceType
from secured import SecuredKafka, allow
from support import wait_until

from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.inbox import Consumer
from outbox.testing.fixtures import token
from outbox.transform import Record, Transformer

SECONDS = 90


@pytest.fixture
def topic(secured: SecuredKafka) -> Iterator[str]:
    """A topic with rights for all; afterwards the broker has the certificate of before."""
    name = f"t-{token()}"
    secured.admin.create_topics([NewTopic(name, 1)], operation_timeout=30)[name].result()
    allow(secured.admin, ResourceType.TOPIC, name, AclOperation.READ, AclOperation.DESCRIBE)
    allow(secured.admin, ResourceType.TRANSACTIONAL_ID, f"{name}*", AclOperation.WRITE, AclOperation.DESCRIBE)
    allow(secured.admin, ResourceType.GROUP, name, AclOperation.READ, AclOperation.DESCRIBE)
    client = AdminClient({**secured.options, "log_level": 0})

    def granted() -> bool:
        with suppress(KafkaException):
            return client.describe_consumer_groups([name])[name].result(30) is not None
        return False

    # The last one; the broker takes them in their order.
    wait_until(granted, what="the rights")
    yield name
    secured.show(secured.certificates)


@pytest.fixture
def authority(secured: SecuredKafka, tmp_path: Path) -> Path:
    """The file of the authority that a client is to trust."""
    return Path(shutil.copy(secured.certificates.authority, tmp_path / "authority.pem"))


Member = Callable[[str, str, Mapping[str, Any], list[bytes | None]], tuple[Callable[[], None], Callable[[], None]]]
"""Returns how to run a member, and how to stop it; it keeps the messages that it has seen."""


def inbox(url: str, topic: str, kafka: Mapping[str, Any], seen: list[bytes | None]) -> Any:
    consumer = Consumer(url, [topic], group=topic, kafka=kafka, dedup=False)
    return lambda: consumer.run(lambda _, message: seen.append(message.value())), consumer.stop


def transformer(_: str, topic: str, kafka: Mapping[str, Any], seen: list[bytes | None]) -> Any:
    def transform(message: Message) -> list[Record]:
        seen.append(message.value())
        return []

    stop = threading.Event()
    member = Transformer(transform, topics=[topic], group=topic, kafka=kafka)
    return lambda: member.run(stop), stop.set


@pytest.mark.parametrize("kind", [inbox, transformer])
def test_a_member_goes_on_with_renewed_certificates(secured, topic, authority, outbox_postgres, kind: Member):
    """The broker has a certificate of another authority, and it must connect again."""
    errors: list[str] = []
    seen: list[bytes | None] = []
    producer = Producer({"bootstrap.servers": secured.plain})

    def send(value: bytes) -> None:
        producer.produce(topic, value, "k")
        assert producer.flush(30) == 0

    options = {
        "ssl.ca.location": str(authority),
        "error_cb": lambda error: errors.append(error.str()),
        # For so long the group waits for a member that could not leave it.
        "session.timeout.ms": 6000,
        "reconnect.backoff.max.ms": 500,
    }
    run, stop = kind(outbox_postgres.url, topic, secured.options | options, seen)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            send(b"1")
            wait_until(lambda: seen or running.done(), SECONDS, "the first message")
            secured.show(secured.certificates.other)
            wait_until(lambda: any("certificate verify failed" in text for text in errors), SECONDS, "its mistrust")
            send(b"2")
            shutil.copy(secured.certificates.stranger, authority)
            # An error that is the one before is reported half a minute later, and it takes two to see that the files
            # are others: so another one comes in between.
            secured.proxy.stop()
            wait_until(lambda: any("refused" in text for text in errors), SECONDS, "a refused connection")
            secured.proxy.start()
            wait_until(lambda: b"2" in seen or running.done(), SECONDS, "the second message")
        finally:
            stop()
        running.result(60)
    assert seen == [b"1", b"2"]


def test_what_asks_for_a_group_goes_on_with_renewed_certificates(secured, topic, authority):
    """An inbox, a driver of Spark, and what shows them."""
    kafka = KafkaAdmin(secured.options | {"ssl.ca.location": str(authority)})
    assert kafka.look([topic])[1].keys() == {(topic, 0)}
    wait_until(lambda: kafka.show_lag(topic, {(topic, 0): 0}) is None, SECONDS, "its position to be shown")
    secured.show(secured.certificates.other)
    usual, kafka._seconds = kafka._seconds, 3.0

    def mistrusts() -> bool:
        with pytest.raises(ConsumerUnavailable) as failed:
            kafka.look([topic])
        return "certificate verify failed" in str(failed.value)

    # A request that was under way when the connections were cut may fail before the next connection does.
    wait_until(mistrusts, SECONDS, "its mistrust")
    assert kafka.show_lag(topic, {(topic, 0): 0}, seconds=0.5) is not None
    shutil.copy(secured.certificates.stranger, authority)
    kafka._seconds = usual
    assert kafka.look([topic])[1].keys() == {(topic, 0)}
    wait_until(lambda: kafka.show_lag(topic, {(topic, 0): 0}) is None, SECONDS, "its position to be shown again")
