"""Reads the events of a transaction that is still open, through the connection that wrote them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg  # brings no psycopg until it connects
from sqlalchemy.orm import Session

from outbox import _statements, _targets
from outbox.errors import TargetError
from outbox.event import BYTES_CONTENT_TYPE, CONTENT_TYPE, JSON_CONTENT_TYPE, Event
from outbox.tables import outbox_tables

# A service may have neither of the two, as in outbox.writer.
if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

    from outbox._targets import AsyncpgConnection

# A row's xmin is the id of the transaction or subtransaction that wrote it, cut to 32 bits. The open transaction's rows
# have its own id or a later one that is still in progress: rows that others have in progress are invisible. (A released
# savepoint stays in progress until its transaction ends; rows of one that was rolled back are invisible.)
_AHEAD = "mod(xmin::text::bigint - mod(xact, 4294967296) + 6442450944, 4294967296) - 2147483648"
_MINE = f"CASE WHEN {_AHEAD} >= 0 THEN pg_xact_status((xact + {_AHEAD})::text::xid8) = 'in progress' ELSE false END"

_COLUMNS = ("aggregate_type", "aggregate_id", "event_type", "payload", "payload_bytes", "headers", "event_id")
_JSON = ("payload", "headers")
_NONE_OPEN = "no transaction is open, so there is none whose events could be read; look within"


@cache
def query(schema: str, *, json_text: bool = False) -> sa.Select[Any]:
    """Return the statement; it finds no rows in a transaction that has written nothing.

    json_text   payload and headers as text, whatever the connection makes of JSON.
    """
    events = outbox_tables(sa.MetaData(), schema=schema).events
    own = sa.text("(SELECT pg_current_xact_id_if_assigned()::text::bigint AS xact) AS own")
    columns: dict[str, sa.ColumnElement[Any]] = {name: events.c[name] for name in _COLUMNS}
    if json_text:
        columns |= {name: sa.cast(events.c[name], sa.Text()).label(name) for name in _JSON}
    return (
        sa.select(*columns.values())
        .select_from(events, own)
        .where(sa.text("xact IS NOT NULL"), sa.text(_MINE))
        .order_by(events.c.id)
    )


def read(target: Session | sa.Connection | psycopg.Connection[Any], schema: str) -> list[Event]:
    """Read from a synchronous target."""
    if isinstance(target, Session):
        target.flush()
        return _events(target.execute(query(schema)))
    if isinstance(target, sa.Connection):
        return _events(target.execute(query(schema)))
    driver = sys.modules.get("psycopg")
    if driver is not None and isinstance(target, driver.Connection):
        from psycopg import Cursor
        from psycopg.rows import tuple_row

        _check(target)
        with Cursor(target, row_factory=tuple_row) as cursor:
            return _events(_decoded(cursor.execute(*_for_psycopg(schema))))
    raise _unknown(target)


async def read_async(
    target: AsyncSession | AsyncConnection | psycopg.AsyncConnection[Any] | AsyncpgConnection, schema: str
) -> list[Event]:
    """Read from an asynchronous target."""
    sqlalchemy_async, driver = sys.modules.get("sqlalchemy.ext.asyncio"), sys.modules.get("psycopg")
    if sqlalchemy_async is not None and isinstance(
        target, sqlalchemy_async.AsyncSession | sqlalchemy_async.AsyncConnection
    ):
        found: list[Event] = await target.run_sync(read, schema)
        return found
    if driver is not None and isinstance(target, driver.AsyncConnection):
        from psycopg import AsyncCursor
        from psycopg.rows import tuple_row

        _check(target)
        async with AsyncCursor(target, row_factory=tuple_row) as cursor:
            await cursor.execute(*_for_psycopg(schema))
            return _events(_decoded(await cursor.fetchall()))
    if _targets.is_asyncpg(target):
        return await _read_asyncpg(cast("AsyncpgConnection", target), schema)
    raise _unknown(target)


async def _read_asyncpg(connection: AsyncpgConnection, schema: str) -> list[Event]:
    if not connection.is_in_transaction():
        raise TargetError(f"{_NONE_OPEN} `async with connection.transaction():`")
    return _events(_decoded(await connection.fetch(*_statements.asyncpg_arguments(query(schema, json_text=True), {}))))


def _for_psycopg(schema: str) -> tuple[bytes, Any]:
    compiled = query(schema, json_text=True).compile(dialect=PGDialect_psycopg())  # type: ignore[no-untyped-call]
    return str(compiled).encode(), compiled.params


def _decoded(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """Return the rows with payload and headers from their text: some connections, as Django's, read jsonb as text."""
    decode = [name in _JSON for name in _COLUMNS]
    return [
        [
            orjson.loads(value) if is_json and value is not None else value
            for value, is_json in zip(row, decode, strict=True)
        ]
        for row in rows
    ]


def _check(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    from psycopg.pq import TransactionStatus

    if connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE:
        raise TargetError(f"the connection is in autocommit mode and {_NONE_OPEN} `with connection.transaction():`")


def _unknown(target: object) -> TargetError:
    return TargetError(
        f"{type(target).__name__} is neither a Session nor a Connection of SQLAlchemy or psycopg; for the asynchronous "
        "ones, and those of asyncpg, use recorded_events_async"
    )


def _events(rows: Iterable[Sequence[Any]]) -> list[Event]:
    return [_event(row) for row in rows]


def _event(row: Sequence[Any]) -> Event:
    aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers, event_id = row
    own = dict(headers or {})
    content_type = own.pop(CONTENT_TYPE, None)
    usual = JSON_CONTENT_TYPE if payload_bytes is None else BYTES_CONTENT_TYPE
    return Event(
        aggregate_type,
        aggregate_id,
        event_type,
        payload if payload_bytes is None else bytes(payload_bytes),
        headers=own,
        event_id=event_id,
        content_type=None if content_type == usual else content_type,
    )
