"""Where a lane's events come from: refused ones, the table and the way back into the stream. See stream_bench.

Real brokers and real relays are in acceptance/test_wal_failures.py.
"""

from __future__ import annotations

import secrets

import psycopg
import pytest
from stream_bench import SKIP, confirmed_flush, noted, now_at, outboxed
from support import backlog, wait_until, write

from outbox import Event, Outbox
from relay.core.ports import Receipt, UnsettledBatch
from relay.operations.dead_letters import DeadLetters, Selection
from relay.wal.lane_hash import lane_of
from relay.wal.slot import IDLE_BYTES, heartbeat_prefix

__all__ = ["outboxed"]

# --- refused events --------------------------------------------------------------------------------------------------


def test_a_refused_events_key_waits_in_the_table_and_the_others_go_on(outboxed):
    box = outboxed()
    box.relay(once=True)
    box.streams()
    box.kafka.bad = {"a"}
    box.add("a1", "b1", "a2", "c1")
    box.published("b1", "c1")
    assert not box.streaming()
    assert box.failed() == ["a"]
    box.add("a3", "b2")
    box.published("b1", "c1", "b2")
    assert backlog(box.url) == 3
    box.kafka.bad = set()
    box.turns(5)
    assert backlog(box.url) == 3
    box.hurry()
    box.published("b1", "c1", "b2", "a1", "a2", "a3")
    box.streams()
    assert (backlog(box.url), box.failed()) == (0, [])
    box.add("a4")
    box.published("b1", "c1", "b2", "a1", "a2", "a3", "a4")
    assert (box.held_back(), box.streaming()) == (0, True)


def test_a_relay_that_takes_over_in_the_table_state_goes_on_there(outboxed):
    box = outboxed()
    box.relay(once=True)
    box.streams()
    box.kafka.bad = {"a"}
    box.add("a1", "b1")
    box.published("b1")
    box.relay(once=True)
    box.add("a2", "b2")
    box.published("b1", "b2")
    assert box.failed() == ["a"]
    box.kafka.bad = set()
    box.hurry()
    box.published("b1", "b2", "a1", "a2")
    box.streams()


def test_with_skip_the_key_goes_on_and_a_dead_letter_can_be_put_back(outboxed):
    box = outboxed()
    box.relay(SKIP, attempts=1, once=True)
    box.streams()
    box.kafka.bad = {"a1", "b1"}
    box.add("a1", "b1", "a2")
    box.published("a2")
    assert sorted(box.dead) == ["a1", "b1"]
    box.streams()
    desk = DeadLetters(box.admin, "outbox")
    ids = [row["event_id"] for row in desk.list(Selection())]
    assert desk.discard(Selection(ids[1:]), "no")[0]["event_type"] == "b1"
    box.kafka.bad = set()
    # The lane may learn of it as of a failure, or from the stream.
    assert desk.retry(Selection()) == ids[:1]
    box.published("a2", "a1")
    assert (backlog(box.url), box.failed()) == (0, [])
    box.streams()


def test_a_retried_dead_letter_goes_before_the_later_events_of_its_key(outboxed):
    box = outboxed()
    box.relay(attempts=1)
    box.streams()
    box.kafka.bad = {"a1"}
    box.add("a1", "a2")
    box.until(lambda: box.dead == ["a1"], "the dead letter")
    box.add("a3", "b1")
    box.published("b1")
    box.kafka.bad = set()
    DeadLetters(box.admin, "outbox").retry(Selection())
    box.published("b1", "a1", "a2", "a3")
    box.streams()


def test_a_batch_that_is_refused_as_a_whole_is_halved_until_the_event_is_found(outboxed):
    box = outboxed()
    box.relay(batch=8)
    box.streams()
    box.add("a1", "b1", "c1", "d whole", "d2", "e1", "f1", "g1")
    box.published("a1", "b1", "c1", "e1", "f1", "g1")
    assert box.failed() == ["d"]
    assert backlog(box.url) == 2


def test_a_heartbeat_is_written_for_some_wal_and_not_for_less(outboxed):
    """Each is WAL itself: an outbox at rest, on a server at rest, must not write WAL for ever."""
    box = outboxed()

    def beats() -> int:
        # What is read is flushed, and a message outside of a transaction is not by itself.
        box.rows("SELECT pg_logical_emit_message(true, 'flush', '')")
        query = (
            "SELECT count(*) FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1', "
            "'publication_names', 'outbox_relay', 'messages', 'true') WHERE position(%s::bytea IN data) > 0"
        )
        return box.rows(query, box.names.slot, heartbeat_prefix("outbox").encode())[0][0]

    def at_rest() -> list[int]:
        """Return how many more there are after a try; nothing where others, as autovacuum, wrote WAL meanwhile."""
        before, began = beats(), now_at(box)
        box.cdc._slot.heartbeat(after_lsn=began)
        added = beats() - before
        return [added] if now_at(box) - began < IDLE_BYTES else []

    assert wait_until(at_rest, what="a server at rest") == [0]
    before, began = beats(), now_at(box)
    box.rows("SELECT pg_logical_emit_message(false, 'filler', repeat('x', %s))", IDLE_BYTES + 1)
    box.cdc._slot.heartbeat(after_lsn=began)
    assert beats() == before + 1


def test_what_is_published_is_not_sent_again_because_it_can_not_be_settled(outboxed):
    """At-least-once: neither again and again, nor an older one after a newer one."""
    box = outboxed()
    box.relay()
    box.streams()
    box.kafka.bad = {"b"}
    box.admin.execute("ALTER TABLE outbox.failures ADD CONSTRAINT mine CHECK (aggregate_id <> 'b')")
    box.add("a1", "b1", "c1")
    box.add("d1")
    box.until(lambda: "c1" in box.kafka.names(), "those beside the refused one")
    box.turns(10)
    assert sorted(box.kafka.names()) in (["a1", "c1"], ["a1", "c1", "d1"])
    box.admin.execute("ALTER TABLE outbox.failures DROP CONSTRAINT mine")
    box.kafka.bad = set()
    box.until(lambda: {"b1", "d1"} <= set(box.kafka.names()), "the others")
    box.streams()
    assert sorted(box.kafka.names()) == ["a1", "b1", "c1", "d1"]
    box.admin.execute("""
        CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE query_canceled; END $$;
        CREATE TRIGGER stop BEFORE DELETE ON outbox.events FOR EACH ROW EXECUTE FUNCTION stop()""")
    write(box.url, [Event("Order", "a", "a2")])
    box.until(lambda: "a2" in box.kafka.names(), "it")
    box.turns(5)
    box.admin.execute("DROP FUNCTION stop CASCADE")
    box.until(lambda: backlog(box.url) == 0, "the row to be settled")
    box.turns(5)
    assert box.kafka.names("a") == ["a1", "a2"]


# --- room ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_lane_with_many_events_has_the_bytes_that_others_do_not_need(outboxed, reads_ahead):
    lanes, hot, share = 16, 5, 8192
    box = outboxed(lanes)
    box.relay(turn_bytes=lanes * share)
    box.streams()
    before = box.given()
    keys = {lane_of("Order", key, lanes): key for key in map(str, range(1000))}
    counts = dict.fromkeys(keys, 2) | {hot: 30}
    with psycopg.connect(box.url) as connection:
        for lane, count in counts.items():
            # Random text: a payload that repeats itself is compressed.
            events = [Event("Order", keys[lane], "T", {"pad": secrets.token_hex(1000)}) for _ in range(count)]
            Outbox().add_many(connection, events)
    box.read(before + sum(counts.values()))
    limits = dict.fromkeys(keys, 1) | {hot: 30}
    # While nothing is known of their sizes, each has an equal share.
    batches = box.source.fetch(limits).batches
    assert batches.keys() == keys.keys()
    assert sum(claim.size for claim in batches[hot]) <= share + 2100
    assert box.source.settle({lane: Receipt(UnsettledBatch(batch)) for lane, batch in batches.items()}) == {}
    if not reads_ahead:
        box.source._stream_reader.forget_ahead()
    sent = noted(box)
    batches = box.source.fetch(limits).batches
    assert batches.keys() == keys.keys()
    # A lane asks for a quarter of a turn's bytes at most.
    assert lanes * share // 5 <= sum(claim.size for claim in batches[hot]) <= lanes * share // 4
    assert bool(sent) is not reads_ahead


# --- the table, and back ---------------------------------------------------------------------------------------------


def test_what_is_committed_at_each_step_of_catching_up_comes_once_and_in_order(outboxed):
    """The lane begins with a backlog; between all of its turns another event is committed, old ids late."""
    box = outboxed()
    sent = [f"a{number:03}" for number in range(200)]
    box.add(*sent[:100])
    late = psycopg.connect(box.url)
    Outbox().add(late, Event("Order", "z", "z1"))
    box.relay(batch=30)
    for number, name in enumerate(sent[100:]):
        box.add(name)
        box.turns()
        if number == 5:
            late.commit()
    late.close()
    box.until(lambda: len(box.kafka.published) == 201, "all events")
    box.turns(5)
    assert box.kafka.names("a") == sent
    assert box.kafka.names("z") == ["z1"]
    assert box.streaming()
    assert box.held_back() == 0


def test_an_event_that_was_open_while_the_lane_went_to_the_table_and_back(outboxed):
    box = outboxed()
    box.relay()
    box.streams()
    with psycopg.connect(box.url) as late:
        Outbox().add(late, Event("Order", "z", "z1"))
        box.kafka.bad = {"a1"}
        box.add("a1", "b1")
        box.published("b1")
        box.kafka.bad = set()
        box.hurry()
        box.published("b1", "a1")
        box.streams()
    box.published("b1", "a1", "z1")


def test_published_events_are_archived_from_the_stream_and_from_the_table(outboxed):
    box = outboxed()
    box.relay(archive=True)
    box.streams()
    box.add("a1")
    box.add("b1")
    box.published("a1", "b1")
    box.kafka.bad = {"b2"}
    box.add("b2")
    box.until(lambda: box.failed() == ["b"], "a failure")
    box.kafka.bad = set()
    box.hurry()
    box.published("a1", "b1", "b2")
    assert box.rows("SELECT event_type FROM outbox.published ORDER BY id") == [("a1",), ("b1",), ("b2",)]


def test_messages_of_others_stop_nothing_and_the_slot_goes_past_them(outboxed):
    """Any role of the database can write logical decoding messages, with any prefix."""
    box = outboxed()
    box.relay()
    box.streams()
    for prefix in ("outbox.outbox", heartbeat_prefix("outbox"), "other"):
        for transactional in (True, False):
            box.rows("SELECT pg_logical_emit_message(%s, %s, repeat('x', 300000))", transactional, prefix)
    box.add("a1")
    box.published("a1")
    end = now_at(box)
    box.cdc._slot.heartbeat()
    box.until(lambda: confirmed_flush(box) >= end, "the slot to move on")
    box.nothing_left()
