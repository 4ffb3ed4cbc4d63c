"""A password that Kafka refuses: while it is changed, that passes; one that stays wrong ends a member."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AclOperation, NewTopic, ResourceType
from secured import PASSWORD, SecuredKafka, allow, set_password
from support import wait_until

from outbox.inbox import Consumer, KafkaFailed
from outbox.testing.fixtures import token
from outbox.transform import KafkaRefused, Transformer, _session

SECONDS = 90


@pytest.fixture
def topic(secured: SecuredKafka) -> str:
    name = f"t-{token()}"
    secured.admin.create_topics([NewTopic(name, 1)], operation_timeout=30)[name].result()
    allow(secured.admin, ResourceType.TOPIC, name, AclOperation.READ, AclOperation.DESCRIBE)
    allow(secured.admin, ResourceType.GROUP, name, AclOperation.READ, AclOperation.DESCRIBE)
    return name


def test_an_inbox_outlives_a_refusal_of_its_password(secured, topic, outbox_postgres):
    seen: list[bytes | None] = []
    errors: list[str] = []
    ended: list[BaseException] = []
    producer = Producer({"bootstrap.servers": secured.plain})

    def send(value: bytes) -> None:
        producer.produce(topic, value, "k")
        assert producer.flush(30) == 0

    kafka = secured.options | {"error_cb": lambda error: errors.append(error.str())}
    consumer = Consumer(outbox_postgres.url, [topic], group=topic, kafka=kafka, dedup=False)

    def run() -> None:
        try:
            consumer.run(lambda _, message: seen.append(message.value()))
        except BaseException as error:  # noqa: BLE001  looked at below
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        send(b"1")
        wait_until(lambda: seen or ended, SECONDS, "the first message")
        set_password(secured.admin, "outbox", "another")
        secured.proxy.cut()
        wait_until(lambda: any("uthentication" in text for text in errors) or ended, SECONDS, "a refusal")
        set_password(secured.admin, "outbox", PASSWORD)
        send(b"2")
        wait_until(lambda: b"2" in seen or ended, SECONDS, "the second message")
    finally:
        set_password(secured.admin, "outbox", PASSWORD)
        consumer.stop()
        thread.join(60)
    assert ended == []
    assert seen == [b"1", b"2"]


def test_a_password_that_stays_wrong_ends_it(secured, topic, outbox_postgres, monkeypatch):
    monkeypatch.setattr("outbox._clients.kafka_rules.REFUSED_SECONDS", 0.0)
    kafka = secured.options | {"sasl.password": "wrong"}
    with pytest.raises(KafkaFailed, match="look at the credentials"):
        Consumer(outbox_postgres.url, [topic], group=topic, kafka=kafka).run(lambda *_: None)
    # Its producer asks first: the consumer does not connect before that is answered.
    monkeypatch.setattr(_session, "SECONDS", 2.0)
    with pytest.raises(KafkaRefused, match=r"SASL authentication error.*look at the credentials"):
        Transformer(lambda _: [], topics=[topic], group=topic, kafka=kafka).run()
