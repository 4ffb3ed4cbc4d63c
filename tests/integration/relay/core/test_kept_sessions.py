"""A relay that lives keeps its session in Postgres, or opens another one before others take its lanes for free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from loop_fakes import all_of
from pause_rig import Rig, url
from polling_support import add
from support import look_up, owners, wait_until

from outbox._clients.clock import uptime
from relay import database, lanes, supervisor
from relay.core import lease as core_lease
from relay.core.ports import Batches, DatabaseUnavailable, Sent
from relay.database import Connector
from relay.lanes import LaneTable, lock_session

__all__ = ["url"]

SESSION = "SELECT session FROM outbox.relays WHERE instance = 'me'"
END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'control loop'"


@pytest.fixture
def observer(url) -> Iterator[LaneTable]:
    """Another relay's session, which only looks at the lanes."""
    with closing(Connector(url, "observer")()) as connection:
        yield LaneTable(connection, "outbox", "observer", "0", 600.0, session=lock_session(connection))


def with_lanes(url: str, observer: LaneTable) -> Any:
    """Wait until the relay has all lanes and the observer has seen its session. Return that."""
    wait_until(lambda: owners(url) == {"me": 4}, what="the relay to have all lanes")
    observer.distribution()
    return look_up(url, SESSION)


def never_free(observer: LaneTable) -> bool:
    return [observer.distribution().free for _ in range(3)] == [0, 0, 0]


def test_a_relay_whose_row_another_session_has_locked_keeps_its_session_and_its_leases(url, observer, monkeypatch):
    monkeypatch.setattr(database, "_LOCK_SECONDS", 1)
    with Rig(url, lease_seconds=60.0) as rig:
        relay = rig.supervisor
        before = with_lanes(url, observer)

        def fails() -> bool:
            # As when the next beat is due.
            relay._beat_at = None
            return relay._health._control is not None

        with psycopg.connect(url) as locking:
            locking.execute("UPDATE outbox.relays SET version = 'locked' WHERE instance = 'me'")
            for lease in relay._held.leases:
                lease._until -= 40.0
            wait_until(fails, what="a beat to be given up")
            assert never_free(observer)
            assert look_up(url, SESSION) == before
            assert min(lease.remaining_seconds for lease in relay._held.leases) > 30.0
            locking.rollback()
        wait_until(lambda: relay._health._control is None, what="a beat")
        assert look_up(url, SESSION) == before
        assert look_up(url, "SELECT DISTINCT owner, epoch FROM outbox.lanes") == [("me", 1)]
    assert owners(url) == {}


def test_a_relay_on_a_machine_that_was_suspended_renews_its_leases_at_once(url, observer, monkeypatch):
    with Rig(url, lease_seconds=3000.0) as rig:
        with_lanes(url, observer)
        leases = rig.supervisor._held.leases
        for module in (supervisor, lanes, core_lease):
            monkeypatch.setattr(module, "uptime", lambda: uptime() + 4000.0)
        wait_until(lambda: min(lease.remaining_seconds for lease in leases) > 2000.0, what="a renewal")


def test_a_relay_with_lanes_does_not_wait_for_its_next_tick_to_connect_again(url, observer):
    refused: list[str] = []

    def connect() -> Any:
        if len(refused) < 4:
            refused.append("refused")
            raise DatabaseUnavailable("too many connections")
        return Connector(url, "control loop")()

    with Rig(url, lease_seconds=60.0) as rig:
        relay = rig.supervisor
        before = with_lanes(url, observer)
        relay._components = replace(relay._components, connect=connect)
        relay._tick_seconds = 600.0
        look_up(url, END)
        wait_until(lambda: look_up(url, SESSION) != before, what="another session")
        assert never_free(observer)
        assert len(refused) == 4


def test_a_relay_that_stops_opens_another_session_for_its_last_turn(outbox_postgres, url, observer):
    publishing, acknowledged = threading.Event(), threading.Event()

    def slowly(batches: Batches) -> Sent:
        publishing.set()
        acknowledged.wait(60)
        return all_of(batches)

    with Rig(url, lease_seconds=60.0) as rig:
        relay = rig.supervisor
        relay._components = replace(relay._components, shutdown_seconds=60.0)
        rig.broker.always = slowly
        before = with_lanes(url, observer)
        add(outbox_postgres, "k")
        publishing.wait(30)
        # It looks at its connection, and not only when the leases are due.
        relay._tick_seconds = 600.0
        for lease in relay._held.leases:
            lease._until -= 40.0
        rig.stop.set()
        relay._worker.stopping.wait(30)
        try:
            wait_until(lambda: min(lease.remaining_seconds for lease in relay._held.leases) > 30.0, what="a renewal")
            look_up(url, END)
            wait_until(lambda: look_up(url, SESSION) not in (before, []), what="another session")
            assert never_free(observer)
        finally:
            acknowledged.set()
    assert look_up(url, "SELECT count(*) FROM outbox.events") == [(0,)]
    assert owners(url) == {}
