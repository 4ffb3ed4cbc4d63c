"""The options of every Kafka client: what a user gives, and what all clients get besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outbox._app import credentials
from outbox.errors import ConfigurationError

_VERIFIED: Final = {"enable.ssl.certificate.verification": "true", "ssl.endpoint.identification.algorithm": "https"}


def complete(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for librdkafka, with the callback for tokens where the client needs it.

    Raises ConfigurationError for an option that would send credentials and events to a server that is not verified.
    """
    for name, required in _VERIFIED.items():
        value = str(options.get(name, required))
        if value.lower() != required:
            raise ConfigurationError(
                f"kafka option {name}={value} would turn off the verification of the broker's certificate: remove it, "
                "and name the certificate authority in ssl.ca.location"
            )
    return {**options, **credentials.token_callback(options)}
