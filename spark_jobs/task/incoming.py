"""From Kafka messages to the columns of META, and what a task needs to decode the messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import itemgetter
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.consumer.ids import key_id, uuid8
from outbox.consumer.letters import DeadLetter
from outbox.consumer.messages import (
    FIRST_TIME,
    LAST_TIME,
    NOT_UTF8,
    Headers,
    UndecodableHeaders,
    stored_headers,
)
from outbox.consumer.model import MessageRef, RejectedRecord
from outbox.event import CE_TRACEPARENT, CE_TRACESTATE, TRACEPARENT, TRACESTATE
from spark_jobs import ids as identity
from spark_jobs.payloads.framing import HEADER

_Named = Sequence[Mapping[str, bytes | None]]
"""Each message's headers by name. If several have the same name, the first one counts."""

# W3C Trace Context. As it demands, invalid headers are ignored.
_TRACE: Final = {
    TRACEPARENT: re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    TRACESTATE: re.compile(rb"[ -~]{1,512}"),
}


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of one partition, column by column.

    milliseconds  Kafka's timestamps, in Unix time.
    keys, values  None is Kafka's null.
    headers       of each message, in their original order.
    """

    topic: str
    part: int
    offsets: Sequence[int]
    milliseconds: Sequence[int]
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[Headers]

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def size(self) -> int:
        """The total bytes of keys, values and the values of headers."""
        of_headers = map(itemgetter(1), chain.from_iterable(self.headers))
        return sum(map(len, filter(None, chain(self.keys, self.values, of_headers))))

    @staticmethod
    def joined(parts: Sequence[Messages]) -> Messages:
        """Concatenate messages of one partition; there must be at least one part."""
        columns = zip(*((p.offsets, p.milliseconds, p.keys, p.values, p.headers) for p in parts), strict=True)
        listed: list[list[Any]] = [list(chain.from_iterable(column)) for column in columns]
        return Messages(parts[0].topic, parts[0].part, *listed)

    def traces(self, most: int) -> list[tuple[str, str | None]]:
        """Return up to ``most`` distinct traces: each message's of the last hop, or else that of the writer."""
        found: dict[tuple[str, str | None], None] = {}
        for headers in self.headers:
            trace = _trace_of(_by_name(headers))
            if trace is not None:
                found[trace] = None
                if len(found) == most:
                    break
        return list(found)

    def only(self, numbers: Sequence[int]) -> Messages:
        listed: list[list[Any]] = [
            [column[number] for number in numbers]
            for column in (self.offsets, self.milliseconds, self.keys, self.values, self.headers)
        ]
        return Messages(self.topic, self.part, *listed)

    @property
    def times(self) -> pa.Array:
        """The timestamps, limited to the range of Postgres and Python: a producer may have sent microseconds."""
        limited = np.clip(np.asarray(self.milliseconds, np.int64), FIRST_TIME, LAST_TIME)
        return pa.array(limited * 1_000, pa.timestamp("us", "UTC"))


@dataclass(frozen=True, slots=True)
class Incoming:
    """Selects messages and converts them to columns.

    types   select only messages of these event types. None: all.
    ids     their source: "headers"; "content": key and value, whatever the headers say; "columns": decoded columns,
            from which Spark makes them; "place": the headers or else the message's place.
    traced  add the columns of the message's trace: see effects.produce.Traced.
    key     of "headers" and "place": a header that counts before the id, see Dedup.
    """

    types: tuple[str, ...] | None
    ids: Literal["headers", "content", "columns", "place"]
    traced: bool = False
    key: str | None = None

    def taken(self, messages: Messages) -> tuple[dict[str, pa.Array], pa.Array, pa.Array, pa.Array]:
        """Return the columns of META, the payloads, the headers that refer to their schemas, and problems or null."""
        messages, headers, kinds = self._chosen(messages)
        values = pa.array(messages.values, pa.binary())
        meta = {
            "message_topic": pa.repeat(messages.topic, len(messages)),
            "message_part": pa.repeat(pa.scalar(messages.part, pa.int32()), len(messages)),
            "message_offset": pa.array(messages.offsets, pa.int64()),
            "message_key": _text(pa.array(messages.keys, pa.binary())),
            "message_type": kinds,
            "message_time": messages.times,
            "message_tombstone": values.is_null(),
            "message_id": self._ids(messages, headers),
            **(_traces(headers) if self.traced else {}),
        }
        problems = pa.array(
            [NOT_UTF8 if isinstance(one, UndecodableHeaders) else None for one in messages.headers], pa.string()
        )
        return meta, values, _values(headers, HEADER), problems

    def chosen(self, messages: Messages) -> Messages:
        return messages if self.types is None else self._chosen(messages)[0]

    def letters(self, messages: Messages, why: Callable[[MessageRef], RejectedRecord]) -> list[DeadLetter]:
        """Return each message as a dead letter. ``why`` returns the reason for the message at a place."""
        unknown = self.ids in {"content", "columns"}
        ids = [None] * len(messages) if unknown else self._named(list(map(_by_name, messages.headers))).to_pylist()
        times = messages.times.cast(pa.int64()).to_pylist()
        return [
            DeadLetter(why((messages.topic, messages.part, offset)), id_, key, value, stored_headers(headers), time)
            for offset, id_, key, value, headers, time in zip(
                messages.offsets, ids, messages.keys, messages.values, messages.headers, times, strict=True
            )
        ]

    def _chosen(self, messages: Messages) -> tuple[Messages, _Named, pa.Array]:
        headers = list(map(_by_name, messages.headers))
        kinds = _text(_values(headers, "ce_type", "event-type"))
        if self.types is None:
            return messages, headers, kinds
        # The types of messages with undecodable headers can't be relied on.
        undecodable = pa.array([isinstance(one, UndecodableHeaders) for one in messages.headers], pa.bool_())
        wanted = pc.or_(pc.is_in(kinds, value_set=pa.array(self.types, pa.string())), undecodable)
        messages = messages.only(pc.indices_nonzero(wanted).to_pylist())
        return messages, list(compress(headers, wanted.to_pylist())), kinds.filter(wanted)

    def _ids(self, messages: Messages, headers: _Named) -> pa.Array:
        if self.ids == "content":
            pairs = zip(messages.keys, messages.values, strict=True)
            return pa.array([uuid8(content(key, value)) for key, value in pairs], pa.string())
        if self.ids == "columns":
            return pa.nulls(len(messages), pa.string())
        ids = self._named(headers)
        if self.ids == "headers" or not ids.null_count:
            return ids
        times = messages.times.cast(pa.int64()).to_pylist()
        made = [
            id_ or uuid8(place(messages.topic, messages.part, offset, time))
            for id_, offset, time in zip(ids.to_pylist(), messages.offsets, times, strict=True)
        ]
        return pa.array(made, pa.string())

    def _named(self, headers: _Named) -> pa.Array:
        """Return the ids from the headers, with those of the keys."""
        ids = _ids(headers)
        keys = _values(headers, self.key).to_pylist() if self.key is not None else []
        if not any(keys):
            return ids
        of_each = (
            _values(headers, *names).to_pylist() for names in (("ce_id", "id"), ("ce_source",), ("aggregate-type",))
        )
        made = [
            # For an event without a key of its own, the relay's header is the event's id.
            id_ if not key or key == given else key_id(source or b"", kind or b"", key)
            for id_, key, given, source, kind in zip(ids.to_pylist(), keys, *of_each, strict=True)
        ]
        return pa.array(made, pa.string())


def _by_name(headers: Headers) -> dict[str, bytes | None]:
    named = dict(headers)
    return named if len(named) == len(headers) else dict(reversed(headers))


def _values(headers: _Named, name: str, otherwise: str | None = None) -> pa.Array:
    """Return each message's header of this name, or of the name ``otherwise`` if that is missing or null."""
    found = [named.get(name) for named in headers]
    if otherwise is not None and None in found:
        pairs = zip(headers, found, strict=True)
        found = [named.get(otherwise) if value is None else value for named, value in pairs]
    return pa.array(found, pa.binary())


def _traces(headers: _Named) -> dict[str, pa.Array]:
    traces = [_trace_of(named) or (None, None) for named in headers]
    return {
        TRACEPARENT: pa.array([parent for parent, _ in traces], pa.string()),
        TRACESTATE: pa.array([state for _, state in traces], pa.string()),
    }


def _trace_of(named: Mapping[str, bytes | None]) -> tuple[str, str | None] | None:
    """Return the trace of the last hop, or else that of the writer; None if neither is valid."""
    for parent, state in ((TRACEPARENT, TRACESTATE), (CE_TRACEPARENT, CE_TRACESTATE)):
        found = _fitting(named.get(parent), TRACEPARENT)
        if found is not None:
            return found, _fitting(named.get(state), TRACESTATE)
    return None


def _fitting(value: bytes | None, name: str) -> str | None:
    return value.decode("ascii") if value is not None and _TRACE[name].fullmatch(value) else None


def _text(column: pa.Array) -> pa.Array:
    """Return bytes as text that Postgres accepts: NUL and bytes that are not UTF-8 are replaced."""
    try:
        text = column.cast(pa.string())
    except pa.ArrowInvalid:
        text = pa.array([None if one is None else one.decode("utf-8", "replace") for one in column.to_pylist()])
    data = text.buffers()[2]
    if data is not None and not np.frombuffer(data, np.uint8).all():
        text = pc.replace_substring(text, "\0", "\ufffd")
    return text


def _ids(headers: _Named) -> pa.Array:
    """Return the ids from the headers; a hash of an id that is not a UUID; null if there is none."""
    given = _values(headers, "ce_id", "id")
    _, wrong = identity.parsed(given)
    if not wrong.any():
        return given.cast(pa.string())
    texts: list[str | None] = [None] * len(given)
    sources = _values(headers, "ce_source").to_pylist()
    for number, (name, hashed) in enumerate(zip(given.to_pylist(), wrong.tolist(), strict=True)):
        if name and hashed:
            # Two sources may use the same id (CloudEvents: source and id together are unique).
            texts[number] = uuid8((sources[number] or b"") + b"\0" + name)
        elif name:
            texts[number] = name.decode()
    return pa.array(texts, pa.string())


def content(key: bytes | None, value: bytes | None) -> bytes:
    """Return the content that identifies a message without an id. Null and empty differ, and so do key and value."""
    length = b"-" if key is None else b"%d" % len(key)
    return b"%s:%s%s%s" % (length, key or b"", b"-" if value is None else b"+", value or b"")


def place(topic: str, part: int, offset: int, microseconds: int) -> bytes:
    """Return the place that identifies a message without an id, for jobs that need none.

    It includes the time: otherwise messages of a recreated topic would get the ids of earlier ones.
    """
    return f"{topic}/{part}/{offset}/{microseconds}".encode()
