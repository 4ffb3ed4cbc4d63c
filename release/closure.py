"""Which installed distributions an extra brings along, from their metadata."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.message import Message
from importlib.metadata import distribution
from typing import Final, cast

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

PROJECT: Final = canonicalize_name("outbox-kafka")
CORE: Final = ""
"""The name, among the extras, of what is installed without any."""


@dataclass(frozen=True, slots=True, eq=False)
class Installed:
    """A distribution of this environment: its metadata, parsed once."""

    metadata: Message
    requires: tuple[Requirement, ...]

    @property
    def version(self) -> str:
        """Return its version."""
        return str(self.metadata["Version"])


def extras(requires: Iterable[str]) -> list[str]:
    """Return the extras that these requirements of the project belong to, without ``dev``, the core's first."""
    markers = [str(one.marker) for one in map(Requirement, requires) if one.marker is not None]
    found = {marker.rpartition("extra == ")[2].strip("\"'") for marker in markers if "extra == " in marker}
    return [CORE, *sorted(found - {"dev"})]


def closure(requires: Iterable[str], extra: str) -> dict[NormalizedName, Installed]:
    """Return what the project needs with this extra on this platform, by name, as it is installed here.

    Raises PackageNotFoundError if something is not.
    """
    found: dict[NormalizedName, Installed] = {}
    seen: set[tuple[NormalizedName, str]] = set()
    waiting = list(_needed(map(Requirement, requires), extra))
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        needed = found.setdefault(name, _installed(name))
        for wanted in {CORE, *need.extras} - {was for of, was in seen if of == name}:
            seen.add((name, wanted))
            waiting += _needed(needed.requires, wanted)
    return found


def direct(requires: Iterable[str], extra: str) -> set[NormalizedName]:
    """Return the distributions that the project itself names for this extra on this platform."""
    return {canonicalize_name(one.name) for one in _needed(map(Requirement, requires), extra)}


def needs(found: Installed, among: Iterable[NormalizedName]) -> list[NormalizedName]:
    """Return the distributions among these that one requires, with or without its extras."""
    return sorted({canonicalize_name(one.name) for one in found.requires} & set(among))


@functools.cache
def _installed(name: NormalizedName) -> Installed:
    metadata = cast("Message", distribution(name).metadata)  # which its protocol does not say
    return Installed(metadata, tuple(map(Requirement, metadata.get_all("Requires-Dist", []))))


def _needed(requires: Iterable[Requirement], extra: str) -> Iterator[Requirement]:
    """Yield the requirements that apply here: those of an extra, or those that need none."""
    for need in requires:
        applies = {name: need.marker is None or need.marker.evaluate({"extra": name}) for name in (CORE, extra)}
        if applies[extra] and (extra == CORE or not applies[CORE]):
            yield need
