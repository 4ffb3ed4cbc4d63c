"""The sessions and connections in whose transaction the library works, and what it refuses of them.

No driver and nothing of SQLAlchemy is imported here: a service uses one of them, and each costs a process more time and
memory than all the rest. Objects of their classes exist only if the caller has imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from outbox.errors import TargetError


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

_ORM: Final = "sqlalchemy.orm"
_SQLALCHEMY_ASYNC: Final = "sqlalchemy.ext.asyncio"
DJANGO: Final = "django.db.connection.connection inside transaction.atomic()"
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
        return f"; in Django give {DJANGO}"
    return ""


def is_psycopg(target: object) -> TypeIs[psycopg.Connection[Any]]:
    return isinstance(target, _classes("psycopg", "Connection"))


def is_session(target: object) -> TypeIs[Session]:
    return isinstance(target, _classes(_ORM, "Session"))


def is_connection(target: object) -> TypeIs[sa.Connection]:
    return isinstance(target, _classes("sqlalchemy", "Connection"))


def is_sqlalchemy_async(target: object) -> bool:
    """Return whether a target is one of SQLAlchemy's asyncio, which runs synchronous code with ``run_sync``."""
    return isinstance(target, _classes(_SQLALCHEMY_ASYNC, "AsyncSession", "AsyncConnection"))


def is_asyncpg(target: object) -> bool:
    """Return whether a target is a connection of asyncpg, perhaps one that a pool gave."""
    return isinstance(target, _classes("asyncpg", "Connection"))
