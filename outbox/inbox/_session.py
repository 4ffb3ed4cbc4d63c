"""A member's session of Postgres, and which of its errors are no message's fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg

from outbox.consumer.postgres_errors import clear_schema_errors

# Connections, serialization and deadlocks, a server that stops or starts, lacks resources, or is read-only.
_PASSING: Final = ("08", "40", "53", "57P", "25006")


class Session:
    """One session, which is replaced when it has ended."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]]) -> None:
        self._connect = connect
        self._connection: psycopg.Connection[Any] | None = None

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        """Open a transaction. Raises SchemaError and psycopg's errors."""
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
            # Changes by others are seen at once, whatever the default of the role or database.
            self._connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        with clear_schema_errors("applying messages"), self._connection.transaction():
            yield self._connection

    def passes(self, error: BaseException | None) -> bool:
        """Return whether an error is no message's fault: the session is gone, or its transaction was interrupted."""
        if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith(_PASSING):
            return True
        closed = self._connection is None or self._connection.closed
        # Postgres ends a session whose handler takes too long: the next attempt may take as long.
        return bool(closed) and not isinstance(error, psycopg.errors.IdleInTransactionSessionTimeout)

    def close(self) -> None:
        """Close the session. The next transaction opens another one."""
        if self._connection is not None:
            self._connection.close()
