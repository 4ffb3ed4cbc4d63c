"""How long to pause after failures: twice as long each time, and at random, so that clients do not return together."""

from __future__ import annotations

import random
import threading
from typing import Final

FIRST: Final = 0.2
"""The first pause, in seconds, of clients without a setting for it."""
MEMBER_PAUSE: Final = (0.1, 5.0)
"""The first and the longest pause, in seconds, of a member of a Kafka group."""
_MOST_DOUBLED: Final = 60


def doubled(earlier: int, first: float, longest: float) -> float:
    """Return how many seconds to pause after this number of earlier failures, without jitter."""
    return min(longest, first * 2.0 ** min(max(earlier, 0), _MOST_DOUBLED))


def jittered(seconds: float) -> float:
    """Return a random time between the half and the whole of a pause."""
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311  no secret


def pause(stop: threading.Event, failures: int) -> None:
    """Wait as a member of a Kafka group does after this number of earlier failures; at most until ``stop`` is set."""
    stop.wait(jittered(doubled(failures, *MEMBER_PAUSE)))
