"""Reads the records of the outbox's topics: all since a time, or the one at an offset."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from outbox._clients.kafka_client import silent_logger
from outbox._clients.kafka_rules import is_end
from outbox.event import CE_ID, CE_SOURCE, CE_TIME, DEAD_LETTER, REPLAY
from relay.core.ports import Unavailable
from relay.kafka.client import headers_of, reader_options, unavailable_on_kafka_error
from relay.kafka.offsets import Offsets, Partition, Undecided

_SECONDS: Final = 30.0
_AT_ONCE: Final = 5000
_WAIT_SECONDS: Final = 0.2
_MOST_NAMED: Final = 10

Record = TypeVar("Record")


class TopicRecord(NamedTuple):
    """One record. ``mark`` distinguishes a replay or a dead-letter copy from its event, which has the same id.

    ``copy``: it is a dead-letter copy, or a replay of one.

    ``source`` and ``written`` are the headers ``ce_source`` and ``ce_time``, empty without them. ``headers`` are there
    if it was read alone.
    """

    partition: Partition
    offset: int
    milliseconds: int
    event_id: str | None
    mark: str
    copy: bool
    value: bytes | None
    key: bytes | None
    source: str
    written: str
    headers: Mapping[str, str | bytes | None] | None = None


def committed_since(
    options: Mapping[str, str], since: Mapping[str, int], seconds: float = math.inf
) -> Iterator[Sequence[TopicRecord]]:
    """Yield the committed records of each topic, in groups, from a time (milliseconds) up to its current end.

    Ignores topics that do not exist. Raises Unavailable when one may not be seen, can't be read to its end, or not
    within ``seconds``: after the records of those that can.
    """
    with unavailable_on_kafka_error(f"reading {', '.join(sorted(since))}"):
        offsets = Offsets(options)
        partitions = offsets.partitions(since)
        forbidden = offsets.forbidden(since.keys() - {at.topic for at in partitions})
        # Including open transactions: a committed event may be behind one.
        ends = offsets.high(partitions)
        starts: dict[Partition, int] = {}
        for milliseconds in set(since.values()):
            starts |= offsets.since([at for at in partitions if since[at.topic] == milliseconds], milliseconds)
        # A negative offset means that all records are older.
        starts = {found: start for found, start in starts.items() if 0 <= start < ends[found]}
        yield from read(options, starts, ends, _seen, isolation="read_committed", seconds=seconds)
        if forbidden:
            raise Unavailable(
                f"Kafka: {', '.join(forbidden)} may not be seen with these credentials: grant DESCRIBE and READ"
            )


def record_at(options: Mapping[str, str], place: Partition, offset: int, seconds: float) -> TopicRecord | None:
    """Return the committed record at an offset, with its key and headers; None if there is none any more.

    Raises Unavailable when Kafka does not return it within ``seconds``.
    """
    more = {"enable.partition.eof": True, "auto.offset.reset": "error", "queued.min.messages": 1}
    consumer = Consumer(reader_options(options, "outbox-trace", "read_committed", more), logger=silent_logger())
    where = f"reading {place.topic} partition {place.number} at offset {offset}"
    deadline = time.monotonic() + seconds
    try:
        with unavailable_on_kafka_error(where):
            consumer.assign([TopicPartition(place.topic, place.number, offset)])
            while (left := deadline - time.monotonic()) > 0:
                for message in consumer.consume(1, left):
                    error = message.error()
                    if error is None:
                        if message.offset() != offset:
                            return None  # the next one, where retention, compaction or an abort left a gap
                        headers = headers_of(message)
                        return _seen(place, message, headers)._replace(headers=headers)
                    if error.code() in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE} or is_end(error):
                        return None
    finally:
        consumer.close()
    raise Unavailable(f"Kafka, {where}: no answer within {seconds:g} s")


def first_times(
    options: Mapping[str, str], offsets: Offsets, starts: Mapping[Partition, int], *, group: str = "outbox-reconcile"
) -> dict[Partition, int]:
    """Return the time of each partition's first committed record from an offset on, in milliseconds, if there is one.

    offsets  asks the same brokers. Raises Unavailable.
    """
    found: dict[Partition, int] = {}

    def note(place: Partition, message: Message) -> None:
        found.setdefault(place, message.timestamp()[1])

    with unavailable_on_kafka_error("looking for the first records"):
        stable = offsets.stable(starts)
        there = {place: start for place, start in starts.items() if start < stable[place]}
        ends = {place: start + 1 for place, start in there.items()}
        for _ in read(options, there, ends, note, isolation="read_committed", group=group):
            pass
    return found


def behind(options: Mapping[str, str], undecided: Collection[Undecided]) -> Iterator[Sequence[TopicRecord]]:
    """Yield all records from where each partition is undecided to its end, including those of open transactions."""
    with unavailable_on_kafka_error("reading what is undecided"):
        starts = {found.partition: found.stable for found in undecided}
        ends = {found.partition: found.end for found in undecided}
        yield from read(options, starts, ends, _seen, isolation="read_uncommitted")


def read(
    options: Mapping[str, str],
    starts: Mapping[Partition, int],
    ends: Mapping[Partition, int],
    make: Callable[[Partition, Message], Record],
    *,
    isolation: str,
    seconds: float = math.inf,
    group: str = "outbox-reconcile",
) -> Iterator[Sequence[Record]]:
    """Yield what is made of each record from ``starts`` on, in groups, until all partitions have been read to ``ends``.

    Records behind an end may be among them. Raises Unavailable when a partition can't be read to its end, or not within
    ``seconds``, and KafkaException.
    """
    if not starts:
        return
    # A small buffer: what is read is added up at once. When it is full, librdkafka waits for a second by default.
    buffer = {"queued.max.messages.kbytes": 4096, "fetch.queue.backoff.ms": 10}
    more = {"enable.partition.eof": True, "auto.offset.reset": "earliest", **buffer}
    consumer = Consumer(reader_options(options, group, isolation, more), logger=silent_logger())
    try:
        consumer.assign([TopicPartition(found.topic, found.number, start) for found, start in starts.items()])
        unread, refused = set(starts), set[Partition]()
        known: dict[tuple[str, int], Partition] = {found: found for found in starts}
        began = heard = time.monotonic()
        late = False
        while unread:
            seen: list[Record] = []
            before = set(unread)
            messages = consumer.consume(_AT_ONCE, _WAIT_SECONDS)
            messages.reverse()
            while messages:
                # Dropped one by one: the garbage collector would scan the headers of all: a quarter of the time.
                message = messages.pop()
                named = message.topic() or "", message.partition() or 0
                # An error may be that of a topic, or of the client.
                found = known.get(named) or Partition(*named)
                error = message.error()
                if error is None:
                    seen.append(make(found, message))
                elif error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    # What other topics have is worth more than this error: it is raised after them.
                    refused |= {one for one in unread if one.topic == found.topic}
                    unread -= refused
                    continue
                if _ends(error, message.offset() or 0, ends.get(found)):
                    unread.discard(found)
            if done := before - unread:
                # What follows is not wanted: a busy topic has no end.
                consumer.pause([TopicPartition(found.topic, found.number) for found in done])
            if seen:
                yield seen
                heard = time.monotonic()
            now = time.monotonic()
            late = now - began > seconds
            if late or now - heard > _SECONDS:
                break
        _check_complete(unread, refused, seconds if late else _SECONDS)
    finally:
        consumer.close()


def _ends(error: KafkaError | None, offset: int, end: int | None) -> bool:
    """Return whether a partition has been read up to ``end``; None: it is an error of none. Raises KafkaException."""
    following = offset + 1 if error is None else offset
    return (error is None or is_end(error)) and end is not None and following >= end


def _check_complete(unread: Collection[Partition], refused: Collection[Partition], seconds: float) -> None:
    why = []
    if unread:
        why.append(
            f"{_named(unread)} could not be read to the end within {seconds:g} s; is a transaction of another producer "
            "open there?"
        )
    if refused:
        why.append(f"{_named(refused)} may not be read with these credentials: grant READ on the topic")
    if why:
        raise Unavailable(f"Kafka: {'; '.join(why)}")


def _named(partitions: Collection[Partition]) -> str:
    names = [f"{found.topic} partition {found.number}" for found in sorted(partitions)]
    return ", ".join(names[:_MOST_NAMED] + ["…"] * (len(names) > _MOST_NAMED))


def _seen(partition: Partition, message: Message, headers: Mapping[str, Any] | None = None) -> TopicRecord:
    # They can be read only once.
    headers = headers_of(message) if headers is None else headers
    value, key = message.value(), message.key()
    return TopicRecord(
        partition,
        message.offset() or 0,
        message.timestamp()[1],
        _uuid(header_text(headers.get(CE_ID))),
        header_text(headers.get(REPLAY) or headers.get(DEAD_LETTER)),
        DEAD_LETTER in headers,
        value if isinstance(value, bytes) else None,
        key if isinstance(key, bytes) else None,
        header_text(headers.get(CE_SOURCE)),
        header_text(headers.get(CE_TIME)),
    )


def _uuid(text: str) -> str | None:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        return None


def header_text(value: str | bytes | None) -> str:
    """Return a header as text; empty without one."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value or ""
    # Postgres takes none. Another character, as without it this would be another id or mark.
    return text.replace("\0", "\ufffd")
