"""What a group learns of a topic's settings where Kafka refuses to say them, or does not answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox.consumer.kafka_admin import KafkaAdmin

SETTINGS = {"retention.bytes": "-1", "retention.ms": "5000", "cleanup.policy": "compact", "delete.retention.ms": "7000"}


@pytest.fixture
def admin() -> KafkaAdmin:
    return KafkaAdmin({"bootstrap.servers": "127.0.0.1:1"})


def answers(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Any]) -> None:
    monkeypatch.setattr(KafkaAdmin, "_configurations", lambda *_: [answer()])


def failing(code: int) -> Callable[[], Any]:
    def fail() -> Any:
        raise KafkaException(KafkaError(code))

    return fail


def test_they_are_what_kafka_says(monkeypatch, admin):
    answers(monkeypatch, lambda: {name: SimpleNamespace(value=value) for name, value in SETTINGS.items()})
    assert (admin.retention_seconds("t"), admin.tombstone_seconds("t"), admin.may_compact("t")) == (5.0, 7.0, True)


@pytest.mark.parametrize("code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART])
def test_they_are_not_known_without_the_right_or_the_topic(monkeypatch, admin, code):
    answers(monkeypatch, failing(code))
    assert (admin.retention_seconds("t"), admin.tombstone_seconds("t")) == (None, None)


@pytest.mark.parametrize("code", [KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError.NOT_CONTROLLER])
def test_an_answer_that_is_late_says_nothing_about_the_topic(monkeypatch, admin, code):
    answers(monkeypatch, failing(code))
    for ask in (admin.retention_seconds, admin.tombstone_seconds, admin.may_compact):
        with pytest.raises(KafkaException):
            ask("t")
