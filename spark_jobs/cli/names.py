"""The settings of the consumers' commands, with the names of all settings checked first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spark_jobs import settings
from spark_jobs.settings import Settings

_checks: list[Callable[[], None]] = []


def check_with(check: Callable[[], None]) -> None:
    """Call this before settings are read: it raises ConfigurationError for a name that no application knows.

    A consumer knows its own settings only. Where the command line is put together, all are known.
    """
    _checks[:] = [check]


def load(**given: Any) -> Settings:
    """Read the settings. Raises ConfigurationError naming each mistake: a misspelt name must not become a default."""
    for check in _checks:
        check()
    return settings.load(**given)
