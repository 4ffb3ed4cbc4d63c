"""What a driver needs installed, looked for before anything of it is imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from outbox.errors import ConfigurationError


def require_installed() -> None:
    """Raise ConfigurationError unless everything is installed that a driver imports."""
    for module in ("pyspark", "pyarrow", "pandas"):
        if importlib.util.find_spec(module) is None:
            raise ConfigurationError(f"{module} is not installed; run: pip install 'outbox-kafka[spark]'")


def connector_jars() -> list[Path]:
    """Return the jars of Spark's Kafka connector, fetched if need be. Raises ConfigurationError where that can't be."""
    try:
        from outbox.sandbox import jars
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{error.name} is not installed, so the Kafka connector's jars can't be fetched; run "
            "pip install 'outbox-kafka[sandbox]', or give OUTBOX_SPARK_PACKAGES"
        ) from error
    return jars.fetch("spark-kafka")
