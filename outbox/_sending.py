"""Send statements in the transaction of a caller's session or connection, whichever driver it has.

What is to be sent, and what follows from the answers, is a generator of ``Step``, which is the same for all drivers.
No driver and nothing of SQLAlchemy is imported here: objects of their classes exist only if the caller has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from outbox import _targets
from outbox._statements import Statement
from outbox.errors import SchemaError, TargetError

if TYPE_CHECKING:
    import psycopg
    import sqlalchemy as sa
    from sqlalchemy.orm import Session

    from outbox._targets import AsyncpgConnection

T = TypeVar("T")

_MISSING: Final = frozenset({"3F000", "42P01", "42703"})
"""SQLSTATEs of a schema, table or column that does not exist."""
# As libpq numbers them: PQTRANS_IDLE, PQTRANS_ACTIVE, PQ_PIPELINE_OFF. psycopg's enums would be imported in each call.
_IDLE: Final = 0
_ACTIVE: Final = 1
_PIPELINE_OFF: Final = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What is ready to be sent: a statement and its parameters.

    answers  the statement returns rows.
    """

    statement: Statement
    values: Mapping[str, Any]
    answers: bool = False


Rows = Sequence[Sequence[Any]]
"""What a statement returned."""
Steps = Generator[Step, Any, T]
"""Yields what is to be sent, gets its Rows, and returns the result."""


def run(steps: Steps[T], send: Callable[[Step], Rows]) -> T:
    """Send each step, give its rows to what yielded it, and return the result of the last."""
    rows: Rows | None = None  # what starts a generator
    while True:
        try:
            step = steps.send(rows)
        except StopIteration as end:
            return cast("T", end.value)
        rows = send(step)


async def run_async(steps: Steps[T], send: Callable[[Step], Awaitable[Rows]]) -> T:
    """Return the same as ``run``, for an asynchronous target."""
    rows: Rows | None = None
    while True:
        try:
            step = steps.send(rows)
        except StopIteration as end:
            return cast("T", end.value)
        rows = await send(step)


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


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends what one part of the library needs.

    taker, async_taker  what takes the targets, for the texts of TargetError.
    what                lives in Postgres.
    unbound             what would follow without a transaction.
    explained           explains the driver's errors.
    flushes             rows that a session has are sent first: triggers and foreign keys see the order of the code.
    """

    taker: str
    async_taker: str
    what: str
    unbound: str
    explained: AbstractContextManager[None] = field(default_factory=nullcontext)
    flushes: bool = True

    def to(self, target: Any) -> Callable[[Step], Rows]:
        """Return a function that sends a step in the target's transaction, and returns its rows. Raises TargetError."""
        found = _targets.sync_target(target, self.taker, self.async_taker)
        if _targets.is_psycopg(found):
            return lambda step: self._to_psycopg(found, step)
        if _targets.is_session(found):
            return lambda step: self._to_session(found, step)
        return lambda step: self._to_connection(found, step)

    def to_async(self, target: Any) -> Callable[[Step], Awaitable[Rows]]:
        """Return the same as ``to``, for an asynchronous target."""
        found: Any = _targets.async_target(target, self.async_taker, self.taker)
        if _targets.is_asyncpg(found):
            return lambda step: self._to_asyncpg(found, step)
        if not _targets.is_sqlalchemy_async(found):
            return lambda step: self._to_async_psycopg(found, step)
        send = self._to_session if hasattr(found, "sync_session") else self._to_connection
        return lambda step: found.run_sync(send, step)

    def _to_session(self, session: Session, step: Step) -> Rows:
        from sqlalchemy.exc import UnboundExecutionError

        if self.flushes:
            session.flush()
        try:
            connection = session.connection()
        except UnboundExecutionError as error:
            raise TargetError(
                "the session has no single database; give session.connection(bind_arguments={'mapper': …}) instead"
            ) from error
        return self._to_connection(connection, step)

    def _to_connection(self, connection: sa.Connection, step: Step) -> Rows:
        if connection.dialect.name != "postgresql":
            raise TargetError(f"{self.what} lives in Postgres, this connection goes to {connection.dialect.name}")
        if getattr(connection.connection.dbapi_connection, "autocommit", False):
            raise self._no_transaction("the connection's isolation level is AUTOCOMMIT; use another")
        with self.explained:
            translated = connection.get_execution_options().get("schema_translate_map") or {}
            values = step.values
            if "schema" in values:
                values = {**values, "schema": translated.get(values["schema"], values["schema"])}
            # Never streamed, as the connection's options may want: the server has no cursors for INSERT.
            options = {"stream_results": False, "yield_per": None}
            result = connection.execute(step.statement.sqlalchemy(translated), values, execution_options=options)
            return result.all() if step.answers else ()

    def _to_psycopg(self, connection: psycopg.Connection[Any], step: Step) -> Rows:
        module = sys.modules["psycopg"]  # faster than an import in each call
        if _state_unknown(connection):
            with connection.pipeline():
                pass
        self._require_transaction(connection)
        # Not connection.execute(): the caller's cursor factory may use another kind of placeholder.
        cursor = module.Cursor(connection, row_factory=module.rows.tuple_row)
        with self._explained_to(connection):
            cursor.execute(step.statement.psycopg, step.values)
        return cast("Rows", cursor.fetchall()) if step.answers else ()

    async def _to_async_psycopg(self, connection: psycopg.AsyncConnection[Any], step: Step) -> Rows:
        module = sys.modules["psycopg"]
        if _state_unknown(connection):
            async with connection.pipeline():
                pass
        self._require_transaction(connection)
        cursor = module.AsyncCursor(connection, row_factory=module.rows.tuple_row)
        with self._explained_to(connection):
            await cursor.execute(step.statement.psycopg, step.values)
        return cast("Rows", await cursor.fetchall()) if step.answers else ()

    async def _to_asyncpg(self, connection: AsyncpgConnection, step: Step) -> Rows:
        if not connection.is_in_transaction():
            raise self._no_transaction(
                "asyncpg commits each statement by itself; open one with connection.transaction()"
            )
        with self.explained:
            return await connection.fetch(*step.statement.asyncpg(step.values))

    def _require_transaction(self, connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
        if connection.autocommit and connection.pgconn.transaction_status == _IDLE:
            in_django = "django.db" in sys.modules
            way_out = f"in Django give {_targets.DJANGO}" if in_django else "open one with connection.transaction()"
            raise self._no_transaction(f"the connection is in autocommit mode; {way_out}")

    def _no_transaction(self, advice: str) -> TargetError:
        return TargetError(f"no transaction is open, so {self.unbound}: {advice}")

    def _explained_to(
        self, connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
    ) -> AbstractContextManager[None]:
        """Return the block in which a statement is executed, which explains its errors.

        Within a pipeline these may be errors of the caller's own statements, and are left as they are.
        """
        return nullcontext() if _in_pipeline(connection) else self.explained


def _state_unknown(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Return whether only the server knows if a transaction is open: in autocommit mode, with a pipeline in progress.

    A nested pipeline block waits for the results of all that was sent before it.
    """
    return connection.autocommit and _in_pipeline(connection) and connection.pgconn.transaction_status == _ACTIVE


def _in_pipeline(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    return connection.pgconn.pipeline_status != _PIPELINE_OFF
