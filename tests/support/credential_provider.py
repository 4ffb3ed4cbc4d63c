"""Credential providers for tests, which relays and Spark's workers import too: they are told by the environment."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path

from outbox.credentials import Credential, CredentialRequest


def unsigned(until: float) -> str:
    """Return an unsigned token of the user ``outbox``."""
    parts = {"alg": "none"}, {"sub": "outbox", "iat": int(time.time()) - 5, "exp": int(until)}
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*encoded, ""])


def from_environment(request: CredentialRequest) -> Credential:
    """Return the password of the variable TEST_PASSWORD; for Kafka a token for the user ``outbox``."""
    if request.purpose == "postgres":
        return Credential(os.environ["TEST_PASSWORD"])
    until = time.time() + 60
    return Credential(unsigned(until), until, "outbox")


def noting(request: CredentialRequest) -> Credential:
    """Write the purpose and the process into the file of the variable TEST_NOTES, and return any password."""
    with Path(os.environ["TEST_NOTES"]).open("a") as notes:
        notes.write(f"{request.purpose} {os.getpid()}\n")
    return Credential("any")
