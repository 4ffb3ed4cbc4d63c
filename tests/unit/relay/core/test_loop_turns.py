"""The worker's loop and what is in a turn: settled while the next is published, refused in part, or too late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from loop_fakes import SETTINGS, OneSource, Step, World, all_of, claim, clock, in_order, spread

from outbox._clients.clock import uptime
from relay.core.lease import Lease
from relay.core.ports import (
    Batches,
    BatchRefused,
    Completed,
    DeliveryTimeout,
    Failed,
    LaneLost,
    Receipt,
    Sent,
    TopicUnusable,
    Unavailable,
    UnsettledBatch,
)

__all__ = ["clock"]


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
        if self.settling or (where == "fetch" and self.unsettled):
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
    return Completed({lane: Receipt(UnsettledBatch(claims, number=1)) for lane, claims in batches.items()})


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


# Refusals


def test_a_refused_event_is_handed_to_the_source_and_the_lanes_live_on():
    def refuse(batches: Batches) -> Sent:
        return Completed(
            {
                0: Receipt(UnsettledBatch([batches[0][0]]), [(batches[0][1], "too large")]),
                1: Receipt(UnsettledBatch(batches[1])),
            }
        )

    world = World({0: [1, 2, 3], 1: [4]}, refuse).run()
    assert world.broker.log == [1, 4, 3]
    assert world.watcher.seen == ["published 2", "refused 0/2 too large", "published 1"]
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
    last = world.broker.turns.index({5: [poison]})
    alone = [turn for turn in world.broker.turns[: last + 1] if turn.keys() == {5}]
    assert [len(world.broker.turns[first][5]), *(len(turn[5]) for turn in alone)] == sizes
    # Between the two all others have a turn.
    between = [turn for turn in world.broker.turns[first + 1 : last] if turn.keys() != {5}]
    assert [turn.keys() for turn in between] == [rows.keys() - {5}] * (len(alone) - 1)


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


@pytest.mark.parametrize("poison", [(130,), (1, 256), (700, 701)])
def test_among_256_lanes_of_which_none_is_named_the_refused_event_is_found_by_halving_them(poison):
    rows = spread(256, 8)
    world = World(rows, settings=replace(SETTINGS, batch_size=128))
    world.broker.always = poisoned(*poison, names_lanes=False)
    world.run()
    assert sorted(world.table.refused) == sorted(poison)
    assert in_order(world, {lane: [row for row in each if row not in poison] for lane, each in rows.items()})
    refused = [turn for turn in world.broker.turns if any(row in poison for each in turn.values() for row in each)]
    # 256 lanes have 8 halvings, and the batch of 2 one more; the first refusal is that of all.
    assert len(refused) <= 10 * len(poison)
    assert len(world.broker.turns) < 80


def test_events_that_are_refused_together_only_make_the_turns_smaller():
    """No event is at fault: the broker takes no request with more than 8 of them, and the guess is wrong."""
    rows = spread(4, 100)
    world = World(rows, settings=replace(SETTINGS, batch_size=16))

    def publish(batches: Batches) -> Sent:
        if sum(map(len, batches.values())) <= 8:
            return all_of(batches)
        return Failed(BatchRefused("too large"), blamed=tuple(batches), likeliest={0: batches[0][0].position})

    world.broker.always = lambda batches: publish(batches) if 0 in batches else all_of(batches)
    world.run()
    assert world.table.refused == []
    assert in_order(world, rows)
    refused = [turn for turn in world.broker.turns if 0 in turn and sum(map(len, turn.values())) > 8]
    assert len(refused) < len(world.broker.turns) / 5


def test_what_is_proven_to_be_refused_costs_no_other_turn():
    """The publisher knows which event it was: the lanes go on together, and the publisher with them."""
    rows = spread(4, 40)
    poison = rows[2][5]

    def publish(batches: Batches) -> Sent:
        bad = [item for item in batches.get(2, ()) if item.position == poison]
        if not bad:
            return all_of(batches)
        receipts = {2: Receipt(refused=[(bad[0], "too large")])}
        return Failed(BatchRefused("too large"), receipts, [2], publisher_unusable=False)

    world = World(rows, settings=replace(SETTINGS, batch_size=8))
    world.broker.always = publish
    world.run()
    assert world.table.refused == [poison]
    assert in_order(world, {lane: [row for row in each if row != poison] for lane, each in rows.items()})
    assert all(len(turn) == 4 for turn in world.broker.turns[:-1])
    assert (world.broker.opened, len(world.broker.joins)) == (1, 1)


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
            return Failed(DeliveryTimeout("no acknowledgement within 4 s"))
        return all_of(batches)

    return publish


def test_a_turn_that_is_late_is_halved_until_it_fits_and_grows_again():
    rows = spread(2, 300)
    world = World(rows, *[slow(8)] * 4, settings=replace(SETTINGS, batch_size=32)).run()
    sizes = [max(map(len, turn.values())) for turn in world.broker.turns]
    assert sizes[:5] == [32, 16, 8, 4, 4]
    # Doubled after some clean turns, not at once.
    assert sizes[3:11] == [4] * 8
    assert 32 in sizes[11:]
    assert in_order(world, rows)


def test_a_turn_that_is_late_with_one_event_of_each_lane_is_one_of_fewer_lanes():
    """Each lane costs a marker in a partition of its own: with hundreds of lanes no turn would ever be in time."""
    rows = spread(16, 60)
    # The last lanes have nothing, which says nothing about those that wait for their turn.
    rows |= {lane: [] for lane in range(16, 64)}
    world = World(rows, *[slow(2)] * 60, settings=replace(SETTINGS, batch_size=16)).run()
    lanes = [len(turn) for turn in world.broker.turns]
    assert lanes[:6] == [16, 16, 8, 4, 2, 2]
    # What the metrics show: how many events of a lane, and how many lanes, a turn may have.
    assert world.watcher.limits[:2] == [(16, 64), (4, 16)]
    assert (1, 2) in world.watcher.limits
    # All have their turns: the first events of all lanes come before the third of any, though it takes 8 turns.
    log = world.broker.log
    assert set(range(1, 17)) <= set(log[: log.index(33)])
    # It grows again, first to all lanes, and then in the events of each.
    assert max(lanes[60:]) == 16
    assert max(len(batch) for turn in world.broker.turns[60:] for batch in turn.values()) > 1
    assert in_order(world, rows)


def test_a_late_turn_of_a_single_event_leaves_all_lanes_in_the_next_turns():
    """It says nothing about the number of lanes: most of them just had no event."""
    rows: dict[int, list[int]] = {0: [1], **{lane: [] for lane in range(1, 64)}}
    world = World(rows, settings=replace(SETTINGS, batch_size=16))

    def late(batches: Batches) -> Sent:
        for lane in rows:
            world.table.rows[lane] += range(100 + lane, 2500, 64)
        return slow(0)(batches)

    world.broker.script = [late]
    world.run()
    assert [len(turn) for turn in world.broker.turns[:3]] == [1, 64, 64]


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
        half = {lane: Receipt(UnsettledBatch(claims[:16])) for lane, claims in batches.items()}
        return Failed(TopicUnusable("topic 'invoice-events' has no leader for partition 0"), half)

    world = World(rows, stalled, settings=replace(SETTINGS, batch_size=32))
    world.run()
    assert {len(claims) for turn in world.broker.turns[:8] for claims in turn.values()} == {32}
    assert world.table.left_out[:2] == [frozenset(), frozenset({("Invoice", False)})]
    # What was acknowledged beside them is not sent again.
    assert in_order(world, rows)


def test_a_lease_that_is_taken_again_forgets_what_was_suspected():
    """Or every second turn would be of this lane alone, for no events."""
    loop = World(spread(2, 4)).loop
    loop._take_and_let_go()
    batches = {number: [claim(number, position) for position in range(4)] for number in range(2)}
    loop._sizes.note_taken(loop._sizes.limits([0, 1]), batches)
    loop._sizes.narrowed(batches, Failed(BatchRefused("too large"), blamed=[0]))
    assert loop._sizes.limits([0, 1]) == {0: 2}
    loop._held.give([Lease(0, 2, 60.0, 0.0)])
    loop._take_and_let_go()
    assert [loop._sizes.limits([0, 1]).keys() for _ in range(3)] == [{0, 1}] * 3


def test_a_suspected_lane_without_events_does_not_hold_up_its_group():
    """Its topic was paused meanwhile, for example: none of what is suspected comes."""
    sizes = World(spread(2, 4)).loop
    sizes._take_and_let_go()
    turn_sizes = sizes._sizes
    batches = {number: [claim(number, position) for position in range(4)] for number in range(2)}
    turn_sizes.note_taken(turn_sizes.limits([0, 1]), batches)
    turn_sizes.narrowed(batches, Failed(BatchRefused("too large"), blamed=[0, 1], likeliest={0: 3, 1: 0}))
    read: set[int] = set()
    for _ in range(4):
        limits = turn_sizes.limits([0, 1])
        turn_sizes.note_taken(limits, {1: batches[1]} if 1 in limits else {})
        read |= limits.keys()
    assert 1 in read


@pytest.fixture
def lane_0_is_retried(monkeypatch):
    """All events of lane 0 have been refused before."""
    real = OneSource.fetch

    def fetch(self: OneSource, limits: Any) -> Any:
        fetched = real(self, limits)
        return replace(fetched, retried=[0] if 0 in fetched.batches else [])

    monkeypatch.setattr(OneSource, "fetch", fetch)


@pytest.mark.usefixtures("lane_0_is_retried")
def test_retried_events_whose_lease_would_not_outlast_a_second_publish_go_with_the_others_next_time():
    rows = spread(2, 20)
    world = World(rows, settings=replace(SETTINGS, batch_size=4, delivery_seconds=5.0))

    def slowly(batches: Batches) -> Sent:
        for lease in world.held.leases:
            lease._until = uptime() + 4.0
        return all_of(batches)

    world.broker.script = [slowly]
    world.run()
    assert [turn.keys() for turn in world.broker.turns[:2]] == [{1}, {0, 1}]
    assert in_order(world, rows)


@pytest.mark.usefixtures("lane_0_is_retried")
def test_a_retried_event_that_is_not_answered_goes_with_the_others_next_time():
    """By itself, a topic that is silent can't be told from a slow broker; and it does not make the turns smaller."""
    rows = spread(2, 60)

    def publish(batches: Batches) -> Sent:
        return Failed(DeliveryTimeout("no acknowledgement within 4 s")) if batches.keys() == {0} else all_of(batches)

    world = World(rows, settings=replace(SETTINGS, batch_size=16))
    world.broker.script = [publish] * 3
    world.run()
    assert [turn.keys() for turn in world.broker.turns[:3]] == [{1}, {0}, {0, 1}]
    assert [len(turn[0]) for turn in world.broker.turns[1:3]] == [16, 16]
    assert in_order(world, rows)
