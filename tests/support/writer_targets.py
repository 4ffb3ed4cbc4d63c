"""Every kind of target an outbox writes to, behind one face, so that one scenario runs over all of them.

And what tests of the writer share besides.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from outbox import AsyncOutbox, Event, Outbox
from outbox.urls import sqlalchemy_url


def event(number: int = 1, key: str = "o-1") -> Event:
    return Event("Order", key, "OrderPlaced", {"n": number})


def stored(database: Any) -> list[dict[str, Any]]:
    """What others see in the table: the committed rows."""
    with psycopg.connect(database.url, row_factory=dict_row) as connection:
        return connection.execute("SELECT * FROM outbox.events ORDER BY id").fetchall()


def numbers(database: Any) -> list[int]:
    return [row["payload"]["n"] for row in stored(database)]


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)


class Undo(Exception):
    """Ends a savepoint, to be rolled back."""


@dataclass
class Target:
    """One open target. What is synchronous is called and answers at once; the face is the same."""

    given: Any
    owner: Any
    """What commits: the session, or the connection of a cursor."""
    schema: str = "outbox"
    options: dict[str, Any] = field(default_factory=dict)
    """Of the outbox."""

    async def add(self, given: Event, **options: Any) -> Any:
        return await _settled(self._outbox.add(self.given, given, **options))

    async def add_many(self, events: list[Event], **options: Any) -> Any:
        return await _settled(self._outbox.add_many(self.given, events, **options))

    async def cancel(self, event_id: UUID) -> Any:
        return await _settled(self._outbox.cancel(self.given, event_id))

    async def reschedule(self, event_id: UUID, **options: Any) -> Any:
        return await _settled(self._outbox.reschedule(self.given, event_id, **options))

    async def check(self) -> None:
        await _settled(self._outbox.check(self.given))

    async def commit(self) -> None:
        await _settled(self.owner.commit())

    async def rollback(self) -> None:
        await _settled(self.owner.rollback())

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        block = (self.owner.transaction if hasattr(self.owner, "transaction") else self.owner.begin_nested)()
        if hasattr(block, "__aenter__"):
            async with block:
                yield
        else:
            with block:
                yield

    @property
    def _outbox(self) -> Any:
        is_async = inspect.iscoroutinefunction(self.owner.commit) or isinstance(self.owner, async_scoped_session)
        return (AsyncOutbox if is_async else Outbox)(schema=self.schema, **self.options)


async def _settled(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


@contextlib.asynccontextmanager
async def _sa(database: Any, kind: str, driver: str) -> AsyncIterator[Target]:
    engine = sa.create_engine(sqlalchemy_url(database.url, driver))
    try:
        if kind == "Connection":
            with engine.connect() as connection:
                yield Target(connection, connection)
        elif kind == "Session":
            with Session(engine) as session:
                yield Target(session, session)
        elif kind == "sessionmaker":
            with sessionmaker(engine)() as session:
                yield Target(session, session)
        else:
            scoped = scoped_session(sessionmaker(engine))
            try:
                yield Target(scoped, scoped)
            finally:
                scoped.remove()
    finally:
        engine.dispose()


@contextlib.asynccontextmanager
async def _sa_async(database: Any, kind: str, driver: str) -> AsyncIterator[Target]:
    engine = create_async_engine(sqlalchemy_url(database.url, driver))
    try:
        if kind == "AsyncConnection":
            async with engine.connect() as connection:
                yield Target(connection, connection)
        elif kind == "AsyncSession":
            async with AsyncSession(engine) as session:
                yield Target(session, session)
        else:
            scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
            try:
                yield Target(scoped, scoped)
            finally:
                await scoped.remove()
    finally:
        await engine.dispose()


@contextlib.asynccontextmanager
async def _psycopg(database: Any, kind: str, factory: Any) -> AsyncIterator[Target]:
    with psycopg.connect(database.url, cursor_factory=factory) as connection:
        yield Target(connection.cursor() if kind == "Cursor" else connection, connection)


@contextlib.asynccontextmanager
async def _psycopg_async(database: Any, kind: str, factory: Any) -> AsyncIterator[Target]:
    async with await psycopg.AsyncConnection.connect(database.url, cursor_factory=factory) as connection:
        yield Target(connection.cursor() if kind == "AsyncCursor" else connection, connection)


class AsyncpgTransactions:
    """A connection of asyncpg that is always in a transaction, with the methods of the other owners."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.transaction = connection.transaction  # nested in this one, so a savepoint

    async def begin(self) -> None:
        self._block = self._connection.transaction()
        await self._block.start()

    async def commit(self) -> None:
        await self._block.commit()
        await self.begin()

    async def rollback(self) -> None:
        await self._block.rollback()
        await self.begin()


@contextlib.asynccontextmanager
async def _asyncpg(database: Any, kind: str, codec: bool) -> AsyncIterator[Target]:
    async def set_up(connection: Any) -> None:
        if codec:
            for name in ("json", "jsonb"):
                await connection.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")

    async with contextlib.AsyncExitStack() as opened:
        if kind == "Connection":
            connection = await asyncpg.connect(database.url)
            opened.push_async_callback(connection.close)
            await set_up(connection)
        else:
            pool = await opened.enter_async_context(
                asyncpg.create_pool(database.url, min_size=1, max_size=1, init=set_up)
            )
            connection = await opened.enter_async_context(pool.acquire())
        owner = AsyncpgTransactions(connection)
        await owner.begin()
        yield Target(connection, owner)


TARGETS: dict[str, tuple[Callable[..., Any], str, Any]] = {
    "SQLAlchemy Connection, psycopg": (_sa, "Connection", "psycopg"),
    "SQLAlchemy Connection, psycopg2": (_sa, "Connection", "psycopg2"),
    "Session, psycopg": (_sa, "Session", "psycopg"),
    "Session, psycopg2": (_sa, "Session", "psycopg2"),
    "sessionmaker": (_sa, "sessionmaker", "psycopg"),
    "scoped_session": (_sa, "scoped_session", "psycopg"),
    "AsyncConnection, psycopg": (_sa_async, "AsyncConnection", "psycopg"),
    "AsyncConnection, asyncpg": (_sa_async, "AsyncConnection", "asyncpg"),
    "AsyncSession, psycopg": (_sa_async, "AsyncSession", "psycopg"),
    "AsyncSession, asyncpg": (_sa_async, "AsyncSession", "asyncpg"),
    "async_scoped_session": (_sa_async, "async_scoped_session", "asyncpg"),
    "psycopg Connection": (_psycopg, "Connection", psycopg.Cursor),
    "psycopg Connection, raw cursors": (_psycopg, "Connection", psycopg.RawCursor),
    "psycopg Cursor": (_psycopg, "Cursor", psycopg.Cursor),
    "psycopg Cursor, client-side": (_psycopg, "Cursor", psycopg.ClientCursor),
    "psycopg AsyncConnection": (_psycopg_async, "AsyncConnection", psycopg.AsyncCursor),
    "psycopg AsyncConnection, raw cursors": (_psycopg_async, "AsyncConnection", psycopg.AsyncRawCursor),
    "psycopg AsyncCursor": (_psycopg_async, "AsyncCursor", psycopg.AsyncCursor),
    "asyncpg Connection": (_asyncpg, "Connection", False),
    "asyncpg, of a pool with codecs for JSON": (_asyncpg, "Pool", True),
}


def opened(name: str, database: Any) -> contextlib.AbstractAsyncContextManager[Target]:
    """Open the target of that name on a database."""
    opener, kind, option = TARGETS[name]
    return opener(database, kind, option)


every_target = pytest.mark.parametrize("name", TARGETS)
# What the spellings of a driver share is shown with one of them.
each_driver = pytest.mark.parametrize(
    "name",
    [
        "SQLAlchemy Connection, psycopg2",
        "Session, psycopg",
        "AsyncConnection, asyncpg",
        "AsyncSession, psycopg",
        "psycopg Cursor",
        "psycopg AsyncConnection",
        "asyncpg Connection",
    ],
)


# What is decided before anything is sent is the same for all drivers.
both_ways = pytest.mark.parametrize("name", ["Session, psycopg", "asyncpg Connection"])


def on_target(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a coroutine test over the target that its parameter ``name`` says, opened on the test's database."""

    @functools.wraps(test)
    def run(outbox_postgres: Any, name: str, **others: Any) -> None:
        async def opening() -> None:
            async with opened(name, outbox_postgres) as target:
                await test(target, outbox_postgres, **others)

        asyncio.run(opening())

    own = inspect.signature(run, follow_wrapped=False)
    others = list(inspect.signature(test).parameters.values())[2:]
    run.__signature__ = own.replace(parameters=[*list(own.parameters.values())[:2], *others])  # type: ignore[attr-defined]
    return run


async def write(target: Target, many: bool, first: int, **options: Any) -> list[UUID]:
    """Write two events from the number ``first`` on, by either method."""
    if many:
        return await target.add_many([event(first), event(first + 1)], **options)
    return [await target.add(event(first), **options), await target.add(event(first + 1), **options)]


def waits_for_a_lock(database: Any, connection: psycopg.Connection[Any]) -> bool:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    with psycopg.connect(database.url, autocommit=True) as watch:
        return watch.execute(waiting, (connection.info.backend_pid,)).fetchone()[0] == 1


def round_trips(connection: psycopg.Connection[Any], trace: Path, work: Callable[[], Any]) -> int:
    """Count by libpq's own trace: the client ends what it sends with one Sync or Query."""
    with trace.open("w") as file:
        connection.pgconn.trace(file.fileno())
        work()
        connection.pgconn.untrace()
    fields = [line.split("\t") for line in trace.read_text().splitlines()]
    return sum(each[1:2] == ["F"] and each[3] in {"Sync", "Query"} for each in fields)
