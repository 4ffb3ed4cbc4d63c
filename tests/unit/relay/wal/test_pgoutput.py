"""The decoder against hand-made bytes, against an encoder of its own, and against noise."""

from __future__ import annotations

import datetime as dt
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.wal.pgoutput import Begin, Commit, Insert, Message, PgOutputError, Relation, decode

NOON = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
NOON_BYTES = bytes.fromhex("000303c6de699000")
"""Microseconds from 2000-01-01 to NOON: 848,577,600 seconds."""


def test_the_hand_made_time_is_right():
    assert int.from_bytes(NOON_BYTES) == (NOON - dt.datetime(2000, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)
    assert Commit(24, int.from_bytes(NOON_BYTES)).committed_at == NOON


BY_HAND = {
    "begin": (b"B" + bytes.fromhex("0000000001a2b3c4") + NOON_BYTES + b"\0\0\2\xda", Begin(0x1A2B3C4, 730)),
    "commit": (b"C\0" + b"\0" * 7 + b"\x10" + b"\0" * 7 + b"\x18" + NOON_BYTES, Commit(24, int.from_bytes(NOON_BYTES))),
    "relation": (
        b"R\0\0\x40\x00outbox\0events\0d\0\2\1id\0\0\0\0\x14\xff\xff\xff\xff\0name\0\0\0\0\x19\0\0\0\x0a",
        Relation(16384, "outbox", "events", ("id", "name")),
    ),
    "insert": (b"I\0\0\x40\0N\0\3t\0\0\0\x02ab" + b"n" + b"t\0\0\0\0", Insert(16384, (b"ab", None, b""))),
    "message": (b"M\1" + b"\0" * 7 + b"\x09outbox\0\0\0\0\3abc", Message(True, 9, "outbox")),
}


@pytest.mark.parametrize(
    "data",
    [
        b"O" + b"\0" * 7 + b"\x05node-1\0",
        b"Y\0\0\x40\x05shop\0mood\0",
        b"U\0\0\x40\0N\0\1t\0\0\0\1a",
        b"D\0\0\x40\0K\0\1t\0\0\0\1a",
        b"T\0\0\0\2\3\0\0\x40\0\0\0\x40\1",
    ],
    ids=["origin", "type", "update", "delete", "truncate"],
)
def test_what_is_not_about_inserted_rows_is_skipped(data):
    assert decode(data) is None


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
LSN = st.integers(0, 2**64 - 1)
NAME = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
MICROSECONDS = st.integers(-(10**15), 10**16)
ROW = st.lists(st.one_of(st.none(), st.binary(max_size=30)), max_size=8).map(tuple)
ANY = st.one_of(
    st.builds(Begin, LSN, UINT32),
    st.builds(Commit, LSN, MICROSECONDS),
    st.builds(Relation, UINT32, NAME, NAME, st.lists(NAME, max_size=5).map(tuple)),
    st.builds(Insert, UINT32, ROW),
    st.builds(Message, st.booleans(), LSN, NAME),
)


def text(value: str) -> bytes:
    return value.encode() + b"\0"


def row(values) -> bytes:
    parts = [struct.pack(">h", len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        else:
            parts.append(b"t" + struct.pack(">i", len(value)) + value)
    return b"".join(parts)


def encode(message) -> bytes:
    match message:
        case Begin(lsn, xid):
            return b"B" + struct.pack(">Q", lsn) + NOON_BYTES + struct.pack(">I", xid)
        case Commit(end, at):
            return b"C\0" + struct.pack(">QQq", 1, end, at)
        case Relation(oid, schema, name, columns):
            head = b"R" + struct.pack(">I", oid) + text(schema) + text(name) + b"d" + struct.pack(">h", len(columns))
            return head + b"".join(b"\1" + text(column) + struct.pack(">Ii", 20, -1) for column in columns)
        case Insert(oid, new):
            return b"I" + struct.pack(">I", oid) + b"N" + row(new)
        case Message(transactional, lsn, prefix):
            head = b"M" + bytes([transactional]) + struct.pack(">Q", lsn) + text(prefix)
            return head + struct.pack(">i", 3) + b"abc"
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
        found = decode(bytes(damaged))
    except PgOutputError:
        return
    if isinstance(found, Commit):
        assert found.committed_at.tzinfo is dt.UTC
