"""Reads the events that a transaction has written, or that wait in the outbox, through a connection of the test's."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from outbox._sending import Sender, Step
from outbox._statements import COLUMNS, SCHEMA, Statement
from outbox.event import BYTES_CONTENT_TYPE, CE_SUBJECT, CONTENT_TYPE, IDEMPOTENCY_KEY, JSON_CONTENT_TYPE, Event

if TYPE_CHECKING:
    from outbox._targets import AsyncTarget, SyncTarget


@dataclass(frozen=True, slots=True)
class ScheduledEvent(Event):
    """An event that was written with ``not_before``."""

    not_before: dt.datetime = field(kw_only=True)


_NONE: Final = "there is none whose events could be read"
_RECORDED: Final = Sender("recorded_events", "recorded_events_async", "the outbox", _NONE)
_COMMITTED: Final = Sender("committed_events", "committed_events_async", "the outbox", _NONE)
# A row's xmin is the id of the transaction or subtransaction that wrote it, cut to 32 bits. The open transaction's rows
# have its own id or a later one that is still in progress: rows that others have in progress are invisible. (A released
# savepoint stays in progress until its transaction ends; rows of one that was rolled back are invisible.)
_AHEAD: Final = "mod(xmin::text::bigint - mod(xact, 4294967296) + 6442450944, 4294967296) - 2147483648"
_MINE: Final = f"""xact IS NOT NULL
   AND CASE WHEN {_AHEAD} >= 0 THEN pg_xact_status((xact + {_AHEAD})::text::xid8) = 'in progress' ELSE false END"""
# JSON and ids as text, whatever the connection makes of them.
_TEXTS: Final = ", ".join(name if name == "payload_bytes" else f"{name}::text" for name in COLUMNS)


@cache
def _query(schema: str, which: str = _MINE) -> Statement:
    """Return the statement; ``_MINE`` finds no rows in a transaction that has written nothing."""
    text = f"""
WITH own AS (SELECT pg_current_xact_id_if_assigned()::text::bigint AS xact)
SELECT {_TEXTS}, not_before FROM (
    SELECT {", ".join(COLUMNS)}, NULL::timestamptz AS not_before, id FROM {SCHEMA}events, own WHERE {which}
    UNION ALL
    SELECT {", ".join(COLUMNS)}, not_before, id FROM {SCHEMA}scheduled, own WHERE {which}) AS written
 ORDER BY not_before NULLS FIRST, id"""
    return Statement(text, schema)


def recorded_events(target: SyncTarget, *, schema: str = "outbox") -> list[Event]:
    """Return the events that the open transaction of ``target`` has written so far, in the order of their ids.

    The events that it has scheduled follow, as ``ScheduledEvent``, in the order in which they become due. After a
    commit or a rollback there are none.

    target   the session or connection that the code under test gave to ``Outbox.add``, or another one of the same
             transaction; a session is flushed first.
    schema   of the outbox's tables.

    Raises TargetError for a connection in autocommit mode without a transaction, and for a target that ``add`` refuses.
    """
    return [_event(row) for row in _RECORDED.to(target)(Step(_query(schema), {}, answers=True))]


async def recorded_events_async(target: AsyncTarget, *, schema: str = "outbox") -> list[Event]:
    """Return the same as ``recorded_events``, for a target of ``AsyncOutbox.add``."""
    return [_event(row) for row in await _RECORDED.to_async(target)(Step(_query(schema), {}, answers=True))]


def committed_events(target: SyncTarget, *, schema: str = "outbox") -> list[Event]:
    """Return the events that wait in the outbox, whoever committed them, in the order of ``recorded_events``.

    A relay takes events out: use it where none runs. The transaction of ``target`` may have written some of them.
    Arguments and errors are those of ``recorded_events``.
    """
    return [_event(row) for row in _COMMITTED.to(target)(Step(_query(schema, "true"), {}, answers=True))]


async def committed_events_async(target: AsyncTarget, *, schema: str = "outbox") -> list[Event]:
    """Return the same as ``committed_events``, for a target of ``AsyncOutbox.add``."""
    return [_event(row) for row in await _COMMITTED.to_async(target)(Step(_query(schema, "true"), {}, answers=True))]


def _event(row: Sequence[Any]) -> Event:
    event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers, not_before = row
    own = json.loads(headers or "{}")
    content_type = own.pop(CONTENT_TYPE, None)
    usual = JSON_CONTENT_TYPE if payload_bytes is None else BYTES_CONTENT_TYPE
    given: dict[str, Any] = {
        "idempotency_key": own.pop(IDEMPOTENCY_KEY, None),
        "subject": own.pop(CE_SUBJECT, None),
        "aggregate_type": aggregate_type,
        "aggregate_id": aggregate_id,
        "event_type": event_type,
        "payload": json.loads(payload or "null") if payload_bytes is None else bytes(payload_bytes),
        "headers": own,
        "event_id": UUID(event_id),
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
