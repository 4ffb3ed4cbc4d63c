"""Exactly-once: a turn is sent while the one before is settled, and committed when that is known to have gone well."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psycopg
import pytest
from support import wait_until
from takeover_support import LANES, Place, Worker, place

from outbox.errors import OutboxError
from relay import database
from relay.core.ports import Completed, DatabaseUnavailable, Fetched, LaneLocked, LaneLost, Sent

__all__ = ["place"]


class Confirmed:
    """``Source.confirm``, and what readers saw when it was called."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.seen: dict[str, int] = {}
        self.settling = False

    def __call__(self, deadline: float) -> Mapping[int, OutboxError]:
        for level in ("read_committed", "read_uncommitted"):
            place = self.worker.place
            self.seen[level] = len(place.kafka.consume(place.topic, isolation=level, wait_for_open=False))
        return self.worker.source.confirm(deadline)


def fetch(worker: Worker, limit: int = 1000) -> Fetched:
    """Read a turn: of all that is there, unless the limit says that there is a backlog."""
    fetched = worker.source.fetch({lease.lane: limit for lease in worker.leases})
    assert fetched.failed == {}
    return fetched


def readable(place: Place) -> int:
    """Return how many events are committed. What was sent and is not must be aborted by now, or readers would wait.

    The coordinator would do that by itself in a minute.
    """
    return len(place.kafka.consume(place.topic, timeout=5))


def settle(worker: Worker, sent: Sent) -> None:
    assert isinstance(sent, Completed)
    assert worker.source.settle(sent.receipts) == {}


def begun(place: Place) -> tuple[Worker, int]:
    """Return a worker that has published a turn, not settled yet, and how much it had. There are more events by now."""
    worker = place.joined("a")
    place.add(30)
    first = place.count
    settle(worker, worker.publish(1000))
    assert len(place.tables.left()) == first
    place.add(30)
    return worker, first


def test_a_turn_is_on_kafka_and_seen_by_nobody_before_the_one_before_is_settled(place):
    worker, first = begun(place)
    fetched = fetch(worker)
    assert fetched.unconfirmed
    confirmed = Confirmed(worker)
    sent = worker.publisher.publish(fetched.batches, confirmed)
    assert confirmed.seen == {"read_committed": first, "read_uncommitted": place.count}
    assert len(place.tables.left()) == place.count - first
    settle(worker, sent)
    assert readable(place) == place.count
    worker.drain()
    assert place.all_once()


def test_in_a_backlog_the_turn_before_is_settled_first_and_the_next_one_read_meanwhile(place):
    place.add(600)
    worker = place.joined("a")
    for _ in range(3):
        fetched = fetch(worker, 10)
        assert not fetched.unconfirmed
        settle(worker, worker.publisher.publish(fetched.batches))
    worker.drain()
    assert place.all_once()


def test_a_turn_with_a_lane_that_was_lost_is_not_committed_and_the_others_go_on(place):
    former, first = begun(place)
    # Nobody has fenced: the epoch alone says it.
    place.tables.acquire([2, 5])
    fetched = fetch(former)
    sent = former.publisher.publish(fetched.batches, former.source.confirm)
    assert {lane: type(error) for lane, error in sent.lanes.items()} == {2: LaneLost, 5: LaneLost}
    assert sent.publisher_unusable
    assert readable(place) == first
    for lane in sent.lanes:
        former.source.drop(lane)
    former.leases = [lease for lease in former.leases if lease.lane not in sent.lanes]
    heir = place.joined("b", [2, 5])
    former.publisher = former.new_publisher()
    assert former.join() == {}
    for worker in (former, heir):
        sent = worker.publish(1000)
        assert isinstance(sent, Completed)
        assert worker.source.settle(sent.receipts) == {}
        assert worker.source.flush(list(sent.receipts)) == {}
    assert place.all_once()


def test_a_lane_that_stays_locked_does_not_hold_the_others_up(place):
    """Its turn is taken back once. After that it is settled by its marker, when it can be taken over again."""
    worker, first = begun(place)
    with psycopg.connect(place.tables.url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 3 FOR UPDATE")
        sent = worker.publisher.publish(fetch(worker).batches, worker.source.confirm)
        assert {lane: type(error) for lane, error in sent.lanes.items()} == {3: LaneLocked}
        assert readable(place) == first
        worker.publisher = worker.new_publisher()
        assert {lane: type(error) for lane, error in worker.join().items()} == {3: LaneLocked}
        all_leases = worker.leases
        worker.leases = [lease for lease in all_leases if lease.lane != 3]
        for _ in range(3):
            fetched = fetch(worker)
            assert fetched.unconfirmed
            sent = worker.publisher.publish(fetched.batches, worker.source.confirm)
            assert isinstance(sent, Completed)
            settle(worker, sent)
            place.add(30)
        assert readable(place) > first
    worker.leases = all_leases
    assert worker.join() == {}
    worker.drain()
    assert place.all_once()


def test_a_locked_lane_without_new_events_takes_nothing_back(place):
    worker, first = begun(place)
    place.tables.run("DELETE FROM outbox.events WHERE lane = 3 AND id > %s", max_id(place, first))
    gone = place.count - len(place.tables.left())
    with psycopg.connect(place.tables.url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 3 FOR UPDATE")
        fetched = fetch(worker)
        assert 3 not in fetched.batches
        sent = worker.publisher.publish(fetched.batches, worker.source.confirm)
        assert isinstance(sent, Completed)
        failed = worker.source.settle(sent.receipts)
        assert {lane: type(error) for lane, error in failed.items()} == {3: LaneLocked}
    worker.drain()
    assert place.read().total() == place.count - gone


def max_id(place: Place, count: int) -> int:
    """Return the highest id of the first events."""
    return place.tables.run("SELECT max(id) FROM (SELECT id FROM outbox.events ORDER BY id LIMIT %s) AS e", count)[0][0]


def test_the_deadline_holds_for_lanes_whose_leases_were_prolonged_meanwhile(place):
    """Their rows are somewhere else then, and the statement is sent once more."""
    worker, _ = begun(place)
    settle(worker, worker.publisher.publish(fetch(worker).batches, worker.source.confirm))
    place.add(30)
    place.tables.run("UPDATE outbox.lanes SET lease_until = lease_until + interval '1 s'")
    with psycopg.connect(place.tables.url) as other:
        other.execute("SELECT FROM outbox.events ORDER BY id FOR UPDATE")
        assert fetch(worker).unconfirmed
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable, match="settling"):
            worker.source.confirm(began + 1.0)
        # Without the deadline it is the limit for locks that ends it.
        waited = time.monotonic() - began
        other.rollback()
    assert waited < 8
    assert worker.source.settlement.collect() == {}


def test_readers_do_not_wait_for_a_database_that_does_not_answer(place, monkeypatch):
    """Its rows are locked by somebody, or a standby that must have them is away: the transaction is aborted in time."""
    # After this time the statement ends, long after readers need it.
    monkeypatch.setattr(database, "_LOCK_SECONDS", 5.0)
    worker, first = begun(place)
    worker.publisher._delivery_seconds = 2.0
    with psycopg.connect(place.tables.url) as other:
        other.execute("SELECT FROM outbox.events ORDER BY id FOR UPDATE")
        fetched = fetch(worker)
        sent = worker.publisher.publish(fetched.batches, worker.source.confirm)
        assert isinstance(sent.error, DatabaseUnavailable)
        assert "settling" in str(sent.error)
        assert sent.receipts == {}
        assert readable(place) == first
        # The statement is broken off with its connection.
        worker.source.close()
        wait_until(lambda: place.tables.run(_WAITING) == [(0,)] or None, 30, "the statement to end")
    again = Worker(place, "b", place.tables.acquire(range(LANES)))
    assert again.join() == {}
    again.drain()
    assert place.all_once()


_WAITING = """SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND wait_event_type = 'Lock' AND application_name = 'test'"""
