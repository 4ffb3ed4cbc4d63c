"""Reading tables of which a role may have rights on some only: each table that it can't read hides its own figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import errors, sql

# By name, because to_regclass needs USAGE on the schema.
_UNREADABLE: Final = """
SELECT has_schema_privilege(n.oid, 'USAGE'), c.relname, current_user::text
  FROM pg_namespace AS n JOIN pg_class AS c ON c.relnamespace = n.oid
 WHERE n.nspname = %s AND c.relname = ANY(%s) AND NOT has_any_column_privilege(c.oid, 'SELECT')
 ORDER BY c.relname"""


class VisibleTables:
    """The tables of one schema. ``hidden``: those that this role could not read, each with what to grant."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection = connection
        self._schema = schema
        self.hidden: dict[str, str] = {}

    @contextmanager
    def reading(self, *tables: str) -> Iterator[None]:
        """Run statements that read these tables, in a savepoint. Without a right on one they end, and it is hidden.

        Any other error is raised; so is the one of a role that has no right on the whole schema.
        """
        try:
            with self._connection.transaction():
                yield
        except errors.InsufficientPrivilege:
            if not self._hide(tables):
                raise

    def _hide(self, tables: tuple[str, ...]) -> bool:
        rows = psycopg.Cursor(self._connection).execute(_UNREADABLE, (self._schema, list(tables))).fetchall()
        if not all(usage for usage, _, _ in rows):
            return False
        # Without a row it is a column that can't be read.
        user = rows[0][2] if rows else self._connection.info.user
        for table in [table for _, table, _ in rows] or tables:
            grant = sql.SQL("GRANT SELECT ON {} TO {}").format(
                sql.Identifier(self._schema, table), sql.Identifier(user)
            )
            self.hidden[table] = f"permission denied for table {table}: {grant.as_string(self._connection)}"
        return True
