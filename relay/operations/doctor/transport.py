"""The doctor's checks of what passwords and events travel through: TLS to Kafka and to Postgres."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from psycopg.conninfo import conninfo_to_dict

from outbox._app.settings import is_loopback
from outbox._clients.checks import Finding, warning
from relay.config import Settings

_ENCRYPTED: Final = frozenset({"ssl", "sasl_ssl"})
_VERIFYING: Final = frozenset({"verify-ca", "verify-full"})


def check_transport(settings: Settings) -> Iterator[Finding]:
    """Check whether passwords and events can be read, or a server be impersonated, on the way. Asks no server."""
    protocol = settings.kafka.get("security.protocol", "plaintext").lower()
    servers = [server.rpartition(":")[0] for server in settings.require_kafka().split(",")]
    if protocol not in _ENCRYPTED and not all(map(_is_local, servers)):
        passwords = protocol == "sasl_plaintext"
        yield warning(
            "Kafka, TLS",
            f"security.protocol is {protocol}: {'the credentials and ' if passwords else ''}all events can be read "
            "on the way to the brokers",
            f"set OUTBOX_KAFKA__SECURITY_PROTOCOL={'SASL_SSL' if passwords else 'SSL'}, and "
            "OUTBOX_KAFKA__SSL_CA_LOCATION for an authority of your own",
        )
    given = conninfo_to_dict(settings.require_database())
    hosts = str(given.get("host") or given.get("hostaddr") or "").split(",")
    mode = str(given.get("sslmode") or "prefer")
    if mode not in _VERIFYING and not all(map(_is_local, hosts)):
        asked = "is not set, and libpq's default is prefer" if "sslmode" not in given else f"is {mode}"
        yield warning(
            "Postgres, TLS",
            f"sslmode {asked}: a server that is not verified, or without TLS, gets the password and the events",
            "add ?sslmode=verify-full&sslrootcert=system to the URL, or name your authority's file",
        )


def _is_local(host: str) -> bool:
    """Return whether a host is this machine: a socket, localhost, or a loopback address."""
    name = host.strip().strip("[]")
    return not name or name.startswith(("/", "@")) or is_loopback(f"{name}:0")
