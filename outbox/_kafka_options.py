"""What holds for the options of every Kafka client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outbox.errors import ConfigurationError

_VERIFIED: Final = {"enable.ssl.certificate.verification": "true", "ssl.endpoint.identification.algorithm": "https"}


def require_verification(options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for options that would send credentials and events to a server that is not verified."""
    for name, required in _VERIFIED.items():
        value = str(options.get(name, required))
        if value.lower() != required:
            raise ConfigurationError(
                f"kafka option {name}={value} would turn off the verification of the broker's certificate: remove it, "
                "and name the certificate authority in ssl.ca.location"
            )
