"""Write events in the caller's transaction.

    outbox = Outbox()
    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.add(session, Event("Order", order.id, "OrderPlaced", {"total": order.total}))

Nothing here commits, rolls back or opens a transaction of its own: events live and die with the business rows. What
can be wrong with an event is found before anything is sent, so a refused one leaves the transaction usable.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import orjson
import psycopg
import sqlalchemy as sa
from psycopg.pq import TransactionStatus
from sqlalchemy.orm import Session, scoped_session

from outbox import _payload, _statements, _trace
from outbox.errors import ConfigurationError, EventError, EventTooLarge, TargetError
from outbox.event import CONTENT_TYPE, MAX_EVENT_BYTES, Event
from outbox.tables import DEFAULT_SCHEMA

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    SyncTarget = Session | scoped_session[Any] | sa.Connection | psycopg.Connection[Any] | psycopg.Cursor[Any]
    AsyncTarget = (
        AsyncSession
        | async_scoped_session[Any]
        | AsyncConnection
        | psycopg.AsyncConnection[Any]
        | psycopg.AsyncCursor[Any]
    )

_SYNC = "a SQLAlchemy Session or Connection, or a psycopg Connection or Cursor"
_ASYNC = "a SQLAlchemy AsyncSession or AsyncConnection, or a psycopg AsyncConnection or AsyncCursor"


@dataclass(frozen=True, slots=True)
class _Batch:
    """Events ready to be sent: the statement's parameters, and which statement."""

    ids: list[UUID]
    values: dict[str, Any]
    many: bool
    lock_key: bool


class _Writer:
    """What both outboxes share: everything but the waiting."""

    def __init__(self, *, schema: str = DEFAULT_SCHEMA, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        """Take the schema of the outbox's tables, and a limit for payload, key and headers together, in bytes.

        Raises ConfigurationError for a limit above 1,000,000: the table's CHECK holds that one.
        """
        if not 1 <= max_event_bytes <= MAX_EVENT_BYTES:
            raise ConfigurationError(f"max_event_bytes must be 1 to {MAX_EVENT_BYTES:,}, not {max_event_bytes:,}")
        self._schema = schema
        self._limit = max_event_bytes

    def _prepare(self, events: Sequence[Event], *, lock_key: bool) -> _Batch:
        rows = [self._row(event) for event in events]
        many = lock_key or len(rows) > 1
        values = {name: [row[name] for row in rows] for name in _statements.COLUMNS} if many else rows[0]
        return _Batch([event.event_id for event in events], values, many, lock_key)

    def _row(self, event: Event) -> dict[str, Any]:
        if not isinstance(event, Event):
            raise EventError("event", f"must be an outbox.Event, not {type(event).__name__}")
        text, raw, content_type = _payload.encode(event)
        headers = _trace.current() | dict(event.headers)
        if content_type is not None:
            headers[CONTENT_TYPE] = content_type
        stored = orjson.dumps(headers).decode() if headers else None
        beside = len(event.aggregate_id.encode()) + _payload.stored_size(stored, None, 0 if stored else 1)
        size = beside + _payload.stored_size(text, raw, self._limit - beside)
        if size > self._limit:
            raise EventTooLarge(size, self._limit)
        return {
            "event_id": str(event.event_id),
            "aggregate_type": event.aggregate_type,
            "aggregate_id": event.aggregate_id,
            "event_type": event.event_type,
            "payload": text,
            "payload_bytes": raw,
            "headers": stored,
        }

    def _to_session(self, session: Session, batch: _Batch) -> None:
        # Rows added before the event reach the server before it: triggers and foreign keys see what the code did.
        session.flush()
        try:
            connection = session.connection()
        except sa.exc.UnboundExecutionError as error:
            raise TargetError(
                "the session has no single database; give session.connection(bind_arguments={'mapper': …}) instead"
            ) from error
        self._to_connection(connection, batch)

    def _to_connection(self, connection: sa.Connection, batch: _Batch) -> None:
        if connection.dialect.name != "postgresql":
            raise TargetError(f"the outbox lives in Postgres, this connection goes to {connection.dialect.name}")
        if getattr(connection.connection.dbapi_connection, "autocommit", False):
            raise TargetError(_no_transaction("the connection's isolation level is AUTOCOMMIT; use another"))
        statement = (
            _statements.insert_many(self._schema, lock_key=batch.lock_key)
            if batch.many
            else _statements.insert_one(self._schema)
        )
        connection.execute(statement, batch.values)

    def _psycopg_sql(self, batch: _Batch) -> Any:
        return _statements.psycopg_sql(self._schema, many=batch.many, lock_key=batch.lock_key)


class Outbox(_Writer):
    """Writes events through synchronous sessions and connections. Holds no state; one for the whole process will do.

    schema           of the outbox's tables.
    max_event_bytes  for payload, key and headers together; may only be lower than the table's 1,000,000.
    """

    def add(self, target: SyncTarget, event: Event, *, lock_key: bool = False) -> UUID:
        """Write one event in the target's transaction, with one statement. Gives its event_id.

        lock_key takes a transaction-level advisory lock on (aggregate_type, aggregate_id) first. Writers of one
        aggregate then go one after another and its events are published in commit order. Not needed where they
        lock or update the aggregate's row anyway.

        Raises EventError and its children for an event that can't be written, TargetError for a target without a
        transaction. Errors of the database pass through as the driver raises them.
        """
        return self.add_many(target, (event,), lock_key=lock_key)[0]

    def add_many(self, target: SyncTarget, events: Iterable[Event], *, lock_key: bool = False) -> list[UUID]:
        """Write events in the list's order, in one round trip. Nothing is sent for an empty list. See ``add``."""
        events = tuple(events)
        send = self._sender(target)
        if not events:
            return []
        batch = self._prepare(events, lock_key=lock_key)
        send(batch)
        return batch.ids

    def _sender(self, target: Any) -> Any:
        if isinstance(target, scoped_session):
            target = target()
        if isinstance(target, Session):
            return lambda batch: self._to_session(target, batch)
        if isinstance(target, sa.Connection):
            return lambda batch: self._to_connection(target, batch)
        if isinstance(target, psycopg.Cursor):
            target = target.connection
        if isinstance(target, psycopg.Connection):
            _require_transaction(target)
            return lambda batch: target.execute(self._psycopg_sql(batch), batch.values)
        if _is_async(target):
            raise TargetError(f"Outbox takes {_SYNC}; for a {type(target).__name__} use AsyncOutbox")
        raise TargetError(f"Outbox takes {_SYNC}, not a {type(target).__name__}")


class AsyncOutbox(_Writer):
    """Writes events through asynchronous sessions and connections. The same as Outbox in all else."""

    async def add(self, target: AsyncTarget, event: Event, *, lock_key: bool = False) -> UUID:
        """Write one event in the target's transaction; see ``Outbox.add``."""
        return (await self.add_many(target, (event,), lock_key=lock_key))[0]

    async def add_many(self, target: AsyncTarget, events: Iterable[Event], *, lock_key: bool = False) -> list[UUID]:
        """Write events in the list's order, in one round trip; see ``Outbox.add_many``."""
        events = tuple(events)
        send = self._sender(target)
        if not events:
            return []
        batch = self._prepare(events, lock_key=lock_key)
        await send(batch)
        return batch.ids

    def _sender(self, target: Any) -> Any:
        # An object of these classes exists only where the module has been imported; it needs greenlet, we do not.
        sqlalchemy_async: Any = sys.modules.get("sqlalchemy.ext.asyncio")
        if sqlalchemy_async is not None:
            if isinstance(target, sqlalchemy_async.async_scoped_session):
                target = target()
            if isinstance(target, sqlalchemy_async.AsyncSession):
                return lambda batch: target.run_sync(self._to_session, batch)
            if isinstance(target, sqlalchemy_async.AsyncConnection):
                return lambda batch: target.run_sync(self._to_connection, batch)
        if isinstance(target, psycopg.AsyncCursor):
            target = target.connection
        if isinstance(target, psycopg.AsyncConnection):
            _require_transaction(target)
            return lambda batch: target.execute(self._psycopg_sql(batch), batch.values)
        if isinstance(target, Session | scoped_session | sa.Connection | psycopg.Connection | psycopg.Cursor):
            raise TargetError(f"AsyncOutbox takes {_ASYNC}; for a {type(target).__name__} use Outbox")
        raise TargetError(f"AsyncOutbox takes {_ASYNC}, not a {type(target).__name__}")


def _is_async(target: object) -> bool:
    return isinstance(target, psycopg.AsyncConnection | psycopg.AsyncCursor) or type(target).__module__.startswith(
        "sqlalchemy.ext.asyncio"
    )


def _require_transaction(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        raise TargetError(
            _no_transaction("the connection is in autocommit mode; open one with connection.transaction()")
        )


def _no_transaction(advice: str) -> str:
    return f"no transaction is open, so the event would be committed apart from the business rows: {advice}"
