"""The worker's loop and its lanes: one in trouble beside others, leases, pauses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from loop_fakes import SETTINGS, Clock, OnePublisher, OneSource, Step, World, all_of, clock, in_order, spread

from outbox._clients.clock import uptime
from outbox.errors import OutboxError
from relay.core import lane as core_lane
from relay.core.lease import Lease
from relay.core.marker import StateLost
from relay.core.pauses import Pauses
from relay.core.ports import (
    Batches,
    BatchRefused,
    BrokerUnavailable,
    Failed,
    LaneLost,
    NotFenced,
    Sent,
    StatementCutShort,
    Unavailable,
)

__all__ = ["clock"]


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


def test_a_lane_whose_former_publisher_can_not_be_fenced_stops_the_others_only_before_they_have_joined():
    """Tried alone, it is all lanes of that join."""
    rows = {0: [1, 4, 7, 10], 1: [2, 5, 8, 11]}
    world = World(rows)
    world.broker.fail_join = {1: [BrokerUnavailable("not fenced")]}
    raising = [NotFenced("not fenced")] * 2

    def join(leases: Sequence[Lease]) -> Mapping[int, OutboxError]:
        if [lease.lane for lease in leases] == [1] and raising:
            raise raising.pop()
        return joined(leases)

    make = world.broker.publisher

    def publisher(source: OneSource) -> OnePublisher:
        nonlocal joined
        made = make(source)
        joined = made.join
        made.join = join  # type: ignore[method-assign]
        return made

    joined: Callable[[Sequence[Lease]], Mapping[int, OutboxError]]
    world.loop._new_publisher = publisher  # type: ignore[assignment]
    world.run()
    assert raising == []
    assert [line for line in world.watcher.seen if "unav" in line] == ["unavailable [1] not fenced"] * 3
    assert in_order(world, rows)
    assert (world.broker.opened, world.table.opened) == (1, 1)


LONG = core_lane._LONG_SECONDS + 1.0


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
    world.broker.fail_join = {lane: [BrokerUnavailable("no leader")] for lane in (1, 3)}
    world.run()
    assert world.watcher.seen[0] == "unavailable [1, 3] no leader"


def test_of_lanes_with_the_same_trouble_the_longest_wait_is_reported():
    world = World({lane: [lane + 1] for lane in (1, 3)})
    world.broker.fail_join = {lane: [BrokerUnavailable("no leader")] * 2 for lane in (1, 3)}
    report = world.watcher.unavailable

    def unavailable(lanes: Collection[int], error: Exception, seconds: float) -> None:
        report(lanes, error, seconds)
        if len(world.watcher.waits) == 1:
            # A lane that was taken again begins with the shortest wait.
            world.held.give([Lease(1, 2, 60.0, uptime())])
        world.clock.sleep(1.0)

    world.watcher.unavailable = unavailable
    world.run()
    assert world.watcher.seen[:2] == ["unavailable [1, 3] no leader"] * 2
    assert world.watcher.waits == [0.001, 0.002]


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
    assert world.let_go() == {0: (True, False), 1: (False, True), 2: (True, False)}
    assert world.table.rows[1] == rows[1]
    assert (world.table.rows[0], world.table.rows[2]) == ([], [])
    assert all(1 not in turn for turn in world.broker.turns[1:])
    assert world.watcher.seen[1] == "unavailable [1] epoch is over"
    assert (world.broker.opened, world.table.opened) == (1, 1)


def test_a_lane_that_is_lost_when_it_has_been_taken_again_goes_on():
    """Its lease had expired, and no other relay had taken it: the turn in flight is of the former lease."""
    world = World({0: [1, 2, 3, 4], 1: [5]})
    world.table.unconfirmed = True

    def taken_again(batches: Batches) -> Sent:
        world.held.give([Lease(0, 2, 60.0, uptime())])
        world.table.fail_lanes = {0: [LaneLost("epoch is over")]}
        return all_of(batches)

    world.broker.script = [all_of, taken_again]
    world.run()
    assert world.table.left == []
    assert {(gone.lease.lane, gone.lease.epoch, gone.lost) for gone in world.held.take_let_go()} == {
        (0, 2, False),
        (1, 1, False),
    }


def test_a_lane_that_is_lost_while_it_is_joined_is_let_go():
    world = World({0: [1], 1: []})
    world.broker.fail_join = {1: [LaneLost("epoch is over")]}
    world.run()
    assert world.let_go() == {1: (False, True), 0: (True, False)}
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
    assert set(map(str, stopped[1:-1])) == {'([0], "event e6 is published, but can\'t be settled: [6] is too long")'}
    # A person sees to it, and the lane goes on by itself.
    world = World({0: list(range(1, 12)), 1: []}, settings=replace(SETTINGS, batch_size=8))
    world.table.stuck = {6}
    left = iter(range(5))
    world.watcher.unavailable = lambda *_: world.table.stuck.clear() if next(left, None) is None else None
    world.run()
    assert (world.broker.log, world.table.left) == (list(range(1, 12)), [])


def test_a_lane_that_waits_for_a_lock_to_be_settled_holds_up_no_other(clock):
    """Each attempt takes as long as Postgres waits for a lock: it comes seldom, and one lane's in a turn."""
    rows = spread(3, 6)

    def then_lock(batches: Batches) -> Sent:
        world.table.fail_fetch.append(StatementCutShort("locked"))
        world.table.locked = {0: 3, 1: 1}
        world.table.on_lock = lambda: clock.sleep(10.0)
        return all_of(batches)

    world = World(rows, then_lock)
    world.watcher.unavailable = lambda lanes, *_: tried.append((list(lanes), clock.monotonic()))
    tried: list[tuple[list[int], float]] = []
    world.run()
    assert [lanes for lanes, _ in tried] == [[0, 1, 2], [0], [1], [0], [0]]
    times = [at for lanes, at in tried if lanes == [0]]
    assert all(later - at >= 35.0 for at, later in pairwise(times))
    assert in_order(world, rows)
    assert world.table.left == []
    # The third one went on between the first attempts of the others.
    assert {2} in map(set, world.broker.turns)


# Leases


def test_nothing_of_a_lane_is_fetched_while_its_lease_may_be_over_and_the_others_go_on():
    rows = {0: [1, 3, 5], 1: [2, 4]}
    world = World(rows)
    over = world.leases[1] = Lease(1, 1, 60.0, uptime() - 60.0)
    world.held.give([over])

    def idle(_lanes: Collection[int]) -> None:
        if not world.table.rows[0] and not over.secure:
            assert world.broker.joins == [[0]]
            assert world.table.rows[1] == [2, 4]
            over.renewed(uptime())
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
        world.leases[1].renewed(uptime())
        return all_of(batches)

    world.broker.script = [run_out, again]
    world.run()
    assert world.broker.turns == [{0: [1, 2], 1: [4, 5]}, {0: [3]}, {1: [6]}]
    # It was joined all the time: nobody else can have had it, or its epoch would have changed.
    assert world.broker.joins == [[0, 1]]


def test_without_lanes_it_waits_and_opens_nothing():
    world = World({})
    threading.Timer(0.05, world.stop.set).start()
    world.run()
    assert (world.table.opened, world.broker.opened) == (0, 0)


# Paused lanes


def all_paused(*lanes: int) -> Pauses:
    return Pauses(numbers=frozenset(lanes), lanes=frozenset(lanes))


def test_a_paused_lane_is_not_read_and_the_others_are():
    rows = spread(3, 6)
    world = World(rows)
    world.pauses.now = all_paused(1)
    world.table.on_wait = lambda _: world.stop.set()
    world.run()
    assert all(1 not in limits for limits in world.table.fetched)
    assert world.table.rows == {0: [], 1: rows[1], 2: []}
    assert set(map(frozenset, world.table.paused)) == {frozenset({1})}
    assert world.clean() == dict.fromkeys(range(3), True)


def test_what_was_in_flight_is_settled_when_its_lane_is_paused():
    """And when it is resumed, it goes on behind that."""
    rows = {0: [1, 2, 3, 4]}
    world = World(rows)

    def then_pause(batches: Batches) -> Sent:
        world.pauses.now = all_paused(0)
        return all_of(batches)

    def then_resume(_: Collection[int]) -> None:
        assert world.table.rows == {0: [3, 4]}
        world.pauses.now = Pauses()

    world.broker.script = [then_pause]
    world.table.on_pause = then_resume
    world.run()
    assert world.broker.turns == [{0: [1, 2]}, {0: [3, 4]}]
    assert (world.table.opened, world.broker.opened) == (1, 1)
    assert world.loop.has_succeeded


def test_a_paused_lane_that_can_not_be_settled_is_taken_over_again():
    rows = spread(2, 4)
    world = World(rows)

    def then_pause(batches: Batches) -> Sent:
        world.pauses.now = all_paused(1)
        world.table.fail_lanes = {1: [Unavailable("locked")]}
        return all_of(batches)

    world.broker.script = [then_pause]
    world.table.on_wait = lambda _: world.stop.set() if len(world.broker.joins) == 2 else None
    world.run()
    assert world.watcher.errors == {1: 1}
    # Nothing else of it follows for as long as it is paused.
    assert "recovered [1]" in world.watcher.seen
    assert world.broker.joins == [[0, 1], [1]]
    assert world.table.left == rows[1][2:]
    assert in_order(world, {0: rows[0], 1: rows[1][:2]})


def test_a_lane_that_comes_with_a_pause_is_never_read():
    """The control loop hands the pauses over first, and the lanes after them."""
    rows = spread(2, 4)
    world = World(rows)
    world.held.let_go(world.leases[1], clean=True)
    world.held.take_let_go()

    def then_give(batches: Batches) -> Sent:
        world.pauses.now = all_paused(1)
        world.held.give([world.leases[1]])
        return all_of(batches)

    world.broker.script = [then_give]
    world.table.on_wait = lambda _: world.stop.set()
    world.run()
    assert world.broker.joins == [[0], [1]]
    assert world.table.left == rows[1]
