"""Connections of commands to the sink's database, and what Postgres's errors mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from outbox._clients.postgres import causes, first_line
from outbox.consumer import connections
from outbox.consumer.errors import ConsumerError, ConsumerUnavailable, EffectFailed, Interrupted, shown
from outbox.errors import SchemaError
from outbox.urls import display_url

AWAY: Final = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    # The server ended a session that was idle in a transaction for too long: InternalErrors to psycopg.
    errors.IdleInTransactionSessionTimeout,
    errors.TransactionTimeout,
    # A failover is under way and the address is still the standby's; or a provider protects a full disk.
    errors.ReadOnlySqlTransaction,
)
"""Errors that may pass by themselves: the transaction was rolled back, and a new connection may succeed."""

_SCHEMA: Final = (errors.UndefinedTable, errors.UndefinedColumn, errors.InvalidSchemaName, errors.InsufficientPrivilege)


# Classes of SQLSTATE: more than one row for one, data that does not fit, constraints, values beyond a limit (too long
# for an index), and errors that a trigger or function of the sink raises.
_DATA: Final = ("21", "22", "23", "44", "54", "P0001", "P0004")


# A session that was ended, or a server that is read-only since a failover: another try may reach another server.
_PASSING: Final = frozenset({"25006", "25P03", "25P04"})


# OperationalErrors to psycopg that do not pass: program limits (a value that is too long stays too long), a missing
# savepoint, because the effect has ended the transaction, a missing file, as of an extension, and objects that are not
# ready: a sequence without a value, a view without data, an enum's value of the same transaction.
_STAYING: Final = ("54", "3B", "55000", "55P04", "58P01")
# The server has no disk, memory or connections left. What goes beyond a configured limit (53400) may be the message's.
_EXHAUSTED: Final = ("53000", "53100", "53200", "53300")
# Connections, a server that stops or starts, one that lacks resources, one that is read-only.
_AWAY_STATES: Final = ("08", *_EXHAUSTED, "57P", "25006")

MOST_STRIKES: Final = 5
"""The most interruptions in a row, while Postgres answers, that are not yet taken for the message's fault."""


@dataclass(slots=True)
class Strikes:
    """Counts the interruptions in a row that may be a message's fault."""

    count: int = 0

    def strike(self, error: BaseException | None) -> bool:
        """Count an interruption, unless the server lacks resources. Returns whether there were too many."""
        if (found := caused_by(error)) is not None and found.sqlstate in _EXHAUSTED:
            return False
        self.count += 1
        return self.count > MOST_STRIKES


def caused_by(error: BaseException | None) -> psycopg.Error | None:
    """Return the error of Postgres that an error is, or was raised from: code of users wraps them. None for others."""
    return next((found for found in causes(error) if isinstance(found, psycopg.Error)), None)


def spoilt(connection: psycopg.Connection[Any]) -> str | None:
    """Return why the COMMIT of this open transaction would be a ROLLBACK, without an error; None if it would not."""
    if connection.info.transaction_status is TransactionStatus.INTRANS:
        return None
    return "an error of the database was caught, or the transaction was ended: nothing can be committed"


def connect(
    url: str, application_name: str, connect_seconds: int | None = None, *, pinned: bool = True
) -> psycopg.Connection[Any]:
    """Connect, in autocommit. Raises ConsumerUnavailable when the server can't be reached.

    pinned  names mean pg_catalog's, and otherwise what they mean to the role.
    """
    try:
        return connections.connect(url, application_name, connect_seconds=connect_seconds, pinned=pinned)
    except psycopg.OperationalError as error:
        raise ConsumerUnavailable(f"Postgres at {display_url(url)}: {first_line(error)}") from error


@contextmanager
def clear_schema_errors(doing: str) -> Iterator[None]:
    """Turn errors about missing tables or rights into SchemaError."""
    try:
        yield
    except _SCHEMA as error:
        denied = isinstance(error, errors.InsufficientPrivilege)
        text = f"Postgres, {doing}: {first_line(error)}"
        raise SchemaError.refused(text, denied=denied, options=" --consumer") from error


@contextmanager
def clear_errors(doing: str) -> Iterator[None]:
    """Turn errors about missing tables or rights into SchemaError, and those of AWAY into ConsumerUnavailable."""
    try:
        with clear_schema_errors(doing):
            yield
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


def passing(error: psycopg.Error) -> bool:
    """Return whether another try may succeed."""
    return passing_kind(type(error), error.sqlstate)


def passing_kind(kind: type[psycopg.Error], state: str | None = None) -> bool:
    """Return the same for an error of which the class is known, and perhaps its SQLSTATE."""
    state = state or kind.sqlstate
    return (issubclass(kind, psycopg.OperationalError) and not (state or "").startswith(_STAYING)) or state in _PASSING


def by_data(error: psycopg.Error) -> bool:
    """Return whether the data of the rows caused the error."""
    return (error.sqlstate or "").startswith(_DATA)


def of_postgres(error: psycopg.Error, where: str) -> ConsumerError:
    """Return the ConsumerError for an error of the sink in a range, which ``where`` names."""
    text = f"{where}: {shown(error)}"
    if not passing(error):
        return EffectFailed(text)
    # Without a SQLSTATE the server is away. With one it has ended this transaction, unless _AWAY_STATES says otherwise.
    state = error.sqlstate
    return ConsumerUnavailable(text) if state is None or state.startswith(_AWAY_STATES) else Interrupted(text)
