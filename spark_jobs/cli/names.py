"""The settings of the consumers' commands, with the names of all settings checked first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spark_jobs import settings
from spark_jobs.settings import Settings

_checks: list[Callable[[], None]] = []


def check_with(check: Callable[[], None]) -> None:
    """Register a function to call before settings are read, which raises ConfigurationError for unknown names.

    A consumer knows only its own settings; the assembly of the command line knows all of them.
    """
    _checks[:] = [check]


def load(**given: Any) -> Settings:
    """Read the settings. Raises ConfigurationError for each mistake, including misspelt names."""
    for check in _checks:
        check()
    return settings.load(**given)
