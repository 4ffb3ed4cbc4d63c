"""What `outbox doctor` checks and what it finds, for the parts that declare their own checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its subject, what was found, and what to do about it, if anything."""

    level: Level
    about: str
    found: str
    do: str = ""
    setting: str = ""
    """For a finding that weakens a guarantee: the setting that would change it."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its subject, its query to a server, and how it judges the answer.

    judge      returns the findings; by default the answer is the findings.
    grant      the right that the query needs in Postgres.
    do         what to do when the query fails.
    essential  whether a failure ends the list of checks, because later ones rely on this one.
    """

    about: str
    query: Callable[[], Any]
    judge: Callable[[Any], Iterable[Finding]] = iter
    grant: str = ""
    do: str = ""
    essential: bool = False


def ok(about: str, found: str, do: str = "") -> Finding:
    """Return a finding that needs no attention; ``do`` may suggest an improvement."""
    return Finding(Level.OK, about, found, do)


def warning(about: str, found: str, do: str = "", setting: str = "") -> Finding:
    """Return a finding that needs attention."""
    return Finding(Level.WARNING, about, found, do, setting)


def failure(about: str, found: str, do: str = "", setting: str = "") -> Finding:
    """Return a finding that breaks a guarantee or stops the relay."""
    return Finding(Level.FAILURE, about, found, do, setting)
