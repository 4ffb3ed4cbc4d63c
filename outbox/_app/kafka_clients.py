"""The options of every Kafka client: what a user gives, and what all clients get besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outbox._app import credentials


def complete(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for librdkafka, with the callback for tokens where the client needs it."""
    return {**options, **credentials.token_callback(options)}
