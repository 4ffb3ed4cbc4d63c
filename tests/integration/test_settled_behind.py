"""A turn that is published while the one before is settled: when that is allowed, and what becomes of both."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest
from support import wait_until

from outbox import Event, Outbox
from outbox.testing.fixtures import PrivatePostgres
from relay import db
from relay.database import Connector
from relay.failures import FailurePolicy, Failures
from relay.lane_hash import lane_of
from relay.lanes import LaneTable
from relay.polling import source as polling
from relay.polling.source import PollingSource
from relay.ports import PUBLISHED, Batches, LaneBusy, LaneLost, Receipt, Refused, Unavailable
from relay.routing import Router

LANES = 2
KEYS = [next(f"k{n}" for n in range(1000) if lane_of("Order", f"k{n}", LANES) == lane) for lane in range(LANES)]
LIMIT = 10


class Box:
    """An outbox of two lanes, and the source of a worker that holds both."""

    def __init__(self, database, archive: bool = False) -> None:
        self.database = database
        self.archive = archive
        db.change_lanes(database.url, LANES)
        self.admin = psycopg.connect(database.url, autocommit=True)
        with psycopg.connect(database.url, autocommit=True) as connection:
            self.leases = LaneTable(connection, "outbox", "me", "0", 30.0).acquire(LANES)
        failures = Failures("outbox", FailurePolicy(), Router())
        self.source = PollingSource(Connector(database.url, "test"), "outbox", failures, archive=archive)
        for lease in self.leases:
            self.source.hold(lease)

    def close(self) -> None:
        self.source.close()
        self.admin.close()

    def add(self, *lanes: int, **options: str) -> str:
        """Commit one event in each of these lanes; options are settings of the session. Return where the WAL ends."""
        with psycopg.connect(self.database.url) as connection:
            for name, value in options.items():
                connection.execute("SELECT set_config(%s, %s, false)", (name, value))
            Outbox().add_many(connection, [Event("Order", KEYS[lane], "T", {}) for lane in lanes])
            connection.commit()
            return str(connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0])

    def flush(self) -> None:
        """Commit something, by which all that is in the WAL is flushed."""
        self.admin.execute("SELECT pg_logical_emit_message(true, 'other', '')")

    def fetch(self, limit: int = LIMIT):
        return self.source.fetch(dict.fromkeys(range(LANES), limit))

    def turn(self, limit: int = LIMIT) -> Batches:
        """Publish a turn, and return what it had."""
        fetched = self.fetch(limit)
        assert fetched.failed == {}
        assert self.source.settle(published(fetched.batches)) == {}
        return fetched.batches

    def left(self) -> int:
        return self.admin.execute("SELECT count(*) FROM outbox.events").fetchone()[0]


def published(batches: Batches) -> dict[int, Receipt]:
    return {lane: Receipt([(claim, PUBLISHED) for claim in claims]) for lane, claims in batches.items()}


def ids(batches: Batches) -> list[int]:
    return sorted(claim.position for claims in batches.values() for claim in claims)


@pytest.fixture
def box(outbox_postgres, request, monkeypatch):
    # Something else in the server may be writing: the WAL writer flushes that some time later.
    monkeypatch.setattr(polling, "_FLUSH_SECONDS", 30.0)
    box = Box(outbox_postgres, archive=getattr(request, "param", False))
    yield box
    box.close()


def test_a_turn_is_published_while_the_one_before_is_settled(box):
    box.add(0, 1)
    first = box.turn()
    box.add(0, 0, 1)
    fetched = box.fetch()
    assert len(ids(first)) == 2
    assert len(ids(fetched.batches)) == 3
    assert not set(ids(first)) & set(ids(fetched.batches))
    assert sorted(fetched.settling) == [0, 1]
    assert box.source.settle(published(fetched.batches)) == {}
    # The first is settled by now, and of the second nothing is.
    assert box.left() == 3
    fetched = box.fetch()
    assert (fetched.batches, fetched.settling) == ({}, ())
    assert box.left() == 0


def test_a_lane_without_new_events_is_settled_beside_the_others(box):
    box.add(0, 1)
    box.turn()
    box.add(1)
    fetched = box.fetch()
    assert fetched.batches.keys() == {1}
    assert sorted(fetched.settling) == [0, 1]
    assert box.source.settle(published(fetched.batches)) == {}
    assert box.left() == 1


@pytest.mark.parametrize("count", [6, 7])
def test_what_a_crash_may_repeat_of_a_lane_is_a_batch(box, count):
    """Of twelve events: behind six, six more may go at once, and seven may not."""
    box.add(*[0] * 6)
    box.turn(12)
    box.add(*[0] * count, 1)
    fetched = box.fetch(12)
    assert len(ids(fetched.batches)) == count + 1
    assert sorted(fetched.settling) == ([0] if count == 6 else [])
    if count == 7:
        assert box.left() == 8


def test_a_backlog_is_settled_before_more_is_published(box):
    box.add(*[0] * 30)
    for left in (20, 10, 0):
        fetched = box.fetch()
        assert fetched.settling == ()
        assert box.source.settle(published(fetched.batches)) == {}
        assert box.left() == left + 10


@pytest.mark.parametrize("others", [True, False], ids=["beside others", "alone"])
def test_what_is_not_flushed_is_not_returned(box, monkeypatch, others):
    """A commit can be visible before it is durable: a flush by others is waited for, or settling makes one."""
    monkeypatch.undo()
    stop = threading.Event()

    def commit() -> None:
        with psycopg.connect(box.database.url, autocommit=True) as connection:
            while not stop.is_set():
                connection.execute("SELECT pg_logical_emit_message(true, 'other', '')")

    thread = threading.Thread(target=commit)
    if others:
        thread.start()
    try:
        for _ in range(30):
            lsn = box.add(0, 1, synchronous_commit="off")
            fetched = box.fetch()
            durable = box.admin.execute("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", (lsn,)).fetchone()
            assert (durable, len(ids(fetched.batches))) == ((True,), 2)
            assert box.source.settle(published(fetched.batches)) == {}
    finally:
        stop.set()
        if others:
            thread.join()


def test_what_a_standby_must_have_is_not_returned_before():
    """With synchronous_commit = local it is visible here before; a failover would undo it."""
    with PrivatePostgres() as factory:
        server = factory()
        database = factory.database(server, "local")
        box = Box(database)
        found: list[Batches] = []
        with psycopg.connect(server.url(), autocommit=True) as admin:
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            admin.execute("SELECT pg_reload_conf()")
            wait_until(lambda: admin.execute("SHOW synchronous_standby_names").fetchone() == ("nobody",), what="it")
            # A session that is older has the setting with its next statement, or the one after.
            look = "SELECT current_setting('synchronous_standby_names')"
            wait_until(lambda: box.source.connection.execute(look).fetchone() == ("nobody",), what="the source too")
            box.add(0, 1, synchronous_commit="local")
            thread = threading.Thread(target=lambda: found.append(box.fetch().batches))
            thread.start()
            try:
                waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
                wait_until(lambda: admin.execute(waits).fetchone() == (1,), what="the commit to wait")
                assert found == []
            finally:
                admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
                admin.execute("SELECT pg_reload_conf()")
                thread.join(60)
            assert len(ids(found[0])) == 2
        box.close()


def test_a_lane_that_is_another_relay_s_is_not_returned(box):
    box.add(0, 1)
    box.turn()
    box.add(0, 1)
    box.admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity' WHERE lane = 0")
    LaneTable(box.admin, "outbox", "another", "0", 30.0).acquire(1)
    fetched = box.fetch()
    assert fetched.batches.keys() == {1}
    assert isinstance(fetched.failed[0], LaneLost)
    failed = box.source.settle(published(fetched.batches))
    assert {lane: type(error) for lane, error in failed.items()} == {0: LaneLost}
    # Of lane 0 nothing was settled: another relay has it now. Of lane 1 the first is.
    assert box.left() == 3


@pytest.mark.parametrize("box", [False, True], indirect=True, ids=["", "archive"])
def test_a_lane_that_is_locked_meanwhile_is_settled_with_both_turns_later(box):
    box.add(0, 1)
    box.turn()
    box.add(0, 0, 1)
    with psycopg.connect(box.database.url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 0 FOR UPDATE")
        box.flush()
        fetched = box.fetch()
        assert sorted(fetched.settling) == [0, 1]
        receipts = published(fetched.batches)
        failed = box.source.settle(receipts)
        assert {lane: type(error) for lane, error in failed.items()} == {0: LaneBusy}
        assert sorted(claim.lane for claims in fetched.batches.values() for claim in claims) == [0, 0, 1]
        assert box.left() == 4
    # As the loop does it: all that is published of the lane, once more.
    rows = [(claim, PUBLISHED) for claim in box.source.settlement.lanes[0].pending.claims]
    assert len(rows) == 3
    assert box.source.settle({0: Receipt(rows)}) == {}
    assert box.source.flush([0, 1]) == {}
    assert box.left() == 0
    kept = box.admin.execute("SELECT count(*), count(DISTINCT id) FROM outbox.published").fetchone()
    assert kept == ((5, 5) if box.archive else (0, 0))


def test_an_event_that_is_refused_in_the_second_turn_stays(box):
    box.add(0, 1)
    box.turn()
    box.add(0, 0, 1)
    fetched = box.fetch()
    receipts = published(fetched.batches)
    first, second = fetched.batches[0]
    receipts[0] = Receipt([(first, PUBLISHED), (second, Refused("too large"))])
    assert box.source.settle(receipts) == {}
    assert box.source.flush([0, 1]) == {}
    assert box.admin.execute("SELECT id FROM outbox.events").fetchall() == [(second.position,)]


def test_what_ends_the_connection_meanwhile_is_said_by_settle(box):
    box.add(0, 1)
    box.turn()
    box.add(0, 1)
    with psycopg.connect(box.database.url) as other:
        other.execute("LOCK TABLE outbox.events IN SHARE MODE")
        box.flush()
        fetched = box.fetch()
        assert sorted(fetched.settling) == [0, 1]
        other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'test'")
        with pytest.raises(Unavailable):
            box.source.settle(published(fetched.batches))
    assert box.left() == 4


def test_leases_are_prolonged_before_anything_is_published(box):
    """A lease of which too little is left for a turn is not left to a statement that comes behind it."""
    box.add(0, 1)
    box.turn()
    box.add(0, 1)
    lease = box.leases[0]
    lease._until = time.monotonic() + lease.ttl_seconds * 0.5
    fetched = box.fetch()
    assert fetched.settling == ()
    assert lease.remaining_seconds > lease.ttl_seconds * 0.9
    assert (len(ids(fetched.batches)), box.left()) == (2, 2)


def test_exactly_once_the_turn_before_is_settled_before_the_next_one_is_seen(box):
    """Its marker takes the place of the one that names the rows of the turn before."""
    for lease in box.leases:
        box.source.adopt(lease, None, "me")
    box.add(0, 1)
    fetched = box.fetch()
    assert box.source.settle(published(fetched.batches)) == {}
    box.add(0, 1)
    fetched = box.fetch()
    assert (len(ids(fetched.batches)), fetched.settling, fetched.unconfirmed) == (2, (), True)
    assert box.source.confirm(time.monotonic() + 60) == {}
    assert box.left() == 2
