"""The setting OUTBOX of a Django project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS

from outbox.event import DEFAULT_SCHEMA

_TYPES: Final[Mapping[str, type]] = {"SCHEMA": str, "LANES": int, "DATABASE": str}


@dataclass(frozen=True, slots=True)
class Options:
    """OUTBOX = {"SCHEMA": "outbox", "LANES": 4, "DATABASE": "default"}: each key may be left out.

    schema    of the outbox's tables.
    lanes     how many the first `migrate` creates; None: the default number, or as many as there are.
    database  the alias whose database has the tables, and in whose transactions events are written.
    """

    schema: str = DEFAULT_SCHEMA
    lanes: int | None = None
    database: str = DEFAULT_DB_ALIAS


def options() -> Options:
    """Return the setting without what ``problems`` reports: Django's checks run when models have used it already."""
    given = getattr(settings, "OUTBOX", {})
    usable = given.items() if isinstance(given, Mapping) else ()
    return Options(**{name.lower(): value for name, value in usable if _fits(name, value)})


def problems() -> list[str]:
    """Return what is wrong with the form of the setting: one line each."""
    given = getattr(settings, "OUTBOX", {})
    if not isinstance(given, Mapping):
        return [f"OUTBOX must be a dict, not {type(given).__name__}"]
    takes = ", ".join(f"{name} ({kind.__name__})" for name, kind in _TYPES.items())
    return [
        f"OUTBOX has {name!r}: {value!r}, and takes {takes}" for name, value in given.items() if not _fits(name, value)
    ]


def _fits(name: object, value: object) -> bool:
    return name in _TYPES and isinstance(value, _TYPES[str(name)]) and not isinstance(value, bool)
