"""A member's session of Postgres, and which of its errors are no message's fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg

from outbox.consumer.connections import OwnSession
from outbox.consumer.postgres_errors import caused_by, clear_schema_errors

# Connections, serialization and deadlocks, locks, a server that stops or starts, lacks resources, or is read-only.
_PASSING: Final = ("08", "40", "53", "55P03", "57P", "25006")


class Session(OwnSession):
    """One session, which is replaced when it has ended, and from time to time."""

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        """Open a transaction. Raises SchemaError and psycopg's errors."""
        connection = self.connected()
        with clear_schema_errors("applying messages"), connection.transaction():
            yield connection

    def passes(self, error: BaseException | None) -> bool:
        """Return whether an error is no message's fault: the session is gone, or its transaction was interrupted.

        The handler may have wrapped the error of Postgres in one of its own.
        """
        found = caused_by(error)
        if found is not None and (found.sqlstate or "").startswith(_PASSING):
            return True
        # Postgres ends a session whose handler takes too long: the next attempt may take as long.
        return self.ended and not isinstance(found, psycopg.errors.IdleInTransactionSessionTimeout)
