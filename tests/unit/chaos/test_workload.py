"""What ``make chaos`` does beside the servers: payloads, the writers' pace, and the clocks of recoveries."""

from __future__ import annotations

import threading
import time

import orjson
from chaos.course import BILL, ORDER, Write
from chaos.history import digest_of, event_of
from chaos.recovery import RecoveryWatch
from chaos.workload import Pace, Payloads


def test_payloads_follow_from_the_seed_and_have_their_sizes():
    one, same, other = Payloads(1), Payloads(1), Payloads(2)
    for size in (0, 1, 7, 8, 100, 990_000):
        write = Write(ORDER, "k", size)
        payload, digest = one.make(write, event_of(1, 5))
        assert isinstance(payload, bytes)
        assert len(payload) == size
        assert digest == digest_of(payload, "application/octet-stream")
        assert same.make(write, event_of(1, 5)) == (payload, digest)
        if size >= 8:
            assert one.make(write, event_of(1, 6))[1] != digest
            assert one.make(write, event_of(2, 5))[1] != digest
        if size > 8:
            assert other.make(write, event_of(1, 5))[1] != digest


def test_json_is_recognized_in_the_form_that_postgres_gives_it():
    payload, digest = Payloads(1).make(Write(BILL, "k", 40, json=True), event_of(0, 3))
    assert isinstance(payload, dict)
    spaced = ", ".join(f'"{name}": {orjson.dumps(payload[name]).decode()}' for name in ("text", "n"))
    assert digest_of(f"{{{spaced}}}".encode(), "application/json") == digest


def test_a_tombstone_has_no_payload():
    assert Payloads(1).make(Write(ORDER, "k", -1), 0) == (None, digest_of(None, None))


def test_writers_are_held_back_to_their_pace_and_while_the_outbox_is_full():
    stop = threading.Event()
    began = time.monotonic()
    pace = Pace(events=5000.0, size=1e9)
    for _ in range(4):
        pace.wait(300, 0, stop)
    assert time.monotonic() - began >= 0.23
    quick = Pace(events=1e9, size=1e9)
    quick.full = True
    began = time.monotonic()
    threading.Timer(0.1, lambda: setattr(quick, "full", False)).start()
    quick.wait(1, 1, stop)
    assert time.monotonic() - began >= 0.09


def test_a_recovery_ends_with_the_first_event_that_was_begun_after_the_healing():
    numbers = {0: 10, 1: 20}
    watch = RecoveryWatch("postgresql://nobody@127.0.0.1:1/none", ["Order"], Pace(1, 1), lambda: numbers)
    watch.read(event_of(0, 50))
    watch.healed("relay_kill")
    numbers[0] = 30
    watch.healed("broker_kill")
    assert watch.first_reads() == []
    watch.read(event_of(0, 9))
    watch.read(event_of(1, 19))
    assert watch.first_reads() == []
    watch.read(event_of(0, 10))
    assert [each.fault for each in watch.recoveries if each.first_read is not None] == ["relay_kill"]
    watch.read(event_of(1, 20))
    assert len(watch.first_reads()) == 2
    assert watch.first_reads() == sorted(watch.first_reads())
    assert watch.catch_ups() == []
