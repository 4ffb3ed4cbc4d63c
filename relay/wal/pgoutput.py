"""The messages of logical decoding's ``pgoutput`` plugin, protocol version 1: bytes in, messages out. No I/O.

Layouts: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html. Numbers are big-endian, text
is UTF-8 and ends with a zero byte, an LSN is a 64-bit byte position in the WAL, times count microseconds since 2000.

Only messages about inserted rows are decoded, since the publication has only inserts. A message refers to a relation by
its oid; the Relation message that describes it comes first, and again whenever the table was altered.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct, error
from typing import Final, NamedTuple

from outbox.errors import OutboxError

_EPOCH: Final = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
# What Python has dates for, almost: the years 4 to 9985.
_TIMES: Final = range(-63 * 10**15, 252 * 10**15)
# A named tuple's own constructor takes longer than reading the bytes.
_new: Final = tuple.__new__

_BEGIN: Final = Struct(">cQqI")
_COMMIT: Final = Struct(">cBQQq")
_RELATION: Final = Struct(">cI")
_INSERT: Final = Struct(">cIch")
_MESSAGE: Final = Struct(">cBQ")
_COUNT: Final = Struct(">H")
_LENGTH: Final = Struct(">i")
# The replica identity before the number of columns; the type and its modifier behind each column's name.
_IDENTITY_BYTES: Final = 1
_TYPE_BYTES: Final = 8

# Type, Origin, Update, Delete, Truncate.
_SKIPPED: Final = frozenset({b"Y", b"O", b"U", b"D", b"T"})


class PgOutputError(OutboxError):
    """The bytes are not a message of pgoutput's protocol version 1."""


Value = bytes | None
"""A column's value: its text in the server's encoding; None is NULL."""


class Begin(NamedTuple):
    """A transaction begins. ``final_lsn`` is the position of its commit record."""

    final_lsn: int
    xid: int


class Commit(NamedTuple):
    """A transaction ends. Streaming that resumes at ``end_lsn`` skips it."""

    end_lsn: int
    microseconds: int

    @property
    def committed_at(self) -> dt.datetime:
        return _EPOCH + dt.timedelta(microseconds=self.microseconds)


@dataclass(frozen=True, slots=True)
class Relation:
    """The definition of a table from here on. It includes generated columns only if the publication has them."""

    oid: int
    schema: str
    name: str
    columns: Sequence[str]


class Insert(NamedTuple):
    """A row was inserted: one value for each column of the relation."""

    relation: int
    new: Sequence[Value]


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes that a session wrote with pg_logical_emit_message. Their content is not decoded.

    A message that is not ``transactional`` comes immediately, outside of any Begin and Commit.
    """

    transactional: bool
    lsn: int
    prefix: str


Decoded = Begin | Commit | Relation | Insert | Message
"""Closed: every match over it ends in assert_never."""


def decode(data: bytes) -> Decoded | None:
    """Return the decoded message; None for one that is not about inserted rows.

    Raises PgOutputError for bytes that are not exactly one message.
    """
    kind = data[:1]
    if kind in _SKIPPED:
        return None
    read = _KINDS.get(kind)
    if read is None:
        raise PgOutputError(f"pgoutput: a message of unknown kind {kind!r}; protocol version 1 has none such")
    try:
        return read(data)
    except (error, ValueError, IndexError, OverflowError) as problem:
        raise PgOutputError(
            f"pgoutput: a {kind.decode()} message of {len(data)} bytes is damaged, or of a newer protocol: {problem}"
        ) from problem


def insert_head(relation: int, columns: int) -> bytes:
    """Return how a table's Inserts begin whose first column is a short text: up to its length, which is one byte."""
    return _INSERT.pack(b"I", relation, b"N", columns) + b"t\0\0\0"


def insert_tail(number: int) -> bytes:
    """Return how Inserts end whose last column is this number."""
    digits = str(number).encode()
    return b"t" + _LENGTH.pack(len(digits)) + digits


def _begin(data: bytes) -> Begin:
    _, lsn, _, xid = _BEGIN.unpack(data)
    return _new(Begin, (lsn, xid))


def _commit(data: bytes) -> Commit:
    _, flags, _, end_lsn, microseconds = _COMMIT.unpack(data)
    if flags or microseconds not in _TIMES:
        raise ValueError(f"flags {flags}, {microseconds} microseconds from 2000")
    return _new(Commit, (end_lsn, microseconds))


def _relation(data: bytes) -> Relation:
    _, oid = _RELATION.unpack_from(data)
    schema, name, rest = data[_RELATION.size :].split(b"\0", 2)
    (count,) = _COUNT.unpack_from(rest, _IDENTITY_BYTES)
    at = _IDENTITY_BYTES + _COUNT.size
    columns = []
    for _ in range(count):
        _require(rest[at] <= 1, f"unknown flags {rest[at]}")
        end = rest.index(b"\0", at + 1)
        columns.append(rest[at + 1 : end].decode())
        at = end + 1 + _TYPE_BYTES
    _require(at == len(rest), "its length is wrong")
    return Relation(oid, schema.decode(), name.decode(), tuple(columns))


def _insert(data: bytes) -> Insert:
    _, relation, mark, count = _INSERT.unpack_from(data)
    if mark != b"N" or count < 0:
        raise ValueError(f"a row marked {mark!r} with {count} columns")
    text, null = b"tn"
    unpack = _LENGTH.unpack_from
    values: list[Value] = []
    at = _INSERT.size
    for _ in range(count):
        kind = data[at]
        if kind == text:
            (length,) = unpack(data, at + 1)
            start = at + 5
            at = start + length
            if length < 0 or at > len(data):
                raise ValueError(f"a value of {length} bytes")
            values.append(data[start:at])
        elif kind == null:
            values.append(None)
            at += 1
        else:
            raise ValueError(f"a value of unknown kind {kind}")
    _require(at == len(data), "its length is wrong")
    return Insert(relation, tuple(values))


def _message(data: bytes) -> Message:
    _, flags, lsn = _MESSAGE.unpack_from(data)
    _require(flags <= 1, f"unknown flags {flags}")
    prefix, rest = data[_MESSAGE.size :].split(b"\0", 1)
    _require(_LENGTH.unpack_from(rest)[0] == len(rest) - _LENGTH.size, "its length is wrong")
    return Message(bool(flags), lsn, prefix.decode())


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


_KINDS: Final[Mapping[bytes, Callable[[bytes], Decoded]]] = {
    b"B": _begin,
    b"C": _commit,
    b"R": _relation,
    b"I": _insert,
    b"M": _message,
}
