"""The fast way to read an event, against the one that takes any row."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.errors import OutboxError, SchemaError
from relay.core.ports import WalPosition
from relay.wal.channel import StreamEvent
from relay.wal.events import _NEVER, EventReader

OID = 4711
LANES = 256
COLUMNS = b"".join(b"\0" + name + b"\0" + struct.pack(">Ii", 20, -1) for name in (b"id", b"lane"))
RELATION = b"R" + struct.pack(">I", OID) + b"outbox\0events\0d" + struct.pack(">H", 2) + COLUMNS
BEGIN = struct.pack(">cQqI", b"B", 900, 0, 77)
COMMIT = struct.pack(">cBQQq", b"C", 0, 900, 950, 0)


def insert(*texts: bytes, oid: int = OID) -> bytes:
    head = b"I" + struct.pack(">IcH", oid, b"N", len(texts))
    return head + b"".join(b"t" + struct.pack(">i", len(text)) + text for text in texts)


def read(*messages: bytes, fast: bool = True) -> Any:
    """Return the events and the end of the messages, or the type of the error."""
    reader = EventReader("outbox", LANES)
    reader.begin(OID, lambda: None)
    reader.read([RELATION])
    if not fast:
        reader._head = _NEVER
    try:
        reader.read(messages)
    except (OutboxError, ValueError, IndexError) as error:
        return type(error)
    return reader.new, reader.end


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, LANES - 1)), max_size=20))
def test_events_are_read_as_any_row_is(events):
    rows = [insert(str(id_).encode(), str(lane).encode()) for id_, lane in events]
    new, end = read(BEGIN, *rows, COMMIT)
    assert (new, end) == read(BEGIN, *rows, COMMIT, fast=False)
    assert [event for lane in sorted(new) for event in new[lane]] == [
        StreamEvent(id_, WalPosition(900, number, 77))
        for number, (id_, lane) in sorted(enumerate(events, 1), key=lambda each: each[1][1])
    ]
    assert end[0] == 950


@given(st.integers(1, 2**63 - 1), st.integers(0, LANES - 1), st.data())
def test_a_damaged_event_is_read_as_a_damaged_row_is(id_, lane, data):
    row = bytearray(insert(str(id_).encode(), str(lane).encode()))
    match data.draw(st.sampled_from(["cut", "longer", "changed"])):
        case "cut":
            del row[data.draw(st.integers(1, len(row) - 1)) :]
        case "longer":
            row += data.draw(st.binary(min_size=1, max_size=5))
        case _:
            row[data.draw(st.integers(0, len(row) - 1))] = data.draw(st.integers(0, 255))
    assert read(BEGIN, bytes(row)) == read(BEGIN, bytes(row), fast=False)


@pytest.mark.parametrize("messages", [[], [BEGIN, COMMIT]], ids=["before any", "behind one"])
def test_an_event_outside_of_a_transaction_is_an_error(messages):
    assert read(*messages, insert(b"5", b"3")) is SchemaError
