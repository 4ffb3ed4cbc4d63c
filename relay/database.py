"""Connections of the relay, and the line between "the server is away" and "this is a bug"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Self

import psycopg
from psycopg import errors, pq
from psycopg.abc import Params

from outbox.errors import SchemaError
from outbox.urls import display_url, libpq_url
from relay.ports import DatabaseUnavailable, Unavailable

# Conditions that pass by themselves: Postgres is starting or stopping, is full, was told to cancel, or chose this
# transaction as a victim. (https://www.postgresql.org/docs/current/errcodes-appendix.html, classes 08, 40, 53, 55, 57)
_PASSING: Final = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    errors.QueryCanceled,
    errors.LockNotAvailable,
    errors.ObjectInUse,
    errors.IdleInTransactionSessionTimeout,
    errors.TransactionTimeout,
)
# By what is written there, and so for as long as it is: features that are missing, data, constraints, triggers and
# functions of others, limits of Postgres (54: psycopg takes it for a server that is away), damaged files. No server
# that comes back mends these.
_STANDING: Final = frozenset({"0A", "22", "23", "27", "38", "39", "54", "P0", "XX"})
# One code says several things. The function that says it, and its file, have the same names on every server, whatever
# language its messages are in.
_REPLICA_IDENTITY: Final = "CheckCmdReplicaIdentity"
_RECOVERY: Final = "xlogfuncs.c"
# Changes of the schema under way, or rights not granted yet: also worth waiting for, but they need a person.
_SCHEMA: Final = (
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.InvalidSchemaName,
    errors.InsufficientPrivilege,
)


TIMELINE: Final = "('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int"
"""SQL: the timeline on which a primary writes; a checkpoint tells it only later. An error on a standby."""


FURTHER: Final = """commit_lsn = greatest(commit_lsn, %(commit_lsn)s::bigint),
       commit_number = CASE WHEN %(commit_lsn)s::bigint > coalesce(commit_lsn, -1) THEN %(commit_number)s::int
                            WHEN %(commit_lsn)s::bigint = commit_lsn
                            THEN greatest(commit_number, %(commit_number)s::int)
                            ELSE commit_number END"""
"""SQL for SET: a lane's place in the WAL goes on to another one, or stays; it never goes back. NULL for no place."""


class StandingError(SchemaError):
    """Postgres refuses by what is written there, and will for as long as nobody changes something."""


@contextmanager
def unavailable_on_error(doing: str) -> Iterator[None]:
    """Turn a passing database error into Unavailable, and one that needs a person into SchemaError or StandingError.

    What is left is a mistake in a statement, and goes on as it is.
    """
    try:
        yield
    except _SCHEMA as error:
        raise SchemaError(
            f"Postgres, {doing}: {_first_line(error)}; see `outbox db check`, then run `outbox db upgrade` or grant it"
        ) from error
    except psycopg.Error as error:
        explained = _explained(doing, error)
        if explained is None:
            raise
        raise explained from error


def _explained(doing: str, error: psycopg.Error) -> Unavailable | SchemaError | None:
    text = f"Postgres, {doing}: {_first_line(error)}"
    if isinstance(error, errors.ObjectNotInPrerequisiteState | errors.InvalidColumnReference):
        # Somebody else's publication stands in the way of a DELETE: it publishes deletes, and the table's key, of which
        # the lane is a generated column, is not in it. (Postgres 18; see the doctor.)
        if error.diag.source_function == _REPLICA_IDENTITY:
            return SchemaError(f"{text}: a publication of deletes has the outbox's table; see `outbox doctor`")
        if isinstance(error, errors.InvalidColumnReference):
            return SchemaError(f"{text}; see `outbox db check`")
    if isinstance(error, errors.ReadOnlySqlTransaction) or error.diag.source_file == _RECOVERY:
        # A failover under way, or a provider that saves a full disk.
        return DatabaseUnavailable(
            f"{text}: this server is a standby that is not promoted, or is set to read only; with several hosts in the "
            "URL, add target_session_attrs=read-write"
        )
    if isinstance(error, errors.CheckViolation) and error.diag.constraint_name is None:
        # No constraint's, but a partition's: one of the archive was attached between choosing it for a row and writing
        # the row.
        return DatabaseUnavailable(text)
    if (error.sqlstate or "")[:2] in _STANDING:
        place = ".".join(name for name in (error.diag.schema_name, error.diag.table_name) if name)
        return StandingError(
            f"{text}{f' (table {place})' if place else ''}: trying again does not mend it; see `outbox db check` and "
            "the server's log"
        )
    return DatabaseUnavailable(text) if isinstance(error, _PASSING) else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


NOTICE_DEAD_HOSTS: Final[Mapping[str, Any]] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Options of every connection: one to a host that has vanished ends within seconds."""


# A statement that waits longer than this for a lock, or takes longer altogether, is given up and tried again: a relay
# that hangs in one would keep its lanes without publishing them.
_LOCK_SECONDS: Final = 10
_STATEMENT_SECONDS: Final = 120


# Behind a pooler no session of ours ends while a relay sleeps (SIGSTOP) in a transaction, with rows locked.
_IDLE_SECONDS: Final = 10

_LIMITS: Final = "SELECT set_config('lock_timeout', %s, %s), set_config('statement_timeout', %s, %s)"
_LIMITS_AND_IDLE: Final = _LIMITS + ", set_config('idle_in_transaction_session_timeout', %s, true)"


class RelayConnection(psycopg.Connection[Any]):
    """A connection that can limit each of its transactions, once told to: where limits of a session are not kept.

    A statement outside of a transaction gets one of its own, sent at once with its limits.
    """

    limits_transactions = False
    _depth = 0

    @contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Iterator[psycopg.Transaction]:
        """Open a transaction, within the limits; nested, a savepoint."""
        with super().transaction(savepoint_name, force_rollback) as transaction:
            self._depth += 1
            try:
                if self.limits_transactions and self._depth == 1:
                    self.execute(_LIMITS_AND_IDLE, (*_limits(local=True), f"{_IDLE_SECONDS}s"))
                yield transaction
            finally:
                self._depth -= 1

    @property
    def in_block(self) -> bool:
        """Return whether a transaction or a pipeline of the caller's is open."""
        return self._depth > 0 or self.pgconn.pipeline_status != pq.PipelineStatus.OFF


class _LimitedCursor(psycopg.Cursor[Any]):
    """A cursor of such a connection. Its connection gets it when it is told to limit its transactions."""

    def execute(self, query: Any, params: Params | None = None, **options: Any) -> Self:
        """Execute a statement, in a transaction in any case."""
        connection = self.connection
        assert isinstance(connection, RelayConnection)
        if connection.in_block:
            return super().execute(query, params, **options)
        with connection.pipeline(), connection.transaction():
            super().execute(query, params, **options)
        return self


def _limits(*, local: bool) -> tuple[str, bool, str, bool]:
    return f"{_LOCK_SECONDS}s", local, f"{_STATEMENT_SECONDS}s", local


def begin_session(connection: psycopg.Connection[Any]) -> bool:
    """Set limits for a session, and let the driver keep plans in it; return False behind a pooler.

    A pooler in transaction mode gives each transaction to another server process: what is set for a session would be
    left to strangers, so there each transaction has the limits (``RelayConnection``). It is recognized by the process
    that was announced at the start, which is not the one that answers.
    """
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    if row[0] != connection.info.backend_pid:
        if isinstance(connection, RelayConnection):
            connection.limits_transactions = True
            connection.cursor_factory = _LimitedCursor
        return False
    connection.execute(_LIMITS, _limits(local=False))
    connection.prepare_threshold = 5
    return True


class Connector:
    """Makes connections to one database. ``connect`` raises Unavailable when the server can't be reached.

    Autocommit, no prepared statements (PgBouncer in transaction mode does not keep them), NOTICE_DEAD_HOSTS, and a name
    that shows in pg_stat_activity.
    """

    def __init__(self, url: str, application_name: str) -> None:
        self._url = libpq_url(url)
        self._name = application_name

    def __call__(self) -> RelayConnection:
        """Connect."""
        try:
            return RelayConnection.connect(
                self._url,
                autocommit=True,
                prepare_threshold=None,
                application_name=self._name,
                **NOTICE_DEAD_HOSTS,
            )
        except psycopg.OperationalError as error:
            raise DatabaseUnavailable(f"Postgres at {display_url(self._url)}: {_first_line(error)}") from error
