"""Which positions are asked for again, when their leaders are there. On brokers: integration/outbox/transform."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.cimpl import TopicPartition

from outbox.transform import InputLost, _positions
from outbox.transform._positions import require_whole

OPTIONS = {"group.id": "g"}
READ = [TopicPartition("in", number, 10, "", 3) for number in range(3)]


def whole(*answers: dict[str, Any] | int) -> set[tuple[str, int]]:
    """Ask brokers that give these answers for the partitions, or one error instead."""

    def offsets_for_times(asked: Sequence[TopicPartition], _seconds: float) -> list[Any]:
        if isinstance(answers[0], int):
            raise KafkaException(KafkaError(answers[0]))
        usual = {"leader_epoch": 3, "error": None}
        return [
            SimpleNamespace(topic=at.topic, partition=at.partition, **(usual | cast("dict[str, Any]", answer)))
            for at, answer in zip(asked, answers, strict=True)
        ]

    consumer = cast("Any", SimpleNamespace(offsets_for_times=offsets_for_times))
    return require_whole(consumer, READ, OPTIONS)


AWAY = {"error": KafkaError(KafkaError.LEADER_NOT_AVAILABLE), "leader_epoch": None}


def test_partitions_without_a_leader_are_left_and_the_others_are_checked(monkeypatch):
    assert whole({}, {}, {}) == set()
    asked: list[list[tuple[str, int]]] = []
    monkeypatch.setattr(_positions, "cut_logs", lambda _options, doubtful, *_: asked.append(sorted(doubtful)) or {})
    assert whole({}, AWAY, {"leader_epoch": 4}) == {("in", 1)}
    assert asked == [[("in", 2)]]
    monkeypatch.setattr(_positions, "cut_logs", lambda *_: {("in", 2): 7})
    with pytest.raises(InputLost, match="only the part before 7"):
        whole({}, AWAY, {"leader_epoch": 4})


@pytest.mark.parametrize("code", [KafkaError._TIMED_OUT, KafkaError._UNKNOWN_PARTITION])
def test_so_they_are_when_none_of_them_answers(code):
    """_UNKNOWN_PARTITION is what librdkafka says if no partition has a leader."""
    assert whole(code) == {("in", 0), ("in", 1), ("in", 2)}


def test_and_when_a_leader_is_gone_before_its_log_is_checked(monkeypatch):
    def late(*_: Any) -> None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    monkeypatch.setattr(_positions, "cut_logs", late)
    assert ("in", 2) in whole({}, {}, {"leader_epoch": 4})


def test_other_errors_are_raised():
    with pytest.raises(KafkaException):
        whole(KafkaError.GROUP_AUTHORIZATION_FAILED)
    with pytest.raises(KafkaException):
        whole({}, {"error": KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)}, {})
