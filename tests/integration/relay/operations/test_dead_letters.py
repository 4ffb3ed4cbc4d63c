"""What a person does with failed events: list, show, retry, discard, by command and as an operator."""

from __future__ import annotations

import json

import pytest
from failing_lane import SKIP, half, hurry, lane, name, outbox, retried, turn
from one_lane import OneLane
from support import backlog, wait_until
from typer.testing import CliRunner

from outbox import Event, Outbox
from relay.cli.app import app
from relay.kafka.routing import Router
from relay.operations.dead_letters import Selection
from relay.polling import low_water_mark

__all__ = ["lane"]


def test_a_retried_dead_letter_goes_first_and_the_events_behind_it_follow(lane):
    source = lane.source()
    (first, *_) = lane.add("a1", "a2", "b1")
    turn(source, "a1")
    lane.add("a3")
    assert retried(lane, first) == [first]
    assert lane.rows("SELECT * FROM outbox.dead_letters") == []
    assert turn(source) == ["a1"]
    assert turn(source) == ["a2", "a3"]
    assert lane.rows("SELECT * FROM outbox.failures") == []


NOBODY = "019f0000-0000-7000-8000-000000000000"


@pytest.fixture
def raise_the_mark(lane, monkeypatch):
    """Let a source read from far above, as one does that has run for long: the waits between the steps are left out."""
    monkeypatch.setattr(low_water_mark, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(low_water_mark, "_SETTLE_SECONDS", 0.0)

    def risen(source: OneLane) -> bool:
        turn(source)
        turn(source)
        # A row with an id that nobody reads any more.
        lane.admin.execute(
            "INSERT INTO outbox.events (id, aggregate_type, aggregate_id, event_type) OVERRIDING SYSTEM VALUE "
            "VALUES (-1, 'Order', 'probe', 'probe')"
        )
        seen = source.fetch(100)
        lane.admin.execute("DELETE FROM outbox.events WHERE id = -1")
        return not seen

    def raise_it(source: OneLane) -> None:
        lane.add("z1")
        wait_until(lambda: risen(source), what="the mark to rise")

    return raise_it


def turned(source: OneLane) -> list[str]:
    """Turns until something is published, as what a person did may be seen a second later."""
    return wait_until(lambda: turn(source), what="something to publish")


def test_a_retried_dead_letter_below_the_mark_goes_first(lane, raise_the_mark):
    """A relay that has run for long starts its reads above old ids; only due failures may lie below."""
    source = lane.source()
    lane.add("a1", "a2")
    turn(source, "a1")
    raise_the_mark(source)
    retried(lane)
    assert turned(source) == ["a1"]
    assert turned(source) == ["a2"]


def test_a_skipped_dead_letter_that_is_retried_goes_out_late_and_frees_its_key(lane):
    """The source has no failures when it comes back, and may have looked a moment ago."""
    source = lane.source(SKIP)
    lane.add("a1", "a2")
    half(source, "a1")
    assert turn(source) == ["a2"]
    # The source sees at some time that there are none any more.
    wait_until(lambda: turn(source) == [] and not source.source.reader.has_failures(0))
    retried(lane)
    assert turned(source) == ["a1"]
    assert lane.rows("SELECT * FROM outbox.failures") == []
    lane.add("a3")
    assert turned(source) == ["a3"]


def test_a_skipped_dead_letter_below_the_mark_is_found_when_it_is_retried(lane, raise_the_mark):
    source = lane.source(SKIP)
    lane.add("a1", "a2")
    half(source, "a1")
    turn(source)
    raise_the_mark(source)
    retried(lane)
    assert turned(source) == ["a1"]


def test_a_retry_begins_to_count_anew_and_may_fail_again(lane):
    source = lane.source(attempts=2)
    lane.add("a1", "a2")
    turn(source, "a1")
    hurry(lane)
    turn(source, "a1")
    retried(lane)
    assert turn(source, "a1") == []
    assert lane.rows("SELECT attempts FROM outbox.failures") == [(1,)]
    hurry(lane)
    assert turn(source, "a1") == []
    assert lane.dead == ["a1", "a1"]
    assert turn(source) == []


def test_a_waiting_event_that_is_retried_is_due_at_once_and_keeps_its_count(lane):
    source = lane.source(attempts=3)
    (first, *_) = lane.add("a1", "a2")
    turn(source, "a1")
    assert turn(source) == []
    assert retried(lane, first) == [first]
    assert turn(source, "a1") == []
    assert lane.rows("SELECT attempts FROM outbox.failures") == [(2,)]


def test_a_relay_that_was_killed_before_it_settled_a_retried_event_leaves_it_to_the_next(lane):
    source = lane.source()
    lane.add("a1", "a2")
    turn(source, "a1")
    retried(lane)
    assert [name(claim) for claim in source.fetch(10)] == ["a1"]
    source.close()
    after = lane.source()
    assert turn(after) == ["a1"]
    assert turn(after) == ["a2"]


def test_discarding_a_dead_letter_frees_its_key_and_the_audit_says_who_and_why(lane):
    source = lane.source()
    (first, *_) = lane.add("a1", "a2")
    turn(source, "a1")
    assert turn(source) == []
    gone = lane.desk().discard(Selection([first]), "wrong customer")
    assert [event["event_id"] for event in gone] == [first]
    assert turn(source) == ["a2"]
    ((who, what, why, details),) = lane.rows("SELECT who, what, why, details FROM outbox.audit")
    ((me,),) = lane.rows("SELECT session_user::text")
    assert (who, what, why) == (me, "discard", "wrong customer")
    assert details["event_id"] == first
    assert details["last_error"] == "a1 is bad"
    assert (details["payload"], details["payload_base64"]) == ({"n": "a1"}, None)


def test_discarding_an_event_that_waits_frees_its_key_and_one_that_is_due_is_left_alone(lane):
    source = lane.source(attempts=9)
    lane.add("a1", "a2", "b1")
    turn(source, "a1", "b1")
    lane.admin.execute(
        "UPDATE outbox.failures SET next_attempt_at = clock_timestamp() "
        "+ CASE aggregate_id WHEN 'a' THEN interval '10 minutes' ELSE interval '1 second' END"
    )
    gone = lane.desk().discard(Selection(), "all of them")
    assert [event["event_type"] for event in gone] == ["a1"]
    lane.admin.execute("UPDATE outbox.failures SET next_attempt_at = clock_timestamp() + interval '10 minutes'")
    assert turn(source) == ["a2"]
    hurry(lane)
    assert turn(source) == ["b1"]
    assert lane.rows("SELECT * FROM outbox.failures") == []


def test_the_list_shows_what_waits_and_what_is_dead_the_oldest_failure_first(lane):
    assert "no failed events" in outbox(lane, "dead-letters", "list")
    assert json.loads(outbox(lane, "dead-letters", "list", "--json")) == {"failures": []}
    source = lane.source(attempts=2)
    ids = lane.add("a1", "b1", "c1")
    turn(source, "a1", "b1", "c1")
    lane.admin.execute("UPDATE outbox.failures SET next_attempt_at = now() - interval '1 s' WHERE aggregate_id = 'a'")
    turn(source, "a1")
    lines = outbox(lane, "dead-letters", "list").splitlines()
    shown = {line.split()[0]: line for line in lines}
    assert "Order/a" in shown[ids[0]]
    assert "retrying, 1 attempt: b1 is bad" in shown[ids[1]]
    assert "dead, its key waits, 2 attempts: a1 is bad" in shown[ids[0]]
    listed = json.loads(outbox(lane, "dead-letters", "list", "--json"))["failures"]
    assert [failure["event_id"] for failure in listed] == ids
    assert json.loads(outbox(lane, "dead-letters", "list", "--json", "--aggregate-type", "Cart")) == {"failures": []}
    assert len(json.loads(outbox(lane, "dead-letters", "list", "--json", "--limit", "1"))["failures"]) == 1


def test_show_gives_the_payload_as_it_is_and_how_much_waits_behind(lane):
    source = lane.source()
    payload = '{"big": 123456789012345678901234567890, "exact": 0.10000000000000000000001, "ü": "ä"}'
    ((event_id,),) = lane.rows(
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload, headers) "
        "VALUES ('Order', 'a', 'a1', %s, '{\"tenant\": \"acme\"}') RETURNING event_id::text",
        payload,
    )
    lane.add("a2", "a3", "b1")
    turn(source, "a1")
    for arguments in ((), ("--json",)):
        text = outbox(lane, "dead-letters", "show", event_id, *arguments)
        assert "123456789012345678901234567890" in text
        assert "0.10000000000000000000001" in text
        shown = json.loads(text)
        assert shown["headers"] == {"tenant": "acme"}
        assert (shown["state"], shown["events_behind_it"]) == ("dead, its key waits", 2)
    assert outbox(lane, "dead-letters", "show", event_id, "--json").count("\n") == 1


def test_show_gives_bytes_as_hexadecimal_digits_also_of_an_event_that_waits(lane):
    source = lane.source(attempts=2)
    with lane.database.connect() as connection:
        event_id = str(Outbox().add(connection, Event("Order", "a", "a1", b"\x00\xff")))
    turn(source, "a1")
    shown = json.loads(outbox(lane, "dead-letters", "show", event_id))
    assert (shown["state"], shown["payload_bytes"], shown["payload"]) == ("retrying", "00ff", None)


def test_ids_that_are_not_among_the_failed_ones_are_named(lane):
    assert f"no failed event has the id {NOBODY}" in outbox(lane, "dead-letters", "show", NOBODY, status=1)
    for arguments in (("retry", NOBODY), ("discard", "--reason", "x", NOBODY)):
        line = outbox(lane, "dead-letters", *arguments, status=1)
        assert "not among the failed events" in line
        assert NOBODY in line
    done = CliRunner().invoke(app, ["dead-letters", "retry", "no-uuid"])
    assert done.exit_code == 2
    assert lane.rows("SELECT * FROM outbox.audit") == []
    (healthy,) = lane.add("a1")
    outbox(lane, "dead-letters", "discard", "--reason", "x", healthy, status=1)
    assert backlog(lane.database.url) == 1


def test_retry_and_discard_by_id_and_by_type(lane):
    source = lane.source(Router())
    ids = lane.add("a1", "b1")
    with lane.database.connect() as connection:
        ids.append(str(Outbox().add(connection, Event("Cart", "c", "c1"))))
    turn(source, "a1", "b1", "c1")
    assert json.loads(outbox(lane, "dead-letters", "retry", ids[0], "--json")) == {"retried": [ids[0]], "locked": []}
    # A dry run leaves nothing in the audit, and needs no reason.
    planned = outbox(lane, "dead-letters", "discard", "--all", "--aggregate-type", "Cart", "--dry-run")
    assert planned.startswith("would be discarded: ")
    discarded = outbox(
        lane, "dead-letters", "discard", "--all", "--aggregate-type", "Cart", "--reason", "old", "--json"
    )
    assert json.loads(discarded) == {"discarded": [ids[2]], "locked": []}
    assert "1 event was discarded" in outbox(lane, "dead-letters", "discard", ids[1], "--reason", "old")
    assert [row[0] for row in lane.rows("SELECT what FROM outbox.audit ORDER BY id")] == ["retry", "discard", "discard"]
    assert turn(source) == ["a1"]
