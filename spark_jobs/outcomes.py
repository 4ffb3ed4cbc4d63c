"""How a transaction of a range ends where it is not committed, as a sink says it; see ``sink``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_jobs.model import Place

Wish = tuple[int, str]
"""A dead letter that somebody wants tried again: its id, and for which reason it died."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """A message that can't be applied, and why. ``reason`` is one of those of ``dead_letters``."""

    place: Place
    reason: str
    error: str
    sqlstate: str | None = None


class Culprits(Exception):
    """Ends the transaction: these messages have to be taken out first. Each is named once, however many rows it has.

    They need not be all that there are: the next attempt names others.
    """

    def __init__(self, found: Sequence[Culprit]) -> None:
        self.found = list({culprit.place: culprit for culprit in reversed(found)}.values())[::-1]
        super().__init__(f"{len(self.found)} messages can't be applied; the first: {self.found[0]}")


class Broken(Exception):
    """Ends the transaction: the effect fails whatever the messages are."""


class Moved(Exception):
    """Ends the transaction: the offset is within the range, so the round has to be planned anew."""


class Uncopyable(Exception):
    """Ends the transaction: a value does not fit its column. The next attempt asks for the way that finds out which."""


class Roundabout(Exception):
    """Ends the transaction: the short way does not do. The next attempt of the range asks for the long one."""
