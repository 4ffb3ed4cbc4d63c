"""Pauses, read by a relay: from its first turn on, confirmed when its turn in flight has ended."""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
from counting import Counting
from loop_fakes import all_of
from pause_rig import LANE, ORDERS, Rig, url
from pause_support import pause, read, resume
from polling_support import add, source, table, taken
from support import look_up, wait_until

from relay.core.pauses import ALL, Pauses
from relay.lanes import LaneTable
from relay.polling import low_water_mark, reader
from relay.supervisor import Supervisor

__all__ = ["url"]


# What relays read
def test_a_relay_reads_them_with_its_census_and_with_the_lanes_it_takes(outbox_postgres, url):
    relay = table(outbox_postgres, "me")
    relay.beat()
    assert relay.pauses is None
    relay.distribution()
    assert relay.pauses == Pauses()
    pause(url, LANE, ORDERS, wait=False)
    taken_now = relay.acquire(1)
    numbers = {scope: one.number for scope, one in read(url).items()}
    known = relay.pauses
    assert known is not None
    assert len(taken_now) == 1
    assert (known.lanes, known.topics, known.every_lane) == ({1}, {"order-events"}, False)
    assert known.numbers == {numbers[LANE], numbers[ORDERS]}
    resume(url, LANE, ORDERS)
    pause(url, ALL, wait=False)
    relay.distribution()
    assert relay.pauses.covers(3)
    assert relay.pauses.lanes == set()


def test_a_pause_between_the_census_and_the_taking_holds_from_the_first_turn_on(outbox_postgres, url, monkeypatch):
    add(outbox_postgres, *(f"k{number}" for number in range(40)))
    census = LaneTable.distribution

    def then_pause(self: LaneTable, next_due: Any) -> Any:
        found = census(self, next_due)
        if not read(url):
            pause(url, LANE, wait=False)
        return found

    monkeypatch.setattr(LaneTable, "distribution", then_pause)
    with Rig(url) as rig:
        wait_until(lambda: rig.lanes() == {0, 2, 3}, what="the other lanes")
        wait_until(lambda: not read(url)[LANE].unconfirmed, what="it to confirm")
    assert rig.lanes() == {0, 2, 3}


def test_a_relay_confirms_when_its_turn_in_flight_has_ended(outbox_postgres, url):
    add(outbox_postgres, *(f"k{number}" for number in range(40)))
    go_on = threading.Event()
    with Rig(url) as rig:

        def slowly(batches: Any) -> Any:
            assert go_on.wait(30)
            return all_of(batches)

        rig.broker.always = slowly
        wait_until(lambda: rig.broker.turns, what="a turn")
        pause(url, ALL, wait=False)
        wait_until(lambda: rig.pauses.now.every_lane, what="the control loop to know")
        time.sleep(1.2)
        assert read(url)[ALL].unconfirmed == ("me",)
        go_on.set()
        wait_until(lambda: not read(url)[ALL].unconfirmed, what="it to confirm")
        # What was in flight is settled, and not left for later.
        settled = {lane for turn in rig.broker.turns for lane in turn}
        rows = {row[0] for row in look_up(url, "SELECT DISTINCT lane FROM outbox.events")}
        assert not settled & rows


def test_a_relay_whose_own_row_is_locked_obeys_all_the_same_and_has_not_confirmed(url):
    """It can't say that it is alive, nor that it obeys. Its leases are renewed, so it must know the pauses."""
    with Rig(url, lease_seconds=6.0) as rig:
        wait_until(lambda: rig.supervisor.health().ready, what="the relay to be ready")
        with psycopg.connect(url) as other:
            other.execute("SELECT FROM outbox.relays FOR UPDATE")
            wait_until(lambda: rig.supervisor._health._control is not None, what="a beat that waits in vain")
            pause(url, ALL, wait=False)
            wait_until(lambda: rig.pauses.obeyed.every_lane, 20, "it to obey")
            assert read(url)[ALL].unconfirmed == ("me",)
        wait_until(lambda: not read(url)[ALL].unconfirmed, what="it to confirm")


def test_an_idle_relay_sends_no_statement_more(url):
    """One of the control loop a tick; and of the worker's loop none while all is paused."""
    with Counting(url) as counting, Rig(counting.url) as rig:
        wait_until(lambda: rig.supervisor.health().ready, what="the relay to be ready")
        settled, began = counting.executed, time.monotonic()

        def more() -> bool:
            """Return whether these are more than a paused relay sends: see below."""
            return counting.executed - settled > time.monotonic() - began + 4

        wait_until(more, 20, "an idle relay's statements")
        pause(url, ALL, wait=False)
        wait_until(lambda: not read(url)[ALL].unconfirmed, what="it to confirm")
        before, began = counting.executed, time.monotonic()
        time.sleep(2.0)
        # A census a second, perhaps a renewal and a beat in between.
        assert counting.executed - before <= time.monotonic() - began + 4
        assert rig.supervisor.health().ready
        assert rig.supervisor.health().paused_lanes == [0, 1, 2, 3]


def test_a_tick_is_one_statement(url):
    """Of the control loop. The worker's loop does not run here: its statements would be counted too."""
    with Counting(url) as counting:
        supervisor = Supervisor(Rig(counting.url, lease_seconds=600.0).supervisor._components)
        for _ in range(8):
            supervisor._tick()
        before = counting.executed
        supervisor._tick()
        assert counting.executed - before == 1
        supervisor._disconnect()


def test_what_is_left_out_is_not_visited_by_each_read(outbox_postgres, url, monkeypatch):
    """A topic may be paused for hours: the low-water mark passes its events by, and goes back when it is resumed."""
    from outbox._app import migrate as db

    db.change_lanes(url, 1)
    monkeypatch.setattr(low_water_mark, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(low_water_mark, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(reader, "_LOOK_SECONDS", 0.0)
    add(outbox_postgres, *(f"k{number}" for number in range(40)))
    with source(outbox_postgres, taken(table(outbox_postgres, "me"))) as one:
        one.source.leave_out(frozenset({("Order", False)}))
        last = look_up(url, "SELECT max(id) FROM outbox.events")[0][0]

        def passed() -> bool:
            assert one.fetch(100) == []
            return bool(one.source.reader.marks([0])[0] == last)

        wait_until(passed, what="the mark to rise")
        one.source.leave_out(frozenset())
        assert len(one.fetch(100)) == 40
