"""Read a range of one partition from Kafka, in the task that applies it, and prove that it is complete.

The reader tracks its position, so Kafka proves the end of a range, not the end of an iterator:

| what Kafka sends                               | what it proves                                                      |
|------------------------------------------------|---------------------------------------------------------------------|
| the message before the range's end             | the whole range has come                                            |
| a message at the end or after it               | the same: offsets in between are markers, aborted or compacted      |
| the end of what is committed, at or after it   | the same                                                            |
| the end of what is committed, before it        | nothing: the broker, a new leader, does not have all yet; wait      |
| an error: a lost offset, a corrupt record, ... | the range can't be read: CorruptRecords, NotAuthorized, or else ... |
|                                                | ... ConsumerUnavailable: the driver plans again                     |
| nothing, for ``patience_seconds``              | the same                                                            |

The proof also shows that there is no message between the range's end and the offset of that message or end. The group's
offset moves there, so a long run of aborted transactions after a range is read only once.

Messages come in the order of their offsets; one out of order ends the attempt (InputCut).
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox._clients.callbacks import weak_callback
from outbox._clients.kafka import ConnectionErrors, complete
from outbox._clients.kafka_client import silent_logger
from outbox._clients.kafka_rules import is_end, is_refusal
from outbox.consumer import patience
from outbox.consumer.errors import ConsumerUnavailable, JobError
from outbox.consumer.kafka_errors import of_kafka
from outbox.consumer.messages import headers_of
from outbox.consumer.model import Partition, Range
from spark_jobs.errors import InputCut
from spark_jobs.task.input import TaskInput

if TYPE_CHECKING:
    from spark_jobs.task.incoming import Messages

PATIENCE_SECONDS: Final = 30.0
_OURS: Final = frozenset(
    {
        *("isolation.level", "group.id", "enable.auto.commit", "auto.offset.reset"),
        *("enable.partition.eof", "check.crcs", "statistics.interval.ms"),
    }
)
_ROWS: Final = 10_000
"""The most messages in one batch of a range."""
_BYTES: Final = 16 * 1024 * 1024
"""And the approximate limit in bytes, of which Python, Arrow and COPY have a copy each."""
_AT_ONCE: Final = 2_000
"""The most messages to request from librdkafka in one call."""
_AT_FIRST: Final = 16
"""The same, before their size is known: librdkafka's queue, which is refilled during the call, limits nothing."""
_WAIT_SECONDS: Final = 0.02
_MOST_BYTES: Final = 64 * 1024 * 1024
"""The most that the driver holds at once."""
_SETTINGS: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    # If retention or a truncation has removed the offset, raise an error instead of reading elsewhere.
    "auto.offset.reset": "error",
    "allow.auto.create.topics": False,
    "check.crcs": True,
    # Shows progress in records that are not delivered: see RangeReader._progress.
    "statistics.interval.ms": 1000,
    # How long a broker waits at the end of a partition whose last record is a transaction marker: only its answer
    # shows that no message follows.
    "fetch.wait.max.ms": 20,
    # Limits what is read ahead beyond the range, which is read again with the next range.
    "fetch.message.max.bytes": 2 * 1024 * 1024,
    "queued.max.messages.kbytes": 8 * 1024,
    # By default librdkafka pauses for a second when its queue is full.
    "fetch.queue.backoff.ms": 5,
}


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """How a task reaches Kafka.

    options  librdkafka's: addresses and credentials, and the user's own settings of its consumer.
    group    the consumer group, from which the client's ``group.id`` is made; the client joins no group.
    """

    options: Mapping[str, str] = field(repr=False)
    group: str
    patience_seconds: float = PATIENCE_SECONDS

    def librdkafka(self) -> dict[str, Any]:
        """Return librdkafka's options. Raises JobError for one that the consumer must set itself."""
        for name in _OURS & self.options.keys():
            raise JobError(f"kafka option {name!r} is set by the consumer itself; remove it")
        return {**_SETTINGS, **self.options, "group.id": f"{self.group}-spark"}


class TooMuch(Exception):
    """A few messages are too large to be held at once."""


class _RangeProgress:
    """How much of one partition's range has been read."""

    def __init__(self, partition: Partition, span: Range, without: Collection[int]) -> None:
        self.partition = partition
        self.end = span.end
        self.at = span.start
        self.size = 0
        self.whole = span.start >= span.end
        self._without = frozenset(without)

    def take(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages that belong to the range, and record the progress. Raises InputCut."""
        if self.whole:
            return []
        offsets = [message.offset() or 0 for message in messages]
        for here, there in zip([self.at - 1, *offsets], offsets, strict=False):
            if there <= here:
                raise InputCut(
                    f"{self.partition[0]}-{self.partition[1]}: Kafka sent offset {there} where {here + 1} or a later "
                    "one was to come; nothing was committed"
                )
        if offsets:
            self.reach(next((offset for offset in offsets if offset >= self.end), offsets[-1] + 1))
        if not self._without and (not offsets or offsets[-1] < self.end):
            return list(messages)
        pairs = zip(messages, offsets, strict=True)
        return [message for message, offset in pairs if offset < self.end and offset not in self._without]

    def reach(self, at: int) -> None:
        """Record that no message is outstanding before this offset. Ignored once the range is complete."""
        if not self.whole:
            self.at = max(self.at, at)
            self.whole = self.at >= self.end

    def require_whole(self) -> None:
        """Raise InputCut unless Kafka has proved that the whole range has come."""
        if not self.whole:
            raise InputCut(
                f"{self.partition[0]}-{self.partition[1]}: read up to offset {self.at}, and the range ends at "
                f"{self.end}; nothing was committed. A retry reads the same range again"
            )


class RangeReader:
    """Reads ranges, one after the other, with one client. For one thread at a time; must be closed.

    ``broken`` is true after an error, and while a range is read: the client must not be used for another range then.
    """

    def __init__(self, settings: ReaderSettings) -> None:
        self.patience_seconds = settings.patience_seconds
        self._heard = 0.0
        self._fetched: dict[tuple[str, str], int] = {}
        self._refused: KafkaError | None = None
        self._connections = ConnectionErrors()
        self.broken = False
        try:
            self._consumer = Consumer(
                {
                    **complete(settings.librdkafka()),
                    "stats_cb": weak_callback(self._progress),
                    "error_cb": weak_callback(self._hear),
                },
                logger=silent_logger(),
            )
        except KafkaException as error:
            raise JobError(f"kafka: {error.args[0]}") from error

    def close(self) -> None:
        self._consumer.close()

    def poll(self) -> None:
        """Handle what the client has reported between two ranges; it has no messages then."""
        self._consumer.poll(0)

    def range(self, partition: Partition, span: Range, without: Collection[int] = ()) -> TaskInput[Messages]:
        """Return a range's messages, except for the offsets ``without``; they are read during iteration."""
        progress = _RangeProgress(partition, span, without)
        return TaskInput(self._parts(progress), progress.require_whole, progress)

    def whole(
        self, ranges: Mapping[Partition, Range], without: Mapping[Partition, Collection[int]]
    ) -> dict[Partition, TaskInput[Messages]]:
        """Read several ranges at once into memory, for few messages. Raises TooMuch."""
        from spark_jobs.task.incoming import Messages

        spans = {
            partition: _RangeProgress(partition, span, without.get(partition, ())) for partition, span in ranges.items()
        }
        found: dict[Partition, list[Messages]] = {partition: [] for partition in spans}
        size = 0
        for part, bytes_read in self._read(spans):
            for partition, messages in part.items():
                found[partition].append(messages)
                spans[partition].size += messages.size
            size += bytes_read
            if size > _MOST_BYTES:
                raise TooMuch
        return {
            partition: TaskInput(
                [Messages.joined(parts)] if parts else [], spans[partition].require_whole, spans[partition]
            )
            for partition, parts in found.items()
        }

    def _parts(self, span: _RangeProgress) -> Iterator[Messages]:
        from spark_jobs.task.incoming import Messages

        held: list[Messages] = []
        rows = size = 0
        for part, bytes_read in self._read({span.partition: span}):
            held += part.values()
            span.size += bytes_read
            rows, size = rows + sum(map(len, part.values())), size + bytes_read
            if rows >= _ROWS or size >= _BYTES:
                yield Messages.joined(held)
                held, rows, size = [], 0, 0
        if held:
            yield Messages.joined(held)

    def _read(self, spans: Mapping[Partition, _RangeProgress]) -> Iterator[tuple[dict[Partition, Messages], int]]:
        """Read until all ranges are complete. Yields new messages by partition, and their bytes."""
        unread = {partition: span for partition, span in spans.items() if not span.whole}
        if not unread:
            return
        # Until the end: a caller that stops in the middle leaves messages in the client's queue.
        self.broken = True
        try:
            self._consumer.assign([TopicPartition(*partition, span.at) for partition, span in unread.items()])
            self._heard = time.monotonic()
            self._refused = None
            at_once = _AT_FIRST
            while unread:
                most = min(at_once, sum(span.end - span.at for span in unread.values()))
                with _GARBAGE_COLLECTION.off():
                    messages = self._consumer.consume(most, _WAIT_SECONDS)
                    taken = self._sorted(messages, unread).items()
                    part = {partition: _columns(partition, some) for partition, some in taken if some}
                size = sum(some.size for some in part.values())
                if part:
                    mean = size // sum(map(len, part.values()))
                    at_once = max(1, min(_AT_ONCE, _BYTES // max(1, mean)))
                if messages:
                    self._heard, self._refused = time.monotonic(), None
                    self._connections.forget()
                elif time.monotonic() - self._heard > patience.current().longest(self.patience_seconds):
                    patience.current().silent(self._heard)
                    if self._refused is not None:
                        raise of_kafka(self._refused, f"Kafka, reading {_shown(unread)}")
                    raise ConsumerUnavailable(
                        f"Kafka: nothing of {_shown(unread)} came for {time.monotonic() - self._heard:.0f} s; nothing "
                        f"was committed{self._connections.reason}"
                    )
                whole = [partition for partition, span in unread.items() if span.whole]
                for partition in whole:
                    del unread[partition]
                if whole and unread:
                    self._consumer.incremental_unassign([TopicPartition(*partition) for partition in whole])
                yield part, size
            self._consumer.unassign()
        except KafkaException as error:
            explained = self._connections.explained(error)
            raise of_kafka(explained.args[0], f"Kafka, reading {_shown(unread)}") from error
        self.broken = False

    def _progress(self, statistics: str) -> None:
        """Record progress of the client without messages, as in a long run of aborted transactions.

        Only extends the waiting time: what librdkafka has fetched proves nothing about what it has delivered.
        """
        topics = orjson.loads(statistics)["topics"]
        fetched = {
            (topic, part): figures["next_offset"]
            for topic, of_topic in topics.items()
            for part, figures in of_topic["partitions"].items()
        }
        if fetched != self._fetched:
            self._fetched = fetched
            self._heard = time.monotonic()

    def _hear(self, error: KafkaError) -> None:
        """Record that a broker refuses the client, which is the only sign of why no messages come."""
        self._connections.hear(error)
        if is_refusal(error):
            self._refused = error

    def _sorted(
        self, messages: Sequence[Message], spans: Mapping[Partition, _RangeProgress]
    ) -> dict[Partition, list[Message]]:
        """Return the messages of each partition. Raises KafkaException for an error."""
        if len(spans) == 1 and not any(message.error() for message in messages):
            ((partition, span),) = spans.items()
            if any((message.topic(), message.partition()) != partition for message in messages):
                raise InputCut(f"{partition[0]}-{partition[1]}: Kafka sent messages of another partition")
            return {partition: span.take(messages)}
        taken: dict[Partition, list[Message]] = {partition: [] for partition in spans}
        for message in messages:
            partition = (message.topic() or "", message.partition() or 0)
            error = message.error()
            if error is None and partition in spans:
                taken[partition] += spans[partition].take([message])
            elif error is not None and is_end(error) and partition in spans:
                # Its offset is that of the next message.
                spans[partition].reach(message.offset() or 0)
        return taken


def _shown(spans: Mapping[Partition, _RangeProgress]) -> str:
    named = [f"{topic}-{part} from offset {span.at}" for (topic, part), span in spans.items()]
    return ", ".join(named[:3]) + (f" and {len(named) - 3} partitions more" if len(named) > 3 else "")


def _columns(partition: Partition, messages: Sequence[Message]) -> Messages:
    from spark_jobs.task.incoming import Messages

    return Messages(
        *partition,
        [message.offset() or 0 for message in messages],
        [message.timestamp()[1] for message in messages],
        [message.key() for message in messages],
        [message.value() for message in messages],
        headers_of(messages),
    )


class _GarbageCollection:
    """Switches Python's garbage collection off while any thread wants that; a driver may run several consumers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._without = 0
        self._was = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable it inside the block: creating many small objects takes half the time without searches for cycles."""
        with self._lock:
            if self._without == 0:
                self._was = gc.isenabled()
                gc.disable()
            self._without += 1
        try:
            yield
        finally:
            with self._lock:
                self._without -= 1
                if self._without == 0 and self._was:
                    gc.enable()


_GARBAGE_COLLECTION: Final = _GarbageCollection()


_Name = tuple[int, str, frozenset[tuple[str, str]]]
_KEPT: dict[_Name, RangeReader] = {}


@contextmanager
def kept(settings: ReaderSettings) -> Iterator[RangeReader]:
    """Yield this process's reader, which stays connected between tasks. For one thread at a time."""
    # The process id, because a fork copies this table but not librdkafka's threads.
    name = (os.getpid(), settings.group, frozenset(settings.options.items()))
    # In a Spark worker, nothing else polls the reader of a group that has ended.
    _poll(one for one in list(_KEPT) if one[1] != settings.group)
    reader = _KEPT.pop(name, None) or RangeReader(settings)
    # The patience may have changed since the reader was opened.
    reader.patience_seconds = settings.patience_seconds
    try:
        yield reader
    except BaseException:
        reader.broken = True
        raise
    finally:
        if reader.broken or _KEPT.setdefault(name, reader) is not reader:
            reader.close()


def poll_kept(group: str) -> None:
    """Handle what this process's readers of a group have reported: statistics wait in their clients without limit."""
    _poll(name for name in list(_KEPT) if name[1] == group)


def _poll(names: Iterable[_Name]) -> None:
    for name in names:
        if reader := _KEPT.pop(name, None):
            reader.poll()
            if _KEPT.setdefault(name, reader) is not reader:
                reader.close()


def close_kept(group: str) -> None:
    """Close this process's readers of a group. Other threads may use those of other groups."""
    for name in [name for name in list(_KEPT) if name[1] == group]:
        if reader := _KEPT.pop(name, None):
            reader.close()
