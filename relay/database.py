"""Connections of the relay, and the line between "the server is away" and "this is a bug"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import errors

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


def begin_session(connection: psycopg.Connection[Any]) -> bool:
    """Set limits for a session, and let the driver keep plans in it; return False behind a pooler.

    A pooler in transaction mode gives each transaction to another server process: what is set for a session would be
    left to strangers. It is recognized by the process that was announced at the start, which is not the one that
    answers.
    """
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    if row[0] != connection.info.backend_pid:
        return False
    connection.execute(
        "SELECT set_config('lock_timeout', %s, false), set_config('statement_timeout', %s, false)",
        (f"{_LOCK_SECONDS}s", f"{_STATEMENT_SECONDS}s"),
    )
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

    def __call__(self) -> psycopg.Connection[Any]:
        """Connect."""
        try:
            return psycopg.connect(
                self._url,
                autocommit=True,
                prepare_threshold=None,
                application_name=self._name,
                **NOTICE_DEAD_HOSTS,
            )
        except psycopg.OperationalError as error:
            raise DatabaseUnavailable(f"Postgres at {display_url(self._url)}: {_first_line(error)}") from error
