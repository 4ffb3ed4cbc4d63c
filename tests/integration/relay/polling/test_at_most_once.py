"""The polling source at-most-once: rows go before they are published."""

from __future__ import annotations

import json

import psycopg
import pytest
from failing_lane import COPIED, lane, name, retried
from support import backlog, wait_until, write

from outbox import Event, Outbox
from relay import database
from relay.core.ports import BrokerUnavailable, Claim, LaneLost, Receipt, StatementCutShort, UnsettledBatch
from relay.operations.dead_letters import Selection

__all__ = ["lane"]


def test_at_most_once_the_rows_are_gone_before_they_are_given_out(lane):
    source = lane.deleting_source()
    lane.add("a1", "b1")
    claims = source.fetch(10)
    assert [name(claim) for claim in claims] == ["a1", "b1"]
    assert backlog(lane.database.url) == 0
    source.settle(Receipt(UnsettledBatch([claims[0]])))
    assert lane.lost == [1]
    assert source.fetch(10) == []


def test_at_most_once_one_commit_deletes_what_was_read_and_checks_the_lease(lane, monkeypatch):
    source = lane.deleting_source()
    settlement = source.source.settlement
    sent, send = [], settlement.send

    def count(*lanes, **options):
        sent.append(lanes)
        return send(*lanes, **options)

    monkeypatch.setattr(settlement, "send", count)
    lane.add("a1")
    assert [name(claim) for claim in source.fetch(10)] == ["a1"]
    assert len(sent) == 1
    assert source.fetch(10) == []
    assert len(sent) == 1


def test_at_most_once_nothing_is_deleted_of_topics_that_can_not_be_written_to_or_looked_up(lane):
    answers = [False, BrokerUnavailable("Kafka, asking for its topics: away"), True]

    def must_stay(_claim: Claim) -> bool:
        answer = answers.pop()
        if isinstance(answer, BrokerUnavailable):
            raise answer
        return answer

    source = lane.deleting_source(must_stay=must_stay)
    lane.add("a1", "b1")
    assert source.fetch(10) == []
    with pytest.raises(BrokerUnavailable):
        source.fetch(10)
    assert backlog(lane.database.url) == 2
    assert [name(claim) for claim in source.fetch(10)] == ["a1", "b1"]
    assert backlog(lane.database.url) == 0


def test_at_most_once_a_refused_event_is_a_dead_letter_at_once_and_can_be_retried(lane):
    source = lane.deleting_source()
    with lane.database.connect() as connection:
        Outbox().add(connection, Event("Order", "a", "a1", {"n": 1}, headers={"tenant": "acme"}))
    (event_id, *_) = lane.add("a2")
    claims = source.fetch(10)
    source.settle(Receipt(UnsettledBatch([claims[1]]), [(claims[0], "a1 is bad")]))
    assert (lane.dead, lane.lost) == (["a1"], [])
    assert [failure["event_type"] for failure in lane.desk().list(Selection())] == ["a1"]
    lane.add("a3")
    assert [name(claim) for claim in source.fetch(10)] == ["a3"]
    source.settle(Receipt())
    retried(lane)
    (again,) = source.fetch(10)
    assert (again.event_id, json.loads(again.value), again.headers) == (
        claims[0].event_id,
        {"n": 1},
        {"tenant": "acme"},
    )
    source.settle(Receipt(UnsettledBatch([again])))
    assert lane.rows("SELECT * FROM outbox.failures") == []
    lane.add("a4")
    assert wait_until(lambda: [name(claim) for claim in source.fetch(10)]) == ["a4"]
    assert event_id != again.event_id


def test_at_most_once_a_refused_event_has_its_copy_for_the_dead_letter_topic_too(lane):
    source = lane.deleting_source(COPIED)
    lane.add("a1", "a2")
    claims = source.fetch(10)
    source.settle(Receipt(UnsettledBatch([claims[1]]), [(claims[0], "a1 is bad")]))
    (copy,) = source.fetch(10)
    assert json.loads(copy.value) == {"n": "a1"}
    assert copy.headers["outbox-dead-letter"] == "a1 is bad"
    source.settle(Receipt(refused=[(copy, "no such topic")]))
    assert source.fetch(10) == []


def test_at_most_once_1000_events_that_were_put_back_leave_in_batches(lane):
    """With one in a turn, a lane with thousands of them would do nothing else for minutes."""
    source = lane.deleting_source()
    write(lane.database.url, [Event("Order", f"k{number}", "T", {}) for number in range(1000)])
    claims = source.fetch(1000)
    source.settle(Receipt(refused=[(claim, "bad") for claim in claims]))
    assert len(retried(lane)) == 1000
    # One that looks for failures first.
    source = lane.deleting_source()
    seen: list[int] = []
    turns = 0
    while len(seen) < 1000:
        claims = source.fetch(1000)
        turns += 1
        seen += [claim.position for claim in claims]
        source.settle(Receipt(UnsettledBatch(claims)))
        assert turns < 100, len(seen)
    # One, two, four, eight …, with turns of the other events between.
    assert turns <= 30
    assert len(set(seen)) == 1000
    assert lane.lost == []
    assert lane.rows("SELECT * FROM outbox.failures") == []


def test_at_most_once_what_postgres_has_refused_to_delete_is_not_lost(lane, monkeypatch):
    """The server has answered: nothing is deleted, and nothing was sent."""
    monkeypatch.setattr(database, "_LOCK_SECONDS", 0.2)
    source = lane.deleting_source()
    lane.add("a1", "b1")
    with psycopg.connect(lane.database.url) as other:
        other.execute("SELECT FROM outbox.events FOR UPDATE")
        with pytest.raises(StatementCutShort):
            source.fetch(10)
        source.close()
    assert (lane.lost, backlog(lane.database.url)) == ([], 2)
    with lane.deleting_source() as source:
        assert [name(claim) for claim in source.fetch(10)] == ["a1", "b1"]


def test_at_most_once_a_lost_lane_is_not_said_to_have_published_what_was_read(lane):
    source = lane.deleting_source()
    lane.add("a1", "b1")
    lane.admin.execute("UPDATE outbox.lanes SET epoch = epoch + 1")
    with pytest.raises(LaneLost, match=r"has taken the lane; it publishes the 2 events just read here$"):
        source.fetch(10)
    assert (lane.lost, backlog(lane.database.url)) == ([], 2)


def test_at_most_once_what_may_be_deleted_is_counted_as_lost(lane):
    """The connection ends, and no answer says whether the rows are gone."""
    source = lane.deleting_source()
    lane.add("a1", "b1")
    settle = source.source.settlement.settle

    def cut(lanes):
        settle(lanes)
        source.source.connection.close()
        raise psycopg.OperationalError("the connection is lost")

    source.source.settlement.settle = cut
    with pytest.raises(psycopg.OperationalError):
        source.fetch(10)
    source.close()
    assert (lane.lost, backlog(lane.database.url)) == ([2], 0)
