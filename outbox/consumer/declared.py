"""What a command names as MODULE:NAME."""

from __future__ import annotations

import importlib
from typing import TypeVar

from outbox.errors import ConfigurationError

Declared = TypeVar("Declared")


def find_declared(spec: str, kind: type[Declared], usage: str) -> Declared:
    """Import ``MODULE:NAME`` and return what is declared there. Raises ConfigurationError with ``usage``, or why."""
    module_name, separator, name = spec.partition(":")
    if not separator or not module_name or not name:
        raise ConfigurationError(f"{spec!r}: {usage}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{spec!r}: there is no module {error.name}; run from its folder or set PYTHONPATH"
        ) from error
    if not hasattr(module, name):
        there = ", ".join(other for other, value in vars(module).items() if isinstance(value, kind))
        instead = f"its {kind.__name__}s: {there}" if there else f"it has no {kind.__name__} at all"
        raise ConfigurationError(f"{spec!r}: there is no {name!r} in {module_name}; {instead}")
    found = getattr(module, name)
    if not isinstance(found, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ConfigurationError(
            f"{spec!r}: {name} in {module_name} is {type(found).__name__}, not {article} {kind.__name__}"
        )
    return found
