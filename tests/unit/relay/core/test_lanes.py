"""How lanes spread: pure decisions, no database."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.lanes import LaneDistribution, next_step


def distribution(held: dict[str, int], lanes: int, free: int | None = None) -> LaneDistribution:
    return LaneDistribution(held=held, lanes=lanes, free=lanes - sum(held.values()) if free is None else free)


def test_a_lone_relay_takes_every_lane():
    assert next_step(distribution({"a": 0}, 4), "a") == 4


def test_two_newcomers_leave_each_other_half():
    assert next_step(distribution({"a": 0, "b": 0}, 4), "a") == 2


def test_all_above_the_share_is_given_up_at_once():
    assert next_step(distribution({"a": 4, "b": 0}, 4), "a") == -2
    assert next_step(distribution({"a": 4, "b": 0}, 4), "b") == 0
    assert next_step(distribution({"a": 256, "b": 0}, 256), "a") == -128
    assert next_step(distribution({"a": 64, "b": 0, "c": 0}, 64), "a") == -42


def test_among_equals_the_greatest_name_keeps_one_more():
    held = {"a": 2, "b": 2, "c": 0}
    steps = {name: next_step(distribution(held, 4), name) for name in held}
    assert steps == {"a": -1, "b": 0, "c": 0}


def test_shares_that_differ_by_one_are_even():
    held = {"a": 1, "b": 2, "c": 1}
    assert {name: next_step(distribution(held, 4), name) for name in held} == dict.fromkeys(held, 0)


def test_a_free_lane_is_left_to_whoever_is_short():
    held = {"a": 2, "b": 1, "c": 0}
    assert next_step(distribution(held, 4), "a") == 0
    assert next_step(distribution(held, 4), "b") == 0
    assert next_step(distribution(held, 4), "c") == 1


def test_the_odd_lane_is_one_relays_to_take():
    held = {"a": 1, "b": 1, "c": 1}
    steps = {name: next_step(distribution(held, 4), name) for name in held}
    assert steps == {"a": 0, "b": 0, "c": 1}


def test_more_relays_than_lanes():
    assert next_step(distribution({"a": 1, "b": 0}, 1), "b") == 0
    assert next_step(distribution({"a": 1, "b": 0}, 1), "a") == 0
    held = {"a": 0, "b": 0}
    assert {name: next_step(distribution(held, 1), name) for name in held} == {"a": 0, "b": 1}


def test_no_more_is_taken_than_is_free():
    assert next_step(distribution({"a": 0, "b": 4}, 4), "a") == 0
    assert next_step(distribution({"a": 0, "b": 4}, 8, free=1), "a") == 1


def act(held: dict[str, int], lanes: int, name: str) -> bool:
    """Let one relay look and do its step; say whether there was anything to do."""
    step = next_step(distribution(held, lanes), name)
    held[name] += min(step, lanes - sum(held.values()))
    assert held[name] >= 0
    return step != 0


def act_all(held: dict[str, int], lanes: int) -> bool:
    """Let every relay look and act once, one after the other; say whether any had anything to do."""
    return True in [act(held, lanes, name) for name in sorted(held)]


def even(held: dict[str, int], lanes: int) -> bool:
    return sum(held.values()) == lanes and max(held.values()) - min(held.values()) <= 1


@given(
    lanes=st.integers(1, 256),
    start=st.lists(st.integers(0, 256), min_size=1, max_size=50),
    order=st.randoms(use_true_random=False),
)
def test_any_start_settles_into_an_even_spread(lanes, start, order):
    """Relays act one at a time in any order; after three rounds the spread is even, and it stays."""
    held: dict[str, int] = {}
    left = lanes
    for index, wanted in enumerate(start):
        held[f"r{index}"] = min(wanted, left)
        left -= held[f"r{index}"]
    for _ in range(3):
        names = sorted(held)
        order.shuffle(names)
        for name in names:
            act(held, lanes, name)
    assert even(held, lanes)
    assert not act_all(held, lanes)


@given(
    lanes=st.integers(1, 64),
    start=st.lists(st.integers(0, 64), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_relays_that_all_look_before_any_acts_settle_too(lanes, start, order):
    """Each has a distribution that is as old as a round: what somebody else has taken since is not free any more."""
    held: dict[str, int] = {}
    left = lanes
    for index, wanted in enumerate(start):
        held[f"r{index}"] = min(wanted, left)
        left -= held[f"r{index}"]
    for _ in range(4):
        seen = distribution(dict(held), lanes)
        names = sorted(held)
        order.shuffle(names)
        for name in names:
            step = next_step(seen, name)
            held[name] += min(step, lanes - sum(held.values()))
    assert even(held, lanes)


@pytest.mark.parametrize("lanes", [1, 4, 50, 64, 256])
def test_fifty_relays_join_one_within_three_rounds(lanes):
    held = {"relay-01": lanes} | {f"relay-{n:02}": 0 for n in range(2, 51)}
    rounds = 0
    while act_all(held, lanes):
        rounds += 1
    assert rounds <= 3
    assert even(held, lanes)
    # All but one leave: their lanes are free.
    held = {"relay-17": held["relay-17"]}
    assert act(held, lanes, "relay-17") or lanes == 1
    assert held == {"relay-17": lanes}
