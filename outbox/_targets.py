"""The sessions and connections in whose transaction the library works, and what it refuses of them.

No driver and nothing of SQLAlchemy is imported here: a service uses one of them, and each costs a process more time and
memory than all the rest. Objects of their classes exist only if the caller has imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from outbox.errors import SchemaError, TargetError


class AsyncpgConnection(Protocol):
    """What is used of asyncpg's Connection, and of the proxy of one that a pool gives. asyncpg has no types."""

    def is_in_transaction(self) -> bool: ...
    async def fetch(self, query: str, *args: Any) -> Sequence[Any]: ...


if TYPE_CHECKING:
    import psycopg
    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session
    from typing_extensions import TypeIs  # of type checkers

    SyncTarget = Session | scoped_session[Any] | sa.Connection | psycopg.Connection[Any] | psycopg.Cursor[Any]
    AsyncTarget = (
        AsyncSession
        | async_scoped_session[Any]
        | AsyncConnection
        | psycopg.AsyncConnection[Any]
        | psycopg.AsyncCursor[Any]
        | AsyncpgConnection
    )

_MISSING: Final = frozenset({"3F000", "42P01", "42703"})
"""SQLSTATEs of a schema, table or column that does not exist."""
# As libpq numbers them: PQTRANS_IDLE, PQTRANS_ACTIVE, PQ_PIPELINE_OFF. psycopg's enums would be imported in each call.
_IDLE: Final = 0
_ACTIVE: Final = 1
_PIPELINE_OFF: Final = 0
_ORM: Final = "sqlalchemy.orm"
_SQLALCHEMY_ASYNC: Final = "sqlalchemy.ext.asyncio"
_DJANGO: Final = "django.db.connection.connection inside transaction.atomic()"
_SYNC: Final = "a SQLAlchemy Session or Connection, or a psycopg Connection or Cursor"
_ASYNC: Final = (
    "a SQLAlchemy AsyncSession or AsyncConnection, a psycopg AsyncConnection or AsyncCursor, or an asyncpg Connection"
)


def sync_target(target: Any, taker: str, async_taker: str) -> Session | sa.Connection | psycopg.Connection[Any]:
    """Return the session or connection that a target stands for: that of a scoped session, of a cursor, or itself.

    Raises TargetError for any other object. It names the ``taker``, and for an asynchronous target the other one.
    """
    if is_psycopg(target):
        return target
    if isinstance(target, _classes(_ORM, "scoped_session")):
        target = target()
    if is_session(target) or is_connection(target):
        return target
    found = target.connection if isinstance(target, _classes("psycopg", "Cursor")) else target
    if is_psycopg(found):
        return found
    wrappers = *_classes(_SQLALCHEMY_ASYNC, "async_scoped_session"), *_classes("psycopg", "AsyncCursor")
    other = isinstance(target, (*_async_classes(), *wrappers))
    raise _refused(target, f"{taker} takes {_SYNC}", async_taker if other else None)


def async_target(
    target: Any, taker: str, sync_taker: str
) -> AsyncSession | AsyncConnection | psycopg.AsyncConnection[Any] | AsyncpgConnection:
    """Return the asynchronous session or connection that a target stands for. Raises TargetError as ``sync_target``."""
    found = target
    if isinstance(target, _classes(_SQLALCHEMY_ASYNC, "async_scoped_session")):
        found = target()
    elif isinstance(target, _classes("psycopg", "AsyncCursor")):
        found = target.connection
    if isinstance(found, _async_classes()):
        return found  # type: ignore[no-any-return]
    sync = *_classes(_ORM, "Session", "scoped_session"), *_classes("psycopg", "Connection", "Cursor")
    other = isinstance(target, sync) or is_connection(target)
    raise _refused(target, f"{taker} takes {_ASYNC}", sync_taker if other else None)


def _classes(module: str, *names: str) -> tuple[Any, ...]:
    """Return these classes if their module is imported, else none: then no object of them exists.

    Another thread may be importing it.
    """
    found = sys.modules.get(module)
    if found is None:
        return ()
    return tuple(
        [made for name in names if (made := getattr(found, name, None)) is not None]
    )  # faster than a generator


def _async_classes() -> tuple[Any, ...]:
    drivers = *_classes("psycopg", "AsyncConnection"), *_classes("asyncpg", "Connection")
    return *_classes(_SQLALCHEMY_ASYNC, "AsyncSession", "AsyncConnection"), *drivers


def _refused(target: object, takes: str, other: str | None) -> TargetError:
    if other is not None:
        return TargetError(f"{takes}; for the {_shown(target)} given use {other}")
    return TargetError(f"{takes}, not the {_shown(target)} given{_in_django(target)}")


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


def is_psycopg(target: object) -> TypeIs[psycopg.Connection[Any]]:
    """Return whether a target is a synchronous connection of psycopg."""
    module = sys.modules.get("psycopg")
    return module is not None and isinstance(target, module.Connection)


def is_session(target: object) -> TypeIs[Session]:
    """Return whether a target is a synchronous session of SQLAlchemy."""
    return isinstance(target, _classes(_ORM, "Session"))


def is_connection(target: object) -> TypeIs[sa.Connection]:
    """Return whether a target is a synchronous connection of SQLAlchemy."""
    return isinstance(target, _classes("sqlalchemy", "Connection"))


def is_sqlalchemy_async(target: object) -> bool:
    """Return whether a target is one of SQLAlchemy's asyncio, which runs synchronous code with ``run_sync``."""
    return isinstance(target, _classes(_SQLALCHEMY_ASYNC, "AsyncSession", "AsyncConnection"))


def is_asyncpg(target: object) -> bool:
    """Return whether a target is a connection of asyncpg, perhaps one that a pool gave."""
    return isinstance(target, _classes("asyncpg", "Connection"))


def session_connection(session: Session) -> sa.Connection:
    """Return the connection of a session's transaction. Raises TargetError if it has no single database."""
    from sqlalchemy.exc import UnboundExecutionError

    try:
        return session.connection()
    except UnboundExecutionError as error:
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


class Explained:
    """Says what to do about an error of the driver that is raised in its block. One for any number of blocks.

    missing  what to do about missing tables or columns of ours, which raise SchemaError from the driver's error.
    notes    for other errors, by SQLSTATE: they are added to the error.
    """

    def __init__(self, missing: str, notes: Mapping[str, str]) -> None:
        self._missing = missing
        self._notes = notes

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, Exception):
            return
        original = getattr(error, "orig", error)  # SQLAlchemy wraps the driver's error
        state = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None) or ""
        # SQLAlchemy's adapter of asyncpg wraps it once more, and puts the name of its class before the text.
        driver = original.__cause__ or original
        # Our statements call no functions but pg_catalog's: with a context it is the error of a trigger on our table.
        if state in _MISSING and not getattr(getattr(driver, "diag", driver), "context", None):
            text = str(driver).strip().partition("\n")[0]
            raise SchemaError(
                f"the outbox's tables are missing in this database, or of another version: {text}; {self._missing}"
            ) from error
        if state in self._notes:
            error.add_note(self._notes[state])


def state_unknown(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Return whether only the server knows if a transaction is open: in autocommit mode, with a pipeline in progress.

    A nested pipeline block waits for the results of all that was sent before it.
    """
    return connection.autocommit and in_pipeline(connection) and connection.pgconn.transaction_status == _ACTIVE


def in_pipeline(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Return whether a pipeline is in progress: then a statement may raise the error of one that was sent before."""
    return connection.pgconn.pipeline_status != _PIPELINE_OFF


def require_transaction(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], consequence: str) -> None:
    """Raise TargetError, with the ``consequence``, for a psycopg connection in autocommit without a transaction."""
    if connection.autocommit and connection.pgconn.transaction_status == _IDLE:
        in_django = "django.db" in sys.modules
        way_out = f"in Django give {_DJANGO}" if in_django else "open one with connection.transaction()"
        raise TargetError(_no_transaction(consequence, f"the connection is in autocommit mode; {way_out}"))


def require_asyncpg_transaction(connection: AsyncpgConnection, consequence: str) -> None:
    """Raise TargetError, with the ``consequence``, for an asyncpg connection without a transaction."""
    if not connection.is_in_transaction():
        advice = "asyncpg commits each statement by itself; open one with connection.transaction()"
        raise TargetError(_no_transaction(consequence, advice))


def _no_transaction(consequence: str, advice: str) -> str:
    return f"no transaction is open, so {consequence}: {advice}"
