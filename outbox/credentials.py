"""The hook for short-lived credentials: what ``OUTBOX_CREDENTIALS=package.module:function`` names.

    from outbox.credentials import Credential, CredentialRequest

    def credentials(request: CredentialRequest) -> Credential: ...

docs/operations/secrets.md has examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class CredentialRequest:
    """The server and the user that a credential is for.

    purpose   "postgres": the password of a new connection. "kafka": a token for SASL/OAUTHBEARER.
    host      of Postgres, as in the URL (with several hosts, all of them); for Kafka the bootstrap servers.
    port      of Postgres, as text; several as in the URL.
    user      of Postgres.
    database  of Postgres.

    A field that does not apply, or is not in the URL, is empty.
    """

    purpose: Literal["postgres", "kafka"]
    host: str = ""
    port: str = ""
    user: str = ""
    database: str = ""


@dataclass(frozen=True, slots=True)
class Credential:
    """A password or a token.

    secret      the password or token; never shown.
    expires_at  the token's end in Unix seconds: a new one is requested before it. Required for Kafka, not used for
                Postgres, where each connection requests a password.
    principal   the name of the token's user for Kafka's log.
    extensions  SASL extensions that are sent with the token.
    """

    secret: str = field(repr=False)
    expires_at: float | None = None
    principal: str = ""
    extensions: Mapping[str, str] = field(default_factory=dict)


class CredentialProvider(Protocol):
    """The function that ``OUTBOX_CREDENTIALS`` names. It may be called from several threads."""

    def __call__(self, request: CredentialRequest, /) -> Credential:
        """Return a credential. An exception counts as an outage of the server: the connection is retried."""
