"""The messages of logical decoding's ``pgoutput`` plugin, protocol version 1: bytes in, messages out. No I/O.

Layouts: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html. Numbers are big-endian, text
is UTF-8 and ends with a zero byte, an LSN is a 64-bit byte position in the WAL, times count microseconds since 2000.

Every byte string is one message or raises PgOutputError. Messages refer to a relation only by its oid; the Relation
message that describes it comes before, and again whenever the table was altered.
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from outbox.errors import OutboxError

_EPOCH: Final = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)

_BEGIN: Final = struct.Struct(">QqI")
_COMMIT: Final = struct.Struct(">BQQq")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_UINT32: Final = struct.Struct(">I")
_UINT64: Final = struct.Struct(">Q")


class PgOutputError(OutboxError):
    """The bytes are not a message of pgoutput's protocol version 1."""


@dataclass(frozen=True, slots=True)
class Unchanged:
    """An unchanged value that is stored out of line (TOAST), which the server does not send."""


UNCHANGED: Final = Unchanged()

Value = bytes | Unchanged | None
"""A column's value: its text in the server's encoding (or its binary form, if requested); None is NULL."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction begins. ``final_lsn`` is where its commit record is, ``committed_at`` the commit time."""

    final_lsn: int
    committed_at: dt.datetime
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A transaction ends. Streaming that resumes at ``end_lsn`` skips it; at ``commit_lsn`` it would come again."""

    commit_lsn: int
    end_lsn: int
    committed_at: dt.datetime


@dataclass(frozen=True, slots=True)
class Origin:
    """The transaction came from another server, by replication."""

    commit_lsn: int
    name: str


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a relation. ``key`` says that it belongs to the replica identity."""

    name: str
    type_oid: int
    type_modifier: int
    key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """The definition of a table from here on. It includes generated columns only if the publication has them."""

    oid: int
    schema: str
    name: str
    replica_identity: str
    columns: Sequence[Column]


@dataclass(frozen=True, slots=True)
class Type:
    """A data type that is not built in."""

    oid: int
    schema: str
    name: str


class Insert(NamedTuple):
    """A row was inserted: one value for each column of the relation.

    A tuple, not a dataclass: nearly all messages of a stream are inserts.
    """

    relation: int
    new: Sequence[Value]


@dataclass(frozen=True, slots=True)
class Update:
    """A row was updated. ``old`` is its key, the whole row, or None, depending on the replica identity."""

    relation: int
    old: Sequence[Value] | None
    new: Sequence[Value]


@dataclass(frozen=True, slots=True)
class Delete:
    """A row was deleted. ``old`` is its key or the whole row."""

    relation: int
    old: Sequence[Value]


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables were truncated together."""

    relations: Sequence[int]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes that a transaction wrote with pg_logical_emit_message.

    A message that is not ``transactional`` comes immediately, outside of any Begin and Commit.
    """

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


Decoded = Begin | Commit | Origin | Relation | Type | Insert | Update | Delete | Truncate | Message
"""Closed: every match over it ends in assert_never."""


def decode(data: bytes) -> Decoded:
    """Return the decoded message. Raises PgOutputError for anything but exactly one message."""
    if not data:
        raise PgOutputError("pgoutput: an empty message")
    kind = data[:1]
    if kind == b"I":
        insert = _whole_insert(data)
        if insert is not None:
            return insert
    read = _KINDS.get(kind)
    if read is None:
        raise PgOutputError(f"pgoutput: a message of unknown kind {kind!r}; protocol version 1 has none such")
    reader = _Reader(data)
    try:
        message = read(reader)
    except (struct.error, ValueError, OverflowError) as error:
        raise PgOutputError(
            f"pgoutput: a {kind.decode()} message of {len(data)} bytes is damaged at byte {reader.at}: {error}"
        ) from error
    if reader.at != len(data):
        raise PgOutputError(
            f"pgoutput: a {kind.decode()} message of {len(data)} bytes ends at byte {reader.at}: a newer protocol?"
        )
    return message


class _Reader:
    """Reads a message from a position. Raises struct.error or ValueError at its end."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 1

    def take(self, layout: struct.Struct) -> tuple[int, ...]:
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def number(self, layout: struct.Struct) -> int:
        return self.take(layout)[0]

    def byte(self) -> int:
        (value,) = self.bytes(1)
        return value

    def bytes(self, length: int) -> bytes:
        if length < 0 or self.at + length > len(self.data):
            raise ValueError(f"{length} bytes are announced, {len(self.data) - self.at} are there")
        value = self.data[self.at : self.at + length]
        self.at += length
        return value

    def text(self) -> str:
        end = self.data.find(b"\0", self.at)
        if end < 0:
            raise ValueError("a name does not end")
        value = self.data[self.at : end].decode()
        self.at = end + 1
        return value

    def count(self, layout: struct.Struct) -> int:
        value = self.number(layout)
        if value < 0:
            raise ValueError(f"a count of {value}")
        return value

    def row(self) -> tuple[Value, ...]:
        return tuple(self._value() for _ in range(self.count(_INT16)))

    def _value(self) -> Value:
        match self.bytes(1):
            case b"n":
                return None
            case b"u":
                return UNCHANGED
            case b"t" | b"b":
                return self.bytes(self.number(_INT32))
            case other:
                raise ValueError(f"a value of unknown kind {other!r}")


_INSERT_HEAD: Final = struct.Struct(">cIch")


def _whole_insert(data: bytes) -> Insert | None:
    """Return an Insert, read in one loop without calls; None for the forms that only the reader handles."""
    size, unpack = len(data), _INT32.unpack_from
    if size < _INSERT_HEAD.size:
        return None
    _, relation, mark, count = _INSERT_HEAD.unpack_from(data)
    if mark != b"N":
        return None
    text, null = b"tn"
    values: list[Value] = []
    at = _INSERT_HEAD.size
    try:
        for _ in range(count):
            kind = data[at]
            if kind == text:
                (length,) = unpack(data, at + 1)
                start = at + 5
                at = start + length
                if length < 0 or at > size:
                    return None
                values.append(data[start:at])
            elif kind == null:
                values.append(None)
                at += 1
            else:
                return None
    except (struct.error, IndexError):
        return None
    return Insert(relation, tuple(values)) if at == size and count >= 0 else None


def insert_head(relation: int, columns: int) -> bytes:
    """Return the first bytes of a table's Inserts whose first column is text and not NULL; for ``two_numbers``."""
    return _INSERT_HEAD.pack(b"I", relation, b"N", columns) + b"t"


def two_numbers(data: bytes, head: bytes) -> tuple[int, int] | None:
    """Return the values of an Insert with two numeric columns; None for anything else, which ``decode`` handles.

    Nearly all messages are of this form if the publication has only ids and lanes, so it has a fast path.
    """
    start = len(head) + 4
    if data[: len(head)] != head or len(data) < start:
        return None
    middle = start + _INT32.unpack_from(data, len(head))[0]
    try:
        if data[middle] != head[-1] or _INT32.unpack_from(data, middle + 1)[0] != len(data) - middle - 5:
            return None
        return int(data[start:middle]), int(data[middle + 5 :])
    except (ValueError, IndexError, struct.error):
        return None


def _time(microseconds: int) -> dt.datetime:
    return _EPOCH + dt.timedelta(microseconds=microseconds)


def _flags(reader: _Reader, known: int) -> int:
    flags = reader.byte()
    if flags & ~known:
        raise ValueError(f"unknown flags {flags}")
    return flags


def _begin(reader: _Reader) -> Begin:
    lsn, time, xid = reader.take(_BEGIN)
    return Begin(lsn, _time(time), xid)


def _commit(reader: _Reader) -> Commit:
    flags, commit_lsn, end_lsn, time = reader.take(_COMMIT)
    if flags:
        raise ValueError(f"unknown flags {flags}")
    return Commit(commit_lsn, end_lsn, _time(time))


def _origin(reader: _Reader) -> Origin:
    return Origin(reader.number(_UINT64), reader.text())


def _relation(reader: _Reader) -> Relation:
    oid, schema, name = reader.number(_UINT32), reader.text(), reader.text()
    identity = reader.bytes(1).decode()
    columns = tuple(_column(reader) for _ in range(reader.count(_INT16)))
    return Relation(oid, schema, name, identity, columns)


def _column(reader: _Reader) -> Column:
    key = bool(_flags(reader, 1))
    return Column(reader.text(), reader.number(_UINT32), reader.number(_INT32), key)


def _type(reader: _Reader) -> Type:
    return Type(reader.number(_UINT32), reader.text(), reader.text())


def _marked_row(reader: _Reader, mark: bytes) -> tuple[Value, ...]:
    found = reader.bytes(1)
    if found != mark:
        raise ValueError(f"a row marked {found!r}, not {mark!r}")
    return reader.row()


def _insert(reader: _Reader) -> Insert:
    return Insert(reader.number(_UINT32), _marked_row(reader, b"N"))


def _update(reader: _Reader) -> Update:
    relation = reader.number(_UINT32)
    old = None
    if reader.data[reader.at : reader.at + 1] in {b"K", b"O"}:
        reader.at += 1
        old = reader.row()
    return Update(relation, old, _marked_row(reader, b"N"))


def _delete(reader: _Reader) -> Delete:
    relation = reader.number(_UINT32)
    mark: Literal[b"K", b"O"] = b"O" if reader.data[reader.at : reader.at + 1] == b"O" else b"K"
    return Delete(relation, _marked_row(reader, mark))


def _truncate(reader: _Reader) -> Truncate:
    count = reader.count(_INT32)
    flags = _flags(reader, 3)
    if count * _UINT32.size > len(reader.data) - reader.at:
        raise ValueError(f"{count} relations are announced, the message is too short")
    relations = tuple(reader.number(_UINT32) for _ in range(count))
    return Truncate(relations, cascade=bool(flags & 1), restart_identity=bool(flags & 2))


def _message(reader: _Reader) -> Message:
    flags = _flags(reader, 1)
    lsn, prefix = reader.number(_UINT64), reader.text()
    return Message(bool(flags), lsn, prefix, reader.bytes(reader.number(_INT32)))


_KINDS: Final[Mapping[bytes, Callable[[_Reader], Decoded]]] = {
    b"B": _begin,
    b"C": _commit,
    b"O": _origin,
    b"R": _relation,
    b"Y": _type,
    b"I": _insert,
    b"U": _update,
    b"D": _delete,
    b"T": _truncate,
    b"M": _message,
}
