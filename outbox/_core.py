"""Statements in SQLAlchemy Core as text for psycopg and asyncpg. Each is compiled once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg  # brings no psycopg until it connects

_DIALECT: Final[sa.Dialect] = PGDialect_psycopg()  # type: ignore[no-untyped-call]
# As asyncpg wants it; SQLAlchemy's own dialect for asyncpg would bring greenlet.
_NUMBERED: Final[sa.Dialect] = PGDialect_psycopg(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]


@cache
def psycopg_sql(statement: sa.ClauseElement) -> str:
    """Return a statement as text for psycopg, with ``%(name)s`` parameters."""
    return str(statement.compile(dialect=_DIALECT))


def asyncpg_arguments(statement: sa.ClauseElement, values: Mapping[str, Any]) -> list[Any]:
    """Return what asyncpg's methods take for a statement: its text, and the values in their order."""
    text, names = _numbered(statement)
    return [text, *(values[name] for name in names)]


@cache
def _numbered(statement: sa.ClauseElement) -> tuple[str, tuple[str, ...]]:
    compiled: Any = statement.compile(dialect=_NUMBERED)
    return str(compiled), tuple(compiled.positiontup)
