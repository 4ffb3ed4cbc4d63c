"""An event that another session has locked is published, and can't be settled: its lane waits, and no other."""

from __future__ import annotations

from collections import Counter

import psycopg
import pytest
from loop_fakes import all_of, looped
from polling_support import add, polling, table
from support import look_up, tried, wait_until
from takeover_support import place

import relay.database
from outbox._app import migrate as db
from relay.core.ports import Batches, Completed, Receipt, Sent, StatementCutShort, UnsettledBatch
from relay.polling.source import PollingSource

__all__ = ["place"]

KEYS = [f"k{n}" for n in range(200)]
OF_LANE = "SELECT count(*) FROM outbox.events WHERE lane = %s"


@pytest.fixture
def short_waits(monkeypatch):
    """A statement waits for a lock for a moment, and not for ten seconds."""
    monkeypatch.setattr(relay.database, "_LOCK_SECONDS", 0.3)


LOCK = "SELECT FROM outbox.events WHERE id = (SELECT min(id) FROM outbox.events WHERE lane = 0) FOR UPDATE"


def test_the_other_lanes_of_its_worker_go_on(outbox_postgres, short_waits):
    url = outbox_postgres.url
    db.change_lanes(url, 2)
    leases = table(outbox_postgres, "me", 600.0).acquire(2)
    sent: Counter[int] = Counter()

    def count(batches: Batches) -> Sent:
        sent.update(claim.position for claims in batches.values() for claim in claims)
        return all_of(batches)

    def goes_on() -> None:
        wait_until(lambda: look_up(url, OF_LANE, 1) == [(0,)], 60, "lane 1 to be settled")

    add(outbox_postgres, *KEYS)
    with psycopg.connect(url) as other:
        other.execute(LOCK)
        with looped(lambda: polling(url), leases, count, batch=500):
            goes_on()
            for _ in range(2):
                add(outbox_postgres, *KEYS)
                goes_on()
            assert look_up(url, OF_LANE, 0)[0][0] > 0
            other.rollback()
            wait_until(lambda: look_up(url, OF_LANE, 0) == [(0,)], 60, "lane 0 to be settled")
    assert set(sent.values()) == {1}
    assert len(sent) == 3 * len(KEYS)


OBSTACLES = {
    "a lock": (LOCK, ""),
    "a constraint": (
        "ALTER TABLE outbox.dead_letters ADD CONSTRAINT mine CHECK (lane <> 0)",
        "ALTER TABLE outbox.dead_letters DROP CONSTRAINT mine",
    ),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_refused_event_that_can_not_be_recorded_stops_no_other_lane(outbox_postgres, short_waits, obstacle):
    url = outbox_postgres.url
    db.change_lanes(url, 2)
    leases = table(outbox_postgres, "me", 600.0).acquire(2)
    sent: Counter[int] = Counter()
    opened: list[PollingSource] = []
    put, removed = OBSTACLES[obstacle]

    def refuse(batches: Batches) -> Sent:
        receipts = {}
        for lane, claims in batches.items():
            good = [claim for claim in claims if claim.position != bad]
            refused = [(claim, "bad") for claim in claims if claim.position == bad]
            receipts[lane] = Receipt(UnsettledBatch(good), refused)
            sent.update(claim.position for claim in good)
        return Completed(receipts)

    def source() -> PollingSource:
        opened.append(polling(url, policy=tried(1, 600.0, 600.0)))
        return opened[-1]

    add(outbox_postgres, *KEYS)
    ((bad,),) = look_up(url, "SELECT min(id) FROM outbox.events WHERE lane = 0")
    with psycopg.connect(url) as other:
        other.execute(put)
        if removed:
            other.commit()
        with looped(source, leases, refuse, batch=500) as watcher:
            for _ in range(2):
                refusals = len(watcher.raised)
                wait_until(lambda: len(watcher.raised) > refusals, 60, "the error again")  # noqa: B023
                add(outbox_postgres, *KEYS)
                wait_until(lambda: look_up(url, OF_LANE, 1) == [(0,)], 60, "lane 1 to be settled")
            assert (watcher.errors.keys(), len(opened)) == ({0}, 1)
            other.rollback()
            if removed:
                other.execute(removed)
                other.commit()
            wait_until(lambda: look_up(url, "SELECT count(*) FROM outbox.dead_letters") == [(1,)], 60, "a dead letter")
    assert set(sent.values()) == {1}


def test_exactly_once_the_other_lanes_are_taken_over(place, short_waits):
    place.add()
    place.joined("one").unsettled()
    heir = place.worker("two")
    with psycopg.connect(place.tables.url) as other:
        other.execute(LOCK)
        assert {lane: type(error) for lane, error in heir.join().items()} == {0: StatementCutShort}
        all_leases, heir.leases = heir.leases, [lease for lease in heir.leases if lease.lane != 0]
        heir.unsettled(1000)
        other.rollback()
    heir.leases = all_leases
    assert heir.join() == {}
    heir.drain()
    assert place.all_once()
