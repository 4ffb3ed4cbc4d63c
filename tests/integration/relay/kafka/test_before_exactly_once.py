"""A database from before exactly-once began, while Kafka has the markers of what came after; and lanes that are new."""

from __future__ import annotations

import pytest
from takeover_support import LANES, Place, place

from outbox._app import migrate as db
from outbox.testing.fixtures import Database
from relay.core.marker import StateLost
from relay.core.ports import Completed

__all__ = ["place"]


@pytest.fixture
def neighbour(place, outbox_postgres, outbox_kafka, outbox_postgres_server, _outbox_template):
    """An outbox of the same server and the same name, in another database."""
    name = f"{outbox_postgres.name}_other"
    with Database(outbox_postgres_server.create_database(name, _outbox_template), name) as database:
        made = Place(database, outbox_kafka, name=place.settings.name)
        yield made
        made.close()
    outbox_postgres_server.drop_database(name)


def test_a_neighbours_markers_stop_the_lanes_and_its_worker_goes_on(place, neighbour):
    """Its first ones, which a lane without a settled batch could have written. Later ones: unit/…/test_marker.py."""
    place.add()
    worker = place.joined("a")
    neighbour.add()
    other = neighbour.worker("b")
    failed = other.join()
    assert {type(error) for error in failed.values()} == {StateLost}
    assert sorted(failed) == list(range(LANES))
    assert "choose a new one" in str(failed[0])
    assert other.fenced == []
    assert set(neighbour.tables.batches().values()) == {None}
    worker.drain()
    assert place.all_once()


def test_a_restore_to_before_exactly_once_began_stops_the_lanes(place):
    place.add()
    place.tables.save()
    worker = place.joined("a")
    for _ in range(2):
        worker.turn(2)
    place.tables.table.release(worker.leases, clean=range(LANES))
    before = place.read()
    assert before.total() == 4 * LANES
    place.tables.restore()
    assert set(place.tables.batches().values()) == {None}
    heir = place.worker("b")
    # Taken again after a while, as relays do: each time the epoch rises.
    for _ in range(3):
        failed = heir.join()
        assert sorted(failed) == list(range(LANES))
        assert {type(error) for error in failed.values()} == {StateLost}
        assert "from before exactly-once began" in str(failed[0])
        assert "outbox relay reconcile" in str(failed[0])
        heir = place.worker("b")
    assert place.read() == before


def test_the_first_events_whose_rows_are_gone_stop_the_lane(place):
    """Exactly-once has just begun, and the restored table has not all that it published."""
    place.add()
    worker = place.joined("a")
    assert isinstance(worker.publish(2), Completed)
    place.tables.run("UPDATE outbox.lanes SET last_batch = NULL")
    place.tables.run("DELETE FROM outbox.events WHERE lane = 3")
    heir = place.worker("b")
    failed = heir.join()
    assert list(failed) == [3]
    assert "only 0" in str(failed[3])


@pytest.mark.parametrize("later", [False, True])
def test_lanes_of_another_number_go_on_from_the_markers_that_their_numbers_had(place, later):
    """Not from one of a later epoch than the table knows: Postgres has lost what came after."""
    place.add()
    worker = place.joined("a")
    worker.drain()
    place.tables.table.release(worker.leases, clean=range(LANES))
    before = place.tables.batches()
    db.change_lanes(place.tables.url, LANES - 2)
    markers = place.state.last_markers(range(LANES))
    former = {lane: (marker.batch, marker.epoch + 10 * later) for lane, marker in markers.items()}
    db.change_lanes(place.tables.url, LANES, former=former)
    added = [LANES - 2, LANES - 1]
    assert place.tables.batches() == (before | dict.fromkeys(added, 0) if later else before)
    place.add()
    heir = place.worker("b")
    failed = heir.join()
    if later:
        assert sorted(failed) == added
        assert {type(error) for error in failed.values()} == {StateLost}
        return
    assert failed == {}
    heir.drain()
    assert place.all_once()


def test_lanes_that_exactly_once_has_not_begun_on_stay_so_when_their_number_changes(place):
    db.change_lanes(place.tables.url, LANES + 1)
    assert set(place.tables.batches().values()) == {None}
