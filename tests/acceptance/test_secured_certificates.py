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
from outbox.transform import Record, Transformer, _session

SECONDS = 90


@pytest.fixture
def topic(secured: SecuredKafka) -> Iterator[str]:
    """A topic, with rights on it and for groups whose names begin with its; then the broker's certificate of before."""
    name = f"t-{token()}"
    secured.admin.create_topics([NewTopic(name, 1)], operation_timeout=30)[name].result()
    allow(secured.admin, ResourceType.TOPIC, name, AclOperation.READ, AclOperation.DESCRIBE)
    allow(secured.admin, ResourceType.TRANSACTIONAL_ID, f"{name}*", AclOperation.WRITE, AclOperation.DESCRIBE)
    allow(secured.admin, ResourceType.GROUP, f"{name}*", AclOperation.READ, AclOperation.DESCRIBE)
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


class Member:
    """A member that runs in a thread: what its client has said, and the messages that it has seen."""

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self.seen: list[bytes | None] = []
        self._said: list[str] = []
        self.kafka = {
            **kafka,
            "error_cb": lambda error: self._said.append(error.str()),
            # For so long the group waits for a member that could not leave it.
            "session.timeout.ms": 6000,
            "reconnect.backoff.max.ms": 500,
        }
        self.run: Callable[[], None]
        self.stop: Callable[[], None]

    def said(self, text: str) -> bool:
        return any(text in each for each in self._said)


def inbox(kafka: Mapping[str, Any], topic: str, url: str) -> Member:
    member = Member(kafka)
    consumer = Consumer(url, [topic], group=f"{topic}-inbox", kafka=member.kafka, dedup=False)
    member.run = lambda: consumer.run(lambda _, message: member.seen.append(message.value()))
    member.stop = consumer.stop
    return member


def transformer(kafka: Mapping[str, Any], topic: str) -> Member:
    member = Member(kafka)

    def transform(message: Message) -> list[Record]:
        member.seen.append(message.value())
        return []

    stop = threading.Event()
    transforming = Transformer(transform, topics=[topic], group=f"{topic}-transformer", kafka=member.kafka)
    member.run, member.stop = lambda: transforming.run(stop), stop.set
    return member


class Asking:
    """What asks for a group: an inbox, a driver of Spark, and what shows them."""

    def __init__(self, kafka: Mapping[str, Any], topic: str) -> None:
        self._kafka, self._topic = KafkaAdmin(kafka), topic
        self._usual = self._kafka._seconds

    def is_answered(self) -> None:
        self._kafka._seconds = self._usual
        assert self._kafka.look([self._topic])[1].keys() == {(self._topic, 0)}
        wait_until(lambda: self._shown() is None, SECONDS, "its position to be shown")

    def mistrusts(self) -> None:
        self._kafka._seconds = 3.0
        # A request that was under way when the connections were cut may fail before the next connection does.
        wait_until(self._is_refused, SECONDS, "its mistrust")
        assert self._shown(seconds=0.5) is not None

    def _shown(self, **limit: float) -> Any:
        return self._kafka.show_lag(self._topic, {(self._topic, 0): 0}, **limit)

    def _is_refused(self) -> bool:
        with pytest.raises(ConsumerUnavailable) as failed:
            self._kafka.look([self._topic])
        return "certificate verify failed" in str(failed.value)


def test_clients_go_on_with_renewed_certificates(secured, topic, authority, outbox_postgres, monkeypatch):
    """The broker has a certificate of another authority, and they must connect again. All at once: it takes long."""
    # A producer that began while connections were refused asks for its id again only then.
    monkeypatch.setattr(_session, "SECONDS", 3.0)
    kafka = secured.options | {"ssl.ca.location": str(authority)}
    members = [inbox(kafka, topic, outbox_postgres.url), transformer(kafka, topic)]
    asking = Asking(kafka, topic)
    producer = Producer({"bootstrap.servers": secured.plain})

    def send(value: bytes) -> None:
        producer.produce(topic, value, "k")
        assert producer.flush(30) == 0

    with ThreadPoolExecutor(len(members)) as pool:
        running = [pool.submit(member.run) for member in members]

        def await_all(condition: Callable[[Member], Any], what: str) -> None:
            wait_until(lambda: all(map(condition, members)) or any(each.done() for each in running), SECONDS, what)

        try:
            send(b"1")
            await_all(lambda member: member.seen, "the first message")
            asking.is_answered()
            secured.show(secured.certificates.other)
            await_all(lambda member: member.said("certificate verify failed"), "their mistrust")
            asking.mistrusts()
            send(b"2")
            shutil.copy(secured.certificates.stranger, authority)
            asking.is_answered()
            # An error that is the one before is reported half a minute later, and it takes two to see that the files
            # are others: so another one comes in between.
            secured.proxy.stop()
            await_all(lambda member: member.said("refused"), "refused connections")
            secured.proxy.start()
            await_all(lambda member: b"2" in member.seen, "the second message")
        finally:
            for member in members:
                member.stop()
        for each in running:
            each.result(60)
    assert [member.seen for member in members] == [[b"1", b"2"]] * 2
