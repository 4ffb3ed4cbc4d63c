"""Two topics and what goes from the one to the other. Fixtures in here are for import."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka.cimpl import TopicPartition
from nursery import NURSERY, Forked
from support import wait_until
from threads import in_background

from outbox.sandbox._process import patience
from outbox.transform import Record, Transformer, _positions

if TYPE_CHECKING:
    from kafka_proxy import KafkaProxy

SCRIPT = Path(__file__).with_name("transformer.py")
KEYS = 200

# The coordinator's answers while it moves or starts.
MOVING = {
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}


class Place:
    """Two topics and a group."""

    def __init__(self, kafka: Any, partitions: int = 4) -> None:
        self.kafka = kafka
        self.partitions = partitions
        self.source = kafka.create_topic(kafka.name("in"), partitions)
        self.target = kafka.create_topic(kafka.name("out"), partitions)
        self.group = kafka.name("group")
        self.options = {"bootstrap.servers": kafka.bootstrap_servers, "topic.metadata.propagation.max.ms": 2_000}
        self.where: dict[int, tuple[int | None, int | None]] = {}
        """Partition and offset of each number."""
        # Kept: tests ask again and again, and to make a client takes far more processor time than to ask.
        soon = {"reconnect.backoff.max.ms": 500}
        self._reader = Consumer({**self.options, **soon, "group.id": self.group, "isolation.level": "read_uncommitted"})

    def feed(
        self,
        numbers: range,
        *,
        bad: int | None = None,
        partition: int | None = None,
        transactional: bool = False,
        commit: bool = True,
    ) -> None:
        in_transaction = {"transactional.id": self.kafka.name("feed")} if transactional else {}
        producer = Producer({**self.options, "enable.idempotence": True, **in_transaction})
        if transactional:
            producer.init_transactions(60)
            producer.begin_transaction()
        more = {} if partition is None else {"partition": partition}

        def sent(number: int) -> Callable[[Any, Message], None]:
            return lambda _error, message: self.where.update({number: (message.partition(), message.offset())})

        for number in numbers:
            value = b"{" if number == bad else json.dumps({"n": number}).encode()
            producer.produce(self.source, value, f"k{number % KEYS}".encode(), on_delivery=sent(number), **more)
            producer.poll(0)
        assert producer.flush(60) == 0
        if transactional and commit:
            producer.commit_transaction(60)
        elif transactional:
            producer.abort_transaction(60)

    def member(
        self, transform: Callable[[Message], Any], *, by: KafkaProxy | None = None, **options: Any
    ) -> Transformer:
        """Return a member of the group, which reaches the brokers by the proxy ``by`` if there is one."""
        # Of a rebalance it hears by a heartbeat.
        kafka = {"heartbeat.interval.ms": 500, **self.options}
        if by is not None:
            kafka["bootstrap.servers"] = by.address
        return Transformer(transform, topics=[self.source], group=self.group, kafka=kafka, **options)

    @contextmanager
    def process(self, batch: int = 100) -> Iterator[Forked]:
        """Run a member that doubles each number, until the block ends."""
        arguments = [self.kafka.bootstrap_servers, self.source, self.target, self.group, str(batch)]
        environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])}
        with tempfile.TemporaryDirectory(prefix="outbox-transformer-") as folder:
            log = Path(folder, "log")
            process = NURSERY.fork([str(SCRIPT), *arguments], environment, log.parent, log)
            try:
                yield process
            finally:
                process.signal(signal.SIGKILL)
                process.wait(30)
                print(log.read_text())

    def position(self) -> int:
        """How many messages the group has committed; what is undecided does not count."""
        return sum(max(place.offset, 0) for place in self.positions())

    def positions(self) -> list[TopicPartition]:
        """Each partition's position, with what was committed with it."""
        asked = [TopicPartition(self.source, number) for number in range(self.partitions)]

        def known() -> list[TopicPartition]:
            try:
                return self._reader.committed(asked, 10)
            except KafkaException as error:
                if error.args[0].code() not in MOVING:
                    raise
                return []

        return wait_until(known, 60, "the group's positions")

    def close(self) -> None:
        self._reader.close()

    def come(self, count: int) -> dict[str, list[int]]:
        """The numbers of each key that a read_committed reader sees."""
        found: dict[str, list[int]] = {}
        for message in self.kafka.consume(self.target, count, timeout=60):
            found.setdefault(message.key().decode(), []).append(json.loads(message.value())["n"])
        return found


def terminate(process: Forked) -> None:
    """Tell a member to end, which it does in order."""
    process.signal(signal.SIGTERM)
    assert process.wait(60 * patience())
    assert process.exit_code == 0


def doubled(count: int) -> dict[str, list[int]]:
    return {
        f"k{key}": [2 * number + part for number in range(key, count, KEYS) for part in (0, 1)] for key in range(KEYS)
    }


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that has no position is taken for a new one when it is said twice, and not after three seconds.

    In each module that has this among its names: not where brokers are restarted, which may not know a position then.
    """
    monkeypatch.setattr(_positions, "NEW_SECONDS", 0.0)


@pytest.fixture
def place(outbox_kafka) -> Iterator[Place]:
    with closing(Place(outbox_kafka)) as made:
        yield made


@contextmanager
def running(member: Transformer) -> Iterator[threading.Event]:
    """Run a member in a thread; its error is the test's."""
    with in_background(member.run) as stop:
        yield stop


def copied(place: Place) -> Callable[[Message], Iterator[Record]]:
    def copy(message: Message) -> Iterator[Record]:
        json.loads(message.value() or b"")
        yield Record(place.target, message.key(), message.value())

    return copy
