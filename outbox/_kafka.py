"""What holds for every Kafka client: its options, and which errors are refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from outbox.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

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


def is_refusal(error: KafkaError) -> bool:
    """Return whether Kafka refuses the client's credentials, or an operation that they do not allow."""
    from confluent_kafka import KafkaError as Codes

    return error.code() in {
        # A documented name, in spite of the underscore.
        Codes._AUTHENTICATION,  # noqa: SLF001
        Codes.SASL_AUTHENTICATION_FAILED,
        Codes.UNSUPPORTED_SASL_MECHANISM,
        Codes.ILLEGAL_SASL_STATE,
        Codes.TOPIC_AUTHORIZATION_FAILED,
        Codes.GROUP_AUTHORIZATION_FAILED,
        Codes.CLUSTER_AUTHORIZATION_FAILED,
    }
