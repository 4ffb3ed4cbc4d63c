"""Exactly-once from the WAL: a turn is sent while the one before is settled, and committed after that."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest
from stream_bench import Outboxed, outboxed
from support import backlog

from relay.core.ports import DatabaseUnavailable, Fetched, LaneLost

__all__ = ["outboxed"]


def published(outboxed: Any, lanes: int = 1, **options: Any) -> Outboxed:
    """Return an outbox whose first event is published and not settled, and whose second one the stream has."""
    box: Outboxed = outboxed(lanes)
    box.relay(once=True, **options)
    box.streams()
    box.add("a1")
    box.until(lambda: box.kafka.names("a"), "the first")
    assert backlog(box.url) == 1
    box.add("a2")
    box.read(2)
    return box


def fetch(box: Outboxed, limit: int = 100) -> Fetched:
    fetched = box.source.fetch(dict.fromkeys(range(box.lanes), limit))
    assert [claim.event_type for batch in fetched.batches.values() for claim in batch] == ["a2"]
    assert fetched.failed == {}
    return fetched


def test_it_is_settled_by_the_time_that_the_next_one_is_confirmed(outboxed):
    box = published(outboxed)
    with psycopg.connect(box.url) as other:
        other.execute("SELECT FROM outbox.events FOR UPDATE")
        assert fetch(box).unconfirmed
        with pytest.raises(DatabaseUnavailable, match="settling"):
            box.source.confirm(time.monotonic() + 0.2)
    assert box.source.confirm(time.monotonic() + 60) == {}
    assert box.rows("SELECT event_type FROM outbox.events") == [("a2",)]


def test_a_lane_that_was_lost_is_found_before_the_commit(outboxed):
    box = published(outboxed)
    box.admin.execute("UPDATE outbox.lanes SET owner = 'another', epoch = epoch + 1")
    assert fetch(box).unconfirmed
    assert {lane: type(error) for lane, error in box.source.confirm(time.monotonic() + 60).items()} == {0: LaneLost}
    assert backlog(box.url) == 2


def test_what_was_not_confirmed_comes_again(outboxed):
    """A turn of the loop: the row of the lane is locked for as long as a settlement waits for it."""
    box = published(outboxed)
    with psycopg.connect(box.url) as other:
        other.execute("SELECT FROM outbox.lanes FOR UPDATE")
        box.until(lambda: box.seen.errors, "the lock")
        assert box.kafka.names() == ["a1"]
    box.add("a3")
    box.published("a1", "a2", "a3")
    box.until(lambda: backlog(box.url) == 0, "all to be settled")
    box.nothing_left()


@pytest.mark.parametrize("why", ["a backlog", "a row that is gone"])
def test_it_is_settled_first_where(outboxed, why):
    """With a backlog the next turn is read meanwhile; whether an event is gone shows once the others are settled."""
    box = published(outboxed)
    if why == "a row that is gone":
        box.add("a0")
        box.admin.execute("DELETE FROM outbox.events WHERE event_type = 'a0'")
        box.read(3)
    assert not fetch(box, limit=1 if why == "a backlog" else 100).unconfirmed
    assert box.rows("SELECT event_type FROM outbox.events") == [("a2",)]
