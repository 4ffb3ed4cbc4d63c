"""Reads the events of a transaction that is still open, through the connection that wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg  # brings no psycopg until it connects
from sqlalchemy.orm import Session

from outbox import _core, _targets
from outbox.event import BYTES_CONTENT_TYPE, CONTENT_TYPE, IDEMPOTENCY_KEY, JSON_CONTENT_TYPE, Event
from outbox.tables import outbox_tables
from outbox.testing._scheduled import ScheduledEvent

if TYPE_CHECKING:
    from outbox._targets import AsyncpgConnection, AsyncTarget, SyncTarget

# A row's xmin is the id of the transaction or subtransaction that wrote it, cut to 32 bits. The open transaction's rows
# have its own id or a later one that is still in progress: rows that others have in progress are invisible. (A released
# savepoint stays in progress until its transaction ends; rows of one that was rolled back are invisible.)
_AHEAD = "mod(xmin::text::bigint - mod(xact, 4294967296) + 6442450944, 4294967296) - 2147483648"
_MINE = f"CASE WHEN {_AHEAD} >= 0 THEN pg_xact_status((xact + {_AHEAD})::text::xid8) = 'in progress' ELSE false END"

_COLUMNS = ("aggregate_type", "aggregate_id", "event_type", "payload", "payload_bytes", "headers", "event_id")
_JSON = ("payload", "headers")
_NOT_BEFORE = "not_before"
_NONE_OPEN = "there is none whose events could be read"


@cache
def query(schema: str, *, json_text: bool = False) -> sa.Select[Any]:
    """Return the statement; it finds no rows in a transaction that has written nothing.

    json_text   payload and headers as text, whatever the connection makes of JSON.
    """
    tables = outbox_tables(sa.MetaData(), schema=schema)
    own = sa.text("(SELECT pg_current_xact_id_if_assigned()::text::bigint AS xact) AS own")
    written = sa.union_all(
        *(
            sa.select(
                *(table.c[name] for name in _COLUMNS),
                not_before.label(_NOT_BEFORE),
                table.c.id.label("id"),
            )
            .select_from(table, own)
            .where(sa.text("xact IS NOT NULL"), sa.text(_MINE))
            for table, not_before in (
                (tables.events, sa.cast(sa.null(), sa.DateTime(timezone=True))),
                (tables.scheduled, tables.scheduled.c.not_before),
            )
        )
    ).subquery("written")
    columns: dict[str, sa.ColumnElement[Any]] = {name: written.c[name] for name in (*_COLUMNS, _NOT_BEFORE)}
    if json_text:
        columns |= {name: sa.cast(written.c[name], sa.Text()).label(name) for name in _JSON}
    return sa.select(*columns.values()).order_by(written.c.not_before.nulls_first(), written.c.id)


def read(target: SyncTarget, schema: str) -> list[Event]:
    """Read from a synchronous target."""
    found = _targets.sync_target(target, "recorded_events", "recorded_events_async")
    if isinstance(found, Session):
        found.flush()
        found = _targets.session_connection(found)
    if isinstance(found, sa.Connection):
        _targets.check_connection(found, "the outbox", _NONE_OPEN)
        return _events(_targets.execute(found, query(schema), {}))
    from psycopg import Cursor
    from psycopg.rows import tuple_row

    _targets.require_transaction(found, _NONE_OPEN)
    with Cursor(found, row_factory=tuple_row) as cursor:
        return _events(_decoded(cursor.execute(*_for_psycopg(schema))))


async def read_async(target: AsyncTarget, schema: str) -> list[Event]:
    """Read from an asynchronous target."""
    found: Any = _targets.async_target(target, "recorded_events_async", "recorded_events")
    if _targets.is_asyncpg(found):
        return await _read_asyncpg(found, schema)
    if _targets.is_sqlalchemy_async(found):
        events: list[Event] = await found.run_sync(read, schema)
        return events
    from psycopg import AsyncCursor
    from psycopg.rows import tuple_row

    _targets.require_transaction(found, _NONE_OPEN)
    async with AsyncCursor(found, row_factory=tuple_row) as cursor:
        await cursor.execute(*_for_psycopg(schema))
        return _events(_decoded(await cursor.fetchall()))


async def _read_asyncpg(connection: AsyncpgConnection, schema: str) -> list[Event]:
    _targets.require_asyncpg_transaction(connection, _NONE_OPEN)
    return _events(_decoded(await connection.fetch(*_core.asyncpg_arguments(query(schema, json_text=True), {}))))


def _for_psycopg(schema: str) -> tuple[bytes, Any]:
    compiled = query(schema, json_text=True).compile(dialect=PGDialect_psycopg())  # type: ignore[no-untyped-call]
    return str(compiled).encode(), compiled.params


def _decoded(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """Return the rows with payload and headers from their text: some connections, as Django's, read jsonb as text."""
    decode = [name in _JSON for name in (*_COLUMNS, _NOT_BEFORE)]
    return [
        [
            orjson.loads(value) if is_json and value is not None else value
            for value, is_json in zip(row, decode, strict=True)
        ]
        for row in rows
    ]


def _events(rows: Iterable[Sequence[Any]]) -> list[Event]:
    return [_event(row) for row in rows]


def _event(row: Sequence[Any]) -> Event:
    aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers, event_id, not_before = row
    own = dict(headers or {})
    content_type = own.pop(CONTENT_TYPE, None)
    usual = JSON_CONTENT_TYPE if payload_bytes is None else BYTES_CONTENT_TYPE
    given: dict[str, Any] = {
        "idempotency_key": own.pop(IDEMPOTENCY_KEY, None),
        "aggregate_type": aggregate_type,
        "aggregate_id": aggregate_id,
        "event_type": event_type,
        "payload": payload if payload_bytes is None else bytes(payload_bytes),
        "headers": own,
        "event_id": event_id,
        "content_type": None if content_type == usual else content_type,
    }
    kind: type[Event] = Event
    if not_before is not None:
        kind, given["not_before"] = ScheduledEvent, not_before
    # As it was written, by whatever program: without the checks of an event that is to be written.
    event = object.__new__(kind)
    for name, value in given.items():
        object.__setattr__(event, name, value)
    return event
