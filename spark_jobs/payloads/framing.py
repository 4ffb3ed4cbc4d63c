"""How a message refers to the schema it was written with: the wire formats of Confluent's serializers.

| where                                 | bytes                                                        |
|---------------------------------------|--------------------------------------------------------------|
| before the payload                    | 0x00, id (4 bytes, big-endian)                               |
| in the header ``__value_schema_id``   | 0x01, GUID (16 bytes); the payload then has no prefix        |
| Protobuf, after either                | the path to the message in its file: a list of zigzag varints |
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

from spark_jobs.payloads.reading import Problem

HEADER: Final = "__value_schema_id"

_MOST_INDEXES: Final = 64
"""The deepest nesting of a message type that is accepted."""


@dataclass(frozen=True, slots=True)
class Framed:
    """A payload without its framing. ``indexes``: the path to a Protobuf message in its file, otherwise empty."""

    schema: int | uuid.UUID
    indexes: tuple[int, ...]
    payload: bytes


def unframe(value: bytes, header: bytes | None, *, indexes: bool) -> Framed:
    """Remove the framing. ``indexes``: the payload is Protobuf, with the path to its message. Raises Problem."""
    source, where = (value, "the payload") if header is None else (header, f"the header {HEADER}")
    schema: int | uuid.UUID
    if source[:1] == b"\0":
        end = 5
        schema = int.from_bytes(source[1:5], "big")
    elif source[:1] == b"\1":
        end = 17
        schema = uuid.UUID(bytes=source[1:17].ljust(16, b"\0"))
    else:
        raise Problem(f"{where} does not begin with a schema's id")
    if len(source) < end:
        raise Problem(f"{where} ends within a schema's id")
    path: tuple[int, ...] = ()
    if indexes:
        path, end = _indexes(source, end, where)
    if header is None:
        return Framed(schema, path, value[end:])
    if end != len(header):
        raise Problem(f"{where} has more than a schema's id")
    return Framed(schema, path, value)


def _indexes(source: bytes, start: int, where: str) -> tuple[tuple[int, ...], int]:
    count, position = _varint(source, start, where)
    if count == 0:
        # The short form for the file's first message.
        return (0,), position
    if not 0 < count <= _MOST_INDEXES:
        raise Problem(f"{where} does not say which message of the schema it is")
    path = []
    for _ in range(count):
        index, position = _varint(source, position, where)
        if index < 0:
            raise Problem(f"{where} does not say which message of the schema it is")
        path.append(index)
    return tuple(path), position


def _varint(source: bytes, position: int, where: str) -> tuple[int, int]:
    number = shift = 0
    while position < len(source) and shift < 35:
        byte = source[position]
        position += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return (number >> 1) ^ -(number & 1), position
    raise Problem(f"{where} does not say which message of the schema it is")
