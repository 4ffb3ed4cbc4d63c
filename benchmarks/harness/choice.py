"""Which ways the option ``--ways`` chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Named(Protocol):
    """Something that reports name."""

    @property
    def name(self) -> str: ...


W = TypeVar("W", bound=Named)


def choose(ways: Sequence[W], texts: Sequence[str]) -> list[W]:
    """Return the ways with one of these names, or whose name contains one of these texts; all without any text."""
    names = {way.name for way in ways}
    return [
        way
        for way in ways
        if not texts or any(text == way.name or (text not in names and text in way.name) for text in texts)
    ]
