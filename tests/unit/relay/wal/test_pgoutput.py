"""The decoder against hand-made bytes, against an encoder of its own, and against noise."""

from __future__ import annotations

import datetime as dt
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.wal.pgoutput import (
    UNCHANGED,
    Begin,
    Column,
    Commit,
    Delete,
    Insert,
    Message,
    Origin,
    PgOutputError,
    Relation,
    Truncate,
    Type,
    Update,
    decode,
    insert_head,
    two_numbers,
)

NOON = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
NOON_BYTES = bytes.fromhex("000303c6de699000")
"""Microseconds from 2000-01-01 to NOON: 848,577,600 seconds."""


def test_the_hand_made_time_is_right():
    assert int.from_bytes(NOON_BYTES) == (NOON - dt.datetime(2000, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


BY_HAND = {
    "begin": (b"B" + bytes.fromhex("0000000001a2b3c4") + NOON_BYTES + b"\0\0\2\xda", Begin(0x1A2B3C4, NOON, 730)),
    "commit": (b"C\0" + b"\0" * 7 + b"\x10" + b"\0" * 7 + b"\x18" + NOON_BYTES, Commit(16, 24, NOON)),
    "origin": (b"O" + b"\0" * 7 + b"\x05node-1\0", Origin(5, "node-1")),
    "relation": (
        b"R\0\0\x40\x00outbox\0events\0d\0\2\1id\0\0\0\0\x14\xff\xff\xff\xff\0name\0\0\0\0\x19\0\0\0\x0a",
        Relation(16384, "outbox", "events", "d", (Column("id", 20, -1, True), Column("name", 25, 10, False))),
    ),
    "type": (b"Y\0\0\x40\x05shop\0mood\0", Type(16389, "shop", "mood")),
    "insert": (
        b"I\0\0\x40\0N\0\4t\0\0\0\x02ab" + b"n" + b"u" + b"b\0\0\0\0",
        Insert(16384, (b"ab", None, UNCHANGED, b"")),
    ),
    "update": (b"U\0\0\x40\0N\0\1t\0\0\0\1a", Update(16384, None, (b"a",))),
    "update of the key": (
        b"U\0\0\x40\0K\0\1t\0\0\0\1aN\0\1t\0\0\0\1b",
        Update(16384, (b"a",), (b"b",)),
    ),
    "delete": (b"D\0\0\x40\0K\0\1t\0\0\0\1a", Delete(16384, (b"a",))),
    "delete with the whole row": (b"D\0\0\x40\0O\0\1n", Delete(16384, (None,))),
    "truncate": (b"T\0\0\0\2\3\0\0\x40\0\0\0\x40\1", Truncate((16384, 16385), cascade=True, restart_identity=True)),
    "message": (b"M\1" + b"\0" * 7 + b"\x09outbox\0\0\0\0\3abc", Message(True, 9, "outbox", b"abc")),
}


@pytest.mark.parametrize(("data", "expected"), BY_HAND.values(), ids=BY_HAND.keys())
def test_each_kind_by_hand(data, expected):
    assert decode(data) == expected


@pytest.mark.parametrize(("data", "expected"), BY_HAND.values(), ids=BY_HAND.keys())
def test_no_part_of_a_message_and_nothing_longer_is_a_message(data, expected):
    assert decode(data) == expected
    for length in range(len(data)):
        with pytest.raises(PgOutputError):
            decode(data[:length])
    with pytest.raises(PgOutputError, match="newer protocol"):
        decode(data + b"\0")


# --- an encoder, the other way round ---------------------------------------------------------------------------------

UINT32 = st.integers(0, 2**32 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
LSN = st.integers(0, 2**64 - 1)
NAME = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
TIME = st.datetimes(dt.datetime(1990, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(dt.UTC))
ROW = st.lists(st.one_of(st.none(), st.just(UNCHANGED), st.binary(max_size=30)), max_size=8).map(tuple)
COLUMN = st.builds(Column, NAME, UINT32, INT32, st.booleans())
ANY = st.one_of(
    st.builds(Begin, LSN, TIME, UINT32),
    st.builds(Commit, LSN, LSN, TIME),
    st.builds(Origin, LSN, NAME),
    st.builds(Relation, UINT32, NAME, NAME, st.sampled_from("dnfi"), st.lists(COLUMN, max_size=5).map(tuple)),
    st.builds(Type, UINT32, NAME, NAME),
    st.builds(Insert, UINT32, ROW),
    st.builds(Update, UINT32, st.one_of(st.none(), ROW), ROW),
    st.builds(Delete, UINT32, ROW),
    st.builds(Truncate, st.lists(UINT32, max_size=4).map(tuple), st.booleans(), st.booleans()),
    st.builds(Message, st.booleans(), LSN, NAME, st.binary(max_size=50)),
)


def text(value: str) -> bytes:
    return value.encode() + b"\0"


def time(value: dt.datetime) -> bytes:
    return struct.pack(">q", (value - dt.datetime(2000, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1))


def row(values) -> bytes:
    parts = [struct.pack(">h", len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif value is UNCHANGED:
            parts.append(b"u")
        else:
            parts.append(b"t" + struct.pack(">i", len(value)) + value)
    return b"".join(parts)


def encode(message) -> bytes:  # noqa: C901  one case for each kind
    match message:
        case Begin(lsn, at, xid):
            return b"B" + struct.pack(">Q", lsn) + time(at) + struct.pack(">I", xid)
        case Commit(lsn, end, at):
            return b"C\0" + struct.pack(">QQ", lsn, end) + time(at)
        case Origin(lsn, name):
            return b"O" + struct.pack(">Q", lsn) + text(name)
        case Relation(oid, schema, name, identity, columns):
            head = b"R" + struct.pack(">I", oid) + text(schema) + text(name) + identity.encode()
            return (
                head
                + struct.pack(">h", len(columns))
                + b"".join(
                    bytes([c.key]) + text(c.name) + struct.pack(">Ii", c.type_oid, c.type_modifier) for c in columns
                )
            )
        case Type(oid, schema, name):
            return b"Y" + struct.pack(">I", oid) + text(schema) + text(name)
        case Insert(oid, new):
            return b"I" + struct.pack(">I", oid) + b"N" + row(new)
        case Update(oid, old, new):
            return b"U" + struct.pack(">I", oid) + (b"" if old is None else b"O" + row(old)) + b"N" + row(new)
        case Delete(oid, old):
            return b"D" + struct.pack(">I", oid) + b"K" + row(old)
        case Truncate(oids, cascade, restart):
            flags = cascade | restart << 1
            return b"T" + struct.pack(">iB", len(oids), flags) + b"".join(struct.pack(">I", oid) for oid in oids)
        case Message(transactional, lsn, prefix, content):
            head = b"M" + bytes([transactional]) + struct.pack(">Q", lsn) + text(prefix)
            return head + struct.pack(">i", len(content)) + content
    raise AssertionError(message)


@given(ANY)
def test_whatever_is_encoded_is_decoded(message):
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_the_typed_error(data):
    try:
        decode(data)
    except PgOutputError:
        return


@given(ANY, st.data())
def test_a_damaged_message_gives_a_message_or_the_typed_error(message, data):
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(damaged))
    except PgOutputError:
        return


@given(st.integers(0, 2**32 - 1), st.integers(1, 2**63 - 1), st.integers(0, 255))
def test_two_numbers_are_read_as_an_insert_is(relation, id_, lane):
    texts = [str(id_).encode(), str(lane).encode()]
    head = b"I" + struct.pack(">IcH", relation, b"N", 2)
    data = head + b"".join(b"t" + struct.pack(">i", len(text)) + text for text in texts)
    assert two_numbers(data, insert_head(relation, 2)) == (id_, lane)
    assert decode(data).new == tuple(texts)
    # Another table's, and anything else, is left to decode().
    assert two_numbers(data, insert_head(relation ^ 1, 2)) is None
    for short in range(len(data)):
        assert two_numbers(data[:short], insert_head(relation, 2)) is None
    assert two_numbers(data + b"1", insert_head(relation, 2)) is None
