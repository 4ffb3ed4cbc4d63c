"""The contract of ``relay.core.ports.Source``, over the source of the loop's own tests and over the one that polls."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from typing import Protocol

import loop_fakes
import pytest
from polling_support import polling
from support import wait_until
from takeover_support import Tables

from outbox._clients.clock import uptime
from outbox.errors import OutboxError
from relay.core.lease import Lease
from relay.core.ports import Claim, LaneLost, Receipt, Source, UnsettledBatch
from relay.wal.lane_hash import lane_of

LANES = 2


class Subject(Protocol):
    """An outbox of two lanes."""

    def add(self, lane: int, count: int) -> list[int]:
        """Add events; return their positions."""
        ...

    def source(self) -> Source:
        """Return a new source that holds both lanes."""
        ...

    def left(self, lane: int) -> list[int]:
        """Return the events that a crash would leave, in order."""
        ...

    def lose(self, lane: int) -> None:
        """Give the lane to another relay."""
        ...


class Fake:
    def __init__(self, *, behind: bool = False, unconfirmed: bool = False) -> None:
        self._table = loop_fakes.Table({lane: [] for lane in range(LANES)}, behind=behind, unconfirmed=unconfirmed)
        self._last = 0

    def add(self, lane: int, count: int) -> list[int]:
        added = list(range(self._last + 1, self._last + count + 1))
        self._last += count
        self._table.rows[lane] += added
        return added

    def source(self) -> Source:
        source = self._table.source()
        for lane in range(LANES):
            source.hold(Lease(lane, 1, 60.0, uptime()))
        return source

    def left(self, lane: int) -> list[int]:
        return sorted(self._table.rows[lane])

    def lose(self, lane: int) -> None:
        self._table.fail_lanes[lane] = [LaneLost("another relay has it")]


class Polling:
    def __init__(self, database, *, overlap: bool) -> None:
        self._tables = Tables(database, LANES)
        self._leases = self._tables.acquire(range(LANES))
        self._overlap = overlap
        self._keys = {
            lane: next(f"k{n}" for n in range(99) if lane_of("Order", f"k{n}", LANES) == lane) for lane in (0, 1)
        }

    def add(self, lane: int, count: int) -> list[int]:
        before = self.left(lane)
        self._tables.add(*[self._keys[lane]] * count)
        return self.left(lane)[len(before) :]

    def source(self) -> Source:
        self._tables.opened.append(polling(self._tables.url, self._leases, overlap=self._overlap))
        return self._tables.opened[-1]

    def left(self, lane: int) -> list[int]:
        return [row for (row,) in self._tables.run("SELECT id FROM outbox.events WHERE lane = %s ORDER BY id", lane)]

    def lose(self, lane: int) -> None:
        self._tables.acquire([lane])

    def close(self) -> None:
        for source in self._tables.opened:
            source.close()


@pytest.fixture(params=["fake", "fake behind", "fake unconfirmed", "polling", "polling, overlapping"])
def subject(request):
    match request.param.split(" "):
        case ["fake", *how]:
            yield Fake(behind="behind" in how, unconfirmed="unconfirmed" in how)
        case how:
            made = Polling(request.getfixturevalue("outbox_postgres"), overlap="overlapping" in how)
            yield made
            made.close()


def fetch(source: Source, **limits: int) -> tuple[Mapping[int, list[Claim]], Mapping[int, OutboxError]]:
    """Fetch from lanes called l0 and l1, and confirm; return what may be published, and the lanes that may not."""
    fetched = source.fetch({int(name[1:]): limit for name, limit in limits.items()})
    failed = {**fetched.failed, **(source.confirm(time.monotonic() + 60) if fetched.unconfirmed else {})}
    return {lane: list(batch) for lane, batch in fetched.batches.items() if lane not in failed}, failed


def positions(batches: Mapping[int, list[Claim]]) -> dict[int, list[int]]:
    return {lane: [claim.position for claim in batch] for lane, batch in batches.items()}


def settle(source: Source, batches: Mapping[int, Collection[Claim]]) -> None:
    done = {lane: Receipt(UnsettledBatch(batch)) for lane, batch in batches.items()}
    assert source.settle(done) == {}


def test_events_come_in_order_up_to_the_limit_and_again_until_they_are_settled(subject):
    first, second = subject.add(0, 5), subject.add(1, 3)
    source = subject.source()
    for _ in range(2):
        batches, failed = fetch(source, l0=2, l1=4)
        assert (positions(batches), failed) == ({0: first[:2], 1: second}, {})
    source.close()
    batches, _ = fetch(subject.source(), l0=4)
    assert positions(batches) == {0: first[:4]}


def test_a_lane_that_has_nothing_has_no_batch(subject):
    first = subject.add(0, 1)
    batches, failed = fetch(subject.source(), l0=10, l1=10)
    assert (positions(batches), failed) == ({0: first}, {})


def test_what_was_not_settled_of_a_batch_comes_again(subject):
    added = subject.add(0, 5)
    source = subject.source()
    batches, _ = fetch(source, l0=4)
    settle(source, {0: batches[0][:2]})
    assert source.flush([0]) == {}
    assert subject.left(0) == added[2:]
    batches, _ = fetch(source, l0=4)
    assert positions(batches) == {0: added[2:]}


def test_what_is_settled_is_durable_after_a_flush(subject):
    added = subject.add(0, 4)
    source = subject.source()
    batches, _ = fetch(source, l0=3)
    settle(source, batches)
    assert source.flush([0]) == {}
    source.close()
    assert subject.left(0) == added[3:]


def test_turns_until_nothing_is_left_have_every_event_once_and_in_order(subject):
    added = {0: subject.add(0, 7), 1: subject.add(1, 4)}
    source = subject.source()
    seen: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(20):
        batches, failed = fetch(source, l0=2, l1=2)
        assert failed == {}
        for lane, batch in positions(batches).items():
            seen[lane] += batch
        settle(source, batches)
    assert seen == added
    assert source.flush(range(LANES)) == {}
    assert [subject.left(lane) for lane in range(LANES)] == [[], []]


def test_what_is_pending_of_a_lane_that_is_dropped_is_forgotten(subject):
    subject.add(0, 2)
    second = subject.add(1, 2)
    source = subject.source()
    batches, _ = fetch(source, l0=2, l1=2)
    settle(source, batches)
    source.drop(1)
    assert source.flush([0]) == {}
    batches, _ = fetch(source, l0=2)
    assert batches == {}
    source.close()
    assert (subject.left(0), subject.left(1)) == ([], second)


def test_a_lane_that_another_relay_has_gives_nothing_and_the_others_do(subject):
    first, second = subject.add(0, 2), subject.add(1, 2)
    source = subject.source()
    subject.lose(1)
    batches, failed = fetch(source, l0=2, l1=2)
    assert positions(batches) == {0: first}
    assert [(lane, type(error)) for lane, error in failed.items()] == [(1, LaneLost)]
    assert subject.left(1) == second


def test_waiting_ends_with_an_event_and_with_a_stop(subject):
    source = subject.source()
    assert fetch(source, l0=1, l1=1) == ({}, {})
    stop = threading.Event()
    added = subject.add(1, 1)
    wait_until(lambda: source.wait([0, 1], 0.2, stop), what="an event to be heard of")
    batches, _ = fetch(source, l0=1, l1=1)
    assert positions(batches) == {1: added}
    stop.set()
    began = time.monotonic()
    source.wait([0], 600.0, stop)
    assert time.monotonic() - began < 60


def test_closing_twice_is_safe_and_loses_what_was_not_durable_only(subject):
    added = subject.add(0, 2)
    source = subject.source()
    fetch(source, l0=2)
    source.close()
    source.close()
    batches, _ = fetch(subject.source(), l0=2)
    assert positions(batches) == {0: added}
