"""Lanes that the worker's loop is asked to give back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from loop_fakes import World, all_of, clock, in_order, spread

from relay.core.marker import StateLost
from relay.core.ports import Batches, BrokerUnavailable, Failed, LaneLost, Receipt, Sent, Unavailable, UnsettledBatch

__all__ = ["clock"]


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
    assert world.let_go() == {0: (True, False), 1: (False, False), 2: (False, True), 3: (True, False)}


def test_a_lane_that_is_recalled_before_it_was_joined_is_not_clean():
    """Its row names whoever had it before: that one has to be fenced still."""
    world = World({0: [1, 2], 1: [3]})
    world.broker.fail_join = {1: [StateLost("no marker")] * 1000}
    world.table.on_wait = lambda _: world.stop.set() if not world.table.rows[0] else None
    world.run()
    assert world.clean() == {0: True, 1: False}


@pytest.mark.parametrize(
    "outcome",
    [lambda _: Failed(Unavailable("broker gone")), lambda batches: replace(all_of(batches), publisher_unusable=True)],
    ids=["failure", "unusable"],
)
def test_a_lane_that_is_recalled_when_its_publisher_is_thrown_away_is_not_clean(outcome):
    """A transaction of that publisher may be open: whoever takes the lane must fence it."""

    def recall(batches: Batches) -> Sent:
        world.held.recall([1])
        return outcome(batches)

    world = World({0: [1, 2, 3], 1: [4]}, recall)
    world.table.on_wait = lambda _: world.stop.set() if not world.table.rows[0] else None
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
    assert world.let_go() == {0: (True, False), 1: (False, lost)}


def run_until_both_are_let_go(world: World) -> dict[int, tuple[bool, float]]:
    """Return for each of the two lanes whether it was let go clean, as its loop says before it is stopped, and when."""
    take, gone = world.loop._take_and_let_go, {}

    def then_look() -> None:
        try:
            take()
        finally:
            gone.update({lane: (clean, world.clock.monotonic()) for lane, clean in world.clean().items()})
            if len(gone) == 2:
                world.stop.set()

    world.loop._take_and_let_go = then_look
    world.run()
    return gone


def cleanly(gone: dict[int, tuple[bool, float]]) -> dict[int, bool]:
    return {lane: clean for lane, (clean, _) in gone.items()}


@pytest.mark.parametrize("fails", ["all lanes", "one lane", "a locked lane"])
def test_recalled_lanes_are_kept_until_what_they_published_is_settled(fails):
    """However long it takes: their next holders would send it again, and could settle it no better."""

    def recall(batches: Batches) -> Sent:
        world.held.recall_all()
        if fails == "a locked lane":
            world.table.locked = {1: 1000}
        elif fails == "one lane":
            world.table.fail_lanes = {1: [Unavailable("a commit is lost")] * 5000}
        else:
            world.table.fail_fetch.append(Unavailable("database gone"))
            world.table.fail_settle += [Unavailable("database gone")] * 5000
        return all_of(batches)

    world = World({0: [1, 3, 5], 1: [2, 4, 6]}, recall)
    world.watcher.recovered = lambda _: None
    gone = run_until_both_are_let_go(world)
    assert cleanly(gone) == {0: fails == "one lane", 1: False}
    assert world.table.rows == {0: [5], 1: [6]}
    assert (world.broker.log, world.table.fail_settle) == ([1, 3, 2, 4], [])
    assert not any(world.table.fail_lanes.values())
    assert not any(world.table.locked.values())


def test_lanes_are_left_to_others_when_no_session_can_be_had(clock):
    """The control loop's session may be sound, and keep the leases: the lanes would stand still here."""
    since = []

    def lose_the_server(batches: Batches) -> Sent:
        world.loop._new_source = refuse
        world.table.fail_settle.append(Unavailable("database gone"))
        return all_of({1: batches[1]})

    def refuse():
        since.append(world.loop.failing_since)
        if len(since) == 3:
            world.held.recall_all()
        raise Unavailable("too many connections")

    world = World({0: [1, 3, 5], 1: [2, 4, 6]}, lose_the_server)
    gone = run_until_both_are_let_go(world)
    assert since[:1] == [None]
    assert None not in since[1:]
    assert world.loop.without_session_since is not None
    assert gone[0][1] - since[1] < 1
    assert 10 <= gone[1][1] - since[1] < 11
    assert cleanly(gone) == {0: False, 1: False}


def test_the_seconds_without_a_session_begin_with_its_loss_and_not_with_an_earlier_outage(clock):
    """Neither of Kafka nor of Postgres. As a relay leaves its lanes to another one after them: its session may be back
    in a moment.
    """
    lost_at, outages = [], []

    def send_one_lane(batches: Batches) -> Sent:
        world.table.fail_lanes = {0: [Unavailable("its row is locked")] * 1000}
        return Failed(BrokerUnavailable("no broker"), {0: Receipt(UnsettledBatch(batches[0]))})

    def lose_the_server_once(_batches: Batches) -> Sent:
        world.loop._new_source = refuse_once
        return Failed(BrokerUnavailable("no broker"))

    def refuse_once():
        world.loop._new_source = new_source
        raise Unavailable("too many connections")

    def lose_the_server(_batches: Batches) -> Sent:
        outages.append(world.loop.without_session_since)
        clock.sleep(100.0)
        world.held.recall_all()
        world.loop._new_source = refuse
        lost_at.append(clock.monotonic())
        return Failed(BrokerUnavailable("no broker"))

    def refuse():
        raise Unavailable("too many connections")

    world = World({0: [1, 3, 5], 1: [2, 4, 6]}, send_one_lane, lose_the_server_once, lose_the_server)
    new_source = world.loop._new_source
    gone = run_until_both_are_let_go(world)
    assert outages == [None]
    assert world.loop.without_session_since >= lost_at[0]
    assert gone[1][1] - lost_at[0] < 1
    assert 10 <= gone[0][1] - lost_at[0] < 11


def test_a_lane_that_can_not_be_settled_holds_up_the_others_of_a_stream_for_a_while_only():
    def recall(batches: Batches) -> Sent:
        world.table.fail_lanes = {1: [Unavailable("a trigger")] * 5000}
        world.held.recall_all(settle_seconds=0.0)
        return all_of(batches)

    world = World({0: [1, 3], 1: [2, 4]}, recall)
    gone = run_until_both_are_let_go(world)
    assert cleanly(gone) == {0: True, 1: False}
    assert len(world.table.fail_lanes[1]) > 4900


def test_a_worker_that_is_stopped_does_not_keep_lanes_to_settle_them():
    def recall(batches: Batches) -> Sent:
        world.held.recall([1])
        world.table.fail_lanes = {1: [Unavailable("a commit is lost")] * 1000}
        return all_of(batches)

    world = World({0: [1], 1: [2]}, recall)
    world.watcher.unavailable = lambda *_: world.stop.set() if len(world.table.fail_lanes[1]) < 990 else None
    world.run()
    assert world.clean() == {0: True, 1: False}
    assert world.table.rows == {0: [], 1: [2]}


def test_a_worker_that_can_not_settle_is_none_that_can_not_publish():
    """Its lanes are not left to another relay, which would send once more what can't be settled."""
    since = []

    def then_fail(batches: Batches) -> Sent:
        world.table.fail_settle += [Unavailable("database gone")] * 3
        return all_of(batches)

    world = World({0: [1, 2, 3]}, lambda _: Failed(BrokerUnavailable("no broker")), then_fail)
    world.watcher.unavailable = lambda _lanes, error, _wait: since.append((str(error), world.loop.failing_since))
    world.run()
    assert [(text, at is None) for text, at in since] == [("no broker", False), *([("database gone", True)] * 3)]
    assert (world.broker.log, world.table.left) == ([1, 2, 3], [])
