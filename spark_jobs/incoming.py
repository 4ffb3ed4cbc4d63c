"""Kafka's columns to those of META, for rows that Spark hands to the task as they are.

Spark can do the same with expressions (session.py), and has to where a transform looks at the rows; but its functions
over a message's headers cost more than all the rest of reading it. A test holds both ways against each other. (They
differ where bytes are no UTF-8 because of half a surrogate pair: Java replaces it by one character, Python by three.)
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs import identity
from spark_jobs.framing import HEADER

COLUMNS: Final = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
"""Of Spark's Kafka source."""

# In microseconds of Unix time.
_FIRST_TIME, _LAST_TIME = (
    int(dt.datetime(*day, tzinfo=dt.UTC).timestamp()) * 1_000_000 for day in ((1, 1, 2), (9999, 12, 30))
)


@dataclass(frozen=True, slots=True)
class Incoming:
    """How messages are taken in.

    types        leave out messages of other event types. None: take all.
    fingerprint  the id is made of key and value, and not looked for in the headers.
    """

    types: tuple[str, ...] | None
    fingerprint: bool

    def taken(self, batch: pa.RecordBatch) -> tuple[dict[str, pa.Array], pa.Array, pa.Array]:
        """Return META's columns, the payloads, and the headers that name a payload's schema, of a batch of COLUMNS."""
        headers = _Headers(batch.column("headers"))
        kinds = _text(headers.first("ce_type", "event-type"))
        if self.types is not None:
            wanted = pc.is_in(kinds, value_set=pa.array(self.types, pa.string()))
            batch, kinds = batch.filter(wanted), kinds.filter(wanted)
            headers = _Headers(batch.column("headers"))
        value = batch.column("value")
        meta = {
            "message_topic": batch.column("topic"),
            "message_part": batch.column("partition"),
            "message_offset": batch.column("offset"),
            "message_key": _text(batch.column("key")),
            "message_type": kinds,
            "message_time": _shown(batch.column("timestamp")),
            "message_tombstone": value.is_null(),
            "message_id": _fingerprints(batch) if self.fingerprint else _ids(headers),
        }
        return meta, value, headers.first(HEADER)


class _Headers:
    """The headers of a batch: names and values in one row, and whose they are."""

    def __init__(self, column: pa.ListArray) -> None:
        self._rows = len(column)
        self._names, self._values = column.flatten().flatten()
        self._owners = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)

    def first(self, name: str, otherwise: str | None = None) -> pa.Array:
        """Return the value of each message's first header of this name; ``otherwise`` where it has none or is null."""
        at = np.flatnonzero(pc.equal(self._names, name).to_numpy(zero_copy_only=False))
        owners = self._owners[at]
        if len(at) != self._rows or not np.array_equal(owners, np.arange(self._rows)):
            places = np.full(self._rows, -1, np.int64)
            # From behind, so that the first one stays.
            places[owners[::-1]] = at[::-1]
            found = self._values.take(pa.array(places, mask=places < 0))
        else:
            found = self._values.take(pa.array(at))
        if otherwise is not None and found.null_count:
            found = pc.coalesce(found, self.first(otherwise))
        return found


def _shown(when: pa.Array) -> pa.Array:
    """Return times within what Postgres and Python can show: a producer may have meant microseconds."""
    limited = pc.max_element_wise(pc.min_element_wise(when.cast(pa.int64()), _LAST_TIME), _FIRST_TIME)
    return limited.cast(when.type)


def _text(column: pa.Array) -> pa.Array:
    """Return bytes as text that Postgres takes: no NUL, and what is no UTF-8 replaced."""
    try:
        text = column.cast(pa.string())
    except pa.ArrowInvalid:
        text = pa.array([None if one is None else one.decode("utf-8", "replace") for one in column.to_pylist()])
    data = text.buffers()[2]
    if data is not None and not np.frombuffer(data, np.uint8).all():
        text = pc.replace_substring(text, "\0", "\ufffd")
    return text


def _ids(headers: _Headers) -> pa.Array:
    """The id as a UUID: what the headers say, or a hash of it when that is no UUID; null when they say nothing."""
    given = headers.first("ce_id", "id")
    _, wrong = identity.parsed(given)
    if not wrong.any():
        return given.cast(pa.string())
    texts: list[str | None] = [None] * len(given)
    sources = headers.first("ce_source").to_pylist()
    for number, (name, hashed) in enumerate(zip(given.to_pylist(), wrong.tolist(), strict=True)):
        if name and hashed:
            # Two sources may use one name (CloudEvents: source and id together are unique).
            texts[number] = identity.uuid8((sources[number] or b"") + b"\0" + name)
        elif name:
            texts[number] = name.decode()
    return pa.array(texts, pa.string())


def _fingerprints(batch: pa.RecordBatch) -> pa.Array:
    keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
    return pa.array([identity.uuid8(content(key, value)) for key, value in zip(keys, values, strict=True)], pa.string())


def content(key: bytes | None, value: bytes | None) -> bytes:
    """Return what a message without an id is told by: NULL and empty are two contents, and so are key and value."""
    length = b"-" if key is None else b"%d" % len(key)
    return b"%s:%s%s%s" % (length, key or b"", b"-" if value is None else b"+", value or b"")
