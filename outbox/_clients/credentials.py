"""Ask the credential provider of this process: a password for each new Postgres connection, tokens for Kafka.

The setting ``credentials`` names the provider when settings are loaded. Spark's Python workers load none; there the
variable names it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from outbox.credentials import Credential, CredentialProvider, CredentialRequest
from outbox.errors import ConfigurationError

VARIABLE: Final = "OUTBOX_CREDENTIALS"
_MECHANISM: Final = "OAUTHBEARER"
_PASSWORDS: Final = ("password", "passfile", "service")


_spec: str | None = None
"""The provider's name, as the settings give it."""


def use(spec: str | None) -> None:
    """Use this provider from now on, or none. Raises ConfigurationError, and keeps the former, for a non-function."""
    global _spec
    if spec is not None:
        _imported(spec)
    _spec = spec


def chosen() -> str | None:
    """Return the name of this process's provider, or None."""
    return _spec or os.environ.get(VARIABLE) or None


def _provider() -> CredentialProvider | None:
    spec = chosen()
    return None if spec is None else _imported(spec)


def password_for(address: str) -> dict[str, Any]:
    """Return the password for a new connection as psycopg's argument; empty without a provider.

    Empty, too, for an address that has a password. Raises psycopg's OperationalError when the provider fails, as when
    the server is away, so that the connection is retried.
    """
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    provider = _provider()
    if provider is None:
        return {}
    given = {name: str(value) for name, value in conninfo_to_dict(address).items() if value is not None}
    if any(name in given for name in _PASSWORDS):
        return {}
    request = CredentialRequest(
        "postgres",
        given.get("host", "") or given.get("hostaddr", ""),
        given.get("port", ""),
        given.get("user", ""),
        given.get("dbname", ""),
    )
    try:
        return {"password": _asked(provider, request).secret}
    except Exception as error:
        raise psycopg.OperationalError(_explained(error)) from error


def token_callback(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return librdkafka's option that asks the provider for tokens; empty unless the client needs them.

    A callback that a service passes to its inbox or transformer is kept.
    """
    mechanism = options.get("sasl.mechanism") or options.get("sasl.mechanisms") or ""
    if str(mechanism).upper() != _MECHANISM or options.get("sasl.oauthbearer.method", "default") != "default":
        return {}
    if "oauth_cb" in options or (provider := _provider()) is None:
        return {}
    request = CredentialRequest("kafka", str(options.get("bootstrap.servers", "")))

    def token(_config: str) -> tuple[str, float, str, dict[str, str]]:
        credential = _asked(provider, request)
        if credential.expires_at is None:
            raise ConfigurationError(f"{chosen()}: a token for Kafka needs expires_at")
        return credential.secret, credential.expires_at, credential.principal, dict(credential.extensions)

    return {"oauth_cb": token}


def _asked(provider: CredentialProvider, request: CredentialRequest) -> Credential:
    found = provider(request)
    if not isinstance(found, Credential):
        # Without the value: it may be the secret itself.
        raise TypeError(f"it must return outbox.credentials.Credential, not {type(found).__name__}")
    return found


def _explained(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"the credentials of {chosen()}: {type(error).__name__}" + (f": {text}" if text else "")


@cache
def _imported(spec: str) -> CredentialProvider:
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise ConfigurationError(f"{VARIABLE} must be package.module:function; got {spec!r}")
    if str(Path.cwd()) not in sys.path:
        # The module may be in the working directory, as with `python -m`.
        sys.path.append(str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{VARIABLE}={spec}: {error}") from error
    if not callable(found):
        raise ConfigurationError(f"{VARIABLE}={spec} is not a function")
    return cast("CredentialProvider", found)
