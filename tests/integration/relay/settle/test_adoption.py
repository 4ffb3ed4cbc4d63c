"""What a marker settles when a lane is adopted, and when the lane must stop."""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest
from one_lane import OneLane
from takeover_support import Tables

from outbox.errors import SchemaError
from relay.core.marker import Marker, StateLost
from relay.core.ports import LaneLost, Receipt, Unavailable, UnsettledBatch


class OnlyLane(Tables):
    """An outbox of one lane, taken by ``take``."""

    def take(self, *, archive: bool = False) -> OneLane:
        [lease] = self.acquire([0])
        return OneLane(self.source([], archive=archive), lease)


def adopt(lane: OneLane, marker: Marker | None, own_id: str | None = "me"):
    return lane.source.store.adopt(lane.lease, marker, own_id)


@pytest.fixture
def lane(outbox_postgres):
    lane = OnlyLane(outbox_postgres, 1)
    yield lane
    for source in lane.opened:
        source.close()


def marker(lane: OneLane, batch: int, claims=()) -> Marker:
    """The marker that this lane's relay would write."""
    row = lane.source.connection.execute("SELECT system_identifier::text FROM pg_control_system()").fetchone()
    ids, event_ids = tuple(claim.position for claim in claims), tuple(claim.event_id for claim in claims)
    return Marker(batch, lane.lease.epoch, row[0], 1, ids, event_ids)


def test_a_lane_begins_with_an_empty_marker(lane):
    source = lane.take()
    adopted, identity = adopt(source, None)
    assert adopted is None
    first = Marker(1, source.lease.epoch, identity.system_identifier, identity.timeline)
    assert adopt(source, first)[0] == first
    assert lane.batches() == {0: 1}
    assert identity.timeline == 1


def test_the_marker_settles_what_was_committed_and_not_settled(lane):
    source = lane.take()
    adopt(source, marker(source, 1))
    lane.add("a", "b", "c")
    second = marker(source, 2, source.fetch(2))
    successor = lane.take()
    assert adopt(successor, second)[0] == second
    assert lane.left() == ["c"]
    assert lane.batches() == {0: 2}
    # Again: nothing more goes.
    assert adopt(successor, second)[0] == second
    assert [claim.aggregate_id for claim in successor.fetch(10)] == ["c"]


def test_the_marker_settles_into_the_archive_without_a_place(lane):
    source = lane.take(archive=True)
    adopt(source, marker(source, 1))
    lane.add("a")
    second = marker(source, 2, source.fetch(2))
    adopt(lane.take(archive=True), second)
    assert lane.run('SELECT aggregate_id, topic, "offset" FROM outbox.published') == [("a", None, None)]


def test_batches_are_counted_as_they_are_settled(lane):
    source = lane.take()
    adopt(source, marker(source, 1))
    for batch in (2, 3):
        lane.add("a")
        source.settle(Receipt(UnsettledBatch(source.fetch(10), number=batch)))
        assert lane.batches() == {0: batch - 1}
        source.fetch(10)
        assert lane.batches() == {0: batch}


def test_the_row_names_our_id_with_the_settling_and_not_before(lane):
    source = lane.take()
    assert source.lease.former_id is None
    adopt(source, marker(source, 1), "first")
    assert lane.ids() == {0: "first"}
    successor = lane.take()
    assert successor.lease.former_id == "first"
    assert lane.ids() == {0: "first"}
    with pytest.raises(StateLost):
        adopt(successor, None, "second")
    assert lane.ids() == {0: "first"}
    adopt(successor, marker(source, 1), "second")
    assert (lane.ids(), successor.lease.former_id) == ({0: "second"}, "second")
    with pytest.raises(LaneLost):
        adopt(source, marker(source, 1), "first")
    assert lane.ids() == {0: "second"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("transactional_id = 'other'", r"\(transactional id 'other' instead of 'me'\)"),
        ("transactional_id = NULL", r"\(transactional id None instead of 'me'\)"),
        ("last_batch = 7", r"\(batch 7 instead of 1\)"),
    ],
)
def test_a_row_that_has_changed_is_reported_by_what_differs(lane, change, said):
    source = lane.take()
    adopt(source, marker(source, 1))
    lane.add("a")
    lane.run(f"UPDATE outbox.lanes SET {change}")
    with pytest.raises(Unavailable, match=said):
        source.fetch(10)
    assert lane.left() == ["a"]


@pytest.mark.parametrize(("settled", "found"), [(3, None), (3, 2), (1, 3)])
def test_table_and_marker_that_contradict_each_other_stop_the_lane(lane, settled, found):
    source = lane.take()
    lane.run("UPDATE outbox.lanes SET last_batch = %s", settled)
    lane.add("a")
    with pytest.raises(StateLost, match="reconcile"):
        adopt(source, None if found is None else marker(source, found))
    assert lane.left() == ["a"]
    assert lane.batches() == {0: settled}


def test_a_marker_whose_rows_postgres_has_lost_stops_the_lane(lane):
    """A failover to a standby that was behind: last_batch fits, the rows of the batch are not there."""
    source = lane.take()
    adopt(source, marker(source, 1))
    lane.add("a", "b")
    second = marker(source, 2, source.fetch(10))
    lane.run("DELETE FROM outbox.events WHERE aggregate_id = 'a'")
    with pytest.raises(StateLost, match="only 1"):
        adopt(lane.take(), second)
    assert lane.left() == ["b"]


def test_a_stale_epoch_adopts_nothing(lane):
    source = lane.take()
    adopt(source, marker(source, 1))
    lane.add("a")
    second = marker(source, 2, source.fetch(10))
    lane.take()
    for call in (lambda: adopt(source, second), lambda: source.fetch(10)):
        with pytest.raises(LaneLost):
            call()
    identity, lost = source.source.store.identity([source.lease])
    assert identity is None
    assert isinstance(lost[0], LaneLost)
    assert lane.left() == ["a"]


def test_a_relay_that_sleeps_in_a_transaction_does_not_hold_its_lane(lane):
    """The session ends when the lease has run out, and the lane's row is free again."""
    source = lane.take()
    source.lease.ttl_seconds = 0.2
    connection = source.source.connection

    def sleep_in_it() -> None:
        with source.source.session.transaction(source.lease, "sleeping"):
            connection.execute("SELECT FROM outbox.lanes FOR UPDATE")
            with psycopg.connect(lane.url) as other:
                other.execute("SET lock_timeout = '20s'")
                other.execute("SELECT FROM outbox.lanes FOR UPDATE")
            connection.execute("SELECT 1")

    with pytest.raises(Unavailable, match="idle-in-transaction"):
        sleep_in_it()


MANY = 9


@pytest.fixture
def tables(outbox_postgres):
    tables = Tables(outbox_postgres, MANY)
    yield tables
    for source in tables.opened:
        source.close()


def test_lanes_that_have_nothing_to_settle_are_adopted_at_once_and_no_others(tables):
    """What ``adopt`` would settle, refuse or wait for is left to it; a worker's other lanes do not wait."""
    source = tables.source(leases := tables.acquire(range(MANY)))
    identity, _ = source.store.identity(leases)
    assert identity is not None
    markers: dict[int, Marker | None] = {
        lane: Marker(4, 1, identity.system_identifier, identity.timeline) for lane in range(MANY)
    }
    tables.run("UPDATE outbox.lanes SET last_batch = 4, transactional_id = 'former'")
    # A lane without a marker, one whose batch is not settled, and one that was made anew.
    markers[1] = None
    for lane, batch in {1: None, 2: 3, 3: 0}.items():
        tables.run("UPDATE outbox.lanes SET last_batch = %s WHERE lane = %s", batch, lane)
    # Markers of another database, of a later timeline, and from farther on in the WAL.
    markers[4] = replace(markers[0], system_identifier="12345")
    markers[5] = replace(markers[0], timeline=identity.timeline + 1)
    markers[6] = replace(markers[0], commit_lsn=2**60)
    # A lane that is taken by another relay, and one whose row is locked.
    tables.acquire([7])
    with psycopg.connect(tables.url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 8 FOR UPDATE")
        adopted = source.store.adopt_settled(leases, markers, "mine")
    assert adopted == {0: (markers[0], identity), 1: (None, identity)}
    assert tables.ids() == {lane: "mine" if lane in adopted else "former" for lane in range(MANY)}
    assert [(lease.former_id, lease.last_batch) for lease in leases[:3]] == [("mine", 4), ("mine", None), (None, None)]
    # A worker without transactions has no transactional id.
    assert source.store.adopt_settled(leases, markers, None).keys() == {0, 1, 8}
    assert {lane for lane, named in tables.ids().items() if named is None} == {0, 1, 8}


def test_lanes_that_are_new_are_adopted_at_once_by_their_first_markers(tables):
    source = tables.source(leases := tables.acquire(range(8)))
    identity, _ = source.store.identity(leases)
    assert identity is not None
    first = Marker(1, 1, identity.system_identifier, identity.timeline, outbox=identity.outbox)
    markers: dict[int, Marker | None] = dict.fromkeys(range(8), first)
    # Of an earlier version; of another outbox; with events, of which ``adopt`` finds out whether they are there.
    markers[1] = replace(first, outbox=None)
    markers[2] = replace(first, outbox="another")
    markers[3] = replace(first, positions=(1,), event_ids=("01890a5d-ac96-774b-bcce-b302099a8057",))
    markers[4] = replace(first, batch=2)
    # One that is not new, and two that `outbox db lanes` has added.
    markers[6] = None
    for lane, batch in {5: 3, 6: 0, 7: 0}.items():
        tables.run("UPDATE outbox.lanes SET last_batch = %s WHERE lane = %s", batch, lane)
    adopted = source.store.adopt_settled(leases, markers, "mine")
    assert adopted == {lane: (markers[lane], identity) for lane in (0, 1, 6, 7)}
    assert tables.ids() == {lane: "mine" if lane in adopted else None for lane in range(MANY)}
    assert tables.batches() == {0: 1, 1: 1, 5: 3, 6: 0, 7: 1} | dict.fromkeys([2, 3, 4, 8])
    assert [(lease.former_id, lease.last_batch) for lease in leases[:3]] == [("mine", 1), ("mine", 1), (None, None)]


def test_rights_that_are_missing_adopt_nothing_at_once(tables):
    """The lane whose row can't be written is named by ``adopt``."""
    source = tables.source(leases := tables.acquire([0, 1]))
    tables.run(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE insufficient_privilege; END $$;"
    )
    tables.run(
        "CREATE TRIGGER refuse BEFORE UPDATE ON outbox.lanes FOR EACH ROW "
        "WHEN (new.lane = 1 AND new.transactional_id = 'mine') EXECUTE FUNCTION refuse()"
    )
    source.store.identity(leases)
    assert source.store.adopt_settled(leases, {0: None, 1: None}, "mine") == {}
    assert source.store.adopt(leases[0], None, "mine")[0] is None
    with pytest.raises(SchemaError):
        source.store.adopt(leases[1], None, "mine")
