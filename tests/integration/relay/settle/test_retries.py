"""Failed events on real Postgres: the source's books. No Kafka here."""

from __future__ import annotations

import json
import random
import re

import psycopg
import pytest
from failing_lane import BLOCK, SKIP, hurry, lane, name, outbox, retried, turn
from loop_fakes import all_of, looped
from one_lane import OneLane
from support import backlog, tried, wait_until, write

from outbox import Event
from relay.core.ports import Batches, Receipt, Sent, StandingError, StatementCutShort, UnsettledBatch
from relay.polling.source import PollingSource
from relay.settle.retries import Failures

__all__ = ["lane"]


def test_a_refused_event_makes_its_key_wait_and_no_other(lane):
    source = lane.source(attempts=3)
    lane.add("a1", "b1", "a2", "c1")
    assert turn(source, "a1") == ["b1", "c1"]
    lane.add("a3", "b2")
    assert turn(source) == ["b2"]
    assert turn(source) == []
    hurry(lane)
    assert turn(source) == ["a1"]
    assert turn(source) == ["a2", "a3"]
    assert backlog(lane.database.url) == 0
    assert lane.rows("SELECT * FROM outbox.failures") == []


def test_attempts_back_off_twice_as_long_each_time_up_to_the_longest(lane):
    failures = Failures("outbox", tried(100, 200.0, 900.0), BLOCK)
    source = OneLane(lane.polling(failures), lane.lease)
    lane.add("a1")
    waits = []
    for _ in range(5):
        assert turn(source, "a1") == []
        waits += lane.rows("SELECT extract(epoch FROM next_attempt_at - last_failed_at)::float8 FROM outbox.failures")
        hurry(lane)
    source.close()
    assert [round(wait) for (wait,) in waits] == [200, 400, 800, 900, 900]
    assert lane.rows("SELECT attempts, last_error FROM outbox.failures") == [(5, "a1 is bad")]


def test_the_last_attempt_makes_a_dead_letter_and_with_block_its_key_waits(lane):
    source = lane.source(attempts=2)
    (first, *_) = lane.add("a1", "a2", "b1")
    assert turn(source, "a1") == ["b1"]
    hurry(lane)
    assert turn(source, "a1") == []
    assert lane.dead == ["a1"]
    dead = lane.rows("SELECT event_id::text, event_type, payload, attempts, last_error FROM outbox.dead_letters")
    assert dead == [(first, "a1", {"n": "a1"}, 2, "a1 is bad")]
    hurry(lane)
    assert turn(source) == []
    lane.add("a3", "b2")
    assert turn(source) == ["b2"]
    # Also for the next relay.
    assert turn(lane.source()) == []


def test_with_skip_later_events_wait_while_it_is_tried_and_go_on_when_it_is_dead(lane):
    source = lane.source(SKIP, attempts=2)
    lane.add("a1", "a2")
    assert turn(source, "a1") == []
    assert turn(source) == []
    hurry(lane)
    assert turn(source, "a1") == ["a2"]
    assert lane.rows("SELECT event_type FROM outbox.dead_letters") == [("a1",)]
    assert lane.rows("SELECT * FROM outbox.failures") == []


def test_published_events_of_the_batch_are_settled_with_the_refused_ones_in_one_transaction(lane, monkeypatch):
    source = lane.source()
    lane.add("a1", "b1")
    claims = source.fetch(10)
    source.settle(Receipt(UnsettledBatch([claims[1]])))
    monkeypatch.setattr(Failures, "record", lambda *_: (_ for _ in ()).throw(psycopg.OperationalError("gone")))
    with pytest.raises(Exception, match="gone"):
        source.settle(Receipt(refused=[(claims[0], "no")]))
    assert backlog(lane.database.url) == 2
    assert lane.rows("SELECT * FROM outbox.failures") == []


def test_a_key_with_20000_blocked_events_holds_up_no_other(lane):
    source = lane.source()
    lane.add("a1")
    turn(source, "a1")
    lane.admin.execute(
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) "
        "SELECT 'Order', 'a', 'a' || g, '{}' FROM generate_series(2, 20001) g"
    )
    lane.add("b1", "c1", "a20002", "b2")
    assert turn(source, limit=2) == ["b1", "c1"]
    assert turn(source, limit=2) == ["b2"]
    assert turn(source) == []
    assert backlog(lane.database.url) == 20001
    retried(lane)
    assert turn(source) == ["a1"]
    assert turn(source, limit=3) == ["a2", "a3", "a4"]


def test_the_longest_key_there_can_be_fails_dies_returns_is_archived_and_replayed(lane):
    """4,000 bytes that no compression makes shorter: a btree has no room for them."""
    key = "".join(random.Random(1).choices([chr(code) for code in range(0x20000, 0x2A6DF)], k=1000))
    source = lane.source(attempts=2, archive=True)
    write(lane.database.url, [Event("Order", key, "long1"), Event("Order", key, "long2")])
    lane.add("a1")
    assert turn(source, "long1") == ["a1"]
    hurry(lane)
    assert turn(source, "long1") == []
    assert lane.dead == ["long1"]
    retried(lane)
    assert turn(source) == ["long1"]
    assert turn(source) == ["long2"]
    assert json.loads(outbox(lane, "replay", "--aggregate", f"Order/{key}", "--yes", "--json"))["sent"] == 2
    assert turn(source) == ["long1", "long2"]


REFUSING = """
    CREATE FUNCTION refusing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.event_type = 'long' THEN {}; END IF; RETURN NEW; END $$;
    CREATE TRIGGER refusing BEFORE INSERT ON outbox.published_default FOR EACH ROW EXECUTE FUNCTION refusing()""".format
DROP_REFUSING = "DROP FUNCTION refusing CASCADE"


@pytest.mark.parametrize(
    ("obstacle", "removed", "error"),
    [
        (
            "CREATE INDEX mine ON outbox.published_default (headers)",
            "DROP INDEX outbox.mine",
            r"exceeds btree .*\(table outbox.published_default\): retrying will not help",
        ),
        (
            "ALTER TABLE outbox.published ADD CONSTRAINT short CHECK (octet_length(headers::text) < 3000)",
            "ALTER TABLE outbox.published DROP CONSTRAINT short",
            r"violates check constraint .*\(table outbox.published_default\): retrying will not help",
        ),
        (
            # The role's limit on statements is too short for this one: not told apart from somebody who cancels.
            """
            CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF NEW.event_type = 'long' THEN RAISE query_canceled; END IF; RETURN NEW; END $$;
            CREATE TRIGGER slow BEFORE INSERT ON outbox.published_default FOR EACH ROW EXECUTE FUNCTION slow()""",
            "DROP FUNCTION slow CASCADE",
            "query_canceled",
        ),
        (REFUSING("RAISE 'not today' USING ERRCODE = 'US001'"), DROP_REFUSING, "not today: retrying will not help"),
        (REFUSING("RAISE object_not_in_prerequisite_state"), DROP_REFUSING, "_state: retrying will not help"),
        (REFUSING("RAISE check_violation USING MESSAGE = 'not so'"), DROP_REFUSING, "not so: retrying will not help"),
        (REFUSING("PERFORM dropped()"), DROP_REFUSING, r"function dropped\(\) does not exist: retrying will not help"),
    ],
    ids=["limit", "constraint", "cancelled", "own-code", "raised-passing", "raised-check", "no-function"],
)
def test_what_can_not_be_settled_stops_the_lane_and_is_sent_once(lane, obstacle, removed, error):
    sent: list[str] = []

    def publish(batches: Batches) -> Sent:
        sent.extend(name(claim) for claims in batches.values() for claim in claims)
        return all_of(batches)

    def source() -> PollingSource:
        return lane.polling(Failures("outbox", tried(1, 600.0, 600.0), BLOCK), archive=True)

    lane.admin.execute(obstacle)
    lane.add("a1")
    text = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=5000))
    [bad] = write(lane.database.url, [Event("Order", "b", "long", headers={"text": text})])
    lane.add("c1")
    with looped(source, [lane.lease], publish, batch=2000) as watcher:
        wait_until(lambda: len(watcher.raised) >= 5, what="errors")
        assert sent == ["a1", "long", "c1"]
        last = str(watcher.raised[-1])
        assert re.search(error, last)
        cancelled = error == "query_canceled"
        assert set(map(type, watcher.raised)) == {StatementCutShort if cancelled else StandingError}
        if not cancelled:
            # Those before it are settled.
            assert last.startswith(f"event {bad} is published, but can't be settled: Postgres, settling lane 0: ")
            assert lane.rows("SELECT event_type FROM outbox.published") == [("a1",)]
        lane.admin.execute(removed)
        wait_until(lambda: lane.rows("SELECT count(*) FROM outbox.published") == [(3,)], what="the archive")
    assert sent == ["a1", "long", "c1"]
    assert backlog(lane.database.url) == 0


def test_two_failed_events_of_one_key_are_published_one_after_the_other(lane):
    source = lane.source(attempts=5)
    lane.add("a1", "a2", "a3")
    turn(source, "a1")
    hurry(lane)
    assert turn(source) == ["a1"]
    assert turn(source, "a2") == []
    hurry(lane)
    assert turn(source) == ["a2"]
    assert turn(source) == ["a3"]
