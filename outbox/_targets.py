"""The sessions and connections in whose transaction the library works, and what it refuses of them.

psycopg, asyncpg and SQLAlchemy's asyncio are not imported here: the first needs libpq and the last greenlet, and a
service may have none of them. Objects of their classes exist only if the caller has imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session

from outbox.errors import TargetError


class AsyncpgConnection(Protocol):
    """What is used of asyncpg's Connection, and of the proxy of one that a pool gives. asyncpg has no types."""

    def is_in_transaction(self) -> bool: ...
    async def fetch(self, query: str, *args: Any) -> Sequence[Any]: ...


if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    SyncTarget = Session | scoped_session[Any] | sa.Connection | psycopg.Connection[Any] | psycopg.Cursor[Any]
    AsyncTarget = (
        AsyncSession
        | async_scoped_session[Any]
        | AsyncConnection
        | psycopg.AsyncConnection[Any]
        | psycopg.AsyncCursor[Any]
        | AsyncpgConnection
    )

_DJANGO: Final = "django.db.connection.connection inside transaction.atomic()"
_SYNC: Final = "a SQLAlchemy Session or Connection, or a psycopg Connection or Cursor"
_ASYNC: Final = (
    "a SQLAlchemy AsyncSession or AsyncConnection, a psycopg AsyncConnection or AsyncCursor, or an asyncpg Connection"
)


def sync_target(target: Any, taker: str, async_taker: str) -> Session | sa.Connection | psycopg.Connection[Any]:
    """Return the session or connection that a target stands for: that of a scoped session, of a cursor, or itself.

    Raises TargetError for any other object. It names the ``taker``, and for an asynchronous target the other one.
    """
    if isinstance(target, scoped_session):
        target = target()
    if isinstance(target, Session | sa.Connection):
        return target
    driver = sys.modules.get("psycopg")
    if driver is not None:
        if isinstance(target, driver.Cursor):
            target = target.connection
        if isinstance(target, driver.Connection):
            found: psycopg.Connection[Any] = target
            return found
    if _is_async(target):
        raise TargetError(f"{taker} takes {_SYNC}; for the {_shown(target)} given use {async_taker}")
    raise TargetError(f"{taker} takes {_SYNC}, not the {_shown(target)} given{_in_django(target)}")


def async_target(
    target: Any, taker: str, sync_taker: str
) -> AsyncSession | AsyncConnection | psycopg.AsyncConnection[Any] | AsyncpgConnection:
    """Return the asynchronous session or connection that a target stands for. Raises TargetError as ``sync_target``."""
    sqlalchemy_async = sys.modules.get("sqlalchemy.ext.asyncio")
    found: AsyncSession | AsyncConnection | psycopg.AsyncConnection[Any] | AsyncpgConnection
    if sqlalchemy_async is not None:
        if isinstance(target, sqlalchemy_async.async_scoped_session):
            target = target()
        if isinstance(target, sqlalchemy_async.AsyncSession | sqlalchemy_async.AsyncConnection):
            found = target
            return found
    driver = sys.modules.get("psycopg")
    if driver is not None:
        if isinstance(target, driver.AsyncCursor):
            target = target.connection
        if isinstance(target, driver.AsyncConnection):
            found = target
            return found
    if is_asyncpg(target):
        found = target
        return found
    if _is_sync(target):
        raise TargetError(f"{taker} takes {_ASYNC}; for the {_shown(target)} given use {sync_taker}")
    raise TargetError(f"{taker} takes {_ASYNC}, not the {_shown(target)} given{_in_django(target)}")


def _shown(target: object) -> str:
    """Return the name of an object's class, with the package that has it: several drivers have a Connection."""
    package = type(target).__module__.partition(".")[0]
    return type(target).__name__ if package in {"builtins", "__main__"} else f"{package} {type(target).__name__}"


def _in_django(target: object) -> str:
    """Return what to give in a Django project, for a target that may be one of Django's; elsewhere nothing."""
    # None: Django's connection has no connection before the first query.
    if (target is None or type(target).__module__.startswith("django.")) and "django.db" in sys.modules:
        return f"; in Django give {_DJANGO}"
    return ""


def is_sqlalchemy_async(target: object) -> bool:
    """Return whether a target is one of SQLAlchemy's asyncio, which runs synchronous code with ``run_sync``."""
    sqlalchemy_async = sys.modules.get("sqlalchemy.ext.asyncio")
    return sqlalchemy_async is not None and isinstance(
        target, sqlalchemy_async.AsyncSession | sqlalchemy_async.AsyncConnection
    )


def is_asyncpg(target: object) -> bool:
    """Return whether a target is a connection of asyncpg, perhaps one that a pool gave."""
    driver = sys.modules.get("asyncpg")
    return driver is not None and isinstance(target, driver.Connection)


def session_connection(session: Session) -> sa.Connection:
    """Return the connection of a session's transaction. Raises TargetError if it has no single database."""
    try:
        return session.connection()
    except sa.exc.UnboundExecutionError as error:
        raise TargetError(
            "the session has no single database; give session.connection(bind_arguments={'mapper': …}) instead"
        ) from error


def check_connection(connection: sa.Connection, what: str, consequence: str) -> None:
    """Raise TargetError for a SQLAlchemy connection that is not to Postgres, or that has no transaction.

    what         lives in Postgres.
    consequence  of a missing transaction.
    """
    if connection.dialect.name != "postgresql":
        raise TargetError(f"{what} lives in Postgres, this connection goes to {connection.dialect.name}")
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise TargetError(_no_transaction(consequence, "the connection's isolation level is AUTOCOMMIT; use another"))


def execute(connection: sa.Connection, statement: sa.Executable, values: Mapping[str, Any]) -> sa.CursorResult[Any]:
    """Execute a statement of ours. Its rows are never streamed, as the connection's options may want: the server has no
    cursors for INSERT.
    """
    return connection.execute(statement, values, execution_options={"stream_results": False, "yield_per": None})


@contextmanager
def explained(notes: Mapping[str, str]) -> Iterator[None]:
    """Add a note to an error of the driver that is raised in the block. ``notes`` has them by SQLSTATE."""
    try:
        yield
    except Exception as error:
        original = getattr(error, "orig", error)  # SQLAlchemy wraps the driver's error
        note = notes.get(getattr(original, "sqlstate", None) or getattr(original, "pgcode", None) or "")
        if note is not None:
            error.add_note(note)
        raise


def state_unknown(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Return whether only the server knows if a transaction is open: in autocommit mode, with a pipeline in progress.

    A nested pipeline block waits for the results of all that was sent before it.
    """
    from psycopg.pq import PipelineStatus, TransactionStatus

    return (
        connection.autocommit
        and connection.info.pipeline_status != PipelineStatus.OFF
        and connection.info.transaction_status == TransactionStatus.ACTIVE
    )


def require_transaction(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], consequence: str) -> None:
    """Raise TargetError, with the ``consequence``, for a psycopg connection in autocommit without a transaction."""
    from psycopg.pq import TransactionStatus

    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        in_django = "django.db" in sys.modules
        way_out = f"in Django give {_DJANGO}" if in_django else "open one with connection.transaction()"
        raise TargetError(_no_transaction(consequence, f"the connection is in autocommit mode; {way_out}"))


def require_asyncpg_transaction(connection: AsyncpgConnection, consequence: str) -> None:
    """Raise TargetError, with the ``consequence``, for an asyncpg connection without a transaction."""
    if not connection.is_in_transaction():
        raise TargetError(
            _no_transaction(
                consequence, "asyncpg commits each statement by itself; open one with connection.transaction()"
            )
        )


def _no_transaction(consequence: str, advice: str) -> str:
    return f"no transaction is open, so {consequence}: {advice}"


def _is_sync(target: object) -> bool:
    driver = sys.modules.get("psycopg")
    return isinstance(target, Session | scoped_session | sa.Connection) or (
        driver is not None and isinstance(target, driver.Connection | driver.Cursor)
    )


def _is_async(target: object) -> bool:
    driver, sqlalchemy_async = sys.modules.get("psycopg"), sys.modules.get("sqlalchemy.ext.asyncio")
    return (
        (driver is not None and isinstance(target, driver.AsyncConnection | driver.AsyncCursor))
        or (
            sqlalchemy_async is not None
            and isinstance(
                target,
                sqlalchemy_async.AsyncSession
                | sqlalchemy_async.async_scoped_session
                | sqlalchemy_async.AsyncConnection,
            )
        )
        or is_asyncpg(target)
    )
