"""Which versions of Apache Kafka the sandbox can start. ``jars.lock`` has a set of jars for each."""

from __future__ import annotations

from typing import Final

from outbox.sandbox.errors import ServiceError

DEFAULT: Final = "4.2.1"
KAFKA_VERSIONS: Final = ("3.9.2", "4.0.2", "4.1.2", DEFAULT, "4.3.1", "4.4.0")
"""The newest patch release of each minor version that a Maven repository serves, and the one that is tested most."""


def jars_of(version: str) -> str:
    """Return the name of a version's set of jars. Raises ServiceError if there is none."""
    if version not in KAFKA_VERSIONS:
        raise ServiceError(f"there are no jars of Kafka {version!r}, only of {', '.join(KAFKA_VERSIONS)}: choose one")
    return "kafka" if version == DEFAULT else f"kafka-{version}"
