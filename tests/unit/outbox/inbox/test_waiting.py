"""How often a member looks for dead letters that wait for nothing any more, when it finds none."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

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
    """Three letters that are to be retried."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(clock, seconds)
        self.left = [1, 2, 3]

    def with_letters(self, connection: Any, partitions: Any) -> tuple[set[Any], set[Any]]:
        return set(partitions if self.left else ()), set()

    def hold_back(self, connection: Any, partition: Any, most: int) -> set[int] | None:
        self.looks += 1
        self._clock.now += self._seconds
        return set(self.left) or None

    def retry(self, part: Any, partition: Any, cleared: set[int]) -> bool:
        return bool(cleared) and self.left.pop(0) in cleared


def test_a_letter_is_retried_however_long_the_look_takes(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_waiting, "time", clock)
    letters = Waiting(clock, 3.0)
    waiting = _waiting.WaitingLetters(letters, Session(), letters)  # type: ignore[arg-type]
    claim: Any = "claimed"
    part = Assigned(PLACE, claim, set(), 0)
    for _ in range(3):
        until = clock.now + 1.0
        waiting.keep_up({PLACE: part}, lambda until=until: clock.now < until)
    assert letters.left == []
