"""The audit: who has done what to an outbox, and why."""

from collections.abc import Mapping
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

_AUDIT: Final = "INSERT INTO {audit} (what, why, details) VALUES (%s, %s, %s)"


def note(
    connection: psycopg.Connection[Any],
    names: Mapping[str, sql.Composable],
    what: str,
    why: str | None,
    details: Mapping[str, Any],
) -> None:
    """Write a line into the audit, in the caller's transaction. ``names`` are those of relay.statements.names_of."""
    connection.execute(sql.SQL(_AUDIT).format(**names), (what, why, Jsonb(details)))
