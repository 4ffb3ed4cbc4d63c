"""The messages of a run's topic: read back to count them, or read as they come to measure the latency."""

from __future__ import annotations

import re
import time
from array import array
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from benchmarks.harness.load import child
from benchmarks.harness.results import Run
from benchmarks.harness.servers import PARTITIONS, BenchError, Site

_NUMBER: Final = re.compile(rb'"n": ?(\d+)')
_EOF: Final = KafkaError._PARTITION_EOF
_READ_SECONDS: Final = 60.0
_IDLE_SECONDS: Final = 30.0


@dataclass
class Tally:
    """Which of the events ``first`` … ``first + count - 1`` were seen, and how. Others are passed over.

    repeated    copies beyond the first.
    reordered   events that came after a later one of their key.
    """

    first: int
    count: int
    seen: bytearray = field(default_factory=bytearray)
    found: int = 0
    repeated: int = 0
    reordered: int = 0
    _last: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seen = bytearray(self.count)

    @property
    def lost(self) -> int:
        """How many were not seen."""
        return self.count - self.found

    def add(self, key: bytes | None, value: bytes | None) -> int | None:
        """Count a message. Return the event's number, from 0, if it is seen for the first time; None otherwise."""
        match = _NUMBER.search(value, 0, 64) if value is not None else None
        if match is None or key is None:
            raise BenchError(f"a message that no writer here wrote: {key!r}, {value[:80] if value else value!r}")
        number = int(match[1]) - self.first
        if not 0 <= number < self.count:
            return None
        if self.seen[number]:
            self.repeated += 1
            return None
        self.seen[number] = 1
        self.found += 1
        if self._last.get(key, -1) > number:
            self.reordered += 1
        else:
            self._last[key] = number
        return number

    def note(self, run: Run) -> None:
        """Add the counts to a run. Raises BenchError as ``check`` does."""
        run.repeated += self.repeated
        run.lost += self.lost
        self.check()

    def check(self) -> None:
        """Raise BenchError if an event is missing or out of order: such a run has no figure."""
        if self.lost or self.reordered:
            raise BenchError(f"{self.lost} of {self.count} events are missing, {self.reordered} are out of order")


@dataclass
class Appended:
    """When the broker appended a drain's events, in ms of its clock, and how many came with the first batch."""

    tally: Tally
    begin: int
    end: int
    with_first: int

    @property
    def rate(self) -> float:
        """Events a second from the first append to the last. What came with the first was made before it."""
        seconds = (self.end - self.begin) / 1000
        if seconds <= 0:
            raise BenchError("all events were appended in the same millisecond: take more")
        return (self.tally.count - self.with_first) / seconds


def _consumer(kafka: str, **options: Any) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": "bench",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "log_level": 0,
            **options,
        }
    )


def read_back(site: Site, first: int, count: int) -> Appended:
    """Read the topic to its end; while events are missing, wait for more until nothing new comes for a minute."""
    tally = Tally(first, count)
    times: dict[int, int] = {}
    consumer = _consumer(site.kafka, **{"enable.partition.eof": True, "queued.max.messages.kbytes": 32 << 10})
    consumer.assign([TopicPartition(site.topic, partition, 0) for partition in range(PARTITIONS)])
    ended: set[int] = set()
    deadline = time.monotonic() + _READ_SECONDS
    try:
        while len(ended) < PARTITIONS or tally.lost:
            if time.monotonic() > deadline:
                break
            for message in consumer.consume(1_000, 0.2):
                error = message.error()
                if error is not None:
                    if error.code() != _EOF:
                        raise KafkaException(error)
                    ended.add(message.partition() or 0)
                    continue
                ended.discard(message.partition() or 0)
                if tally.add(message.key(), message.value()) is not None:
                    at = message.timestamp()[1]
                    times[at] = times.get(at, 0) + 1
                    deadline = time.monotonic() + _READ_SECONDS
    finally:
        consumer.close()
    begin = min(times, default=0)
    return Appended(tally, begin, max(times, default=0), times.get(begin, 0))


class Ends:
    """Where the topic ends for readers of what is committed: the sum over its partitions."""

    def __init__(self, site: Site) -> None:
        self._admin = AdminClient({"bootstrap.servers": site.kafka, "log_level": 0})
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        self._asked = {TopicPartition(site.topic, partition): latest for partition in range(PARTITIONS)}

    def now(self) -> int:
        asked = self._admin.list_offsets(self._asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=30)
        return sum(answer.result().offset for answer in asked.values())


def reader(site: Site, first: int, count: int) -> AbstractContextManager[Connection]:
    """Start a process that reads from the topic's present end.

    One second after all events have come, or when nothing comes for half a minute, it sends the times of the first
    sight, in ns of the monotonic clock, by the events' order, and the tally.
    """
    return child(_read, site.kafka, site.topic, first, count)


def _read(kafka: str, topic: str, first: int, count: int, parent: Connection) -> None:
    consumer = _consumer(kafka, **{"fetch.wait.max.ms": 5})
    partitions = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    ends = [consumer.get_watermark_offsets(partition, timeout=30)[1] for partition in partitions]
    consumer.assign([TopicPartition(topic, number, end) for number, end in enumerate(ends)])
    consumer.poll(0.5)
    tally, times = Tally(first, count), array("q", [0]) * count
    parent.send(b"ready")
    deadline = time.monotonic() + _IDLE_SECONDS
    while time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is None or message.error() is not None:
            continue
        now = time.monotonic_ns()
        number = tally.add(message.key(), message.value())
        if number is not None:
            times[number] = now
            # Repeats, if any, follow at once: a second more.
            deadline = time.monotonic() + (_IDLE_SECONDS if tally.lost else 1.0)
    consumer.close()
    parent.send((times, tally))
