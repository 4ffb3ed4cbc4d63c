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
    """The one setting that would change it, of a finding that weakens what is promised."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its subject, what it asks a server, and what it makes of the answer.

    judge      returns the findings; without it the answer is the findings.
    grant      the right that the question needs in Postgres.
    do         what to do when the server can't be asked.
    essential  whether a failure ends the list that the check is in, because the checks behind it rely on it.
    """

    about: str
    query: Callable[[], Any]
    judge: Callable[[Any], Iterable[Finding]] = iter
    grant: str = ""
    do: str = ""
    essential: bool = False


def ok(about: str, found: str, do: str = "") -> Finding:
    """Return a finding that needs nothing, or could be better."""
    return Finding(Level.OK, about, found, do)


def warning(about: str, found: str, do: str = "", setting: str = "") -> Finding:
    """Return a finding that somebody should look at."""
    return Finding(Level.WARNING, about, found, do, setting)


def failure(about: str, found: str, do: str = "", setting: str = "") -> Finding:
    """Return a finding that breaks what is promised, or stops the relay."""
    return Finding(Level.FAILURE, about, found, do, setting)
