"""How lanes spread: pure decisions, no database."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relay.lanes import Census, Step, next_step


def census(held: dict[str, int], lanes: int, free: int | None = None) -> Census:
    return Census(held=held, lanes=lanes, free=lanes - sum(held.values()) if free is None else free)


def test_a_lone_relay_takes_every_lane():
    assert next_step(census({"a": 0}, 4), "a") == Step(acquire=4)


def test_two_newcomers_leave_each_other_half():
    assert next_step(census({"a": 0, "b": 0}, 4), "a") == Step(acquire=2)


def test_the_one_with_most_gives_one_up_for_a_newcomer():
    assert next_step(census({"a": 4, "b": 0}, 4), "a") == Step(release=1)
    assert next_step(census({"a": 4, "b": 0}, 4), "b") == Step()


def test_among_equals_only_one_gives_up():
    held = {"a": 2, "b": 2, "c": 0}
    steps = {name: next_step(census(held, 4), name) for name in held}
    assert steps == {"a": Step(), "b": Step(release=1), "c": Step()}


def test_a_free_lane_is_left_to_whoever_is_short():
    held = {"a": 2, "b": 1, "c": 0}
    assert next_step(census(held, 4), "a") == Step()
    assert next_step(census(held, 4), "b") == Step()
    assert next_step(census(held, 4), "c") == Step(acquire=1)


def test_the_odd_lane_is_taken_once_nobody_is_short():
    assert next_step(census({"a": 1, "b": 1, "c": 1}, 4), "b") == Step(acquire=1)


def test_more_relays_than_lanes():
    assert next_step(census({"a": 1, "b": 0}, 1), "b") == Step()
    assert next_step(census({"a": 1, "b": 0}, 1), "a") == Step()
    assert next_step(census({"a": 0, "b": 0}, 1), "b") == Step(acquire=1)


@given(
    lanes=st.integers(1, 16),
    start=st.lists(st.integers(0, 16), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_any_start_settles_into_an_even_spread(lanes, start, order):
    """Relays act one at a time in any order; after a bounded number of rounds the spread is even and stays."""
    held: dict[str, int] = {}
    left = lanes
    for index, wanted in enumerate(start):
        held[f"r{index}"] = min(wanted, left)
        left -= held[f"r{index}"]
    quiet = False
    for _ in range(4 * lanes + 4):
        names = sorted(held)
        order.shuffle(names)
        quiet = True
        for name in names:
            step = next_step(census(held, lanes), name)
            if step != Step():
                quiet = False
            held[name] += min(step.acquire, lanes - sum(held.values())) - step.release
    assert quiet
    assert sum(held.values()) == lanes
    assert max(held.values()) - min(held.values()) <= 1
