"""Leases of lanes: who gets them, how long they are kept, and how they end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from polling_support import clock_back, table, taken

from outbox import SchemaError
from outbox._clients.clock import uptime
from relay.core.lease import LetGo
from relay.lanes import LaneTable, Releases, next_step
from relay.operations.holding import release_lane


def test_two_that_reach_for_lanes_at_once_never_get_the_same(outbox_postgres):
    found: list[tuple[int, int]] = []
    barrier = threading.Barrier(4)

    def reach(number: int) -> None:
        mine = table(outbox_postgres, f"r{number}")
        barrier.wait(30)
        while leases := mine.acquire(1):
            found.extend((lease.lane, lease.epoch) for lease in leases)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(reach, range(4)))
    assert sorted(found) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_a_lane_locked_by_another_is_skipped_and_not_waited_for(outbox_postgres):
    with outbox_postgres.connect() as other:
        other.execute("SELECT 1 FROM outbox.lanes WHERE lane = 0 FOR UPDATE")
        mine = table(outbox_postgres, "me")
        assert [lease.lane for lease in mine.acquire(4)] == [1, 2, 3]
        assert mine.acquire(4) == []


@pytest.mark.parametrize("count", [4, 256])
def test_a_locked_lane_does_not_keep_the_others_from_being_renewed(outbox_postgres, count):
    from outbox._app import migrate as db

    db.change_lanes(outbox_postgres.url, count)
    connection = outbox_postgres.connect(autocommit=True)
    # Instead of waiting for the lock.
    connection.execute("SET lock_timeout = '1s'")
    mine = LaneTable(connection, "outbox", "me", "0", 30.0)
    leases = mine.acquire(count)
    # A lease that was prolonged lately is left to the worker.
    before = mine.renew(leases)
    assert (before.lost, before.switched) == ([], [])
    for lease in leases:
        lease._until -= 15.0
    until = "SELECT lane, lease_until FROM outbox.lanes"
    with outbox_postgres.connect() as other, outbox_postgres.connect(autocommit=True) as admin:
        before = dict(admin.execute(until).fetchall())
        other.execute("SELECT 1 FROM outbox.lanes WHERE lane = 2 FOR UPDATE")
        renewal = mine.renew(leases)
        assert (renewal.lost, renewal.switched) == ([], [])
        after = dict(admin.execute(until).fetchall())
        assert [lane for lane in after if after[lane] == before[lane]] == [2]
        other.rollback()
        mine.renew(leases)
        assert dict(admin.execute(until).fetchall())[2] > before[2]


def test_a_locked_lane_does_not_keep_the_others_from_being_released(outbox_postgres):
    mine, other = table(outbox_postgres, "me"), table(outbox_postgres, "other")
    leases = mine.acquire(4)
    with outbox_postgres.connect() as locking:
        locking.execute("SELECT 1 FROM outbox.lanes WHERE lane = 2 FOR UPDATE")
        assert mine.release(leases, clean=range(4)) == [2]
        assert [lease.lane for lease in other.acquire(4)] == [0, 1, 3]
    # Only that one is still ours.
    assert mine.release(leases) == []
    assert [lease.lane for lease in other.acquire(4)] == [2]


def test_a_lane_that_was_taken_again_is_not_released_as_clean_as_before(outbox_postgres):
    """Its lease ran out while its row was locked. From the new one a transaction may be open."""
    mine, releases = table(outbox_postgres, "me"), Releases()
    former = mine.acquire(4)[2]
    with outbox_postgres.connect() as locking, outbox_postgres.connect(autocommit=True) as admin:
        locking.execute("SELECT 1 FROM outbox.lanes WHERE lane = 2 FOR UPDATE")
        assert releases.release(mine, [LetGo(former, clean=True)]) == []
        locking.rollback()
        admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity', transactional_id = 'id' WHERE lane = 2")
        again = taken(mine)
        releases.release(mine, [LetGo(again, clean=False)])
        found = admin.execute("SELECT owner, transactional_id FROM outbox.lanes WHERE lane = 2").fetchall()
    assert found == [(None, "id")]


def test_a_lease_runs_out_by_the_databases_clock_and_its_epoch_ends(outbox_postgres):
    mine, other = table(outbox_postgres, "me", ttl=30.0), table(outbox_postgres, "other")
    lease = taken(mine)
    assert lease.secure
    assert mine.renew([lease]).lost == []
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("UPDATE outbox.lanes SET lease_until = clock_timestamp() WHERE lane = %s", (lease.lane,))
        # Nobody took it: the epoch still stands, and so does the owner.
        assert mine.renew([lease]).lost == []
        admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
    epochs = {lease.lane: lease.epoch for lease in other.acquire(4)}
    assert epochs[lease.lane] == lease.epoch + 1
    assert mine.renew([lease]).lost == [lease]
    mine.release([lease])
    with outbox_postgres.connect() as admin:
        query = "SELECT owner FROM outbox.lanes WHERE lane = %s"
        assert admin.execute(query, (lease.lane,)).fetchone() == ("other",)


def test_a_relay_s_row_says_when_its_process_was_started(outbox_postgres):
    """Not when the first one of its name was, nor when the row was made."""
    for hours in (2, 1):
        connection = outbox_postgres.connect(autocommit=True)
        mine = LaneTable(connection, "outbox", "me", "0", 30.0, began=uptime() - hours * 3600.0)
        for _ in range(2):
            mine.beat()
            age = "SELECT extract(epoch FROM clock_timestamp() - started_at)::float8 FROM outbox.relays"
            assert connection.execute(age).fetchone()[0] == pytest.approx(hours * 3600.0, abs=60.0)


def test_the_census_counts_the_living(outbox_postgres):
    first, second = table(outbox_postgres, "first"), table(outbox_postgres, "second", ttl=0.0)
    first.beat()
    second.beat()
    taken(first)
    distribution = first.distribution()
    assert dict(distribution.held) == {"first": 1}
    assert (distribution.lanes, distribution.free) == (4, 3)
    first.leave()
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("UPDATE outbox.relays SET alive_until = alive_until - interval '2 days'")
        first.beat()
        first.forget_dead()
        assert admin.execute("SELECT instance FROM outbox.relays").fetchall() == [("first",)]
        admin.execute("DELETE FROM outbox.lanes")
    with pytest.raises(SchemaError, match="no lanes"):
        first.distribution()


def test_a_dead_relay_gets_no_share_when_the_database_s_clock_goes_back(outbox_postgres):
    """Its row would be alive, and its lanes leased, for as long as the clock went back."""
    dead, mine = table(outbox_postgres, "dead"), table(outbox_postgres, "mine")
    dead.beat()
    taken(dead)
    clock_back(outbox_postgres)
    with outbox_postgres.connect(autocommit=True) as admin:
        mine.beat()
        assert next_step(mine.distribution(), "mine") == 3
        mine.acquire(3)
        assert release_lane(admin, "outbox", 0, "a test") is not None
        assert next_step(mine.distribution(), "mine") == 1
        # One that lives counts again with its next beat.
        dead.beat()
        assert mine.distribution().held.keys() == {"dead", "mine"}
