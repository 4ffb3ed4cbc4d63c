"""List scheduled events, and cancel one as an operator. A service cancels its own with ``Outbox.cancel``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg import sql

from outbox.errors import NotFound
from relay.database import unavailable_on_error
from relay.insights import read_rows
from relay.settle.statements import STATEMENT_LIMIT, names_of

_SECONDS: Final = 10

_LIST: Final = """
SELECT event_id, aggregate_type, aggregate_id, event_type, not_before, scheduled_at
  FROM {scheduled} WHERE %(type)s::text IS NULL OR aggregate_type = %(type)s
 ORDER BY not_before, id LIMIT %(limit)s"""

# The whole event, so that a mistake can be undone. It fitted into a row, so it fits into this one too. Its key is free
# again: what was cancelled has not happened.
_CANCEL: Final = """
WITH gone AS (DELETE FROM {scheduled} WHERE event_id = %(event_id)s RETURNING *),
freed AS (DELETE FROM {idempotency_keys} AS k USING gone WHERE k.event_id = gone.event_id),
noted AS (
    INSERT INTO {audit} (what, why, details)
    SELECT 'cancel scheduled event', %(why)s, jsonb_build_object(
               'event_id', event_id, 'aggregate_type', aggregate_type, 'aggregate_id', aggregate_id,
               'event_type', event_type, 'not_before', not_before, 'scheduled_at', scheduled_at, 'headers', headers,
               'payload', payload, 'payload_base64', translate(encode(payload_bytes, 'base64'), E'\\n', ''))
      FROM gone)
SELECT count(*) FROM gone"""


def list_scheduled(
    connection: psycopg.Connection[Any], schema: str, aggregate_type: str | None, limit: int
) -> Sequence[Mapping[str, Any]]:
    """Return the scheduled events that are due next, as in _LIST."""
    bound = {"type": aggregate_type, "limit": limit}
    return read_rows(connection, "listing scheduled events", _LIST, names_of(schema), bound)


def cancel(connection: psycopg.Connection[Any], schema: str, event_id: UUID, reason: str) -> None:
    """Delete a scheduled event; the audit keeps all of it. Raises NotFound if there is none."""
    bound = {"event_id": event_id, "why": reason}
    with unavailable_on_error("cancelling a scheduled event"), connection.transaction():
        connection.execute(STATEMENT_LIMIT, (f"{_SECONDS}s",))
        row = connection.execute(sql.SQL(_CANCEL).format(**names_of(schema)), bound).fetchone()
    if row is None or not row[0]:
        raise NotFound(
            f"{event_id} is not scheduled: it is already on its way, or was never scheduled. `outbox trace {event_id}` "
            "shows where it is. Nothing was changed"
        )
