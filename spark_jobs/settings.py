"""A consumer's settings, from the same variables and file as the relay's.

Names that belong to the relay are ignored here. The command line, which knows both, checks all names first.
"""

from __future__ import annotations

from typing import Any

from outbox._app.settings import SharedSettings, read


class Settings(SharedSettings):
    """The settings of a consumer."""


def load(**given: Any) -> Settings:
    """Read the settings. ``given`` wins over environment and file. Raises ConfigurationError naming each mistake."""
    return read(Settings, {name: value for name, value in given.items() if value is not None})
