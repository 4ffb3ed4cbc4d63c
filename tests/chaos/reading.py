"""The readers: one that follows the topics while the run is under way, and one that reads all of them at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeVar

import confluent_kafka
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from threads import Threads

from chaos.history import STRANGER, EventIds, Message, Place, Sightings, digest_of
from outbox.consumer.messages import headers_of
from outbox.event import CE_ID, REPLAY
from outbox.sandbox._process import wait_for
from outbox.sandbox.errors import ServiceError
from outbox.testing.fixtures import Topics, token

T = TypeVar("T")

_EOF: Final = KafkaError._PARTITION_EOF
_FATAL: Final = frozenset({KafkaError.OFFSET_OUT_OF_RANGE, KafkaError.TOPIC_AUTHORIZATION_FAILED})
_READ_SECONDS: Final = 120.0
_LEADER_SECONDS: Final = 15.0


def _consumer(bootstrap_servers: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"chaos-{token()}",
            "enable.auto.commit": False,
            # Whatever is lost must be seen, and not passed over.
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 100,
            "queued.max.messages.kbytes": 32_768,
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
        }
    )


def headers(message: confluent_kafka.Message) -> dict[str, str]:
    """Return the headers of a message, whatever it is. To be called once for each message."""
    (found,) = headers_of([message])
    return {name: (value or b"").decode(errors="replace") for name, value in found}


def to_message(message: confluent_kafka.Message, ids: EventIds) -> Message:
    """Return what is kept of a message."""
    named = headers(message)
    topic, partition, offset, key = message.topic(), message.partition(), message.offset(), message.key()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    return Message(
        ids.event(named.get(CE_ID, "")),
        topic,
        partition,
        offset,
        (key or b"").decode(errors="replace"),
        digest_of(message.value(), named.get("content-type")),
        named.get(REPLAY),
        named.get(STRANGER),
        message.timestamp()[1],
    )


def _partitions(topics: Topics, names: Sequence[str]) -> list[TopicPartition]:
    """Return all partitions of these topics, from their beginning. Raises ServiceError when one has no leader for long.

    A broker that was halted has lost its partitions when it goes on, and gets them back a moment later.
    """
    parts: dict[str, list[int]] = {}

    def all_led() -> bool:
        try:
            parts.update((name, topics._partitions(name)) for name in names)
        except KafkaException:
            return False
        return all(parts.values())

    if not wait_for(all_led, _LEADER_SECONDS):
        raise ServiceError(f"no leaders yet: {parts}")
    return [TopicPartition(name, part, 0) for name in names for part in parts[name]]


def read_all(
    topics: Topics,
    names: Sequence[str],
    take: Callable[[confluent_kafka.Message], T],
    first: Mapping[Place, int] = MappingProxyType({}),
) -> Iterator[T]:
    """Return what ``take`` makes of every message that readers of what is committed find, each partition's in order.

    ``first``: where partitions begin from which records were deleted.

    Raises AssertionError while a transaction is open, or when reading takes too long.
    """
    topics.await_transactions(names, _READ_SECONDS)
    consumer = _consumer(topics.bootstrap_servers)
    try:
        partitions = _partitions(topics, names)
        unread = {(each.topic, each.partition) for each in partitions}
        for each in partitions:
            each.offset = first.get((each.topic, each.partition), 0)
        consumer.assign(partitions)
        idle = 0.0
        while unread:
            message = consumer.poll(0.5)
            if message is None:
                idle += 0.5
                assert idle < _READ_SECONDS, f"no answer about {sorted(unread)}"
                continue
            error = message.error()
            if error is None:
                idle = 0.0
                yield take(message)
            elif error.code() == _EOF:
                unread.discard((message.topic(), message.partition()))
            elif error.code() in _FATAL:
                raise KafkaException(error)
    finally:
        consumer.close()


class LiveReader(Threads):
    """Follows topics from their beginning, in a thread, and keeps what it saw where. A topic may come later.

    ``keep``: whether it keeps whole messages, because records are to be deleted.
    """

    def __init__(self, topics: Topics, ids: EventIds, on_event: Callable[[int], None], *, keep: bool = False) -> None:
        self.seen = Sightings()
        self._kept: list[Message] | None = [] if keep else None
        self._on_event = on_event
        self._ids = ids
        self._topics = topics
        self._consumer = _consumer(topics.bootstrap_servers)
        self._new: list[TopicPartition] = []
        self._followed: set[Place] = set()
        self._lock = threading.Lock()
        super().__init__({"live-reader": self._run})

    def follow(self, names: Sequence[str]) -> None:
        """Read these topics too, with the partitions that they have now. Raises ServiceError when one has no leader."""
        partitions = _partitions(self._topics, names)
        with self._lock:
            self._new += [each for each in partitions if (each.topic, each.partition) not in self._followed]
            self._followed |= {(each.topic, each.partition) for each in partitions}

    def deleted(self, ends: Mapping[Place, int]) -> Iterator[Message]:
        """Return what it saw before these offsets, each partition's in order."""
        return (each for each in self._kept or () if each.offset < ends.get((each.topic, each.partition), 0))

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._consumer.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                new, self._new = self._new, []
            if new:
                self._consumer.incremental_assign(new)
            for message in self._consumer.consume(500, 0.1):
                self._take(message)

    def _take(self, message: confluent_kafka.Message) -> None:
        error = message.error()
        if error is not None:
            if error.code() in _FATAL:
                raise KafkaException(error)
            return
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        if self._kept is None:
            event = self._ids.event(headers(message).get(CE_ID, ""))
        else:
            self._kept.append(to_message(message, self._ids))
            event = self._kept[-1].event
        self.seen.add((topic, partition), offset, event)
        if event is not None:
            self._on_event(event)
