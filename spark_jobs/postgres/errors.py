"""A person's connection to the sink's database, and its errors in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import errors

from outbox.errors import SchemaError
from outbox.urls import display_url
from spark_jobs.errors import ConsumerError, ConsumerUnavailable, EffectFailed, Interrupted, shown
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


# Two rows for one, data that does not fit, constraints, values beyond a limit (too long for an index), and what a
# trigger or function of the sink raises on purpose.
_DATA: Final = ("21", "22", "23", "44", "54", "P0001", "P0004")


# A session that was ended, or a server that is read-only since a failover: another try may find another server.
_PASSING: Final = frozenset({"25006", "25P03", "25P04"})


# psycopg counts among what is operational: limits of the program, where a value that is too long stays too long; and a
# savepoint that is gone, because the effect has ended the transaction.
_STAYING: Final = ("54", "3B")
# Connections, a server that stops or starts, one that lacks something, one that is read-only.
_AWAY: Final = ("08", "53", "57P", "25006")


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


def passing(error: psycopg.Error) -> bool:
    """Return whether the same may work on another try."""
    return _passes(isinstance(error, psycopg.OperationalError), error.sqlstate)


def passing_kind(kind: type[psycopg.Error]) -> bool:
    """Return the same of an error of which only the class is known."""
    return _passes(issubclass(kind, psycopg.OperationalError), getattr(kind, "sqlstate", None))


def _passes(operational: bool, state: str | None) -> bool:
    return (operational and not (state or "").startswith(_STAYING)) or state in _PASSING


def by_data(error: psycopg.Error) -> bool:
    """Return whether it is the rows' fault."""
    return (error.sqlstate or "").startswith(_DATA)


def of_postgres(error: psycopg.Error, where: str) -> ConsumerError:
    """Return what an error of the sink's means for a range, of which ``where`` says which it is."""
    text = f"{where}: {shown(error)}"
    if not passing(error):
        return EffectFailed(text)
    # Without a state the server is away. With one it has ended this transaction, unless it speaks of itself.
    state = error.sqlstate
    return ConsumerUnavailable(text) if state is None or state.startswith(_AWAY) else Interrupted(text)
