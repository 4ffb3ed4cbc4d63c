"""The relay's connections, and the distinction between "the server is unavailable" and "this is a bug"."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from outbox._clients.credentials import password_for
from outbox._clients.postgres import UTF8, check_encoding, first_line
from outbox._clients.search_path import PinnedConnection
from outbox.errors import SchemaError
from outbox.urls import display_url, libpq_url
from relay.core.ports import DatabaseUnavailable, StandingError, StatementCutShort, Unavailable
from relay.settle.statements import NOT_DELETED, STATEMENT_LIMIT

# Transient conditions: Postgres is starting or stopping, is out of connections, cancelled the statement, or chose this
# transaction as a victim. (https://www.postgresql.org/docs/current/errcodes-appendix.html, classes 08, 40, 53, 55, 57)
_PASSING: Final = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    errors.ObjectInUse,
    errors.IdleInTransactionSessionTimeout,
    errors.TransactionTimeout,
)
# Persistent conditions: missing features, invalid data, constraints, other programs' triggers and functions, limits of
# Postgres (54, which psycopg reports as an OperationalError), damaged files. Waiting does not fix them.
_STANDING: Final = frozenset({"0A", "22", "23", "27", "38", "39", "54", "P0", "XX"})
# One code has several meanings. The reporting function and its file have the same names on every server, whatever the
# language of its messages.
_REPLICA_IDENTITY: Final = "CheckCmdReplicaIdentity"
_RECOVERY: Final = "xlogfuncs.c"
_RAISE: Final = "exec_stmt_raise"
# A schema change in progress, or rights not granted yet: worth retrying, but an operator may be needed.
_SCHEMA: Final = (errors.UndefinedTable, errors.UndefinedColumn, errors.InvalidSchemaName, errors.InsufficientPrivilege)


@contextmanager
def unavailable_on_error(doing: str) -> Iterator[None]:
    """Turn a transient database error into Unavailable, and one that needs an operator into SchemaError.

    Any other error is a mistake in a statement, and is raised unchanged.
    """
    try:
        yield
    except _SCHEMA as error:
        denied = isinstance(error, errors.InsufficientPrivilege)
        raise SchemaError.refused(f"Postgres, {doing}: {first_line(error)}", denied=denied) from error
    except psycopg.Error as error:
        explained = _explained(doing, error)
        if explained is None:
            raise
        raise explained from error


_T = TypeVar("_T")


def again_if_left(connection: psycopg.Connection[Any], execute: Callable[[], _T]) -> _T:
    """Execute a statement; once more if its DELETE has left rows: another session may have changed them meanwhile.

    Only outside of a transaction, which the error has ended. Returns what ``execute`` returns.
    """
    try:
        return execute()
    except psycopg.DataError as error:
        if NOT_DELETED not in str(error) or connection.info.transaction_status != TransactionStatus.IDLE:
            raise
        return execute()


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Return whether a connection may be another session in each transaction."""
    return isinstance(connection, PinnedConnection) and connection.pooled


@contextmanager
def one_write(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Execute one statement that locks rows, or needs settings of its own, in this block, behind a pooler too.

    There it needs a transaction, which is sent statement by statement, so that Postgres can end it in between: alone it
    is a pipeline with its settings, and Postgres waits for a pipeline's Sync for as long as the relay sleeps, with the
    rows locked.
    """
    with connection.transaction() if is_pooled(connection) else nullcontext():
        yield


@contextmanager
def one_snapshot(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Read everything in this block in one snapshot. A statement that takes longer than ``seconds`` is cancelled."""
    before = connection.isolation_level, connection.read_only
    # With its BEGIN: behind a pooler the settings follow, and after a statement the level can't change any more.
    connection.isolation_level, connection.read_only = psycopg.IsolationLevel.REPEATABLE_READ, True
    try:
        with connection.transaction():
            connection.execute(STATEMENT_LIMIT, (f"{seconds:g}s",))
            yield
    finally:
        if not connection.closed:
            connection.isolation_level, connection.read_only = before


def _explained(doing: str, error: psycopg.Error) -> Unavailable | SchemaError | None:
    text = f"Postgres, {doing}: {first_line(error)}"
    if isinstance(error, errors.LockNotAvailable | errors.QueryCanceled):
        return StatementCutShort(text)
    if isinstance(error, errors.ObjectNotInPrerequisiteState | errors.InvalidColumnReference):
        # Another program's publication makes a DELETE fail: it publishes deletes without the complete key of the table,
        # of which lane is a generated column. (Postgres 18; see the doctor.)
        if error.diag.source_function == _REPLICA_IDENTITY:
            return SchemaError(f"{text}: a publication of deletes has the outbox's table; see `outbox doctor`")
        if isinstance(error, errors.InvalidColumnReference):
            return SchemaError(f"{text}; see `outbox db check`")
    if NOT_DELETED in text:
        return StandingError(
            f"Postgres, {doing}: rows can't be deleted, although no statement fails. If it stays, a trigger or a "
            "policy of row security keeps them: drop it; see `outbox db check`"
        )
    if isinstance(error, errors.ReadOnlySqlTransaction) or error.diag.source_file == _RECOVERY:
        # A failover in progress, or a provider that protects a full disk.
        return DatabaseUnavailable(
            f"{text}: this server is a standby that is not promoted, or is set to read only; with several hosts in the "
            "URL, add target_session_attrs=read-write"
        )
    if isinstance(error, errors.CheckViolation) and error.diag.table_name and not error.diag.constraint_name:
        # Not a constraint, nor a trigger's RAISE, but a partition bound: a partition of the archive was attached while
        # the row was being routed.
        return DatabaseUnavailable(text)
    standing = (error.sqlstate or "")[:2] in _STANDING or error.diag.source_function == _RAISE
    if not standing and isinstance(error, _PASSING):
        return DatabaseUnavailable(text)
    if standing or _is_another_programs(error):
        place = ".".join(name for name in (error.diag.schema_name, error.diag.table_name) if name)
        return StandingError(
            f"{text}{f' (table {place})' if place else ''}: retrying will not help; see `outbox db check` and "
            "the server's log"
        )
    return None


def _is_another_programs(error: psycopg.Error) -> bool:
    """Return whether a function raised this error, as a trigger does: with its own SQLSTATE, or by its own mistake."""
    return error.sqlstate is not None and (bool(error.diag.context) or type(error) is psycopg.DatabaseError)


NOTICE_DEAD_HOSTS: Final[Mapping[str, Any]] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Options of every connection: a connection to a dead host ends within seconds."""


# A statement that waits longer than this for a lock, or runs longer, is cancelled and retried: a relay that hangs in
# one would keep its lanes without publishing them.
_LOCK_SECONDS: Final = 10
LOCK_PART: Final = 0.1
"""The part of a lease that a relay's statement may wait for a lock: a lane's row may be locked, or not be renewed, for
as long.
"""
_STATEMENT_SECONDS: Final = 120


# Behind a pooler, Postgres would not notice a relay that sleeps (SIGSTOP) in a transaction with locked rows.
_IDLE_SECONDS: Final = 10

_SET: Final = "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS s(name, value)"

TRANSACTION_TIMEOUT_SINCE: Final = 170_000
"""The first version of Postgres with ``transaction_timeout``, which ends the session. A role's or a database's is meant
for transactions that are forgotten: a relay limits its own by other means, and needs some that take long.
"""


def begin_session(connection: psycopg.Connection[Any], lock_seconds: float = math.inf) -> bool:
    """Set a session's limits, and allow prepared statements in it. Returns False behind a pooler.

    ``lock_seconds``: the most that a statement may wait for a lock, if it is less than for all sessions.

    A pooler in transaction mode runs each transaction in any server process: session settings would leak to other
    clients, so there each transaction sets the limits (``PinnedConnection``).
    """
    lock_ms = int(min(lock_seconds, _LOCK_SECONDS) * 1000)
    limits = {"lock_timeout": f"{lock_ms}ms", "statement_timeout": f"{_STATEMENT_SECONDS}s"}
    if connection.info.server_version >= TRANSACTION_TIMEOUT_SINCE:
        limits["transaction_timeout"] = "0"
    if is_pooled(connection):
        assert isinstance(connection, PinnedConnection)
        connection.set_in_transactions({**limits, "idle_in_transaction_session_timeout": f"{_IDLE_SECONDS}s"})
        return False
    connection.execute(_SET, (list(limits), list(limits.values())))
    connection.prepare_threshold = 5
    return True


class Connector:
    """Opens connections to one database. A call raises Unavailable when the server can't be reached, and SchemaError.

    Autocommit, no prepared statements (PgBouncer in transaction mode does not keep them), NOTICE_DEAD_HOSTS, a name for
    pg_stat_activity, texts in UTF-8, and names resolved in pg_catalog alone (``outbox._clients.search_path``).
    """

    def __init__(self, url: str, application_name: str) -> None:
        self._url = libpq_url(url)
        self._name = application_name

    def __call__(self) -> PinnedConnection:
        try:
            connection = PinnedConnection.connect(
                self._url,
                autocommit=True,
                prepare_threshold=None,
                application_name=self._name,
                client_encoding=UTF8,
                **NOTICE_DEAD_HOSTS,
                **password_for(self._url),
            )
            check_encoding(connection)
            connection.pin()
        except psycopg.OperationalError as error:
            raise DatabaseUnavailable(f"Postgres at {display_url(self._url)}: {first_line(error)}") from error
        return connection
