"""Names in our SQL mean Postgres's own functions and operators, whatever else is in the database.

Whoever may create in a schema of the search path (everybody in ``public`` up to Postgres 14, and afterwards where a
database was upgraded) can plant a function or an operator there whose argument types fit better than those of
pg_catalog's: ours would be resolved to it, and run with the rights of who executes it. So sessions of our own have no
other schema than pg_catalog in their search path.

| session                                       | what keeps planted names out                                       |
|-----------------------------------------------|--------------------------------------------------------------------|
| the relay's, the page's, those of commands    | PIN once; behind a pooler in each transaction                      |
|   and of migrations                           |                                                                    |
| a consumer's transaction, without statements  | PIN_LOCAL with its BEGIN                                           |
|   of users                                    |                                                                    |
| … with the job's effect; the inbox's; those   | the path is the role's, because users' statements need it. In ours |
|   in which services write                     | functions are qualified, and operators have exactly the types of   |
|                                               | pg_catalog's. Values of a sink's columns, of any type, are         |
|                                               | compared with OPERATOR(schema.=); see spark_jobs' ColumnType       |
| External's transactions, on connections that  | pinned_transaction; restore_path before SQL of users               |
|   users open                                  |                                                                    |
| the definitions of our tables                 | created under PIN; where a host application's migrations create    |
|                                               | them, as in a consumer's transaction with users' statements        |

Behind a pooler in transaction mode, a session setting would be the next client's as well, and PgBouncer refuses it as
an option of the connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Self

import psycopg
from psycopg import pq
from psycopg.abc import Params
from psycopg.rows import tuple_row

from outbox._clients.postgres import pipeline

PIN: Final = "SET search_path = pg_catalog"
_READ_COMMITTED: Final = "SET default_transaction_isolation = 'read committed'"
"""A role's or a database's default may be another: a statement would then see what was there when it began, however
long it runs, and a row that another session has changed would be an error."""
PIN_LOCAL: Final = "SET LOCAL search_path = pg_catalog"
_PIN_RETURNING_PATH: Final = """
WITH before AS MATERIALIZED (SELECT pg_catalog.current_setting('search_path') AS path)
SELECT path, pg_catalog.set_config('search_path', 'pg_catalog', true) FROM before"""
# Qualified: until it is executed, the server session has the search path of its role.
_SETTING: Final = "pg_catalog.set_config('{}', '{}', true)"


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Return whether a connection goes through a pooler.

    It is recognized by the process id announced at connect, which differs from that of the process that answers.
    """
    [(pid,)] = psycopg.Cursor(connection, row_factory=tuple_row).execute("SELECT pg_catalog.pg_backend_pid()")
    return bool(pid != connection.info.backend_pid)


@contextmanager
def pinned_transaction(connection: psycopg.Connection[Any]) -> Iterator[str]:
    """Open a transaction whose names mean pg_catalog's. Yields the search path of the session; see ``restore_path``."""
    with connection.transaction():
        [(path, _)] = psycopg.Cursor(connection, row_factory=tuple_row).execute(_PIN_RETURNING_PATH)
        yield path


def restore_path(connection: psycopg.Connection[Any], path: str) -> None:
    """Let names mean what they mean to the session, until the transaction ends: for statements of users."""
    psycopg.Cursor(connection).execute("SELECT pg_catalog.set_config('search_path', %s, true)", (path,))


class PinnedConnection(psycopg.Connection[Any]):
    """A connection whose names mean pg_catalog's, behind a pooler too: there each transaction makes its own settings.

    A statement outside of a transaction then gets one of its own, sent together with the settings.
    """

    pooled = False
    _settings: bytes = b""
    _depth = 0

    def pin(self) -> None:
        """Pin the search path and the isolation level. To be called once, before anything else.

        Closes the connection on an error.
        """
        try:
            self.pooled = is_pooled(self)
            if self.pooled:
                self.set_in_transactions({})
                self.cursor_factory = _PooledCursor
                self.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            else:
                self.execute(f"{PIN}; {_READ_COMMITTED}")
        except BaseException:
            self.close()
            raise

    def set_in_transactions(self, settings: Mapping[str, str]) -> None:
        """Make these settings in each transaction, besides the search path. Only for pooled connections."""
        made = {"search_path": "pg_catalog", **settings}
        self._settings = f"SELECT {', '.join(_SETTING.format(*each) for each in made.items())}".encode()

    @contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Iterator[psycopg.Transaction]:
        """Open a transaction with the settings; nested, a savepoint."""
        with super().transaction(savepoint_name, force_rollback) as transaction:
            self._depth += 1
            try:
                if self.pooled and self._depth == 1:
                    self.make_settings()
                yield transaction
            finally:
                self._depth -= 1

    def make_settings(self) -> None:
        psycopg.Cursor(self).execute(self._settings)

    @property
    def in_transaction(self) -> bool:
        return self._depth > 0


class _PooledCursor(psycopg.Cursor[Any]):
    """The cursor of a PinnedConnection behind a pooler."""

    def execute(self, query: Any, params: Params | None = None, **options: Any) -> Self:
        """Execute a statement; outside of a transaction, open one for it."""
        connection = self.connection
        assert isinstance(connection, PinnedConnection)
        if not connection.in_transaction:
            if connection.pgconn.pipeline_status == pq.PipelineStatus.OFF:
                with pipeline(connection), connection.transaction():
                    super().execute(query, params, **options)
                return self
            # Up to its next sync, a pipeline is one transaction.
            connection.make_settings()
        return super().execute(query, params, **options)
