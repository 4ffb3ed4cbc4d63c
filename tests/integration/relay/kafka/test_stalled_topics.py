"""How often brokers are asked about 100 topics that take no messages, by two workers."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from outbox._clients.kafka_client import Admin
from outbox.testing.fixtures import Topics as NewTopics
from relay.core.ports import TopicUnusable
from relay.kafka.metadata import SharedMetadata
from relay.kafka.topics import Topics, Unanswered

NAMES = [f"stalled-{number}" for number in range(100)]


@pytest.fixture
def asked(monkeypatch) -> Counter[str]:
    """The requests of all admin clients, by kind."""
    counts: Counter[str] = Counter()

    def count(name: str) -> None:
        real: Callable[..., Any] = getattr(Admin, name)

        def request(self: Admin, *arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return real(self, *arguments, **options)

        monkeypatch.setattr(Admin, name, request)

    for name in ("list_topics", "describe_configs"):
        count(name)
    return counts


def stalled(kafka: Any, names: list[str], clock: Callable[[], float]) -> Topics:
    """Topics none of whose messages were acknowledged, while others' were."""
    topics = Topics({"bootstrap.servers": kafka.bootstrap_servers}, create=False, clock=clock)
    assert sorted(topics.stalled({name: Unanswered(alone=False) for name in names}, 8.0)) == sorted(names)
    return topics


def test_one_answer_serves_all_topics_for_a_second(outbox_kafka, asked):
    now = 0.0
    workers = [stalled(outbox_kafka, NAMES, lambda: now) for _ in range(2)]
    asked.clear()
    for _ in range(30):
        now += 0.1
        for topics in workers:
            topics.paused()
    # Three seconds of two workers.
    assert 2 <= asked["list_topics"] <= 8
    asked.clear()
    for _ in range(30):
        now += 0.1
        for topics in workers:
            for name in NAMES:
                # It turns out to be missing.
                with pytest.raises(TopicUnusable):
                    topics.require(name)
    assert 2 <= asked["list_topics"] <= 8


def test_readiness_does_not_wait_for_an_answer(outbox_kafka, monkeypatch):
    now = 0.0
    topics = stalled(outbox_kafka, NAMES, lambda: now)
    now += 100.0
    waits, answers = threading.Event(), threading.Event()
    real = Admin.list_topics

    def list_topics(self: Admin, *arguments: Any, **options: Any) -> Any:
        waits.set()
        assert answers.wait(60)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Admin, "list_topics", list_topics)
    turn = threading.Thread(target=topics.paused)
    turn.start()
    assert waits.wait(60)
    looked = threading.Thread(target=topics.reasons)
    looked.start()
    looked.join(30)
    waited = looked.is_alive()
    answers.set()
    turn.join()
    assert not waited
    assert topics.reasons().keys() == set(NAMES)


def test_another_client_asks_once_settings_were_not_answered(outbox_kafka):
    with NewTopics(outbox_kafka.bootstrap_servers) as made, socket.create_server(("127.0.0.1", 0)) as silent:
        name = made.create_topic(made.name("t"), 1)
        metadata = SharedMetadata({"bootstrap.servers": outbox_kafka.bootstrap_servers}, time.monotonic)
        # A client that lost the controller: it knows topics, and its other requests time out.
        metadata.admin = Admin({"bootstrap.servers": f"127.0.0.1:{silent.getsockname()[1]}"})
        assert metadata.min_in_sync(name, [], 0.5) is None
        metadata.forget()
        assert name in metadata.topics(30.0).topics
        assert metadata.min_in_sync(name, [], 30.0) == 1
