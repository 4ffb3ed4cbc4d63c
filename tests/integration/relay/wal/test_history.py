"""A worker that streams, through random histories and over a failover."""

from __future__ import annotations

import math
import random

import psycopg
import pytest
from standby import Standby, needs_failover_slots
from stream_bench import Killed, Outboxed, both, confirmed_flush, now_at, outboxed
from support import backlog, wait_until

from outbox import Event, Outbox
from relay.wal import source
from relay.wal.lane_hash import lane_of

__all__ = ["outboxed"]


class RandomHistory:
    """A random history of one outbox: writers, refusals, dead servers and dead relays, switched on and off."""

    KEYS = "abcdefgh"

    def __init__(self, box: Outboxed, chance: random.Random, *, once: bool) -> None:
        self.box = box
        self.once = once
        self.random = chance
        self.count = 0
        box.kafka.kill = lambda point: self.random.random() < 0.04

    def start(self) -> None:
        self.box.relay(
            once=self.once,
            max_events=self.random.choice([5, 50, 5000]),
            batch=self.random.choice([1, 3, 20]),
            backoff=0.001,
        )

    def write(self) -> None:
        """A transaction of several keys. Some of it is rolled back."""
        box, chance = self.box, self.random
        committed = []
        with psycopg.connect(box.url) as connection, connection.transaction() as whole:
            for key in chance.choices(self.KEYS, k=chance.randint(1, 5)):
                self.count += 1
                name = f"{key}{self.count:05}"
                with connection.transaction(force_rollback=chance.random() < 0.2) as savepoint:
                    Outbox().add(connection, Event("Order", key, name))
                if not savepoint.force_rollback:
                    committed.append((key, name))
            if chance.random() < 0.1:
                committed = []
                raise psycopg.Rollback(whole)
        for key, name in committed:
            box.written[key].append(name)

    def step(self) -> None:
        box, chance = self.box, self.random
        try:
            match chance.randint(0, 11):
                case 0 | 1 | 2:
                    self.write()
                case 3:
                    box.kafka.bad = set(chance.choices(self.KEYS, k=chance.randint(0, 2)))
                case 4:
                    box.kafka.bad = set()
                case 5 if chance.random() < 0.3:
                    box.kafka.away = not box.kafka.away
                case 6 if chance.random() < 0.2:
                    box.admin.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'relay' "
                        "AND datname = current_database() AND random() < 0.5"
                    )
                case 7 if chance.random() < 0.2:
                    self.start()
                case _:
                    for _ in range(chance.randint(1, 10)):
                        box.turn(*chance.choice([(), (), (chance.randrange(box.lanes),)]))
        except Killed:
            self.start()

    def end(self) -> None:
        self.box.kafka.bad, self.box.kafka.away, self.box.kafka.kill = set(), False, lambda _point: False
        ended(self.box, once=self.once)


def ended(box: Outboxed, *, once: bool) -> None:
    """Turn until all that was written has come, each key in its order and with ``once`` once, and nothing is left."""
    wanted = {name for names in box.written.values() for name in names}
    box.until(lambda: wanted <= set(box.kafka.names()), f"{len(wanted)} events")
    box.streams()
    box.until(lambda: backlog(box.url) == 0, "all to be settled")
    # A relay that was started a moment ago reads much of the stream again: up to here, all of it is done with.
    end = now_at(box)
    box.cdc._slot.heartbeat()
    box.until(lambda: confirmed_flush(box) >= end, "the stream to be read to its end")
    box.turns(5)
    assert backlog(box.url) == 0
    assert set(box.kafka.names()) == wanted
    for key, written in box.written.items():
        names = box.kafka.names(key)
        assert list(dict.fromkeys(names)) == written
        if once:
            assert names == written
    box.nothing_left()


def reported(box: Outboxed) -> None:
    """Wait until the stream has reported up to where all is settled that is settled now."""
    reading, told = box.session(), list[None]()
    report = reading._report
    reading._report = lambda *given: told.append(report(*given))
    wait_until(lambda: told, 60, "a report")


@both
def test_a_killed_relay_has_confirmed_nothing_that_a_lane_has_not_settled(outboxed, monkeypatch, once):
    """One lane has settled all that it was given, and the other a part: the next relay is given the rest of it."""
    # What the stream has skipped would be read from the table in the end.
    monkeypatch.setattr(source, "_SWEEP_SECONDS", math.inf)
    box = outboxed(2)
    keys = [next(key for key in RandomHistory.KEYS if lane_of("Order", key, 2) == lane) for lane in range(2)]
    box.relay(once=once, batch=20)
    box.streams()
    given = box.given()
    for number in range(100):
        box.add(*(f"{key}{number:03}" for key in keys))
    box.read(given + 200)
    left = "SELECT count(*)::int FROM outbox.events WHERE lane = %s"
    wait_until(lambda: box.turned(1) and box.rows(left, 1) == [(0,)], 60, "one lane to be settled")
    wait_until(lambda: box.turned(0) and box.rows(left, 0) < [(100,)], 60, "a part of the other")
    assert box.rows(left, 0) > [(0,)]
    reported(box)
    box.relay(once=once)
    ended(box, once=once)


@needs_failover_slots
def test_the_last_batch_before_a_failover_is_never_published_again(private_postgres):
    """Its marker names a position on the old timeline; its rows settle it, however long another lane holds the slot."""
    primary = private_postgres({"fsync": "off", "autovacuum": "off"})
    url = private_postgres.database(primary).url
    box = Outboxed(url, "outbox_relay", 2)
    a, b = (next(key for key in "abcdefghijk" if lane_of("Order", key, 2) == lane) for lane in range(2))
    with Standby(primary, synced_slots=True) as standby:
        box.relay(once=True)
        box.streams()
        standby.await_slot("outbox_relay")
        # From here on lane 1 hangs, and with it the slot.
        box.add(f"{b}1")
        box.add(f"{a}1")
        box.kafka.kill = lambda point: point == "after"
        with pytest.raises(Killed):
            wait_until(lambda: box.turned(0) and False, 20, "the kill")
        box.kafka.kill = lambda point: False
        timeline = box.kafka.markers[0].timeline
        box.fail_over(standby, url.replace(f":{primary.port}/", f":{standby.port}/"))
        try:
            box.relay(once=True)
            box.turn(1)
            left = "SELECT count(*) FROM outbox.events WHERE lane = 0"
            wait_until(lambda: box.turned(0) and box.rows(left) == [(0,)], 20, "the marker's row to be settled")
            assert box.kafka.markers[0].timeline == timeline
            box.add(f"{a}2")
            box.until(lambda: box.kafka.names(a) == [f"{a}1", f"{a}2"], "the next event")
            box.relay(once=True)
            box.until(lambda: f"{b}1" in box.kafka.names(), "lane 1")
            box.streams()
            box.turns(5)
            assert sorted(box.kafka.names()) == sorted([f"{a}1", f"{a}2", f"{b}1"])
        finally:
            box.close()


@both
def test_a_random_history(outboxed, chance, once):
    history = RandomHistory(outboxed(chance.choice([1, 2])), chance, once=once)
    history.start()
    for _ in range(80):
        history.step()
    history.end()
