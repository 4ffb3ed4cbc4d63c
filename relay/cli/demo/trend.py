"""Rates, and how far the sink is behind, from the figures of the last looks."""

from __future__ import annotations

from collections import deque
from typing import Final

from relay.cli.demo.ledger import Sight

WINDOW_SECONDS: Final = 3.0


class Trend:
    """Add what is seen, at any times that grow."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Sight]] = deque()
        self._not_applied: deque[tuple[float, int]] = deque()

    def add(self, now: float, sight: Sight) -> None:
        """Take in the figures of this moment, in seconds of any clock."""
        self._looks.append((now, sight))
        while self._looks[0][0] < now - WINDOW_SECONDS:
            self._looks.popleft()
        if not self._not_applied or self._not_applied[-1][1] < sight.committed:
            self._not_applied.append((now, sight.committed))
        while self._not_applied and self._not_applied[0][1] <= sight.applied:
            self._not_applied.popleft()

    def rate(self, figure: str) -> float:
        """Return by how much a figure of ``Sight`` grew in a second, over the last few."""
        if len(self._looks) < 2:
            return 0.0
        (began, first), (ended, last) = self._looks[0], self._looks[-1]
        grown: float = getattr(last, figure) - getattr(first, figure)
        return grown / (ended - began)

    @property
    def behind(self) -> float | None:
        """Return for how many seconds the oldest event that is not applied has been committed; None: all are applied.

        It was committed between two looks, of which the later counts.
        """
        return self._looks[-1][0] - self._not_applied[0][0] if self._not_applied else None
