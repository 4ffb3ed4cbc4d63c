"""The worker's loop against hand-made sources and publishers: what it does when one fails, or one lane does.

Its clock goes on while the loop waits, and where a test says so. So the order of turns and attempts is the same on a
machine that stands still now and then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from outbox.errors import OutboxError, SchemaError
from relay import loop
from relay.lease import HeldLanes, Lease
from relay.loop import LoopSettings, WorkerLoop
from relay.marker import StateLost
from relay.ports import (
    PUBLISHED,
    Batches,
    BatchRefused,
    Claim,
    Completed,
    Confirm,
    Failed,
    Fetched,
    LaneLost,
    Late,
    Receipt,
    Refused,
    Sent,
    TopicUnusable,
    Unavailable,
    Unconfirmed,
)

SETTINGS = LoopSettings(batch_size=2, max_idle_seconds=0.002, min_backoff_seconds=0.001, max_backoff_seconds=0.004)


def claim(lane: int, position: int) -> Claim:
    return Claim(position, f"e{position}", "Order", "k", "T", "2026-01-01T00:00:00Z", b"{}", None, lane=lane)


def all_of(batches: Batches) -> Completed:
    return Completed({lane: Receipt([(item, PUBLISHED) for item in claims]) for lane, claims in batches.items()})


def positions(batches: Batches) -> dict[int, list[int]]:
    return {lane: [item.position for item in claims] for lane, claims in batches.items()}


class Clock:
    """What the loop has for the module ``time``."""

    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


class Stop(threading.Event):
    """Whoever waits for it has waited at once."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if not self.is_set():
            self._clock.sleep(timeout)
        return self.is_set()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    return clock


@dataclass
class Table:
    """The rows of all lanes, as several sources see them one after the other."""

    rows: dict[int, list[int]]
    opened: int = 0
    closed: int = 0
    fetched: list[dict[int, int]] = field(default_factory=list)
    waited: list[set[int]] = field(default_factory=list)
    left_out: list[frozenset[Any]] = field(default_factory=list)
    without: list[set[int]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    fail_fetch: list[Exception] = field(default_factory=list)
    fail_settle: list[Exception] = field(default_factory=list)
    fail_lanes: dict[int, list[OutboxError]] = field(default_factory=dict)
    """What fetch, settle and flush say of a lane, once for each error."""
    stuck: set[int] = field(default_factory=set)
    known: bool = True
    behind: bool = False
    """Whether a turn is settled while the next one is published, as long as there is one."""
    unconfirmed: bool = False
    """A turn is sent before the one before is settled, and published after that."""
    fail_confirm: list[OutboxError] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    on_wait: Callable[[Collection[int]], None] = lambda _: None

    def source(self) -> OneSource:
        self.opened += 1
        return OneSource(self)

    @property
    def left(self) -> list[int]:
        return sorted(row for rows in self.rows.values() for row in rows)


class OneSource:
    """One source over the table. What it was told to settle is gone with the next fetch or flush."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.leases: dict[int, Lease] = {}
        self.pending: dict[int, Receipt] = {}
        self.settling: list[int] = []

    @property
    def store(self) -> Any:
        raise NotImplementedError

    def hold(self, lease: Lease) -> None:
        self.leases[lease.lane] = lease

    def drop(self, lane: int) -> None:
        self.leases.pop(lane, None)
        self.pending.pop(lane, None)

    def fetch(self, limits: Mapping[int, int]) -> Fetched:
        assert limits.keys() <= self.leases.keys()
        if self.table.fail_fetch:
            raise self.table.fail_fetch.pop(0)
        assert not self.settling
        self.table.fetched.append(dict(limits))
        if self.table.behind and self.pending and (left := self._left(limits)):
            self.settling = list(self.pending)
            return Fetched(left, {}, self.table.known, list(self.settling))
        if self.table.unconfirmed and (left := self._left(limits)):
            self.settling = sorted(self.pending.keys() | left.keys())
            return Fetched(left, unconfirmed=True)
        failed = self._make_durable(self.pending.keys() | limits.keys())
        batches = {
            lane: [claim(lane, row) for row in sorted(self.table.rows.get(lane, []))[:limit]]
            for lane, limit in limits.items()
            if lane not in failed
        }
        return Fetched({lane: batch for lane, batch in batches.items() if batch}, failed, self.table.known)

    def confirm(self, deadline: float) -> Mapping[int, OutboxError]:
        assert self.settling
        if self.table.fail_confirm:
            raise self.table.fail_confirm.pop(0)
        settling, self.settling = self.settling, []
        return self._make_durable(settling)

    def _left(self, limits: Mapping[int, int]) -> dict[int, list[Claim]]:
        """Return what is neither settled nor being settled."""
        going = {item.position for receipt in self.pending.values() for item, _ in receipt.results}
        rows = {lane: sorted(set(self.table.rows.get(lane, [])) - going)[:limit] for lane, limit in limits.items()}
        return {lane: [claim(lane, row) for row in each] for lane, each in rows.items() if each}

    def go_on_without(self, lanes: Collection[int]) -> None:
        self.table.without.append(set(lanes))

    def leave_out(self, kinds: frozenset[Any]) -> None:
        self.table.left_out.append(kinds)

    def settle(self, receipts: Mapping[int, Receipt]) -> Mapping[int, OutboxError]:
        if self.table.fail_settle:
            raise self.table.fail_settle.pop(0)
        settling, self.settling = self.settling, []
        failed = self._make_durable(settling)
        self.table.ended += settling
        for lane, receipt in receipts.items():
            before = self.pending[lane].results if lane in failed else ()
            self.pending[lane] = replace(receipt, results=[*before, *receipt.results])
        for receipt in receipts.values():
            self.table.refused += [item.position for item, outcome in receipt.results if outcome is not PUBLISHED]
        return failed

    def flush(self, lanes: Collection[int]) -> Mapping[int, OutboxError]:
        return self._make_durable(lanes)

    def wait(self, lanes: Collection[int], seconds: float, stop: threading.Event) -> bool:
        unknown = not self.table.known
        self.table.waited.append(set(lanes))
        self.table.on_wait(lanes)
        stop.wait(seconds)
        return unknown or any(self.table.rows.get(lane) for lane in lanes)

    def close(self) -> None:
        self.table.closed += 1

    def _make_durable(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        stuck = [
            item.position
            for lane in lanes
            if lane in self.pending
            for item, _ in self.pending[lane].results
            if item.position in self.table.stuck
        ]
        if stuck:
            raise SchemaError(f"{stuck} is too long")
        failed = {lane: self.table.fail_lanes[lane].pop(0) for lane in lanes if self.table.fail_lanes.get(lane)}
        for lane in set(lanes) - failed.keys():
            receipt = self.pending.pop(lane, Receipt())
            for item, _ in receipt.results:
                if item.position in self.table.rows[lane]:
                    self.table.rows[lane].remove(item.position)
        return failed


Step = Callable[[Batches], Sent]


@dataclass
class Broker:
    """What was published; ``script`` says what becomes of the coming turns, then all is acknowledged."""

    script: list[Step] = field(default_factory=list)
    log: list[int] = field(default_factory=list)
    turns: list[dict[int, list[int]]] = field(default_factory=list)
    joins: list[list[int]] = field(default_factory=list)
    fail_join: dict[int, list[OutboxError]] = field(default_factory=dict)
    fail_open: list[Exception] = field(default_factory=list)
    always: Step = all_of
    opened: int = 0
    closed: int = 0
    served: int = 0
    paused: frozenset[Any] = frozenset()

    def publisher(self, source: OneSource) -> OnePublisher:
        assert source.table.opened == source.table.closed + 1
        assert self.opened == self.closed
        if self.fail_open:
            raise self.fail_open.pop(0)
        self.opened += 1
        return OnePublisher(self)


class OnePublisher:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.joined: dict[int, Lease] = {}

    def join(self, leases: Sequence[Lease]) -> Mapping[int, OutboxError]:
        self.broker.joins.append([lease.lane for lease in leases])
        failing = self.broker.fail_join
        failed = {lease.lane: failing[lease.lane].pop(0) for lease in leases if failing.get(lease.lane)}
        self.joined |= {lease.lane: lease for lease in leases if lease.lane not in failed}
        return failed

    def publish(self, batches: Batches, confirm: Confirm | None = None) -> Sent:
        assert batches
        assert batches.keys() <= self.joined.keys()
        assert all(self.joined[lane].secure for lane in batches)
        self.broker.turns.append(positions(batches))
        sent = (self.broker.script.pop(0) if self.broker.script else self.broker.always)(batches)
        if confirm is not None and isinstance(sent, Completed):
            try:
                if unconfirmed := confirm(0.0):
                    return Unconfirmed(unconfirmed, publisher_unusable=True)
            except Unavailable as error:
                return Failed(error)
        for receipt in sent.receipts.values():
            self.broker.log += [item.position for item, outcome in receipt.results if outcome is PUBLISHED]
        return sent

    def paused(self) -> frozenset[Any]:
        return self.broker.paused

    def serve(self) -> None:
        self.broker.served += 1

    def close(self) -> None:
        self.broker.closed += 1


@dataclass
class Watcher:
    seen: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    errors: dict[int, int] = field(default_factory=dict)

    def published(self, count: int) -> None:
        self.seen.append(f"published {count}")

    def refused(self, lane: int, item: Claim, reason: str) -> None:
        self.seen.append(f"refused {lane}/{item.position} {reason}")

    def unavailable(self, lanes: Collection[int], error: Exception, wait_seconds: float) -> None:
        self.waits.append(wait_seconds)
        for lane in lanes:
            self.errors[lane] = self.errors.get(lane, 0) + 1
        self.seen.append(f"unavailable {sorted(lanes)} {error}")

    def recovered(self, lanes: Collection[int]) -> None:
        self.seen.append(f"recovered {sorted(lanes)}")


class World:
    """A worker's loop over a table and a broker. ``run`` ends when an idle worker finds that nothing is left."""

    def __init__(self, rows: Mapping[int, Sequence[int]], *steps: Step, settings: LoopSettings = SETTINGS) -> None:
        assert isinstance(loop.time, Clock)
        self.clock = loop.time
        self.stop = Stop(self.clock)
        self.held = HeldLanes()
        self.table = Table({lane: list(each) for lane, each in rows.items()})
        self.broker = Broker(list(steps))
        self.watcher = Watcher()
        self.leases = {lane: Lease(lane, 1, 60.0, time.monotonic()) for lane in rows}
        self.held.give(self.leases.values())
        self.table.on_wait = lambda _: self.stop.set() if not self.table.left else None
        self.loop = WorkerLoop(
            self.table.source,
            self.broker.publisher,
            held=self.held,
            stop=self.stop,
            observer=self.watcher,
            settings=settings,
        )

    def run(self) -> World:
        # What would never end is a failure, and the loop lets go in order all the same.
        alarm = threading.Timer(20, self.stop.set)
        alarm.start()
        self.loop.run()
        assert alarm.is_alive(), "the loop did not come to an end by itself"
        alarm.cancel()
        return self

    def clean(self) -> dict[int, bool]:
        """Lanes that were let go of, and whether their row need name no id any more."""
        return {gone.lease.lane: gone.clean for gone in self.held.take_let_go()}


def spread(lanes: int, each: int) -> dict[int, list[int]]:
    """Rows of some lanes; ids come in turns, as writers draw them."""
    return {lane: [1 + lane + lanes * n for n in range(each)] for lane in range(lanes)}


def in_order(world: World, rows: Mapping[int, Sequence[int]]) -> bool:
    """Return whether every lane's events were published in order and once."""
    return all([row for row in world.broker.log if row in set(each)] == sorted(each) for each in rows.values())


# All is well


def test_a_turn_has_a_batch_of_every_lane_and_all_end_settled():
    world = World({0: [1, 4, 7], 1: [2], 2: [3, 6, 9, 12, 15]})
    world.run()
    assert world.broker.turns == [{0: [1, 4], 1: [2], 2: [3, 6]}, {0: [7], 2: [9, 12]}, {2: [15]}]
    assert world.table.left == []
    assert world.watcher.seen == ["published 5", "published 3", "published 1"]
    assert (world.table.opened, world.table.closed) == (1, 1)
    assert (world.broker.opened, world.broker.closed) == (1, 1)
    assert world.broker.joins == [[0, 1, 2]]
    assert world.clean() == {0: True, 1: True, 2: True}
    assert world.held.leases == []


def test_a_hot_lane_among_many_has_what_the_others_leave():
    """Of 64 lanes each may have one event in a turn of 32; the one that has a backlog soon has eight."""
    rows = {lane: [lane + 1] for lane in range(1, 64, 2)} | {lane: [] for lane in range(2, 64, 2)}
    rows[0] = list(range(100, 180))
    world = World(rows, settings=replace(SETTINGS, batch_size=8)).run()
    assert in_order(world, rows)
    sizes = [{lane: len(batch) for lane, batch in turn.items()} for turn in world.broker.turns]
    assert sizes[0] == dict.fromkeys([0, *range(1, 64, 2)], 1)
    assert [turn.get(0) for turn in sizes[2:-1]] == [8] * (len(sizes) - 3)
    assert len(sizes) <= 13


def test_many_lanes_that_suddenly_have_events_make_a_turn_of_twice_the_size_at_most():
    rows = {lane: [] for lane in range(64)} | {0: list(range(1, 100)), 1: list(range(100, 200))}
    world = World(rows, settings=replace(SETTINGS, batch_size=8))

    def others_come(batches: Batches) -> Sent:
        for lane in range(2, 64):
            world.table.rows[lane] = list(range(1000 * lane, 1000 * lane + 5))
        return all_of(batches)

    world.broker.script = [all_of, all_of, all_of, others_come]
    world.run()
    sizes = [sum(map(len, turn.values())) for turn in world.broker.turns]
    assert max(sizes) <= 2 * 4 * 8 + 64
    assert sizes[4] > 62
    # Then everybody has the same share again: with 64 lanes an event each.
    assert max(map(len, world.broker.turns[6].values())) == 1


def test_the_last_turn_is_settled_before_the_lanes_are_given_up():
    def last(batches: Batches) -> Sent:
        world.stop.set()
        return all_of(batches)

    world = World({0: [1, 2, 3], 1: [4]}, last)
    world.run()
    assert (world.broker.log, world.table.left) == ([1, 2, 4], [3])
    assert world.clean() == {0: True, 1: True}


def test_a_turn_of_many_lanes_has_no_more_events_than_four_lanes_may_have():
    rows = spread(64, 40)
    world = World(rows, settings=replace(SETTINGS, batch_size=32))
    world.run()
    assert max(sum(map(len, turn.values())) for turn in world.broker.turns) == 128
    assert max(len(turn) for turn in world.broker.turns) == 64
    assert in_order(world, rows)
    # More lanes than events in a turn: one of each all the same.
    world = World(spread(20, 3))
    world.run()
    assert world.broker.turns[0] == {lane: [1 + lane] for lane in range(20)}


def test_lanes_come_while_others_are_published_and_are_joined_alone():
    def more(batches: Batches) -> Sent:
        world.table.rows[7] = [70, 71]
        world.held.give([Lease(7, 1, 60.0, time.monotonic())])
        return all_of(batches)

    world = World({0: [1, 2, 3]}, more)
    world.run()
    assert world.broker.joins == [[0], [7]]
    assert world.broker.turns == [{0: [1, 2]}, {0: [3], 7: [70, 71]}]
    assert (world.table.opened, world.broker.opened) == (1, 1)


def test_a_lane_that_is_given_again_under_a_new_epoch_is_joined_again():
    def taken_again(batches: Batches) -> Sent:
        world.held.give([Lease(0, 2, 60.0, time.monotonic())])
        return all_of(batches)

    world = World({0: [1, 2, 3], 1: [4]}, taken_again)
    world.run()
    assert world.broker.joins == [[0, 1], [0]]
    assert [gone.epoch for gone in (entry.lease for entry in world.held.take_let_go())] == [2, 1]


def test_what_can_not_be_written_to_is_left_out_of_the_next_reads():
    def pause(batches: Batches) -> Sent:
        world.broker.paused = frozenset({("Order", False)})
        return all_of(batches)

    world = World({0: [1, 2, 3]}, pause)
    world.run()
    assert world.table.left_out[:2] == [frozenset(), frozenset({("Order", False)})]


# Failures of a server


def acknowledged(count: int, failure: Unavailable) -> Step:
    """The first ``count`` events of every lane are acknowledged."""

    def publish(batches: Batches) -> Sent:
        receipts = {lane: Receipt([(item, PUBLISHED) for item in claims[:count]]) for lane, claims in batches.items()}
        return Failed(failure, receipts)

    return publish


def test_after_a_failure_what_was_acknowledged_is_settled_and_the_rest_sent_by_a_new_publisher():
    world = World({0: [1, 3, 5], 1: [2, 4]}, acknowledged(1, Unavailable("broker gone")))
    world.run()
    assert world.broker.turns == [{0: [1, 3], 1: [2, 4]}, {0: [3, 5], 1: [4]}]
    assert world.table.left == []
    assert (world.broker.opened, world.table.opened) == (2, 2)
    assert world.watcher.seen == [
        "published 2",
        "unavailable [0, 1] broker gone",
        "published 3",
        "recovered [0, 1]",
    ]


@pytest.mark.parametrize("error", [Unavailable("database gone"), SchemaError("disk full")])
@pytest.mark.parametrize("where", ["fail_settle", "fail_fetch"])
def test_a_failure_while_settling_settles_again_and_sends_nothing_twice(error, where):
    def then_fail(batches: Batches) -> Sent:
        getattr(world.table, where).extend([error] * 3)
        return all_of(batches)

    rows = {0: [1, 3, 5], 1: [2, 4]}
    world = World(rows, then_fail)
    world.run()
    assert in_order(world, rows)
    assert world.table.left == []
    # Settled before anything more was published: by a new source, which reads nothing yet.
    assert sorted(world.broker.log) == [1, 2, 3, 4, 5]


def test_a_stop_while_it_waits_settles_what_is_published():
    world = World({0: [1, 2], 1: [3]})
    world.table.fail_settle.append(Unavailable("database gone"))
    world.watcher.unavailable = lambda *_: world.stop.set()
    world.run()
    assert (sorted(world.broker.log), world.table.left) == ([1, 2, 3], [])


def test_what_is_published_and_can_not_be_settled_before_the_end_is_said_and_nothing_is_let_go_clean():
    def last(batches: Batches) -> Sent:
        world.stop.set()
        world.table.stuck = {2}
        return all_of(batches)

    world = World({0: [1], 1: [2]}, last)
    world.run()
    assert world.watcher.seen == ["published 2", "unavailable [0, 1] [2] is too long"]
    assert world.clean() == {0: False, 1: False}


def test_what_a_marker_settles_is_not_settled_again():
    """The lane is taken over anew instead, which settles what its marker names."""

    def committed(batches: Batches) -> Sent:
        sent = all_of(batches)
        return Completed({lane: replace(receipt, batch=7) for lane, receipt in sent.receipts.items()})

    world = World({0: [1, 2], 1: [3]}, committed)
    world.table.fail_settle.append(Unavailable("database gone"))
    world.run()
    assert world.broker.log == [1, 2, 3, 1, 2, 3]
    assert world.broker.joins == [[0, 1], [0, 1]]


def test_a_failure_while_fetching_sends_nothing():
    world = World({0: [1], 1: [2]})
    world.table.fail_fetch.append(Unavailable("database gone"))
    world.run()
    assert world.broker.log == [1, 2]
    assert world.table.left == []
    assert world.watcher.seen == [
        "unavailable [0, 1] database gone",
        "published 2",
        "recovered [0, 1]",
    ]


@pytest.mark.parametrize("error", [Unavailable("no broker"), StateLost("no marker")])
def test_a_publisher_that_can_not_be_made_is_tried_again(error):
    world = World({0: [1]})
    world.broker.fail_open.append(error)
    world.run()
    assert (world.broker.log, world.table.opened, world.table.closed) == ([1], 2, 2)


def test_waits_double_up_to_the_longest_and_begin_anew_after_a_success():
    world = World({0: [1, 2, 3]}, all_of, acknowledged(0, Unavailable("broker gone")))
    world.table.fail_fetch += [Unavailable("database gone")] * 5
    world.run()
    assert world.watcher.waits == [0.001, 0.002, 0.004, 0.004, 0.004, 0.001]


def test_since_when_nothing_succeeds_is_known():
    seen = []
    world = World({0: [1]})
    world.table.fail_fetch += [Unavailable("database gone")] * 3
    world.watcher.unavailable = lambda *_: seen.append(world.loop.failing_since)
    world.run()
    assert len(seen) == 3
    assert seen[0] is not None
    assert seen == [seen[0]] * 3
    assert world.loop.failing_since is None


def test_finding_nothing_is_no_success_while_the_source_knows_nothing():
    world = World({0: []})
    world.table.fail_fetch.append(Unavailable("database gone"))
    world.table.known = False
    since: list[float | None] = []

    def idle(_lanes: Collection[int]) -> None:
        since.append(world.loop.failing_since)
        world.table.known = len(since) >= 3
        if since[-1] is None:
            world.stop.set()

    world.table.on_wait = idle
    world.run()
    assert None not in since[:3]
    assert world.watcher.seen == ["unavailable [0] database gone", "recovered [0]"]


def test_a_lane_that_waits_for_something_of_its_own_has_not_recovered_with_the_others():
    """How long it has waited would begin anew with each failure of a server that comes back."""
    rows = {0: [1, 2, 3], 1: [4]}
    world = World(rows, lambda _: Failed(Unavailable("away")))
    world.broker.fail_join = {1: [StateLost("lost") for _ in range(4)]}
    world.run()
    assert [line for line in world.watcher.seen if "recovered" in line] == ["recovered [0]", "recovered [1]"]
    assert in_order(world, rows)


def test_a_publisher_that_must_not_be_used_again_is_replaced_without_waiting():
    def renew(batches: Batches) -> Sent:
        return replace(all_of(batches), publisher_unusable=True)

    world = World({0: [1, 2, 3], 1: [4]}, renew)
    world.run()
    assert world.broker.log == [1, 2, 4, 3]
    assert (world.broker.opened, world.table.opened) == (2, 1)
    assert world.broker.joins == [[0, 1], [0, 1]]
    assert world.watcher.waits == []
    assert world.table.left == []


# A turn that is settled while the next one is published


def test_turns_that_are_settled_while_the_next_ones_are_published():
    rows = spread(3, 9)
    world = World(rows)
    world.table.behind = True
    world.run()
    assert in_order(world, rows)
    assert world.table.left == []
    assert len(world.table.ended) == 3 * 4
    assert world.watcher.seen.count("published 6") == 4


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("where", ["settle", "fetch"])
def test_what_is_not_known_to_be_settled_of_two_turns_is_settled_again_and_not_sent(monkeypatch, where, at):
    """The connection ends while the turn before is settled, and the next one is on Kafka as well by then."""
    rows = spread(3, 10)
    world = World(rows)
    world.table.behind = True
    real = getattr(OneSource, where)
    calls: list[int] = []

    def call(self: OneSource, given: Any) -> Any:
        if self.settling or (where == "fetch" and self.pending):
            calls.append(1)
            if len(calls) == at:
                raise Unavailable("the connection is lost")
        return real(self, given)

    monkeypatch.setattr(OneSource, where, call)
    world.run()
    assert world.table.opened == 2
    assert in_order(world, rows)
    assert world.table.left == []


@pytest.mark.parametrize("at", range(4))
def test_a_lane_that_could_not_be_settled_behind_is_settled_with_both_turns_and_nothing_is_sent_again(at):
    rows = spread(3, 12)
    world = World(rows)
    world.table.behind = True

    def then_lock(batches: Batches) -> Sent:
        world.table.fail_lanes = {1: [Unavailable("locked"), Unavailable("locked")]}
        return all_of(batches)

    world.broker.script = [*[all_of] * at, then_lock]
    world.run()
    assert in_order(world, rows)
    assert world.table.left == []
    assert world.table.opened == 1
    assert world.watcher.errors == {1: 2}


def in_transactions(batches: Batches) -> Sent:
    """A turn is a transaction, whose number is of no matter here."""
    sent = all_of(batches)
    return replace(sent, receipts={lane: replace(receipt, batch=1) for lane, receipt in sent.receipts.items()})


def test_turns_that_are_sent_before_they_are_confirmed():
    rows = spread(3, 9)
    world = World(rows)
    world.table.unconfirmed, world.broker.always = True, in_transactions
    world.run()
    assert in_order(world, rows)
    assert world.table.left == []
    assert world.watcher.seen.count("published 6") == 4
    assert (world.table.opened, world.broker.opened) == (1, 1)


@pytest.mark.parametrize("at", range(4))
def test_a_lane_that_is_not_confirmed_takes_the_turn_back_and_only_itself_is_given_up(at):
    rows = spread(3, 12)
    world = World(rows)
    world.table.unconfirmed, world.broker.always = True, in_transactions

    def then_lose(batches: Batches) -> Sent:
        world.table.fail_lanes = {1: [LaneLost("lane 1 is another's")]}
        return in_transactions(batches)

    world.table.on_wait = lambda _: world.stop.set() if not {*rows[0], *rows[2]} & set(world.table.left) else None
    world.broker.script = [*[in_transactions] * at, then_lose]
    world.run()
    # The turn that was taken back is sent again, without the lane.
    assert world.broker.turns[at] == {**world.broker.turns[at + 1], 1: rows[1][2 * at : 2 * at + 2]}
    assert [row for row in world.broker.log if row in rows[1]] == rows[1][: 2 * at]
    rest = {lane: each for lane, each in rows.items() if lane != 1}
    assert in_order(world, rest)
    assert world.broker.opened == 2
    assert world.watcher.errors == {1: 1}
    assert world.clean() == {0: True, 2: True} or world.clean().get(1) is not True


def test_a_turn_that_could_not_be_confirmed_is_read_again_by_new_ones():
    rows = spread(2, 4)
    world = World(rows)
    world.table.unconfirmed, world.broker.always = True, in_transactions
    world.table.fail_confirm = [Unavailable("Postgres is away")]
    world.run()
    assert in_order(world, rows)
    assert world.table.left == []
    assert (world.table.opened, world.broker.opened) == (2, 2)
    assert "unavailable [0, 1] Postgres is away" in world.watcher.seen


# One lane in trouble


def test_a_lane_that_can_not_be_joined_is_tried_again_while_the_others_go_on():
    rows = {0: [1, 4, 7, 10], 1: [2, 5, 8, 11], 2: [3, 6, 9, 12]}
    world = World(rows)
    world.broker.fail_join = {1: [StateLost("no marker")] * 4}
    world.run()
    assert world.broker.turns[:2] == [{0: [1, 4], 2: [3, 6]}, {0: [7, 10], 2: [9, 12]}]
    assert world.broker.joins == [[0, 1, 2], *([[1]] * 4)]
    assert [line for line in world.watcher.seen if "unav" in line] == ["unavailable [1] no marker"] * 4
    assert world.watcher.waits == [0.001, 0.002, 0.004, 0.004]
    assert world.watcher.seen.count("recovered [1]") == 1
    assert in_order(world, rows)
    assert (world.broker.opened, world.table.opened) == (1, 1)
    # One lane that waits for a person is no failure of all.
    assert world.loop.failing_since is None


LONG = loop._ABSENT_SECONDS + 1.0


def slowly(clock: Clock) -> Step:
    def publish(batches: Batches) -> Sent:
        clock.sleep(LONG)
        return all_of(batches)

    return publish


def test_others_do_not_wait_for_a_lane_that_fails_for_long(clock):
    rows = spread(3, 8)
    world = World(rows, *[slowly(clock)] * 2)
    world.broker.fail_join = {1: [StateLost("no marker"), StateLost("no marker")]}
    world.run()
    assert world.table.without[:2] == [set(), {1}]
    assert {1} not in world.table.without[2:]
    assert in_order(world, rows)


def test_a_lane_that_fails_again_long_after_it_was_well_is_not_one_that_fails_for_long(clock):
    rows = spread(3, 20)

    def then_fail(batches: Batches) -> Sent:
        clock.sleep(LONG)
        world.table.fail_lanes = {1: [Unavailable("locked")]}
        return all_of(batches)

    # Behind the slow one it is taken over again, and does well.
    world = World(rows, then_fail, slowly(clock), all_of, then_fail, all_of, all_of)
    world.run()
    assert world.watcher.errors == {1: 2}
    assert not any(world.table.without)
    assert in_order(world, rows)


def test_a_lane_that_fails_after_all_have_for_long_is_not_one_that_fails_for_long(clock):
    """As after a broker's death: the publisher takes a minute, and then one of 256 lanes is locked for a moment."""
    rows = spread(3, 8)
    world = World(rows, all_of, lambda _: Failed(Unavailable("no broker")), all_of)
    make = world.broker.publisher

    def late(source: OneSource) -> OnePublisher:
        if world.broker.opened:
            clock.sleep(LONG)
            world.broker.fail_join = {1: [StateLost("locked")]} if world.broker.opened == 1 else {}
        return make(source)

    world.loop._new_publisher = late
    world.broker.fail_join = {1: [StateLost("locked")]}
    world.run()
    assert world.watcher.errors[1] == 3
    assert not any(world.table.without)
    assert in_order(world, rows)


def test_a_lane_that_waits_for_its_turn_is_not_one_that_fails_for_long(clock):
    """Many lanes have something that was refused, and have turns of their own, one at a time."""
    rows = spread(4, 8)

    def refuse(batches: Batches) -> Sent:
        world.table.fail_lanes = {lane: [Unavailable("a commit is lost")] for lane in rows}
        return Failed(BatchRefused("too large"), blamed=tuple(batches))

    world = World(rows, refuse, *[slowly(clock)] * 4)
    world.run()
    assert world.watcher.errors.keys() == rows.keys()
    assert not any(world.table.without)
    assert in_order(world, rows)


def test_lanes_with_the_same_trouble_are_told_of_together():
    world = World({lane: [lane + 1] for lane in range(4)})
    for lane in (1, 3):
        world.broker.fail_join[lane] = [UnavailableAsEver("no leader")]
    world.run()
    assert world.watcher.seen[0] == "unavailable [1, 3] no leader"


class UnavailableAsEver(Unavailable):
    """One of an error's subclasses."""


@pytest.mark.parametrize("where", ["fetching", "settling"])
def test_a_lane_that_fails_is_taken_over_again_while_the_others_go_on(where):
    rows = spread(3, 8)
    world = World(rows)

    def then_fail(batches: Batches) -> Sent:
        world.table.fail_lanes = {1: [Unavailable("a commit is lost")]}
        if where == "settling":
            return replace(all_of(batches), publisher_unusable=True)
        return all_of(batches)

    world.broker.script = [then_fail]
    world.run()
    assert in_order(world, rows)
    assert world.table.left == []
    assert world.table.opened == 1
    assert world.watcher.errors == {1: 1}
    # It does not take part before it was joined anew.
    assert 1 not in world.broker.turns[1]
    assert len(world.broker.joins) == (3 if where == "settling" else 2)


def test_a_lost_lane_is_let_go_and_the_others_go_on():
    rows = spread(3, 5)
    world = World(rows)

    def then_lose(batches: Batches) -> Sent:
        world.table.fail_lanes = {1: [LaneLost("epoch is over")]}
        return all_of(batches)

    world.broker.script = [then_lose]
    world.table.on_wait = lambda lanes: world.stop.set() if not any(world.table.rows[n] for n in lanes) else None
    world.run()
    gone = {entry.lease.lane: (entry.clean, entry.lost) for entry in world.held.take_let_go()}
    assert gone == {0: (True, False), 1: (False, True), 2: (True, False)}
    assert world.table.rows[1] == rows[1]
    assert (world.table.rows[0], world.table.rows[2]) == ([], [])
    assert all(1 not in turn for turn in world.broker.turns[1:])
    assert world.watcher.seen[1] == "unavailable [1] epoch is over"
    assert (world.broker.opened, world.table.opened) == (1, 1)


def test_a_lane_that_is_lost_while_it_is_joined_is_let_go():
    world = World({0: [1], 1: []})
    world.broker.fail_join = {1: [LaneLost("epoch is over")]}
    world.run()
    assert {entry.lease.lane: entry.lost for entry in world.held.take_let_go()} == {1: True, 0: False}
    assert world.broker.log == [1]


def test_an_event_that_can_never_be_settled_is_sent_once_and_named_and_those_before_it_and_other_lanes_are_settled():
    world = World({0: list(range(1, 12)), 1: list(range(101, 112))}, settings=replace(SETTINGS, batch_size=8))
    world.table.stuck = {6}
    stopped = []

    def noted(lanes: Collection[int], error: Exception, _wait: float) -> None:
        stopped.append((list(lanes), str(error)))
        # The other lane's events go on; then the end.
        if len(stopped) >= 5 and not world.table.rows[1]:
            world.stop.set()

    world.watcher.unavailable = noted
    world.run()
    assert world.broker.log == [*range(1, 9), *range(101, 112)]
    assert world.table.rows == {0: list(range(6, 12)), 1: []}
    assert set(map(str, stopped[1:-1])) == {
        "([0], 'event e6 is published, and stays behind: [6] is too long')",
    }
    # A person sees to it, and the lane goes on by itself.
    world = World({0: list(range(1, 12)), 1: []}, settings=replace(SETTINGS, batch_size=8))
    world.table.stuck = {6}
    left = iter(range(5))
    world.watcher.unavailable = lambda *_: world.table.stuck.clear() if next(left, None) is None else None
    world.run()
    assert (world.broker.log, world.table.left) == (list(range(1, 12)), [])


# Leases


def test_nothing_of_a_lane_is_fetched_while_its_lease_may_be_over_and_the_others_go_on():
    rows = {0: [1, 3, 5], 1: [2, 4]}
    world = World(rows)
    over = world.leases[1] = Lease(1, 1, 60.0, time.monotonic() - 60.0)
    world.held.give([over])

    def idle(_lanes: Collection[int]) -> None:
        if not world.table.rows[0] and not over.secure:
            assert world.broker.joins == [[0]]
            assert world.table.rows[1] == [2, 4]
            over.renewed(time.monotonic())
        elif not world.table.left:
            world.stop.set()

    world.table.on_wait = idle
    world.run()
    assert world.broker.turns == [{0: [1, 3]}, {0: [5]}, {1: [2, 4]}]
    assert world.broker.joins == [[0], [1]]


def test_a_lane_whose_lease_runs_out_rests_until_it_is_renewed():
    world = World({0: [1, 2, 3], 1: [4, 5, 6]})

    def run_out(batches: Batches) -> Sent:
        world.leases[1]._until = 0.0
        return all_of(batches)

    def again(batches: Batches) -> Sent:
        world.leases[1].renewed(time.monotonic())
        return all_of(batches)

    world.broker.script = [run_out, again]
    world.run()
    assert world.broker.turns == [{0: [1, 2], 1: [4, 5]}, {0: [3]}, {1: [6]}]
    # It was joined all the time: nobody else can have had it, or its epoch would have changed.
    assert world.broker.joins == [[0, 1]]


# Refusals


def test_a_refused_event_is_handed_to_the_source_and_the_lanes_live_on():
    def refuse(batches: Batches) -> Sent:
        return Completed(
            {
                0: Receipt([(batches[0][0], PUBLISHED), (batches[0][1], Refused("too large"))]),
                1: Receipt([(item, PUBLISHED) for item in batches[1]]),
            }
        )

    world = World({0: [1, 2, 3], 1: [4]}, refuse)
    world.run()
    assert world.broker.log == [1, 4, 3]
    assert world.watcher.seen == ["refused 0/2 too large", "published 2", "published 1"]
    assert (world.table.left, world.table.refused) == ([], [2])
    assert (world.broker.opened, world.table.opened) == (1, 1)


def poisoned(*poison: int, names_lanes: bool, acknowledges: bool = False) -> Step:
    """The broker refuses a turn with one of these events; it may say of which lanes, and take the other lanes'."""

    def publish(batches: Batches) -> Sent:
        bad = [lane for lane, claims in batches.items() if any(item.position in poison for item in claims)]
        if not bad:
            return all_of(batches)
        receipts = {lane: receipt for lane, receipt in all_of(batches).receipts.items() if lane not in bad}
        return Failed(BatchRefused("too large"), receipts if acknowledges else {}, bad if names_lanes else ())

    return publish


@pytest.mark.parametrize("names_lanes", [True, False])
@pytest.mark.parametrize("acknowledges", [True, False])
@pytest.mark.parametrize("poison", [(10,), (9, 10), (10, 43, 101)])
def test_what_is_refused_is_singled_out_by_lane_and_then_by_halves(names_lanes, acknowledges, poison):
    rows = spread(4, 120)
    world = World(rows, settings=replace(SETTINGS, batch_size=8))
    world.broker.always = poisoned(*poison, names_lanes=names_lanes, acknowledges=acknowledges)
    world.run()
    assert sorted(world.table.refused) == sorted(poison)
    assert in_order(world, {lane: [row for row in each if row not in poison] for lane, each in rows.items()})
    assert len(world.broker.log) == 480 - len(poison)
    # No server is away, and nothing waits.
    assert [line for line in world.watcher.seen if "unavailable" in line] == []
    # Every lane is back at full size in the end, and together with others.
    for lane in rows:
        last = [turn for turn in world.broker.turns if lane in turn][-6:]
        assert max(len(turn[lane]) for turn in last) == 8
    assert sum(len(turn) > 1 for turn in world.broker.turns[-15:]) > 5


def test_the_others_go_on_at_full_size_while_a_lane_is_narrowed_down():
    rows = spread(4, 80)
    world = World(rows, settings=replace(SETTINGS, batch_size=16))
    world.broker.always = poisoned(1, names_lanes=True)
    world.run()
    alone = [turn[0] for turn in world.broker.turns if set(turn) == {0}]
    assert [len(each) for each in alone[:4]] == [8, 4, 2, 1]
    assert world.table.refused == [1]
    until = next(n for n, turn in enumerate(world.broker.turns) if turn.get(0) == [1])
    between = [turn for turn in world.broker.turns[1:until] if 0 not in turn]
    assert len(between) >= 3
    assert all(list(map(len, turn.values())) == [16, 16, 16] for turn in between)


def too_large(*poison: int, guess: Callable[[int], int] = lambda position: position) -> Step:
    """The broker refuses all events that came in one request with one of these; the publisher guesses which it was."""

    def publish(batches: Batches) -> Sent:
        bad = {
            lane: guess(item.position) for lane, claims in batches.items() for item in claims if item.position in poison
        }
        if not bad:
            return all_of(batches)
        return Failed(BatchRefused("too large"), blamed=tuple(batches), likeliest=dict([min(bad.items())]))

    return publish


@pytest.mark.parametrize(("n", "sizes"), [(6, [4, 2, 1]), (4, [4, 1])])
def test_a_large_event_among_many_lanes_is_found_at_once(n, sizes):
    """It is the largest of those that were refused together. The other lanes have no turns of their own."""
    rows = spread(16, 40)
    poison = rows[5][n]
    world = World(rows, settings=replace(SETTINGS, batch_size=16))
    world.broker.always = too_large(poison)
    world.run()
    assert world.table.refused == [poison]
    assert in_order(world, {lane: [row for row in each if row != poison] for lane, each in rows.items()})
    # Refused with all others; then those before it, if there are any, and it.
    first = next(number for number, turn in enumerate(world.broker.turns) if poison in turn[5])
    assert len(world.broker.turns[first]) == 16
    alone = [turn for turn in world.broker.turns if turn.keys() == {5}]
    assert [len(world.broker.turns[first][5]), *(len(turn[5]) for turn in alone)] == sizes
    assert alone[-1] == {5: [poison]}
    # Between the two a turn is another lane's: no guess keeps the others from theirs.
    assert len([turn for turn in world.broker.turns if len(turn) == 1]) == 2 * len(alone) - 1


def test_a_lane_with_one_large_event_after_the_other_does_not_keep_another_one_from_its_turns():
    rows = spread(4, 200)
    poison = [row for n, row in enumerate(rows[1]) if n % 2]
    bad = rows[2][3]
    large, other = too_large(*poison), poisoned(bad, names_lanes=True)
    world = World(rows, settings=replace(SETTINGS, batch_size=8))
    world.broker.always = lambda batches: (
        other(batches) if any(item.position == bad for item in batches.get(2, ())) else large(batches)
    )
    world.run()
    assert sorted(world.table.refused) == sorted([*poison, bad])
    found = world.table.refused.index(bad)
    assert found < 10


@pytest.mark.parametrize("poison", [(10,), (9, 10), (10, 43, 101), tuple(range(20, 60))])
@pytest.mark.parametrize("guess", [lambda p: p, lambda p: p + 4, lambda p: p - 4, lambda _: 0, lambda _: 99])
def test_a_guess_that_is_wrong_costs_turns_and_nothing_else(poison, guess):
    rows = spread(4, 120)
    world = World(rows, settings=replace(SETTINGS, batch_size=8))
    world.broker.always = too_large(*poison, guess=guess)
    world.run()
    assert sorted(world.table.refused) == sorted(poison)
    assert in_order(world, {lane: [row for row in each if row not in poison] for lane, each in rows.items()})
    assert len(world.broker.log) == 480 - len(poison)
    for lane in rows:
        assert max(len(turn[lane]) for turn in [turn for turn in world.broker.turns if lane in turn][-6:]) == 8


def test_one_event_that_is_refused_by_itself_is_named_at_once():
    world = World({0: [1], 1: []})
    world.broker.always = poisoned(1, names_lanes=False)
    world.run()
    assert world.broker.turns == [{0: [1]}]
    assert (world.table.refused, world.broker.log) == ([1], [])


# Lateness


def slow(most: int) -> Step:
    """A broker that takes so many events in the time that a turn may take."""

    def publish(batches: Batches) -> Sent:
        if sum(map(len, batches.values())) > most:
            return Failed(Late("no acknowledgement within 4 s"))
        return all_of(batches)

    return publish


def test_a_turn_that_is_late_is_halved_until_it_fits_and_grows_again():
    rows = spread(2, 300)
    world = World(rows, *[slow(8)] * 4, settings=replace(SETTINGS, batch_size=32))
    world.run()
    sizes = [max(map(len, turn.values())) for turn in world.broker.turns]
    assert sizes[:5] == [32, 16, 8, 4, 4]
    # Doubled after some clean turns, not at once.
    assert sizes[3:11] == [4] * 8
    assert 32 in sizes[11:]
    assert in_order(world, rows)


def test_a_turn_of_one_lane_that_is_narrowed_down_and_late_is_halved_too():
    rows = {0: list(range(1, 200))}
    world = World(rows, settings=replace(SETTINGS, batch_size=64))
    world.broker.script = [poisoned(1, names_lanes=True), *[slow(4)] * 12]
    world.run()
    assert [len(turn[0]) for turn in world.broker.turns[:6]] == [64, 32, 16, 8, 4, 8]
    assert in_order(world, rows)


def test_topics_that_take_nothing_are_left_out_and_turns_stay_as_large():
    rows = spread(2, 300)

    def stalled(batches: Batches) -> Sent:
        world.broker.paused = frozenset({("Invoice", False)})
        half = {lane: Receipt([(item, PUBLISHED) for item in claims[:16]]) for lane, claims in batches.items()}
        return Failed(TopicUnusable("invoice-events", "topic 'invoice-events' has no leader for partition 0"), half)

    world = World(rows, stalled, settings=replace(SETTINGS, batch_size=32))
    world.run()
    assert {len(claims) for turn in world.broker.turns[:8] for claims in turn.values()} == {32}
    assert world.table.left_out[:2] == [frozenset(), frozenset({("Invoice", False)})]
    # What was acknowledged beside them is not sent again.
    assert in_order(world, rows)


# Recalled lanes


def test_a_recalled_lane_is_settled_and_let_go_clean_and_the_others_go_on():
    rows = spread(2, 6)
    gone = []

    def recall(batches: Batches) -> Sent:
        world.held.recall([1])
        return all_of(batches)

    def look(batches: Batches) -> Sent:
        gone.extend(world.held.take_let_go())
        return all_of(batches)

    world = World(rows, recall, look)
    world.table.on_wait = lambda lanes: world.stop.set() if lanes and not world.table.rows[0] else None
    world.run()
    [released] = gone
    assert (released.lease, released.clean, released.lost) == (world.leases[1], True, False)
    assert world.table.rows == {0: [], 1: rows[1][2:]}
    assert all(set(turn) == {0} for turn in world.broker.turns[1:])
    assert world.held.recalled == set()


def test_a_recalled_lane_whose_last_batch_can_not_be_settled_is_not_clean():
    def recall(batches: Batches) -> Sent:
        world.held.recall([1, 2])
        world.table.fail_lanes = {1: [Unavailable("a commit is lost")], 2: [LaneLost("epoch is over")]}
        return all_of(batches)

    world = World(spread(4, 1), recall)
    world.table.on_wait = lambda _: world.stop.set() if not world.table.rows[0] else None
    world.run()
    gone = {entry.lease.lane: (entry.clean, entry.lost) for entry in world.held.take_let_go()}
    assert gone == {0: (True, False), 1: (False, False), 2: (False, True), 3: (True, False)}


def test_a_lane_that_is_recalled_before_it_was_joined_is_not_clean():
    """Its row names whoever had it before: that one has to be fenced still."""
    world = World({0: [1, 2], 1: [3]})
    world.broker.fail_join = {1: [StateLost("no marker")] * 1000}
    world.table.on_wait = lambda _: world.stop.set() if not world.table.rows[0] else None
    world.run()
    assert world.clean() == {0: True, 1: False}


def test_lanes_that_are_recalled_after_a_failure_are_not_clean():
    """A transaction of the publisher that was thrown away may be open: whoever takes the lanes must fence it."""

    def fail(batches: Batches) -> Sent:
        world.held.recall([1])
        return Failed(Unavailable("broker gone"))

    world = World({0: [1], 1: [2]}, fail)
    world.table.on_wait = lambda _: world.stop.set() if not world.table.rows[0] else None
    world.run()
    assert world.clean() == {0: True, 1: False}


def test_a_lane_that_is_recalled_while_its_publisher_is_replaced_is_not_clean():
    def renew(batches: Batches) -> Sent:
        world.held.recall([1])
        return replace(all_of(batches), publisher_unusable=True)

    world = World({0: [1, 2, 3], 1: [4]}, renew)
    world.run()
    assert world.clean() == {0: True, 1: False}


@pytest.mark.parametrize("lost", [False, True])
def test_a_lane_that_is_recalled_while_a_server_is_away_is_settled_before_it_is_let_go(lost):
    """Its next holder would send once more what is acknowledged already."""

    def go_away(batches: Batches) -> Sent:
        world.held.recall([1])
        world.table.fail_fetch += [Unavailable("database gone")] * 2
        world.table.fail_settle += [Unavailable("database gone")] * 2
        if lost:
            world.table.fail_lanes = {1: [LaneLost("epoch is over")]}
        return all_of(batches)

    rows = {0: [1, 3, 5], 1: [2, 4, 6]}
    world = World(rows, go_away)
    world.table.on_wait = lambda lanes: world.stop.set() if lanes and not world.table.rows[0] else None
    world.run()
    assert world.table.rows == {0: [], 1: [2, 4, 6] if lost else [6]}
    assert in_order(world, {0: rows[0], 1: [2, 4]})
    gone = {entry.lease.lane: (entry.clean, entry.lost) for entry in world.held.take_let_go()}
    assert gone == {0: (True, False), 1: (False, lost)}


def test_lanes_that_are_asked_back_are_not_kept_for_ever_to_be_settled(monkeypatch):
    monkeypatch.setattr(loop, "_SETTLE_SECONDS", 0.02)

    def go_away(batches: Batches) -> Sent:
        world.held.recall_all()
        world.table.fail_fetch.append(Unavailable("database gone"))
        world.table.fail_settle += [Unavailable("database gone")] * 1000
        return all_of(batches)

    world = World({0: [1], 1: [2]}, go_away)
    world.watcher.unavailable = lambda lanes, *_: world.stop.set() if not world.held.leases else None
    runner = threading.Thread(target=world.run)
    runner.start()
    gone: list[Any] = []
    while len(gone) < 2 and runner.is_alive():
        gone += world.held.take_let_go()
        time.sleep(0.001)
    world.stop.set()
    runner.join(20)
    assert {entry.lease.lane: entry.clean for entry in gone} == {0: False, 1: False}
    assert 2 <= len(world.table.fail_settle) < 1000


def test_without_lanes_it_waits_and_opens_nothing():
    world = World({})
    threading.Timer(0.05, world.stop.set).start()
    world.run()
    assert (world.table.opened, world.broker.opened) == (0, 0)


# Idle


def test_an_idle_worker_waits_for_all_lanes_and_serves_its_client():
    world = World({0: [], 1: [], 2: []})
    world.table.on_wait = lambda _: world.stop.set() if len(world.table.waited) >= 10 else None
    world.run()
    assert world.table.waited == [{0, 1, 2}] * 10
    assert world.broker.served >= 10
    # One read found nothing; waiting reads nothing more.
    assert world.table.fetched == [dict.fromkeys(range(3), 2)]


@pytest.mark.parametrize("change", ["given", "recalled", "event"])
def test_an_idle_worker_notices(change):
    world = World({0: [], 1: []})

    def idle(lanes: Collection[int]) -> None:
        if len(world.table.waited) == 3:
            match change:
                case "given":
                    world.held.give([Lease(5, 1, 60.0, time.monotonic())])
                case "recalled":
                    world.held.recall([1])
                case _:
                    world.table.rows[1].append(1)
        elif len(world.table.waited) > 3 and not world.table.left:
            world.stop.set()

    world.table.on_wait = idle
    world.run()
    match change:
        case "given":
            assert world.table.waited[-1] == {0, 1, 5}
        case "recalled":
            assert world.table.waited[-1] == {0}
        case _:
            assert world.broker.log == [1]


def test_a_worker_that_waits_with_a_lane_in_trouble_tries_that_lane_in_time():
    world = World({0: [], 1: [7]})
    world.broker.fail_join = {1: [StateLost("no marker")] * 3}
    world.run()
    assert world.broker.log == [7]
    assert world.broker.joins == [[0, 1], [1], [1], [1]]
