"""How many events each lane may have in a turn: a hot one among many, and after turns that were late."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import Final

import pytest
from loop_fakes import claim

from relay.core.lane import Backoff, Lane
from relay.core.lease import Lease
from relay.core.ports import Batches, DeliveryTimeout, Failed
from relay.core.turn_sizes import TurnSizes

_LANES: Final = 256
_HOT: Final = 109


class Queues:
    """The events of 256 lanes, each as the turn in which it came, and the sizes of the turns that take them."""

    def __init__(self, batch_size: int) -> None:
        self._random = random.Random(3)
        self.lanes = {number: Lane(Lease(number, 1, 60.0, 0.0), Backoff(0.1, 5.0)) for number in range(_LANES)}
        self.sizes = TurnSizes(batch_size, self.lanes)
        self.waiting: dict[int, deque[int]] = {number: deque() for number in range(_LANES)}
        self.turns = 0
        self.ahead: dict[int, int] = {}

    def come(self, count: int) -> None:
        """A fifth of the events are of the hot key's lane."""
        for _ in range(count):
            hot = self._random.random() < 0.2
            self.waiting[_HOT if hot else self._random.randrange(_LANES)].append(self.turns)

    def turn(self, *, late: bool = False, grows: bool = False, reads_ahead: bool = False) -> Batches:
        self.turns += 1
        limits = self.sizes.limits(list(self.lanes))
        taken = self.ahead or self.next(limits)
        batches = {number: [claim(number, position) for position in range(count)] for number, count in taken.items()}
        self.sizes.note_taken(limits, batches)
        if late:
            self.sizes.narrowed(batches, Failed(DeliveryTimeout("no acknowledgement within 4 s")))
            return batches
        for number, batch in batches.items():
            for _ in batch:
                self.waiting[number].popleft()
        if grows:
            self.sizes.completed(batches.keys())
        # A source reads the next turn while one is published, if there is more.
        more = any(2 * len(batch) > limits[number] for number, batch in batches.items())
        self.ahead = self.next(limits) if reads_ahead and more else {}
        return batches

    def next(self, limits: Mapping[int, int]) -> dict[int, int]:
        """Return how many events a turn with these limits has of each lane that has some."""
        return {number: min(most, len(self.waiting[number])) for number, most in limits.items() if self.waiting[number]}

    @property
    def oldest(self) -> int:
        return self.turns - min(queue[0] for queue in self.waiting.values() if queue)


def events(batches: Batches) -> int:
    return sum(map(len, batches.values()))


@pytest.mark.parametrize("limit", [1, 16, 64, 128, 1000])
def test_a_hot_lane_among_256_does_not_fall_behind_at_any_limit(limit):
    queues = Queues(1000)
    queues.sizes._limit = limit
    queues.come(7500)
    sizes = []
    for _ in range(130):
        sizes.append(events(queues.turn()))
        queues.come(247)
    assert len(queues.waiting[_HOT]) < 500
    assert queues.oldest <= 10
    assert max(sizes) <= 2 * 4 * max(limit, _LANES)


@pytest.mark.parametrize("limit", [1, 64, 128, 1000])
def test_a_hot_lane_among_256_does_not_fall_behind_if_turns_are_read_ahead(limit):
    """With the limits of the turn before: few of its events do not show that it has no more."""
    queues = Queues(1000)
    queues.sizes._limit = limit
    queues.come(7500)
    for _ in range(130):
        queues.turn(reads_ahead=True)
        queues.come(247)
    assert len(queues.waiting[_HOT]) < 500
    assert queues.oldest <= 10


@pytest.mark.parametrize("batch_size", [16, 100])
def test_a_hot_lane_among_256_busy_ones_does_not_fall_behind_where_batches_are_small(batch_size):
    queues = Queues(batch_size)
    hot = batch_size // 2
    for _ in range(100):
        for number in queues.waiting:
            queues.waiting[number].extend([queues.turns] * (hot if number == _HOT else 1))
        batches = queues.turn()
        assert max(map(len, batches.values())) <= batch_size
    assert len(queues.waiting[_HOT]) <= batch_size
    assert all(len(queue) <= 1 for number, queue in queues.waiting.items() if number != _HOT)


def test_a_hot_lane_among_256_does_not_fall_behind_if_turns_are_late_now_and_then():
    queues = Queues(1000)
    for number in range(1, 400):
        queues.turn(late=not number % 50, grows=True)
        queues.come(247)
    assert len(queues.waiting[_HOT]) < 500


def test_a_late_turn_of_few_events_leaves_a_quarter_of_the_limit():
    """The broker was away, for example, which says nothing about the size."""
    queues = Queues(1000)
    queues.waiting[_HOT].extend([0] * 3)
    queues.waiting[0].append(0)
    queues.turn(late=True)
    assert queues.sizes._limit == 250
    assert queues.sizes._most_lanes is None


def test_a_late_turn_of_a_single_event_changes_nothing_for_it_can_not_be_smaller():
    queues = Queues(1)
    queues.waiting[_HOT].append(0)
    queues.turn(late=True)
    queues.turn(late=True)
    assert (queues.sizes._limit, queues.sizes._most_lanes) == (1, None)


@pytest.mark.parametrize("batch_size", [1, 100, 2000])
@pytest.mark.parametrize("waiting", [1, 3, 5000])
def test_turns_that_are_always_late_become_one_event_of_one_lane(batch_size, waiting):
    """However many events there are, and although the limit may be far above their number."""
    queues = Queues(batch_size)
    for queue in queues.waiting.values():
        queue.extend([0] * waiting)
    for _ in range(6):
        queues.turn()
        for queue in queues.waiting.values():
            queue.extend([0] * (waiting - len(queue)))
    turns = [queues.turn(late=True) for _ in range(12)]
    costs = [events(turn) + len(turn) for turn in turns]
    # Without enough events for the limit, two turns only lower that.
    assert all(after <= before // 2 for before, after in zip(costs, costs[3:], strict=False) if before > 2)
    assert costs[-1] == 2


def test_a_late_turn_halves_the_limit_although_a_hot_lane_had_more_than_that():
    queues = Queues(1000)
    queues.sizes._limit = 64
    queues.waiting[_HOT].extend([0] * 2000)
    for _ in range(5):
        queues.come(247)
        queues.turn()
    queues.come(247)
    assert len(queues.turn(late=True)[_HOT]) > 2 * 64
    assert queues.sizes._limit == 32
