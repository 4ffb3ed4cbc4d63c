"""The result of one of the doctor's checks."""

from dataclasses import dataclass
from enum import StrEnum


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
