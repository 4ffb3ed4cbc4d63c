"""How lanes spread: pure decisions, no database."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.lanes import LaneDistribution, next_step


def distribution(held: dict[str, int], lanes: int, free: int | None = None) -> LaneDistribution:
    return LaneDistribution(held=held, lanes=lanes, free=lanes - sum(held.values()) if free is None else free)


@pytest.mark.parametrize(
    ("held", "lanes", "steps"),
    [
        pytest.param({"a": 0}, 4, {"a": 4}, id="a lone relay takes every lane"),
        pytest.param({"a": 0, "b": 0}, 4, {"a": 2, "b": 2}, id="newcomers leave each other half"),
        pytest.param({"a": 4, "b": 0}, 4, {"a": -2, "b": 0}, id="all above the share is given up at once"),
        pytest.param({"a": 256, "b": 0}, 256, {"a": -128, "b": 0}, id="of many lanes too"),
        pytest.param({"a": 64, "b": 0, "c": 0}, 64, {"a": -42, "b": 0, "c": 0}, id="with an odd lane"),
        pytest.param({"a": 2, "b": 2, "c": 0}, 4, {"a": -1, "b": 0, "c": 0}, id="the greatest name keeps one more"),
        pytest.param({"a": 1, "b": 2, "c": 1}, 4, {"a": 0, "b": 0, "c": 0}, id="shares that differ by one are even"),
        pytest.param({"a": 2, "b": 1, "c": 0}, 4, {"a": 0, "b": 0, "c": 1}, id="a free lane is left to who is short"),
        pytest.param({"a": 1, "b": 1, "c": 1}, 4, {"a": 0, "b": 0, "c": 1}, id="the odd lane is one relay's to take"),
        pytest.param({"a": 1, "b": 0}, 1, {"a": 0, "b": 0}, id="more relays than lanes"),
        pytest.param({"a": 0, "b": 0}, 1, {"a": 0, "b": 1}, id="more relays than lanes, and the lane is free"),
    ],
)
def test_the_step_of_each_relay(held, lanes, steps):
    assert {name: next_step(distribution(held, lanes), name) for name in held} == steps


def test_no_more_is_taken_than_is_free():
    assert next_step(distribution({"a": 0, "b": 4}, 4), "a") == 0
    assert next_step(distribution({"a": 0, "b": 4}, 8, free=1), "a") == 1


def start_with(wanted: list[int], lanes: int) -> dict[str, int]:
    """Relays that hold what they want of the lanes, as far as these suffice."""
    held: dict[str, int] = {}
    for number, count in enumerate(wanted):
        held[f"r{number}"] = min(count, lanes - sum(held.values()))
    return held


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
    held = start_with(start, lanes)
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
    held = start_with(start, lanes)
    for _ in range(4):
        seen = distribution(dict(held), lanes)
        names = sorted(held)
        order.shuffle(names)
        for name in names:
            step = next_step(seen, name)
            held[name] += min(step, lanes - sum(held.values()))
    assert even(held, lanes)
