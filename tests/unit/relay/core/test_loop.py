"""The worker's loop against hand-made sources and publishers: what it does when one fails, or one lane does.

Its clock goes on while the loop waits, and where a test says so. So the order of turns and attempts is the same on a
machine that stands still now and then.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from loop_fakes import SETTINGS, Step, World, all_of, clock, in_order, spread

from outbox._clients.clock import uptime
from outbox.errors import SchemaError
from relay.core.lease import Lease
from relay.core.marker import StateLost
from relay.core.ports import Batches, Completed, Failed, Receipt, Sent, Unavailable, UnsettledBatch

__all__ = ["clock"]


# All is well


def test_a_turn_has_a_batch_of_every_lane_and_all_end_settled():
    world = World({0: [1, 4, 7], 1: [2], 2: [3, 6, 9, 12, 15]}).run()
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
    rows = {lane: [] for lane in range(64)} | {0: list(range(1, 400)), 1: list(range(400, 800))}
    world = World(rows, settings=replace(SETTINGS, batch_size=64))

    def others_come(batches: Batches) -> Sent:
        for lane in range(2, 64):
            world.table.rows[lane] = list(range(1000 * lane, 1000 * lane + 20))
        return all_of(batches)

    world.broker.script = [all_of, all_of, all_of, others_come]
    world.run()
    sizes = [sum(map(len, turn.values())) for turn in world.broker.turns]
    assert max(sizes) <= 2 * 4 * 64
    assert sizes[4] > 4 * 62
    # Then everybody has the same share again: with 64 lanes four events each.
    assert max(map(len, world.broker.turns[6].values())) == 4


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
    for batch_size in (64, 32):
        # If that would be less than four events of each lane, these.
        world = World(rows, settings=replace(SETTINGS, batch_size=batch_size)).run()
        assert max(sum(map(len, turn.values())) for turn in world.broker.turns) == 256
        assert max(len(turn) for turn in world.broker.turns) == 64
        assert in_order(world, rows)
    # More lanes than events in a turn: one of each all the same.
    world = World(spread(20, 3))
    world.run()
    assert world.broker.turns[0] == {lane: [1 + lane] for lane in range(20)}


def test_lanes_come_while_others_are_published_and_are_joined_alone():
    def more(batches: Batches) -> Sent:
        world.table.rows[7] = [70, 71]
        world.held.give([Lease(7, 1, 60.0, uptime())])
        return all_of(batches)

    world = World({0: [1, 2, 3]}, more)
    world.run()
    assert world.broker.joins == [[0], [7]]
    assert world.broker.turns == [{0: [1, 2]}, {0: [3], 7: [70, 71]}]
    assert (world.table.opened, world.broker.opened) == (1, 1)


def test_a_lane_that_is_given_again_under_a_new_epoch_is_joined_again():
    def taken_again(batches: Batches) -> Sent:
        world.held.give([Lease(0, 2, 60.0, uptime())])
        return all_of(batches)

    world = World({0: [1, 2, 3], 1: [4]}, taken_again)
    world.run()
    assert world.broker.joins == [[0, 1], [0]]
    assert [entry.lease.epoch for entry in world.held.take_let_go()] == [2, 1]


# Failures of a server


def acknowledged(count: int, failure: Unavailable) -> Step:
    """The first ``count`` events of every lane are acknowledged."""

    def publish(batches: Batches) -> Sent:
        receipts = {lane: Receipt(UnsettledBatch(claims[:count])) for lane, claims in batches.items()}
        return Failed(failure, receipts)

    return publish


def test_after_a_failure_what_was_acknowledged_is_settled_and_the_rest_sent_by_a_new_publisher():
    world = World({0: [1, 3, 5], 1: [2, 4]}, acknowledged(1, Unavailable("broker gone"))).run()
    assert world.broker.turns == [{0: [1, 3], 1: [2, 4]}, {0: [3, 5], 1: [4]}]
    assert world.table.left == []
    assert (world.broker.opened, world.table.opened) == (2, 2)
    assert world.watcher.seen == ["published 2", "unavailable [0, 1] broker gone", "published 3", "recovered [0, 1]"]


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


@pytest.mark.parametrize("error", [Unavailable("postgres gone"), SchemaError("too long")])
def test_what_is_acknowledged_is_reported_once_though_settling_it_fails(error):
    world = World({0: [1, 2], 1: [3]})
    world.table.fail_settle = [error]
    world.run()
    assert world.watcher.seen[0] == "published 3"
    assert [said for said in world.watcher.seen if said.startswith("published")] == ["published 3"]
    assert world.broker.log == [1, 2, 3]


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
        return Completed({lane: Receipt(UnsettledBatch(claims, number=7)) for lane, claims in batches.items()})

    world = World({0: [1, 2], 1: [3]}, committed)
    world.table.fail_settle.append(Unavailable("database gone"))
    world.run()
    assert world.broker.log == [1, 2, 3, 1, 2, 3]
    assert world.broker.joins == [[0, 1], [0, 1]]


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


def test_failures_while_fetching_send_nothing_and_it_is_known_since_when_nothing_succeeds():
    since = []
    world = World({0: [1], 1: [2]})
    world.table.fail_fetch += [Unavailable("database gone")] * 3
    world.watcher.unavailable = lambda *_: since.append(world.loop.failing_since)
    world.run()
    assert (len(since), len(set(since)), None in since, world.loop.failing_since) == (3, 1, False, None)
    assert (world.broker.log, world.table.left) == ([1, 2], [])
    assert world.watcher.seen == ["published 2", "recovered [0, 1]"]


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

    world = World({0: [1, 2, 3], 1: [4]}, renew).run()
    assert world.broker.log == [1, 2, 4, 3]
    assert (world.broker.opened, world.table.opened) == (2, 1)
    assert world.broker.joins == [[0, 1], [0, 1]]
    assert world.watcher.waits == []
    assert world.table.left == []


# Idle


def test_an_idle_worker_waits_for_all_lanes_and_serves_its_client():
    world = World({0: [], 1: [], 2: []})
    world.table.on_wait = lambda _: world.stop.set() if len(world.table.waited) >= 10 else None
    world.run()
    assert world.table.waited == [{0, 1, 2}] * 10
    assert world.broker.served >= 10
    # One read found nothing; waiting reads nothing more.
    assert world.table.fetched == [dict.fromkeys(range(3), 2)]


@pytest.mark.parametrize(
    ("change", "waited", "published"),
    [
        (lambda world: world.held.give([Lease(5, 1, 60.0, uptime())]), {0, 1, 5}, []),
        (lambda world: world.held.recall([1]), {0}, []),
        (lambda world: world.table.rows[1].append(1), {0, 1}, [1]),
    ],
    ids=["given", "recalled", "event"],
)
def test_an_idle_worker_notices(change, waited, published):
    world = World({0: [], 1: []})

    def idle(_lanes: Collection[int]) -> None:
        if len(world.table.waited) == 3:
            change(world)
        elif len(world.table.waited) > 3 and not world.table.left:
            world.stop.set()

    world.table.on_wait = idle
    world.run()
    assert (world.table.waited[-1], world.broker.log) == (waited, published)


def test_a_worker_that_waits_with_a_lane_in_trouble_tries_that_lane_in_time():
    world = World({0: [], 1: [7]})
    world.broker.fail_join = {1: [StateLost("no marker")] * 3}
    world.run()
    assert world.broker.log == [7]
    assert world.broker.joins == [[0, 1], [1], [1], [1]]
