"""A turn that is published while the one before is settled: when that is allowed, and what becomes of both."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from polling_support import polling
from standby import set_parameter
from support import tried, wait_until

from outbox import Event, Outbox
from outbox._app import migrate as db
from outbox._clients.clock import uptime
from outbox.errors import SchemaError
from outbox.testing.fixtures import PrivatePostgres
from relay.core.lease import Lease
from relay.core.ports import Batches, LaneLocked, LaneLost, Receipt, Unavailable, UnsettledBatch
from relay.lanes import LaneTable
from relay.polling.source import PollingSource
from relay.settle import settlement
from relay.wal.lane_hash import lane_of

LANES = 2
MANY = 64
LIMIT = 10


def keys_of(lanes: int, each: int) -> list[list[str]]:
    """Return so many keys of each lane."""
    found: list[list[str]] = [[] for _ in range(lanes)]
    numbers = itertools.count()
    while any(len(keys) < each for keys in found):
        key = f"k{next(numbers)}"
        lane = found[lane_of("Order", key, lanes)]
        if len(lane) < each:
            lane.append(key)
    return found


KEYS = [keys[0] for keys in keys_of(LANES, 1)]


class Box:
    """An outbox of two lanes or more, and the source of a worker that holds them all."""

    def __init__(self, database, archive: bool = False, lanes: int = LANES) -> None:
        self.database = database
        self.archive = archive
        self.lanes = lanes
        db.change_lanes(database.url, lanes)
        self.admin = psycopg.connect(database.url, autocommit=True)
        with psycopg.connect(database.url, autocommit=True) as connection:
            self.leases = LaneTable(connection, "outbox", "me", "0", 30.0).acquire(lanes)
        self.opened: list[PollingSource] = []
        self.source = self.new_source(self.leases)

    def new_source(self, leases: Collection[Lease]) -> PollingSource:
        """Return a source that holds these lanes."""
        # What is refused comes back in no test, however slow the machine is.
        policy = tried(10, 600.0, 600.0)
        self.opened.append(polling(self.database.url, leases, policy=policy, archive=self.archive))
        return self.opened[-1]

    def close(self) -> None:
        for source in self.opened:
            source.close()
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
        return self.source.fetch(dict.fromkeys(range(self.lanes), limit))

    def turn(self, limit: int = LIMIT) -> Batches:
        """Publish a turn, and return what it had."""
        fetched = self.fetch(limit)
        assert fetched.failed == {}
        assert self.source.settle(published(fetched.batches)) == {}
        return fetched.batches

    def left(self) -> int:
        return self.admin.execute("SELECT count(*) FROM outbox.events").fetchone()[0]

    def left_by_lane(self) -> dict[int, int]:
        found = dict(self.admin.execute("SELECT lane, count(*) FROM outbox.events GROUP BY lane").fetchall())
        return {lane: found.get(lane, 0) for lane in range(self.lanes)}


def published(batches: Batches) -> dict[int, Receipt]:
    return {lane: Receipt(UnsettledBatch(claims)) for lane, claims in batches.items()}


def ids(batches: Batches) -> list[int]:
    return sorted(claim.position for claims in batches.values() for claim in claims)


@pytest.fixture
def box(outbox_postgres, request, monkeypatch):
    # Something else in the server may be writing: the WAL writer flushes that some time later.
    monkeypatch.setattr(settlement, "_FLUSH_SECONDS", 30.0)
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


def test_what_a_crash_may_repeat_of_a_lane_is_a_batch_of_the_size_it_has_now(box):
    """After a turn that was late, batches are half as large: what is published of a lane already counts as before."""
    box.add(*[0] * 5, 1)
    box.turn(10)
    box.add(*[0] * 3, 1)
    fetched = box.fetch(6)
    assert len(ids(fetched.batches)) == 4
    # Three alone are no backlog; with the five that are not settled yet they would be more than a batch.
    assert (fetched.settling, box.left()) == ((), 4)


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
        set_parameter(server.url(), "synchronous_standby_names", "nobody")
        # A session that is older has the setting with its next statement, or the one after.
        look = "SELECT current_setting('synchronous_standby_names')"
        wait_until(lambda: box.source.connection.execute(look).fetchone() == ("nobody",), what="the source too")
        box.add(0, 1, synchronous_commit="local")
        thread = threading.Thread(target=lambda: found.append(box.fetch().batches))
        thread.start()
        try:
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            wait_until(lambda: box.admin.execute(waits).fetchone() == (1,), what="the commit to wait")
            assert found == []
        finally:
            set_parameter(server.url(), "synchronous_standby_names", "")
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


def test_leases_are_checked_behind_the_read_in_its_round_trip(box, monkeypatch):
    """Lane 0 is taken while the read waits for a lock: a check before the read would find it held."""
    for _ in range(2):
        box.add(0, 1)
        box.turn()
    assert box.source.settlement.with_version([0, 1]) == [0, 1]
    monkeypatch.setattr(settlement, "pipeline", lambda _: pytest.fail("a round trip of its own"))
    box.add(0, 1)
    with psycopg.connect(box.database.url) as other, ThreadPoolExecutor(1) as pool:
        other.execute("LOCK TABLE outbox.events IN ACCESS EXCLUSIVE MODE")
        fetching = pool.submit(box.fetch)
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'outbox.events'::regclass"
        wait_until(lambda: box.admin.execute(waits).fetchone() == (1,), what="the read to wait")
        box.admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity' WHERE lane = 0")
        LaneTable(box.admin, "outbox", "another", "0", 30.0).acquire(1)
        other.rollback()
        fetched = fetching.result(60)
    assert fetched.batches.keys() == {1}
    assert isinstance(fetched.failed[0], LaneLost)


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
        assert {lane: type(error) for lane, error in failed.items()} == {0: LaneLocked}
        assert sorted(claim.lane for claims in fetched.batches.values() for claim in claims) == [0, 0, 1]
        assert box.left() == 4
    # As the loop does it: all that is published of the lane, once more.
    pending = box.source.settlement.lanes[0].unsettled
    assert len(pending.rows) == 3
    assert box.source.settle({0: Receipt(pending)}) == {}
    assert box.source.flush([0, 1]) == {}
    assert box.left() == 0
    kept = box.admin.execute("SELECT count(*), count(DISTINCT id) FROM outbox.published").fetchone()
    assert kept == ((5, 5) if box.archive else (0, 0))


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
    lease._until = uptime() + lease.ttl_seconds * 0.5
    fetched = box.fetch()
    assert fetched.settling == ()
    assert lease.remaining_seconds > lease.ttl_seconds * 0.9
    assert (len(ids(fetched.batches)), box.left()) == (2, 2)


def test_exactly_once_the_turn_before_is_settled_before_the_next_one_is_seen(box):
    """Its marker takes the place of the one that names the rows of the turn before."""
    for lease in box.leases:
        box.source.store.adopt(lease, None, "me")
    box.add(0, 1)
    fetched = box.fetch()
    assert box.source.settle(published(fetched.batches)) == {}
    box.add(0, 1)
    fetched = box.fetch()
    assert (len(ids(fetched.batches)), fetched.settling, fetched.unconfirmed) == (2, (), True)
    assert box.source.confirm(time.monotonic() + 60) == {}
    assert box.left() == 2


# At size


@pytest.fixture
def large(outbox_postgres, monkeypatch) -> Iterator[Box]:
    monkeypatch.setattr(settlement, "_FLUSH_SECONDS", 30.0)
    box = Box(outbox_postgres, lanes=MANY)
    yield box
    box.close()


class Lanes:
    """Turns of half a batch of each of many lanes, and what has been published of them."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.keys = keys_of(box.lanes, LIMIT // 2)
        self.published: Counter[int] = Counter()

    def add(self, each: int) -> None:
        """Commit so many events of each lane, of as many keys."""
        with psycopg.connect(self.box.database.url) as connection:
            keys = [key for lane in self.keys for key in lane[:each]]
            Outbox().add_many(connection, [Event("Order", key, "T", {}) for key in keys])

    def publish(self, batches: Batches) -> dict[int, Receipt]:
        """Publish a turn. What the broker was given before it must not be given again."""
        self.published.update(ids(batches))
        assert self.published.most_common(1)[0][1] == 1
        return published(batches)


def test_many_lanes_of_which_one_is_lost_one_locked_and_one_refused_while_a_turn_is_settled(large, monkeypatch):
    box, lanes = large, Lanes(large)
    lost, locked, refused = 7, 19, 40
    others = set(range(MANY)) - {lost, locked, refused}
    half = LIMIT // 2
    lanes.add(half)
    fetched = box.fetch()
    assert len(ids(fetched.batches)) == MANY * half
    assert box.source.settle(lanes.publish(fetched.batches)) == {}
    lanes.add(half)
    taken: list[Lease] = []
    reached: list[str] = []
    with psycopg.connect(box.database.url) as holder:

        def meanwhile(name: str) -> None:
            """The leases were checked, and the statement that settles the turn before is about to be sent."""
            if name == "batch.settling" and not reached:
                reached.append(name)
                box.admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity' WHERE lane = %s", (lost,))
                taken.extend(LaneTable(box.admin, "outbox", "another", "0", 600.0).acquire(1))
                holder.execute("SELECT FROM outbox.lanes WHERE lane = %s FOR UPDATE", (locked,))

        monkeypatch.setattr(settlement, "failpoint", meanwhile)
        # What was committed is flushed, so that nobody has to wait for that.
        box.flush()
        fetched = box.fetch()
        assert reached
        assert (fetched.failed, sorted(fetched.settling)) == ({}, list(range(MANY)))
        assert len(ids(fetched.batches)) == MANY * half
        receipts = lanes.publish(fetched.batches)
        *fine, last = fetched.batches[refused]
        receipts[refused] = Receipt(UnsettledBatch(fine), [(last, "too large")])
        failed = box.source.settle(receipts)
        assert {lane: type(error) for lane, error in failed.items()} == {lost: LaneLost, locked: LaneLocked}
        # Of the others the first turn is settled. With what was refused, the second one too.
        assert box.left_by_lane() == dict.fromkeys(others, half) | {lost: 2 * half, locked: 2 * half, refused: 1}
    # As the loop does it: a lane that is lost is dropped, and of one that was locked all is settled once more.
    box.source.drop(lost)
    pending = box.source.settlement.lanes[locked].unsettled.rows
    assert len(pending) == 2 * half
    assert box.source.settle({locked: Receipt(UnsettledBatch(pending))}) == {}
    assert box.source.flush([locked]) == {}
    # Two more turns, not of the key that waits behind what was refused.
    for _ in range(2):
        lanes.add(half - 1)
        fetched = box.source.fetch(dict.fromkeys(set(range(MANY)) - {lost}, LIMIT))
        assert fetched.failed == {}
        assert fetched.batches.keys() == others | {locked, refused}
        assert box.source.settle(lanes.publish(fetched.batches)) == {}
    assert box.source.flush(list(range(MANY))) == {}
    rest = 2 * half + 2 * (half - 1)
    assert box.left_by_lane() == dict.fromkeys(others | {locked}, 0) | {lost: rest, refused: 1}
    failures = box.admin.execute("SELECT lane, id FROM outbox.failures").fetchall()
    assert failures == [(refused, last.position)]
    # Whoever has the lost lane publishes what was not settled of it again: a batch, and not more.
    assert [lease.lane for lease in taken] == [lost]
    again = ids(box.new_source(taken).fetch({lost: 100}).batches)
    assert len(again) == rest
    assert len([position for position in again if lanes.published[position]]) == LIMIT


def test_many_lanes_of_which_one_can_not_be_settled(large):
    """One statement settles them all. It fails, nothing of it is there, and a new source settles what can be."""
    box, lanes = large, Lanes(large)
    half, stuck = LIMIT // 2, 40
    box.admin.execute(
        "CREATE FUNCTION outbox.refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN RAISE EXCEPTION ''a trigger of the application''; END'"
    )
    box.admin.execute(
        "CREATE TRIGGER refuse BEFORE DELETE ON outbox.events FOR EACH ROW "
        f"WHEN (OLD.lane = {stuck}) EXECUTE FUNCTION outbox.refuse()"
    )
    turns = []
    lanes.add(half)
    fetched = box.fetch()
    assert box.source.settle(lanes.publish(fetched.batches)) == {}
    turns.append(fetched.batches)
    lanes.add(half)
    box.flush()
    fetched = box.fetch()
    assert sorted(fetched.settling) == list(range(MANY))
    turns.append(fetched.batches)
    with pytest.raises((Unavailable, SchemaError), match="a trigger of the application"):
        box.source.settle(lanes.publish(fetched.batches))
    box.source.close()
    assert box.left_by_lane() == dict.fromkeys(range(MANY), 2 * half)
    source = box.new_source(box.leases)
    for lane in set(range(MANY)) - {stuck}:
        claims = [claim for turn in turns for claim in turn[lane]]
        assert source.settle({lane: Receipt(UnsettledBatch(claims))}) == {}
    assert source.flush(list(range(MANY))) == {}
    assert box.left_by_lane() == {lane: 2 * half if lane == stuck else 0 for lane in range(MANY)}


def test_a_number_that_is_given_out_again_settles_no_other_event(box):
    """As after a failover that has lost the event which was read, and now the number is another event's."""
    box.add(0)
    fetched = box.fetch()
    box.admin.execute("UPDATE outbox.events SET event_id = gen_random_uuid()")
    box.source.settle(published(fetched.batches))
    box.fetch()
    box.source.close()
    assert box.left() == 1
