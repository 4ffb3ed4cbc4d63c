"""The client of a schema registry, for writers and for consumers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from outbox.errors import OutboxError

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

_AUTHORITY: Final = "ssl.ca.location"


def check_options(url: str, options: Mapping[str, Any], refused: Callable[[str], OutboxError]) -> None:
    """Raise ``refused`` for an address with credentials, and for options that would turn off verification."""
    if not url.strip():
        raise refused("registry: must be a URL")
    # Anywhere: a password may have the characters that end the part of an address in which it stands.
    if "@" in url:
        raise refused('registry: credentials belong into options["basic.auth.user.info"], not into the URL')
    authority = options.get(_AUTHORITY)
    # The client takes False for "verify nothing".
    if authority is not None and not isinstance(authority, str):
        raise refused(
            f"registry: {_AUTHORITY}={authority!r} would turn off the verification of the registry's certificate: "
            "remove it, or name the file of the certificate authority"
        )


def open_client(url: str, options: Mapping[str, Any], refused: Callable[[str], OutboxError]) -> SchemaRegistryClient:
    """Return a client. Raises ``refused`` for options that it does not take, and ImportError without the extra."""
    from confluent_kafka.schema_registry import SchemaRegistryClient

    try:
        return SchemaRegistryClient({**options, "url": url})
    except OSError as error:
        raise refused(f"registry: a file of the options ssl.… can't be read: {error}") from error
    except (ValueError, TypeError) as error:
        raise refused(f"registry: {error}") from error
