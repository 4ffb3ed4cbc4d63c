"""Clocks: the machine's, for leases, and the database's, as this process knows it from statements that it sends."""

from __future__ import annotations

import sys
import time

# A reading whose answer took longer says less about when the server read its clock, unless the one before is this old.
_QUICK_SECONDS = 0.02
_STALE_SECONDS = 60.0


def uptime() -> float:
    """Return the seconds for leases: on Linux they also pass while the machine is suspended, unlike monotonic()'s."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class DatabaseClock:
    """What the database's clock shows at a moment of this process. One thread writes, others may read.

    Readings come with statements that are sent anyway. The error is at most half of an answer's time.
    """

    def __init__(self) -> None:
        self._ahead: float | None = None
        self._noted_at = 0.0

    def note(self, database_seconds: float, asked_at: float) -> None:
        """Record what the database's clock showed, in seconds since 1970, in the answer to a statement.

        ``asked_at`` is when the statement was sent, by time.monotonic(); the answer has just arrived.
        """
        now = time.monotonic()
        if self._ahead is None or now - asked_at <= _QUICK_SECONDS or now - self._noted_at >= _STALE_SECONDS:
            self._ahead, self._noted_at = database_seconds - (asked_at + now) / 2, now

    def at(self, monotonic: float) -> float | None:
        """Return what the database's clock showed at a time of time.monotonic(); None before the first reading."""
        ahead = self._ahead
        return None if ahead is None else monotonic + ahead
