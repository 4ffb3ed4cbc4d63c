"""A person's connection to the sink's database, and its errors in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import errors

from outbox.errors import SchemaError
from outbox.urls import display_url
from spark_jobs.errors import ConsumerUnavailable
from spark_jobs.postgres import connections

AWAY: Final = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    # The server ended the session of somebody who stood still within a transaction: InternalErrors to psycopg.
    errors.IdleInTransactionSessionTimeout,
    errors.TransactionTimeout,
    # A failover under way: the address is still the standby's. Or a provider that saves a full disk.
    errors.ReadOnlySqlTransaction,
)
"""What passes by itself: the transaction came to nothing, and the same may work on a new connection."""

_SCHEMA: Final = (
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.InvalidSchemaName,
    errors.InsufficientPrivilege,
)


def connect(url: str, application_name: str, connect_seconds: int | None = None) -> psycopg.Connection[Any]:
    """Connect, in autocommit. Raises ConsumerUnavailable when the server can't be reached."""
    try:
        return connections.connect(url, application_name, autocommit=True, connect_seconds=connect_seconds)
    except psycopg.OperationalError as error:
        raise ConsumerUnavailable(f"Postgres at {display_url(url)}: {first_line(error)}") from error


@contextmanager
def clear_errors(doing: str) -> Iterator[None]:
    """Turn a missing table or right into SchemaError, and what passes by itself into ConsumerUnavailable."""
    try:
        yield
    except _SCHEMA as error:
        raise SchemaError(
            f"Postgres, {doing}: {first_line(error)}; see `outbox db check --consumer`, then run "
            "`outbox db upgrade --consumer` or grant it"
        ) from error
    except errors.LockNotAvailable as error:
        raise ConsumerUnavailable(
            f"Postgres, {doing}: a round of the group is using these rows; nothing was changed, try again in a moment"
        ) from error
    except errors.ReadOnlySqlTransaction as error:
        raise ConsumerUnavailable(
            f"Postgres, {doing}: {first_line(error)}: this server is a standby, or is set to read only; with several "
            "hosts in the URL, add target_session_attrs=read-write"
        ) from error
    except AWAY as error:
        raise ConsumerUnavailable(f"Postgres, {doing}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return the line of Postgres's error that says what happened."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
