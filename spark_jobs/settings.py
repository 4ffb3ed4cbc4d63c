"""A consumer's settings: from the variables and the file that the relay reads too.

Names that belong to the relay are passed over here. The command line looks at all of them first, since it knows both.
"""

from __future__ import annotations

from typing import Any

from outbox._app.settings import SharedSettings, read


class Settings(SharedSettings):
    """What a consumer can be told."""


def load(**given: Any) -> Settings:
    """Read the settings. ``given`` wins over environment and file. Raises ConfigurationError naming each mistake."""
    return read(Settings, {name: value for name, value in given.items() if value is not None})
