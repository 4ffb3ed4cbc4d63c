"""Messages in the WAL that are no events, while a lane streams or reads its table."""

from __future__ import annotations

import psycopg
import pytest
from stream_bench import Outboxed, begun, now_at, outboxed, told
from support import wait_until

from outbox import Event, Outbox
from outbox._message import message_prefix
from outbox.errors import ConfigurationError
from relay.operations.dead_letters import DeadLetters, Selection
from relay.wal.session import StreamLimits

__all__ = ["outboxed"]


def foreign(box: Outboxed, content: bytes, *, transactional: bool = True) -> None:
    prefix = message_prefix("outbox")
    box.admin.execute("SELECT pg_logical_emit_message(%s, %s, %s::bytea)", (transactional, prefix, content))


@pytest.mark.parametrize("failing", [False, True], ids=["streaming", "table"])
def test_a_message_that_is_no_event_becomes_a_dead_letter_and_stops_nothing(outboxed, failing):
    box = begun(outboxed, failing=failing)
    box.add("a1", message=True)
    foreign(box, b"\x00\xff no event")
    foreign(box, b"{}\n")
    # More than a row can hold.
    foreign(box, b"x" * 3_000_000)
    box.add("a2", message=True)
    box.published("a1", "a2")
    dead = box.rows("SELECT aggregate_type, event_type, length(payload_bytes) FROM outbox.dead_letters ORDER BY id")
    assert [kind for kind, _, _ in dead] == ["unreadable-message"] * 3
    assert [size for _, _, size in dead] == [11, 3, 990_000]
    assert "3,000,000 bytes" in dead[2][1]
    assert box.dead == [reason for _, reason, _ in dead]
    assert len(DeadLetters(box.admin, "outbox").list(Selection())) == 3 + failing
    assert box.streaming() is not failing
    assert box.failed() == ["z"] * failing


def test_events_without_a_row_do_not_become_dead_letters_because_a_setting_was_forgotten(outboxed):
    """Where some were published before, a relay that takes none does not begin, unless that is what was set."""
    box = outboxed()
    box.relay()
    box.streams()
    box.add("a1", message=True)
    box.published("a1")
    wait_until(lambda: box.turned() and box.cdc.status().slot.message_at, what="a message in the checkpoint")
    box.add("a2", message=True)
    box.relay(limits=StreamLimits(messages=False))
    with pytest.raises(ConfigurationError, match="OUTBOX_WAL__MESSAGES"):
        wait_until(lambda: box.turned() and False, what="the relay to refuse")
    assert box.rows("SELECT FROM outbox.dead_letters") == []
    box.relay()
    box.published("a1", "a2")
    box.relay(limits=StreamLimits(messages=False, refuses_messages=True))
    box.streams()
    box.add("a3", message=True)
    box.until(lambda: len(box.dead) == 1, "a dead letter")
    assert box.kafka.names() == ["a1", "a2"]
    [(content,)] = box.rows("SELECT payload_bytes FROM outbox.dead_letters")
    assert b'"a3"' in content


def test_what_is_no_event_does_not_count_as_one(outboxed):
    """Any role can write it, and must not be able to keep a relay from starting that takes no messages."""
    box = outboxed()
    box.relay(limits=StreamLimits(messages=False))
    box.streams()
    foreign(box, b"no event")
    box.until(lambda: len(box.dead) == 1, "a dead letter")
    passed = now_at(box)
    box.add("a1")
    box.published("a1")
    box.until(lambda: told(box) >= passed, "the checkpoint to be written")
    assert box.cdc.status().slot.message_at is None
    box.relay(limits=StreamLimits(messages=False))
    box.add("a2")
    box.published("a1", "a2")


def test_whatever_a_foreign_program_writes_stops_nothing(outboxed):
    """Heads that are nearly right, with every odd character in every field."""
    box = outboxed()
    box.relay()
    box.streams()
    good = '"version":1,"event_id":"0198a7c4-5d3e-7b21-9c55-2f6d8e1a4b70","payload":"none"'
    odd = ["\\u0000", "\\ud800", "é" * 300, "\\u007f\\u0001", "", "'\\\"", "\U0001f600"]
    fields = ("aggregate_type", "aggregate_id", "event_type", "more\\u0000", "headers")
    count = 0
    for text in odd:
        for field in fields:
            values = {"aggregate_type": "Order", "aggregate_id": "o", "event_type": "o"} | {field: text}
            line = ",".join(f'"{name}":"{value}"' for name, value in values.items() if name != "headers")
            if field == "headers":
                line += f',"headers":{{"x{text}":"{text}"}}'
            foreign(box, ("{" + good + "," + line + "}\n").encode())
            count += 1
    box.add("a1", message=True)
    box.until(lambda: "a1" in box.kafka.names(), "the event behind them")
    (unreadable,) = box.rows("SELECT count(*) FROM outbox.dead_letters")[0]
    assert unreadable + len(box.kafka.published) == count + 1
    assert unreadable > count // 2


@pytest.mark.parametrize("failing", [False, True], ids=["streaming", "table"])
def test_an_event_outside_of_its_transaction_becomes_a_dead_letter(outboxed, failing):
    """Whoever writes with transactional = false has it published although he may roll back: nobody may rely on that."""
    box = begun(outboxed, failing=failing)
    box.kafka.away = True
    # The commit's record is the next one in the WAL: a place of its own all the same.
    with box.admin.transaction():
        Outbox(**box.transport(message=True)).add(box.admin, Event("Order", "a", "a1"))
        foreign(box, b"{}\n not of a transaction", transactional=False)
    box.add("a2", message=True)
    dead = "SELECT aggregate_type, event_type, convert_from(payload_bytes, 'UTF8') FROM outbox.dead_letters"
    box.until(lambda: box.rows(dead), "the dead letter")
    ((kind, reason, payload),) = box.rows(dead)
    assert (kind, payload) == ("unreadable-message", "{}\n not of a transaction")
    assert "transactional = false" in reason
    # Whoever goes on passes by what is done with, and no more.
    box.relay()
    box.kafka.away = False
    box.published("a1", "a2")
    assert len(box.rows(dead)) == 1
    end = box.rows("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint")[0][0]
    box.cdc._slot.heartbeat(0)
    box.until(lambda: box.cdc.status().slot.confirmed_lsn >= end, "the slot to move on")


def test_messages_of_others_and_of_none_are_passed_by(outboxed):
    box = outboxed()
    box.relay()
    box.streams()
    box.add("a1", message=True, commit=False)
    box.admin.execute("SELECT pg_logical_emit_message(true, 'outbox.other', 'x')")
    with psycopg.connect(box.url) as connection:
        outbox = Outbox(**box.transport(message=True))
        outbox.add(connection, Event("Order", "b", "b1"))
        with connection.transaction(force_rollback=True):
            outbox.add(connection, Event("Order", "b", "b2"))
        with connection.transaction():
            outbox.add(connection, Event("Order", "b", "b3"))
    box.published("b1", "b3")
    assert box.rows("SELECT count(*) FROM outbox.dead_letters") == [(0,)]
