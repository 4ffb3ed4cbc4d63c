"""What a transformer says of topics that Kafka does not show it, or shows with an error."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError

from outbox.transform import KafkaRefused, _topics


def require(*topics: str) -> None:
    """The topic "good" is there, and the leader of "new" is not known yet."""
    errors = {"good": None, "new": KafkaError(KafkaError.LEADER_NOT_AVAILABLE)}
    known = SimpleNamespace(topics={name: SimpleNamespace(error=error) for name, error in errors.items()})
    consumer = SimpleNamespace(list_topics=lambda timeout: known)
    plan = SimpleNamespace(topics=topics, group="g")
    _topics.require_topics(cast("Any", consumer), cast("Any", plan), threading.Event())


def test_the_right_to_see_a_topic_and_its_error_are_named(monkeypatch):
    monkeypatch.setattr(_topics, "MISSING_TOPIC_SECONDS", 0.0)
    require("good", "^pattern")
    with pytest.raises(KafkaRefused, match=r"topic gone does not exist, or the client may not DESCRIBE it"):
        require("good", "gone")
    with pytest.raises(KafkaRefused, match=r"group 'g': topic new can't be read: Broker: Leader not available"):
        require("new")
