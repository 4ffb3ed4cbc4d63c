"""Replays out of the archive."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any
from uuid import UUID

import pytest
from failing_lane import BLOCK, Lane, lane, name, outbox, turn

from outbox import Event, Outbox
from relay.core.ports import Receipt, RecordMetadata, UnsettledBatch
from relay.operations.trace import MessageRef, find

__all__ = ["lane"]


@pytest.fixture
def archive(lane):
    """a1 b1 a2 c1 in the archive; c1's place was not known. Gives their ids."""
    source = lane.source(BLOCK, archive=True)
    ids = dict(zip(("a1", "b1", "a2", "c1"), lane.add("a1", "b1", "a2", "c1"), strict=True))
    claims = source.fetch(10)
    source.settle(
        Receipt(
            UnsettledBatch(
                claims,
                [
                    None if name(claim) == "c1" else RecordMetadata("orders", 0, number)
                    for number, claim in enumerate(claims)
                ],
            )
        )
    )
    source.flush()
    return ids


def replayed(lane: Lane) -> list[Any]:
    return lane.rows("SELECT event_id::text, headers->>'outbox-replay' FROM outbox.events ORDER BY id")


def test_a_replay_sends_the_same_event_ids_in_their_old_order_and_marks_them(lane, archive):
    assert "4 events are in the outbox again" in outbox(lane, "replay", "--all", "--yes", "--reason", "a bug")
    rows = replayed(lane)
    assert [event_id for event_id, _ in rows] == list(archive.values())
    assert all(dt.datetime.fromisoformat(mark).tzinfo is not None for _, mark in rows)
    ((what, why, details),) = lane.rows("SELECT what, why, details FROM outbox.audit")
    assert (what, why, details) == ("replay", "a bug", {"events": 4})
    source = lane.source(BLOCK, archive=True)
    assert turn(source) == ["a1", "b1", "a2", "c1"]


def test_a_replay_by_what_was_asked_for(lane, archive):
    for arguments, names in (
        (("--aggregate", "Order/a"), ["a1", "a2"]),
        (("--since", "2001-01-01", "--until", "2002-01-01T00:00:00"), []),
        (("--since", "1970-01-01", "--until", "9998-12-31T23:59:59"), ["a1", "b1", "a2", "c1"]),
        (("--since", "2001-01-01", "--aggregate", "Order/b"), ["b1"]),
        (("--since", "2001-01-01T00:00:00+02:00", "--topic", "orders"), ["a1", "b1", "a2"]),
        (("--event-id", archive["a2"], "--event-id", archive["a1"]), ["a1", "a2"]),
    ):
        shown = json.loads(outbox(lane, "replay", *arguments, "--yes", "--json"))
        assert (shown["events"], shown["sent"]) == (len(names), len(names)), arguments
        assert [event_id for event_id, _ in replayed(lane)] == [archive[name] for name in names], arguments
        lane.admin.execute("DELETE FROM outbox.events")
    last = "SELECT details->'ids' FROM outbox.audit ORDER BY id DESC LIMIT 1"
    assert lane.rows(last) == [([archive["a2"], archive["a1"]],)]


def test_a_replay_wants_to_be_told_what_and_a_yes(lane, archive):
    assert "say what to replay" in outbox(lane, "replay", "--yes", status=2)
    assert "answer yes, or give --yes" in outbox(lane, "replay", "--all", status=2)
    assert "--since" in outbox(lane, "replay", "--since", "yesterday", status=2)
    # As with a variable of a script that is empty: not the events of all keys, or types.
    for aggregate in ("", "/", "Order/", "/a"):
        words = ("replay", "--since", "2001-01-01", "--aggregate", aggregate, "--yes")
        assert "must be TYPE or TYPE/ID" in outbox(lane, *words, status=2)
    assert replayed(lane) == []


def test_an_event_whose_replay_waits_is_traced_to_where_it_was_published(lane, archive):
    outbox(lane, "replay", "--event-id", archive["a2"], "--yes")
    found = find(lane.admin, "outbox", UUID(archive["a2"]), {})
    assert (found.state, found.message) == ("published", MessageRef("orders", 0, 2))


def test_an_event_that_was_replayed_is_replayed_once(lane, archive):
    source = lane.source(BLOCK, archive=True)
    outbox(lane, "replay", "--aggregate", "Order/a", "--yes")
    first = replayed(lane)
    assert turn(source) == ["a1", "a2"]
    assert lane.rows("SELECT count(*) FROM outbox.published") == [(6,)]
    assert json.loads(outbox(lane, "replay", "--all", "--yes", "--json"))["sent"] == 4
    assert [event_id for event_id, _ in replayed(lane)] == list(archive.values())
    assert turn(source) == ["a1", "b1", "a2", "c1"]
    # Also one of which only the replay is within the range, with a mark of its own.
    since = lane.rows("SELECT max(published_at) FROM outbox.published WHERE event_type = 'a1'")[0][0].isoformat()
    outbox(lane, "replay", "--since", since, "--aggregate", "Order/a", "--yes")
    assert [event_id for event_id, _ in replayed(lane)] == [archive["a1"], archive["a2"]]
    assert first[0][0] == archive["a1"]


def test_a_range_that_begins_between_two_events_of_a_key_keeps_their_order(lane, archive):
    """a1 only as it was replayed, a2 as it was first: still a1 before a2."""
    source = lane.source(BLOCK, archive=True)
    outbox(lane, "replay", "--event-id", archive["a1"], "--yes")
    assert turn(source) == ["a1"]
    lane.admin.execute(
        "UPDATE outbox.published SET published_at = published_at - interval '1 hour' "
        "WHERE event_type = 'a1' AND headers IS NULL"
    )
    outbox(lane, "replay", "--aggregate", "Order/a", "--since", "2001-01-01", "--yes")
    lane.admin.execute("DELETE FROM outbox.events")
    since = lane.rows("SELECT min(published_at) FROM outbox.published WHERE event_type = 'a2'")[0][0].isoformat()
    outbox(lane, "replay", "--aggregate", "Order/a", "--since", since, "--yes")
    assert [event_id for event_id, _ in replayed(lane)] == [archive["a1"], archive["a2"]]


def test_an_archived_event_too_large_to_be_marked_is_counted_and_left_out(lane):
    source = lane.source(BLOCK, archive=True)
    with lane.database.connect() as connection:
        Outbox().add(connection, Event("Order", "a", "a1", b"x" * 999_900))
    turn(source)
    shown = json.loads(outbox(lane, "replay", "--all", "--yes", "--json"))
    assert (shown["events"], shown["too_large"], shown["sent"]) == (0, 1, 0)
    assert replayed(lane) == []
