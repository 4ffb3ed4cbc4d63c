"""Reads the records of the outbox's topics: all since a time, or the one at an offset."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox._clients.kafka_client import silent_logger
from outbox.event import CE_ID, DEAD_LETTER, REPLAY
from relay.core.ports import Unavailable
from relay.kafka.client import headers_of, is_end, reader_options, text_of
from relay.kafka.offsets import Offsets, Partition, Undecided

_SECONDS: Final = 30.0
_AT_ONCE: Final = 5000
_WAIT_SECONDS: Final = 0.2
_MOST_NAMED: Final = 10


class TopicRecord(NamedTuple):
    """One record. ``mark`` distinguishes a replay or a dead-letter copy from its event, which has the same id.

    Its key and headers are there if it was read alone: any bytes, or None.
    """

    partition: Partition
    offset: int
    milliseconds: int
    event_id: str | None
    mark: str
    value: bytes | None
    key: bytes | None = None
    headers: Mapping[str, str | bytes | None] | None = None


def committed_since(
    options: Mapping[str, str], since: Mapping[str, int], seconds: float = math.inf
) -> Iterator[Sequence[TopicRecord]]:
    """Yield the committed records of each topic, in groups, from a time (milliseconds) up to its current end.

    Ignores topics that do not exist. Raises Unavailable when one can't be read to its end, or not within ``seconds``:
    after the records of those that can.
    """
    try:
        offsets = Offsets(options)
        partitions = offsets.partitions(since)
        # Including open transactions: a committed event may be behind one.
        ends = offsets.high(partitions)
        starts: dict[Partition, int] = {}
        for milliseconds in set(since.values()):
            starts |= offsets.since([at for at in partitions if since[at.topic] == milliseconds], milliseconds)
        # A negative offset means that all records are older.
        starts = {found: start for found, start in starts.items() if 0 <= start < ends[found]}
        yield from _read(options, starts, ends, isolation="read_committed", seconds=seconds)
    except KafkaException as error:
        raise Unavailable(f"Kafka, reading {', '.join(sorted(since))}: {text_of(error)}") from error


def record_at(options: Mapping[str, str], place: Partition, offset: int, seconds: float) -> TopicRecord | None:
    """Return the committed record at an offset, with its key and headers; None if there is none any more.

    Raises Unavailable when Kafka does not return it within ``seconds``.
    """
    more = {"enable.partition.eof": True, "auto.offset.reset": "error", "queued.min.messages": 1}
    consumer = Consumer(reader_options(options, "outbox-trace", "read_committed", more), logger=silent_logger())
    where = f"Kafka, reading {place.topic} partition {place.number} at offset {offset}"
    deadline = time.monotonic() + seconds
    try:
        consumer.assign([TopicPartition(place.topic, place.number, offset)])
        while (left := deadline - time.monotonic()) > 0:
            for message in consumer.consume(1, left):
                error = message.error()
                if error is None:
                    # The next one, where retention, compaction or an abort left a gap.
                    return _whole(place, message) if message.offset() == offset else None
                if error.code() in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE} or is_end(error):
                    return None
    except KafkaException as error:
        raise Unavailable(f"{where}: {text_of(error)}") from error
    finally:
        consumer.close()
    raise Unavailable(f"{where}: no answer within {seconds:g} s")


def behind(options: Mapping[str, str], undecided: Collection[Undecided]) -> Iterator[Sequence[TopicRecord]]:
    """Yield all records from where each partition is undecided to its end, including those of open transactions."""
    try:
        starts = {found.partition: found.stable for found in undecided}
        ends = {found.partition: found.end for found in undecided}
        yield from _read(options, starts, ends, isolation="read_uncommitted")
    except KafkaException as error:
        raise Unavailable(f"Kafka, reading what is undecided: {text_of(error)}") from error


def _read(
    options: Mapping[str, str],
    starts: Mapping[Partition, int],
    ends: Mapping[Partition, int],
    *,
    isolation: str,
    seconds: float = math.inf,
) -> Iterator[Sequence[TopicRecord]]:
    if not starts:
        return
    more = {"enable.partition.eof": True, "auto.offset.reset": "earliest"}
    consumer = Consumer(reader_options(options, "outbox-reconcile", isolation, more), logger=silent_logger())
    try:
        consumer.assign([TopicPartition(found.topic, found.number, start) for found, start in starts.items()])
        unread, refused = set(starts), set[Partition]()
        began = heard = time.monotonic()
        late = False
        while unread:
            seen: list[TopicRecord] = []
            for message in consumer.consume(_AT_ONCE, _WAIT_SECONDS):
                found = Partition(message.topic() or "", message.partition() or 0)
                error = message.error()
                if error is None:
                    seen.append(_seen(found, message))
                elif error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    # What other topics have is worth more than this error: it is raised after them.
                    refused |= {one for one in unread if one.topic == found.topic}
                    unread -= refused
                elif is_end(error) and (message.offset() or 0) >= ends[found]:
                    unread.discard(found)
            if seen:
                yield seen
                heard = time.monotonic()
            now = time.monotonic()
            late = now - began > seconds
            if late or now - heard > _SECONDS:
                break
        if unread or refused:
            raise _incomplete(unread, refused, seconds if late else _SECONDS)
    finally:
        consumer.close()


def _incomplete(unread: Collection[Partition], refused: Collection[Partition], seconds: float) -> Unavailable:
    why = []
    if unread:
        why.append(
            f"{_named(unread)} could not be read to the end within {seconds:g} s; is a transaction of another producer "
            "open there?"
        )
    if refused:
        why.append(f"{_named(refused)} may not be read with these credentials: grant READ on the topic")
    return Unavailable(f"Kafka: {'; '.join(why)}")


def _named(partitions: Collection[Partition]) -> str:
    names = [f"{found.topic} partition {found.number}" for found in sorted(partitions)]
    return ", ".join(names[:_MOST_NAMED] + ["…"] * (len(names) > _MOST_NAMED))


def _whole(partition: Partition, message: Message) -> TopicRecord:
    key, headers = message.key(), headers_of(message)
    found = _seen(partition, message, headers)
    return found._replace(key=key if isinstance(key, bytes) else None, headers=headers)


def _seen(partition: Partition, message: Message, headers: Mapping[str, Any] | None = None) -> TopicRecord:
    # They can be read only once.
    headers = headers_of(message) if headers is None else headers
    value = message.value()
    return TopicRecord(
        partition,
        message.offset() or 0,
        message.timestamp()[1],
        _uuid(_text(headers.get(CE_ID))),
        _text(headers.get(REPLAY) or headers.get(DEAD_LETTER)),
        value if isinstance(value, bytes) else None,
    )


def _uuid(text: str) -> str | None:
    """Return the id in Postgres's form; None for a message that is not the outbox's."""
    try:
        return str(uuid.UUID(text))
    except ValueError:
        return None


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
