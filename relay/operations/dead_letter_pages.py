"""Failed events grouped by their error, and page by page. Read-only; the actions are in dead_letters.py.

Errors that differ only in numbers and ids are one group: of a topic that is too small for its messages, each event has
an error with a size of its own.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from relay.insights import COUNTED, read_rows
from relay.settle.statements import names_of

PAGE: Final = 50

_KIND: Final = r"""regexp_replace(regexp_replace(left(last_error, 300),
       '[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}', '…', 'gi'), '[0-9]+', 'N', 'g')"""

_FAILED: Final = """
    SELECT * FROM (SELECT lane, id, event_id, aggregate_type, aggregate_id, event_type, attempts, last_error,
                          first_failed_at, dead_at AS failed_at, NULL::timestamptz AS next_attempt_at, 'dead' AS state
                     FROM {dead_letters}{dead}) AS dead
     UNION ALL
    SELECT * FROM (SELECT f.lane, f.id, f.event_id, f.aggregate_type, f.aggregate_id, e.event_type, f.attempts,
                          f.last_error, f.first_failed_at, f.last_failed_at, f.next_attempt_at, 'retrying'
                     FROM {failures} AS f JOIN {events} AS e ON e.lane = f.lane AND e.id = f.id
                    WHERE isfinite(f.next_attempt_at){retrying}) AS retrying"""

_GROUPS: Final = """
SELECT kind, aggregate_type, state, min(left(last_error, 300)) AS sample, count(*) AS events,
       min(first_failed_at) AS first, max(failed_at) AS last
  FROM (SELECT *, {kind} AS kind FROM ({failed}) AS failed) AS failed
 GROUP BY kind, aggregate_type, state ORDER BY count(*) DESC, kind, aggregate_type, state LIMIT 200"""

_PAGE: Final = """
SELECT * FROM ({failed}) AS failed
 WHERE (%(kind)s::text IS NULL OR {kind} = %(kind)s) AND (%(type)s::text IS NULL OR aggregate_type = %(type)s)
   AND (%(state)s::text IS NULL OR state = %(state)s)
   AND (%(at)s::timestamptz IS NULL OR (first_failed_at, lane, id) > (%(at)s, %(lane)s, %(id)s))
 ORDER BY first_failed_at, lane, id LIMIT %(limit)s"""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which failed events: by the kind of their error (``kind`` of a group), aggregate type, and state."""

    kind: str | None = None
    aggregate_type: str | None = None
    state: str | None = None

    def bound(self) -> dict[str, Any]:
        return {"kind": self.kind, "type": self.aggregate_type, "state": self.state}


@dataclass(frozen=True, slots=True)
class FailureCursor:
    first_failed_at: dt.datetime
    lane: int
    id: int


@dataclass(frozen=True, slots=True)
class Page:
    rows: Sequence[Mapping[str, Any]]
    next: FailureCursor | None


class DeadLetterPages:
    """The failed events of one outbox."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection = connection
        self._names: dict[str, sql.Composable] = {**names_of(schema), "kind": sql.SQL(_KIND).format()}

    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Return kind, aggregate_type, state, events, first and last of each group, of at most COUNTED of a state.

        ``sample`` is one of its errors.
        """
        limit = sql.SQL(" LIMIT {}").format(COUNTED)
        failed = sql.SQL(_FAILED).format(**self._names, dead=limit, retrying=limit)
        return self._run(_GROUPS, {}, failed=failed)

    def page(self, chosen: Filter, after: FailureCursor | None = None, limit: int = PAGE) -> Page:
        rows = self._chosen(chosen, after, limit + 1)
        more, rows = len(rows) > limit, rows[:limit]
        last = rows[-1] if more else None
        return Page(rows, None if last is None else FailureCursor(last["first_failed_at"], last["lane"], last["id"]))

    def event_ids(self, chosen: Filter) -> Sequence[str]:
        """Return the first COUNTED ids."""
        return [str(row["event_id"]) for row in self._chosen(chosen, None, COUNTED)]

    def _chosen(self, chosen: Filter, after: FailureCursor | None, limit: int) -> Sequence[Mapping[str, Any]]:
        nothing = sql.SQL("")
        failed = sql.SQL(_FAILED).format(**self._names, dead=nothing, retrying=nothing)
        place = {
            "at": None if after is None else after.first_failed_at,
            "lane": None if after is None else after.lane,
            "id": None if after is None else after.id,
        }
        return self._run(_PAGE, {**chosen.bound(), **place, "limit": limit}, failed=failed)

    def _run(
        self, query: LiteralString, values: dict[str, Any], **names: sql.Composable
    ) -> Sequence[Mapping[str, Any]]:
        return read_rows(self._connection, "looking through the failed events", query, {**self._names, **names}, values)
