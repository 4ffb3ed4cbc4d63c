"""How often a member looks for dead letters that wait for nothing any more, when it finds none."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from outbox.consumer.model import Partition
from outbox.inbox import _waiting
from outbox.inbox._assigned import Assigned

PLACE = ("orders", 0)


class Clock:
    """Stands for the module ``time``."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Letters:
    """Some letters that wait behind others; each look for those that do not takes so many seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self.looks = 0

    def by_index(self, connection: Any) -> None: ...

    def with_letters(self, connection: Any, partitions: Any) -> tuple[set[Any], set[Any]]:
        return set(), set(partitions)

    def release(self, connection: Any, partition: Any, after: bytes) -> tuple[bool, bytes]:
        self.looks += 1
        self._clock.now += self._seconds
        return False, b""

    def keys(self, connection: Any, topic: str) -> set[bytes]:
        return set()

    def gone(self, connection: Any, topics: Any) -> dict[Any, Any]:
        return {}


class Session:
    def transaction(self) -> Any:
        return nullcontext()


@pytest.mark.parametrize(("seconds", "looks"), [(0.001, 100), (0.055, 17), (3.0, 10)])
def test_a_look_that_takes_long_and_releases_nothing_is_not_repeated_each_second(monkeypatch, seconds, looks):
    """As where 100,000 letters of a key wait for one in another partition."""
    clock = Clock()
    monkeypatch.setattr(_waiting, "time", clock)
    letters = Letters(clock, seconds)
    waiting = _waiting.WaitingLetters(letters, Session(), None)  # type: ignore[arg-type]
    part = Assigned(PLACE, None, set(), 0)
    for _ in range(100):
        waiting.keep_up({PLACE: part})
        clock.now += 1.0
    assert letters.looks == looks


class Waiting(Letters):
    """Letters that are to be retried, by partition; ``tried`` has the partitions of those that were."""

    def __init__(self, clock: Clock, seconds: float, left: dict[Partition, list[int]], *, each: float = 0.0) -> None:
        super().__init__(clock, seconds)
        self.left = left
        self.tried: list[Partition] = []
        self._each = each

    def with_letters(self, connection: Any, partitions: Any) -> tuple[set[Any], set[Any]]:
        return {one for one in partitions if self.left[one]}, set()

    def hold_back(self, connection: Any, partition: Partition, most: int) -> set[int] | None:
        self.looks += 1
        self._clock.now += self._seconds
        return set(self.left[partition]) or None

    def retry(self, part: Any, partition: Partition, cleared: set[int]) -> bool:
        if not self.left[partition]:
            return False
        self.tried.append(partition)
        self._clock.now += self._each
        return self.left[partition].pop(0) in cleared

    def keep_up(self, times: int) -> None:
        """Let a member with these partitions keep up, for a second each time."""
        waiting = _waiting.WaitingLetters(self, Session(), self)  # type: ignore[arg-type]
        claim: Any = "claimed"
        parts = {one: Assigned(one, claim, set(), 0) for one in self.left}
        for _ in range(times):
            until = self._clock.now + 1.0
            waiting.keep_up(parts, lambda until=until: self._clock.now < until)


def test_a_letter_is_retried_however_long_the_look_takes(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_waiting, "time", clock)
    letters = Waiting(clock, 3.0, {PLACE: [1, 2, 3]})
    letters.keep_up(3)
    assert letters.left == {PLACE: []}


def test_slow_letters_of_one_partition_keep_no_other_waiting(monkeypatch):
    """Each time only one letter is tried: of another partition than the last one."""
    clock = Clock()
    monkeypatch.setattr(_waiting, "time", clock)
    first, second, third = (("orders", part) for part in range(3))
    letters = Waiting(clock, 0.0, {first: [1, 2, 3, 4], second: [5], third: [6, 7]}, each=2.0)
    letters.keep_up(7)
    assert letters.tried == [first, second, third, first, third, first, first]
