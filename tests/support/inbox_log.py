"""What the tests of the inbox's consumer share: a log to read, upkeep ten times a second, and short pauses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from inbox_support import Log
from support import wait_until

from outbox._clients import backoff
from outbox.inbox import _member, _transactions


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name in ("_UPKEEP_SECONDS", "_POLL_SECONDS"):
        # A member that has nothing to do is in poll() between two upkeeps.
        monkeypatch.setattr(_member, name, 0.1)


@pytest.fixture
def short_pauses(monkeypatch):
    """Between the attempts of a member that is interrupted."""
    for module in (backoff, _transactions):
        monkeypatch.setattr(module, "MEMBER_PAUSE", (0.01, 0.05))


@pytest.fixture
def log(outbox_postgres, outbox_kafka) -> Log:
    return Log(outbox_postgres, outbox_kafka)


def keys(count: int, different: int = 10) -> list[str]:
    return [f"k{number % different}" for number in range(count)]


def end(log: Log) -> int:
    """Where a read_committed reader ends."""
    reader = KafkaConsumer({"bootstrap.servers": log.servers, "group.id": "look", "isolation.level": "read_committed"})
    try:
        return reader.get_watermark_offsets(TopicPartition(log.topic, 0), 30)[1]
    finally:
        reader.close()


class Losing(psycopg.Connection[Any]):
    """Loses the answer to a COMMIT when ``lost`` says so, which is asked behind each."""

    lost: Callable[[], bool]

    @contextmanager
    def transaction(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        with super().transaction(*arguments, **options) as block:
            yield block
        if self.lost():
            self.close()
            raise psycopg.OperationalError("the answer is lost")


def losing(log: Log, lost: Callable[[], bool]) -> Callable[[], psycopg.Connection[Any]]:
    def connect() -> psycopg.Connection[Any]:
        connection = Losing.connect(log.database.url)
        connection.lost = lost
        return connection

    return connect


def accept(log: Log) -> None:
    command = ["offsets", "reset", log.group, "--topic", log.topic, "--to", "loss", "--reason", "accounted for"]
    found = log.command(*command)
    assert found.exit_code == 0, found.output


def recreate(log: Log) -> None:
    """Delete the topic, and create it again."""
    admin = AdminClient({"bootstrap.servers": log.servers})
    admin.delete_topics([log.topic], operation_timeout=30)[log.topic].result(30)

    def created() -> bool:
        future = admin.create_topics([NewTopic(log.topic, 1)], operation_timeout=30)[log.topic]
        return future.exception(30) is None

    wait_until(created, what="the topic")
