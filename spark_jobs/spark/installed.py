"""Check the packages that a driver needs, and their versions."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any, Final

from outbox.errors import ConfigurationError, MissingExtra

SUPPORTED: Final = ("4.1", "4.2")
"""The minor versions of pyspark that the consumer is tested with, in order."""

_LOG: Final = logging.getLogger(__name__)


def require_installed() -> None:
    """Raise ConfigurationError if a package that a driver imports is missing, or pyspark is too old.

    A pyspark that is newer than the tested versions may work, so it only logs a warning.
    """
    for module in ("pyspark", "pyarrow", "pandas"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra("spark", module)
    version = pyspark_version()
    found = re.match(r"\d+\.\d+", version)
    if found is None:
        raise ConfigurationError(f"pyspark has the version {version!r}, which can't be read; {_INSTALL}")
    minor = found[0]
    if _ordered(minor) < _ordered(SUPPORTED[0]):
        raise ConfigurationError(f"pyspark {version} is installed, which the consumer does not support; {_INSTALL}")
    if minor not in SUPPORTED:
        _LOG.warning("pyspark %s is newer than what the consumer is tested with (%s)", version, ", ".join(SUPPORTED))


def pyspark_version() -> str:
    """Return what pyspark's own file says, which may be in a zip.

    A run that finds nothing to do does not import pyspark: with it, it takes a third longer.
    """
    spec: Any = importlib.util.find_spec("pyspark")
    text = spec.loader.get_data(str(Path(spec.origin).with_name("version.py"))).decode()
    return re.sub(r".*__version__[^=]*=\s*['\"]|['\"].*", "", text, flags=re.DOTALL)


def _ordered(minor: str) -> tuple[int, ...]:
    return tuple(map(int, minor.split(".")))


_LAST: Final = _ordered(SUPPORTED[-1])
BOUNDS: Final = f">={SUPPORTED[0]},<{_LAST[0]}.{_LAST[1] + 1}"
"""The versions of pyspark that pip may install, the same as in pyproject.toml."""
_INSTALL: Final = f"run: pip install 'pyspark{BOUNDS}'"
