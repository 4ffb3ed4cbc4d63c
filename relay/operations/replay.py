"""Sends archived events again: a new delivery of the same event id, marked by the header ``outbox-replay``.

Consumers that dedup by event id skip it; those whose ids were deleted, to apply the events again, apply it. The events
go through the outbox like any other, under new row ids, in their old order.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from outbox.event import MAX_EVENT_BYTES, REPLAY
from relay.database import unavailable_on_error
from relay.operations.audit import note
from relay.settle.statements import names_of

_MARK_ROOM: Final = 200

# An event that was replayed before is in the archive twice: it is sent once, in its original order, even if only its
# replay is in the range.
_CHOSEN: Final = """
chosen AS (
    SELECT DISTINCT ON (event_id) *, (SELECT min(p.id) FROM {published} AS p WHERE p.event_id = a.event_id) AS first_id,
           octet_length(aggregate_id) + coalesce(octet_length(payload::text), octet_length(payload_bytes), 0)
           + coalesce(octet_length(headers::text), 0) <= %(limit)s AS fits
      FROM {published} AS a
     WHERE (%(since)s::timestamptz IS NULL OR published_at >= %(since)s)
       AND (%(until)s::timestamptz IS NULL OR published_at < %(until)s)
       AND (%(type)s::text IS NULL OR aggregate_type = %(type)s)
       AND (%(key)s::text IS NULL OR (hashtextextended(aggregate_id, 0) = hashtextextended(%(key)s, 0)
                                      AND aggregate_id = %(key)s))
       AND (%(ids)s::uuid[] IS NULL OR event_id = ANY(%(ids)s::uuid[]))
       AND (%(topic)s::text IS NULL OR topic = %(topic)s)
     ORDER BY event_id, id)"""

_COUNT: Final = """
WITH {chosen}
SELECT count(*) FILTER (WHERE fits) AS events, count(*) FILTER (WHERE NOT fits) AS too_large,
       count(DISTINCT (aggregate_type, aggregate_id)) AS keys, array_agg(DISTINCT topic) AS topics,
       min(published_at) AS first, max(published_at) AS last
  FROM chosen"""

_REPLAY: Final = """
WITH {chosen},
sent AS (
    INSERT INTO {events} (event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers,
                          created_at, from_relay)
    SELECT event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes,
           coalesce(headers, '{{}}') || jsonb_build_object(
               %(mark)s::text, to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')), created_at, true
      FROM chosen WHERE fits ORDER BY first_id RETURNING 1)
SELECT count(*) AS events FROM sent"""


class Replay:
    """Replays from the archive of one outbox.

    ``chosen`` are the conditions, all of which an event meets: ``since``, ``until`` (exclusive), the ``type`` and
    ``key`` of its aggregate, ``ids`` of events, and ``topic``; None for none. Times have a zone.
    """

    def __init__(self, connection: psycopg.Connection[Any], schema: str, chosen: Mapping[str, Any]) -> None:
        self._connection = connection
        self._names = names_of(schema)
        self._names["chosen"] = sql.SQL(_CHOSEN).format(**self._names)
        self._chosen = chosen

    def count(self) -> dict[str, Any]:
        """Return what a replay would send: events, keys, topics, first and last time; and the number ``too_large``."""
        with unavailable_on_error("counting archived events"):
            return self._run(_COUNT)

    def send(self, reason: str | None) -> int:
        """Insert the events into the outbox again. Returns their number. Records the selection in ``audit``."""
        with unavailable_on_error("replaying"), self._connection.transaction():
            events: int = self._run(_REPLAY)["events"]
            details = {"events": events} | {
                name: value.isoformat() if isinstance(value, dt.datetime) else value
                for name, value in self._chosen.items()
                if value is not None
            }
            note(self._connection, self._names, "replay", reason, details)
        return events

    def _run(self, query: LiteralString) -> dict[str, Any]:
        bound = {**self._chosen, "limit": MAX_EVENT_BYTES - _MARK_ROOM, "mark": REPLAY}
        with self._connection.cursor(row_factory=dict_row) as cursor:
            row = cursor.execute(sql.SQL(query).format(**self._names), bound).fetchone()
        assert row is not None
        return row
