"""The audit: who has done what to an outbox, and why."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from relay.insights import read_rows
from relay.settle.statements import names_of

_AUDIT: Final = "INSERT INTO {audit} (what, why, details) VALUES (%s, %s, %s)"
_READ: Final = """
SELECT id, at, who, what, why, details FROM {audit}
 WHERE %(before)s::bigint IS NULL OR id < %(before)s ORDER BY id DESC LIMIT %(limit)s"""


def note(
    connection: psycopg.Connection[Any],
    names: Mapping[str, sql.Composable],
    what: str,
    why: str | None,
    details: Mapping[str, Any],
) -> None:
    """Write a line into the audit, in the caller's transaction. ``names`` are those of settle.statements.names_of."""
    connection.execute(sql.SQL(_AUDIT).format(**names), (what, why, Jsonb(details)))


def read(
    connection: psycopg.Connection[Any], schema: str, *, before: int | None = None, limit: int = 50
) -> Sequence[Mapping[str, Any]]:
    """Return lines of the audit of an outbox or of its consumers, from the one before the id ``before`` on.

    The newest come first.
    """
    return read_rows(connection, "reading the audit", _READ, names_of(schema), {"before": before, "limit": limit})
