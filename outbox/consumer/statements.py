"""Statements over the consumers' tables: their names, cursors that users' settings do not change, and the audit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

TABLES: Final = (
    "groups",
    "offsets",
    "processed_messages",
    "processed_messages_default",
    "dead_letters",
    "losses",
    "reservations",
    "audit",
    "checkpoints",
)
IMMEDIATE: Final = "SET CONSTRAINTS ALL IMMEDIATE"
"""SQL: checks deferred constraints now. Fails in a transaction that has failed."""
_AUDIT: Final = "INSERT INTO {audit} (what, why, details) VALUES (%(what)s, %(why)s, %(details)s)"


@cache
def _names(schema: str) -> Mapping[str, sql.Identifier]:
    return {name: sql.Identifier(schema, name) for name in TABLES}


def statement(schema: str, query: LiteralString, **parts: sql.Composable) -> sql.Composed:
    """Return a statement in which ``{offsets}`` and the like are the tables of this schema."""
    return sql.SQL(query).format(**_names(schema), **parts)


def columns(partitions: Collection[tuple[str, int]]) -> dict[str, object]:
    """Return the values of ``unnest(%(topics)s::text[], %(parts)s::integer[])``."""
    return {"topics": [topic for topic, _ in partitions], "parts": [part for _, part in partitions]}


def execute(
    connection: psycopg.Connection[Any], query: sql.Composed, values: Mapping[str, object]
) -> psycopg.Cursor[tuple[Any, ...]]:
    return cursor(connection).execute(query, values)


def cursor(connection: psycopg.Connection[Any]) -> psycopg.Cursor[tuple[Any, ...]]:
    """Return a cursor for rows as tuples, whatever cursors and rows the user's connection has."""
    return psycopg.Cursor(connection, row_factory=tuple_row)


def note(
    connection: psycopg.Connection[Any], schema: str, what: str, why: str | None, details: Mapping[str, object]
) -> None:
    """Record in ``audit`` what an operator did, and why."""
    values = {"what": what, "why": why, "details": Jsonb(dict(details))}
    execute(connection, statement(schema, _AUDIT), values)
