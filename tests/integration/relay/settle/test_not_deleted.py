"""A DELETE takes the published rows and no others; one that leaves them without an error stops the lane."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from failing_lane import BLOCK, SKIP, Lane, lane, turn
from polling_support import add, table
from rows_and_roles import KEEP
from support import wait_until
from takeover_support import LANES, place

from outbox import Event, Outbox
from outbox._app.settings import FailureSettings
from relay.core.ports import Claim, Completed, DatabaseUnavailable, Receipt, StandingError, UnsettledBatch
from relay.database import Connector
from relay.kafka.routing import Router
from relay.polling.at_most_once import AtMostOnceSource
from relay.settle.retries import Failures
from relay.tasks import scheduled as scheduled_module
from relay.tasks.scheduled import NextDue, ScheduledEvents

__all__ = ["lane", "place"]

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


def left(lane: Lane) -> Sequence[str]:
    return [name for (name,) in lane.rows("SELECT event_type FROM ONLY outbox.events ORDER BY id")]


@pytest.mark.parametrize("archive", [False, True])
def test_a_child_that_comes_while_a_relay_runs_costs_no_event(lane, archive):
    """Its rows stand at the same places of another heap."""
    lane.add("a1", "b1", "c1")
    source = lane.source(archive=archive)
    first = source.fetch(1)
    lane.admin.execute("CREATE TABLE outbox.old () INHERITS (outbox.events)")
    columns = "id, event_id, aggregate_type, aggregate_id, event_type"
    lane.admin.execute(f"INSERT INTO outbox.old ({columns}) SELECT {columns} FROM outbox.events ORDER BY id")
    source.settle(Receipt(UnsettledBatch(first)))
    source.flush()
    assert left(lane) == ["b1", "c1"]
    assert lane.rows("SELECT count(*) FROM outbox.old") == [(3,)]
    assert turn(source) == ["b1", "c1"]
    assert (turn(source), left(lane)) == ([], [])
    if archive:
        assert lane.rows("SELECT event_type FROM outbox.published ORDER BY id") == [("a1",), ("b1",), ("c1",)]


@pytest.mark.parametrize("archive", [False, True])
def test_what_a_trigger_keeps_is_not_settled(lane, archive):
    lane.add("a1", "b1")
    lane.admin.execute(KEEP("events"))
    source = lane.source(archive=archive)
    claims = source.fetch(10)
    source.settle(Receipt(UnsettledBatch(claims)))
    for settling in (source.flush, lambda: source.fetch(10)):
        with pytest.raises(StandingError, match=r"settling lane 0: rows can't be deleted.*outbox db check"):
            settling()
    assert left(lane) == ["a1", "b1"]
    assert lane.rows("SELECT count(*) FROM outbox.published") == [(0,)]
    lane.admin.execute("DROP FUNCTION outbox.keep CASCADE")
    assert (source.fetch(10), left(lane)) == ([], [])


def test_a_rule_that_keeps_rows_is_an_error(lane):
    """Of Postgres: it refuses the statement."""
    lane.add("a1")
    source = lane.source()
    source.settle(Receipt(UnsettledBatch(source.fetch(10))))
    for rule in ("NOTHING", "UPDATE outbox.events SET headers = NULL WHERE id = old.id"):
        lane.admin.execute(f"CREATE OR REPLACE RULE keep AS ON DELETE TO outbox.events DO INSTEAD {rule}")
        with pytest.raises(StandingError):
            source.flush()


@pytest.mark.parametrize("router", [BLOCK, SKIP], ids=["block", "skip"])
def test_a_dead_event_that_a_trigger_keeps_is_reported_and_a_row_of_a_child_is_left_alone(lane, router):
    """It would be refused for ever, without a dead letter; or its key wait for one that is not there."""
    lane.add("a1")
    source = lane.source(router)
    lane.admin.execute("CREATE TABLE outbox.old () INHERITS (outbox.events)")
    columns = "id, event_id, aggregate_type, aggregate_id, event_type"
    lane.admin.execute(f"INSERT INTO outbox.old ({columns}) SELECT {columns} FROM outbox.events")
    lane.admin.execute(KEEP("events"))
    (claim,) = source.fetch(10)
    with pytest.raises(StandingError, match="settling lane 0: rows can't be deleted"):
        source.settle(Receipt(refused=[(claim, "too large")]))
    assert lane.rows("SELECT (SELECT count(*) FROM outbox.failures), (SELECT count(*) FROM outbox.dead_letters)") == [
        (0, 0)
    ]
    lane.admin.execute("DROP FUNCTION outbox.keep CASCADE")
    source.settle(Receipt(refused=[(claim, "too large")]))
    assert left(lane) == []
    assert lane.rows("SELECT event_type FROM outbox.dead_letters") == [("a1",)]
    assert lane.rows("SELECT count(*) FROM outbox.old") == [(1,)]


@pytest.fixture
def once(outbox_postgres):
    """A source of four lanes at-most-once with an event in each; ``lost`` has what it counts as lost."""
    lost: list[tuple[int, int]] = []
    source = AtMostOnceSource(
        Connector(outbox_postgres.url, "test"),
        "outbox",
        Failures("outbox", FailureSettings(), Router()),
        on_lost=lambda *what: lost.append(what),
    )
    for lease in table(outbox_postgres, "me", 600.0).acquire(4):
        source.hold(lease)
    add(outbox_postgres, *(f"k{n}" for n in range(400)))
    yield source, lost
    source.close()


ALL = dict.fromkeys(range(4), 1000)
KEEP_LANE = KEEP("events").replace("RETURN NULL", "RETURN CASE WHEN old.lane <> 1 THEN old END")


def all_published(claims: Sequence[Claim]) -> Receipt:
    return Receipt(UnsettledBatch(claims))


def given_out(source: AtMostOnceSource) -> list[int]:
    """Return the lanes of one turn, all of it sent."""
    fetched = source.fetch(ALL)
    source.settle({lane: all_published(claims) for lane, claims in fetched.batches.items()})
    return sorted(fetched.batches)


def test_at_most_once_a_trigger_that_keeps_rows_of_one_lane_stops_no_other(outbox_postgres, once):
    source, lost = once
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        admin.execute(KEEP_LANE)
        kept = admin.execute("SELECT count(*) FROM outbox.events WHERE lane = 1").fetchone()
        fetched = source.fetch(ALL)
        assert {lane: type(error) for lane, error in fetched.failed.items()} == {1: StandingError}
        source.settle({lane: Receipt(UnsettledBatch(claims)) for lane, claims in fetched.batches.items()})
        assert sorted(fetched.batches) == [0, 2, 3]
        assert admin.execute("SELECT count(*) FROM outbox.events").fetchone() == kept
        admin.execute("DROP FUNCTION outbox.keep CASCADE")
    assert (given_out(source), lost) == ([1], [])


def test_at_most_once_a_trigger_that_keeps_the_rows_of_all_lanes_fails_the_turn(outbox_postgres, once):
    source, lost = once
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        admin.execute(KEEP("events"))
        with pytest.raises(StandingError, match="rows can't be deleted"):
            source.fetch(ALL)
        assert admin.execute("SELECT count(*) FROM outbox.events").fetchone() == (400,)
    source.close()
    assert lost == []


def test_at_most_once_what_a_statement_before_the_refused_one_has_deleted_is_sent(outbox_postgres, once):
    """The row of lane 1 has moved, so another statement than that of the others settles it."""
    source, lost = once
    assert given_out(source) == [0, 1, 2, 3]
    add(outbox_postgres, *(f"k{n}" for n in range(400)))
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        admin.execute(KEEP_LANE)
        admin.execute("UPDATE outbox.lanes SET lease_until = lease_until + interval '1 s' WHERE lane = 1")
        assert given_out(source) == [0, 2, 3]
        assert admin.execute("SELECT DISTINCT lane FROM outbox.events").fetchall() == [(1,)]
    assert lost == []


def test_at_most_once_what_is_deleted_when_postgres_goes_away_is_counted_as_lost(outbox_postgres, once, monkeypatch):
    """Lane 1 is refused, and lane 3 is not asked for any more: nothing of them is lost."""
    source, lost = once
    settle = source.settlement.settle

    def until_lane_2(lanes):
        if list(lanes) == [2]:
            admin.execute("SELECT pg_terminate_backend(%s, 10000)", [source.connection.info.backend_pid])
        return settle(lanes)

    monkeypatch.setattr(source.settlement, "settle", until_lane_2)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        admin.execute(KEEP_LANE)
        in_lanes = dict(admin.execute("SELECT lane::int, count(*) FROM outbox.events GROUP BY 1").fetchall())
        with pytest.raises(DatabaseUnavailable):
            source.fetch(ALL)
    source.close()
    assert sorted(lost) == [(0, in_lanes[0]), (2, in_lanes[2])]


def test_at_most_once_a_lane_whose_dead_letters_are_refused_costs_the_others_nothing(outbox_postgres, once):
    """Lanes 0, 1 and 2 have a refused event each; all else is published."""
    source, lost = once
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        admin.execute("ALTER TABLE outbox.dead_letters ADD CONSTRAINT mine CHECK (lane <> 0)")
        receipts = {
            lane: Receipt(UnsettledBatch(claims[:-1]), [(claims[-1], "bad")]) if lane < 3 else all_published(claims)
            for lane, claims in sorted(source.fetch(ALL).batches.items())
        }
        assert {lane: type(error) for lane, error in source.settle(receipts).items()} == {0: StandingError}
        assert admin.execute("SELECT lane FROM outbox.dead_letters ORDER BY lane").fetchall() == [(1,), (2,)]
    assert lost == [(0, 1)]


def test_at_most_once_what_is_published_is_not_lost_when_dead_letters_are(outbox_postgres, once):
    source, lost = once
    receipts = {
        lane: Receipt(UnsettledBatch(claims[:-1]), [(claims[-1], "bad")]) if lane < 2 else all_published(claims)
        for lane, claims in sorted(source.fetch(ALL).batches.items())
    }
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s, 10000)", [source.connection.info.backend_pid])
    with pytest.raises(DatabaseUnavailable):
        source.settle(receipts)
    assert lost == [(0, 1), (1, 1)]


def test_exactly_once_a_trigger_that_keeps_rows_repeats_none(place):
    place.add(30)
    former = place.joined("a")
    former.unsettled(1000)
    with psycopg.connect(place.tables.url, autocommit=True) as admin:
        admin.execute(KEEP("events"))
    with pytest.raises(StandingError, match="rows can't be deleted"):
        former.source.flush(range(LANES))
    assert place.tables.batches() == dict.fromkeys(range(LANES), 1)
    # Whoever takes the lanes over is stopped by their markers' batches.
    heir = place.worker("b")
    failed = heir.join()
    assert {lane: type(error) for lane, error in failed.items()} == dict.fromkeys(range(LANES), StandingError)
    assert all("rows can't be deleted" in str(error) for error in failed.values())
    assert len(place.tables.left()) == place.count
    place.tables.run("DROP FUNCTION outbox.keep CASCADE")
    assert heir.join() == {}
    assert isinstance(heir.publish(), Completed)
    assert place.all_once()


@pytest.mark.parametrize("archive", [False, True])
def test_a_row_that_another_session_deletes_at_the_same_moment_stops_nothing(lane, archive):
    lane.add("a1", "b1")
    source = lane.source(archive=archive)
    source.settle(Receipt(UnsettledBatch(source.fetch(10))))
    with lane.database.connect() as other:
        other.execute("DELETE FROM outbox.events WHERE event_type = 'a1'")
        settling = threading.Thread(target=source.flush)
        settling.start()
        wait_until(lambda: lane.rows(WAITING) == [(1,)], what="the statement to wait for the row")
        other.commit()
        settling.join()
    assert left(lane) == []
    assert lane.rows("SELECT event_type FROM outbox.published") == ([("b1",)] if archive else [])
    # Settled: nothing is pending any more.
    lane.add("c1")
    assert turn(source) == ["c1"]


def test_scheduled_events_that_a_trigger_keeps_are_reported(lane):
    with psycopg.connect(lane.database.url) as connection:
        ((now,),) = connection.execute("SELECT now()").fetchall()
        Outbox().add(connection, Event("Order", "a", "a1"), not_before=now)
    lane.admin.execute(KEEP("scheduled"))
    due = NextDue()
    due.set(0.0)
    scheduled = ScheduledEvents(Connector(lane.database.url, "test"), "outbox", due)
    with pytest.raises(StandingError, match="moving scheduled events: rows can't be deleted"):
        scheduled.look()
    assert (left(lane), lane.rows("SELECT event_type FROM outbox.scheduled")) == ([], [("a1",)])
    lane.admin.execute("DROP FUNCTION outbox.keep CASCADE")
    scheduled.look()
    scheduled.close()
    assert (left(lane), lane.rows("SELECT event_type FROM outbox.scheduled")) == (["a1"], [])


def test_an_event_that_gets_another_time_that_is_due_while_it_is_moved_stops_nothing(lane, monkeypatch):
    """The move waits after its snapshot is taken, so it locks a version of the row that its DELETE does not see."""
    waiting = scheduled_module._MOVE.replace("SELECT pg_try", "SELECT pg_advisory_xact_lock(7) IS NOT NULL AND pg_try")
    assert waiting != scheduled_module._MOVE
    monkeypatch.setattr(scheduled_module, "_MOVE", waiting)
    with psycopg.connect(lane.database.url) as connection:
        ((now,),) = connection.execute("SELECT now()").fetchall()
        Outbox().add(connection, Event("Order", "a", "a1"), not_before=now)
        event_id = Outbox().add(connection, Event("Order", "b", "b1"), not_before=now)
    due = NextDue()
    due.set(0.0)
    scheduled = ScheduledEvents(Connector(lane.database.url, "test"), "outbox", due)
    with ThreadPoolExecutor(1) as pool, lane.database.connect() as other:
        other.execute("SELECT pg_advisory_xact_lock(7)")
        looking = pool.submit(scheduled.look)
        wait_until(lambda: lane.rows(WAITING) == [(1,)], what="the move to wait")
        with psycopg.connect(lane.database.url) as connection:
            assert Outbox().reschedule(connection, event_id, not_before=now)
    looking.result()
    scheduled.close()
    assert left(lane) == ["a1", "b1"]
