"""The decoder against hand-made bytes and noise. tests/integration/relay/wal/test_pgoutput.py has a server's."""

from __future__ import annotations

import datetime as dt

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


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_the_typed_error(data):
    try:
        decode(data)
    except PgOutputError:
        return


@given(st.sampled_from([data for data, _ in BY_HAND.values()]), st.data())
def test_a_damaged_message_gives_a_message_or_the_typed_error(message, data):
    damaged = bytearray(message)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(damaged))
    except PgOutputError:
        return
    if isinstance(found, Commit):
        assert found.committed_at.tzinfo is dt.UTC
