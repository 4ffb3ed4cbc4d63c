"""Pages of events for an operator who looks through them, and the contents of one. Read-only.

Pages go by keyset: the next one begins behind the last event of this one, however many there are before it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg import sql

from outbox.errors import SchemaError
from outbox.event import DEAD_LETTER
from relay.insights import read_rows
from relay.settle.statements import names_of

PAGE: Final = 50

# The newest of each lane, along the primary key; only these are sorted.
_WAITING: Final = """
SELECT e.* FROM {lanes} AS l
 CROSS JOIN LATERAL (
     SELECT e.id, e.lane, e.event_id, e.aggregate_type, e.aggregate_id, e.event_type, {created_at} AS created_at,
            NULL::timestamptz AS moved_at
       FROM {events} AS e
      WHERE e.lane = l.lane AND (%(id)s::bigint IS NULL OR e.id < %(id)s)
        AND (%(type)s::text IS NULL OR e.aggregate_type = %(type)s)
      ORDER BY e.id DESC LIMIT %(limit)s) AS e
 ORDER BY e.id DESC LIMIT %(limit)s"""

# By the time at which an event got into its table. The archive is read one day's partition after the other, newest
# first: each is sorted as a whole, but not the archive.
_MOVED: Final = """
SELECT id, {lane} AS lane, event_id, aggregate_type, aggregate_id, event_type, {created_at} AS created_at,
       {moved_at} AS moved_at
  FROM {table}
 WHERE (%(at)s::timestamptz IS NULL OR ({moved_at}, id) < (%(at)s, %(id)s))
   AND (%(type)s::text IS NULL OR aggregate_type = %(type)s)
   AND (%(days)s::integer IS NULL OR {moved_at} >= now() - make_interval(days => %(days)s))
 ORDER BY {moved_at} DESC, id DESC LIMIT %(limit)s"""

_CONTENTS: Final = """
SELECT payload::text AS payload, payload_bytes, headers FROM {table} WHERE event_id = %(event_id)s LIMIT 1"""

_TYPES: Final = """
SELECT aggregate_type, copy, count(*) AS events, min(created_at) AS oldest
  FROM (SELECT aggregate_type, {copy} AS copy, {created_at} AS created_at FROM {events} AS e
         LIMIT %(most)s) AS counted
 GROUP BY aggregate_type, copy ORDER BY aggregate_type, copy"""
_COPY: Final = sql.SQL("coalesce(e.headers ? {}, false)").format(DEAD_LETTER)
_MOST_COUNTED: Final = 100_000


class EventState(StrEnum):
    WAITING = "waiting"
    PUBLISHED = "published"
    DEAD = "dead"
    SCHEDULED = "scheduled"


_TABLES: Final = {
    EventState.PUBLISHED: ("published", "published_at"),
    EventState.DEAD: ("dead_letters", "dead_at"),
    EventState.SCHEDULED: ("scheduled", "not_before"),
}
"""The table of each state but waiting, and its column ``moved_at``."""


@dataclass(frozen=True, slots=True)
class EventCursor:
    """The last event of a page. ``at`` is when it got into its table, or is due; None for waiting events."""

    id: int
    at: dt.datetime | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """What an event says: JSON text or bytes or, for a tombstone, neither; and its headers."""

    payload: str | None
    payload_bytes: bytes | None
    headers: Mapping[str, str] | None


class EventSearch:
    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection = connection
        self._names = names_of(schema)

    def page(
        self,
        state: EventState,
        aggregate_type: str | None = None,
        after: EventCursor | None = None,
        *,
        days: int = 1,
        limit: int = PAGE,
    ) -> tuple[Sequence[Mapping[str, Any]], EventCursor | None]:
        """Return a page of events, and its last one; None for that if no page follows.

        ``days``: how far back to look among the published ones.
        """
        bound: dict[str, Any] = {
            "type": aggregate_type,
            "id": None if after is None else after.id,
            "at": None if after is None else after.at,
            "limit": limit + 1,
            "days": days if state is EventState.PUBLISHED else None,
        }
        doing = "looking through the events"
        if state is EventState.WAITING:
            rows = read_rows(self._connection, doing, _WAITING, self._names, bound)
        else:
            rows = read_rows(self._connection, doing, _MOVED, self._columns(state), bound)
        if len(rows) <= limit:
            return rows, None
        last = rows[limit - 1]
        return rows[:limit], EventCursor(last["id"], last["moved_at"])

    def _columns(self, state: EventState) -> dict[str, sql.Composable]:
        table, moved_at = _TABLES[state]
        columns = {"lane": sql.Identifier("lane"), "created_at": self._names["created_at"]}
        if state is EventState.SCHEDULED:
            columns = {"lane": sql.SQL("NULL::smallint"), "created_at": sql.Identifier("scheduled_at")}
        return {**columns, "table": self._names[table], "moved_at": sql.Identifier(moved_at)}

    def contents(self, event_id: UUID) -> Contents | None:
        for table in ("events", "dead_letters", "published", "scheduled"):
            names = {"table": self._names[table]}
            for row in read_rows(self._connection, "reading an event", _CONTENTS, names, {"event_id": event_id}):
                return Contents(row["payload"], row["payload_bytes"], row["headers"])
        return None

    def waiting_types(self) -> Sequence[Mapping[str, Any]]:
        """Return the aggregate types of waiting events, how many, and their oldest time; of the first 100,000 rows.

        Copies for a dead-letter topic are apart (``copy``), unless the role may not read headers.
        """
        doing, bound = "counting the waiting events", {"most": _MOST_COUNTED}
        try:
            return read_rows(self._connection, doing, _TYPES, {**self._names, "copy": _COPY}, bound)
        except SchemaError:
            return read_rows(self._connection, doing, _TYPES, {**self._names, "copy": sql.SQL("false")}, bound)
