"""Rows that were read while the turn before was published: only what comes next is published from them."""

from __future__ import annotations

import secrets
from typing import Any

import psycopg
import pytest
from stream_bench import both, noted, outboxed
from support import backlog

from outbox import Event, Outbox
from relay.core.ports import Receipt, Unavailable, UnsettledBatch

__all__ = ["outboxed"]

NAMES = [f"{key}{number}" for number in range(8) for key in "ab"]


def in_the_stream(outboxed: Any, **options: Any) -> Any:
    """Return an outbox whose relay streams, with all names in its channel, and turns of 4 events."""
    box = outboxed()
    box.relay(batch=4, **options)
    box.streams()
    before = box.given()
    for name in NAMES:
        box.add(name)
    box.read(before + len(NAMES))
    return box


def ahead(box: Any) -> list[str] | None:
    """Return the names of the events whose rows are read ahead, once they are."""
    box.source._table.session.free()
    found = box.source._stream_reader._ahead
    return None if found is None else sorted(row[4] for row in found.rows)


def test_what_was_read_ahead_is_the_next_turn(outboxed):
    box = in_the_stream(outboxed, once=True)
    sent = noted(box)
    for turn in range(4):
        box.turn()
        assert box.kafka.names() == NAMES[: 4 * turn + 4]
        # Only the first turn was not read ahead.
        assert ahead(box) == (sorted(NAMES[4 * turn + 4 : 4 * turn + 8]) or None)
        assert len(sent) == 1
    box.published(*NAMES)
    assert backlog(box.url) == 0
    box.nothing_left()


@both
@pytest.mark.parametrize("point", ["before", "after"])
def test_what_was_not_published_comes_before_what_was_read_ahead(outboxed, once, point):
    """In a turn that failed, or of which it is not known."""
    box = in_the_stream(outboxed, once=once)
    box.turn()
    assert ahead(box) == sorted(NAMES[4:8])
    fails = [True]
    box.kafka.fail = lambda at: Unavailable("away") if at == point and fails and fails.pop() else None
    box.turn()
    box.published(*NAMES)
    assert backlog(box.url) == 0
    box.nothing_left()


def test_rows_that_do_not_fit_are_read_again_as_far_as_they_do(outboxed):
    """No more than a turn's bytes of each lane are ever read."""
    box = outboxed()
    box.relay(batch=4, turn_bytes=70_000)
    box.streams()
    before = box.given()
    names = [f"a{number}" for number in range(12)]
    with psycopg.connect(box.url) as connection:
        for name in names:
            # Random text: a payload that repeats itself is compressed.
            padding = secrets.token_hex(20_000 if name in {"a5", "a6", "a7"} else 10)
            Outbox().add(connection, Event("Order", "a", name, {"pad": padding}))
    box.read(before + len(names))
    box.turn()
    assert box.kafka.names() == names[:4]
    box.source._table.session.free()
    # 120 kB.
    assert [row[0] for row in box.source._stream_reader._ahead.rows] == [None]
    box.turn()
    assert box.kafka.names() == names[:7]
    box.published(*names)
    box.nothing_left()


def test_events_without_a_receipt_come_again_before_what_was_read_ahead_and_a_smaller_turn_is_smaller(outboxed):
    """As of a lane that was not confirmed, and after a turn that did not finish in time."""
    box = in_the_stream(outboxed)
    source, begin = box.source, 0
    for published in (0, 2, 4, 4):
        batch = source.fetch({0: 4}).batches[0]
        assert [claim.event_type for claim in batch] == NAMES[begin : begin + 4]
        assert ahead(box) == sorted(NAMES[begin + 4 : begin + 8])
        receipts = {0: Receipt(UnsettledBatch(batch[:published]))} if published else {}
        assert source.settle(receipts) == {}
        begin += published
    sent = noted(box)
    for limit in (2, 4):
        # The others that were read ahead are the next turn, of which as many are read ahead.
        batch = source.fetch({0: limit}).batches[0]
        assert [claim.event_type for claim in batch] == NAMES[begin : begin + 2]
        assert source.settle({0: Receipt(UnsettledBatch(batch))}) == {}
        begin += 2
    assert sent == []


def test_a_refused_event_takes_the_lane_to_the_table_from_what_was_read_ahead(outboxed):
    box = in_the_stream(outboxed, once=True)
    box.kafka.bad = {"a2"}
    box.turn()
    assert ahead(box) == sorted(NAMES[4:8])
    box.turn()
    assert not box.streaming()
    kept = [name for name in NAMES if name[0] == "b" or name in {"a0", "a1"}]
    box.published(*kept)
    box.kafka.bad = set()
    box.hurry()
    box.until(lambda: backlog(box.url) == 0, "the others")
    assert box.kafka.names("a") == box.written["a"]
    assert box.kafka.names("b") == box.written["b"]


def test_an_event_that_is_announced_again_while_it_is_in_hand_is_not_sent_again(outboxed):
    """Its row is still there when the rows are read ahead, and only because the turn is not settled."""
    box = outboxed()
    box.relay(batch=1, once=True)
    box.streams()
    before = box.given()
    box.add("a0")
    box.rows("""
        WITH again AS (DELETE FROM outbox.events RETURNING *)
        INSERT INTO outbox.events (id, event_id, aggregate_type, aggregate_id, event_type, payload, headers)
        OVERRIDING SYSTEM VALUE
        SELECT id, event_id, aggregate_type, aggregate_id, event_type, payload, headers FROM again RETURNING id""")
    box.add("a1")
    box.read(before + 3)
    box.turn()
    assert ahead(box) == ["a0"]
    box.published("a0", "a1")
    box.nothing_left()


def test_a_lane_that_is_lost_after_its_rows_were_read_ahead_publishes_none_of_them(outboxed):
    box = in_the_stream(outboxed, once=True)
    box.turn()
    assert ahead(box) == sorted(NAMES[4:8])
    box.rows("UPDATE outbox.lanes SET epoch = epoch + 1, owner = 'another' RETURNING lane")
    box.turns(3)
    assert box.kafka.names() == NAMES[:4]


def test_a_connection_that_breaks_while_it_reads_ahead_loses_and_repeats_nothing(outboxed):
    box = in_the_stream(outboxed, once=True)
    box.turn()
    assert box.source._stream_reader._ahead is not None
    box.rows("""
        SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
         WHERE application_name = 'relay' AND datname = current_database() AND position('unnest' IN query) > 0""")
    box.published(*NAMES)
    assert backlog(box.url) == 0


def test_a_lane_that_is_paused_is_read_from_the_table_and_not_from_what_was_read_ahead(outboxed):
    box = in_the_stream(outboxed)
    box.turn()
    assert ahead(box) == sorted(NAMES[4:8])
    assert box.source.pause([0]) == {}
    assert not box.streaming()
    box.published(*NAMES)
    assert backlog(box.url) == 0
