"""What a person does with events that failed: look, try again, give up. The relay's own side is failures.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from outbox.errors import OutboxError
from outbox.event import DEAD_LETTER
from relay.database import unavailable_on_error

_LIST: Final = """
SELECT * FROM (
    SELECT f.lane, f.id, f.event_id::text, f.aggregate_type, f.aggregate_id, e.event_type, 'waiting' AS state,
           f.attempts, f.last_error, f.first_failed_at, f.next_attempt_at
      FROM {failures} AS f JOIN {events} AS e ON e.lane = f.lane AND e.id = f.id
     UNION ALL
    SELECT d.lane, d.id, d.event_id::text, d.aggregate_type, d.aggregate_id, d.event_type,
           CASE WHEN f.id IS NULL THEN 'dead' ELSE 'dead, its key waits' END,
           d.attempts, d.last_error, d.first_failed_at, NULL
      FROM {dead_letters} AS d LEFT JOIN {failures} AS f ON f.lane = d.lane AND f.id = d.id) AS failed
 WHERE (%(ids)s::uuid[] IS NULL OR event_id = ANY(%(ids)s::text[]))
   AND (%(type)s::text IS NULL OR aggregate_type = %(type)s)
 ORDER BY first_failed_at, id LIMIT %(limit)s"""

_SHOW: Final = """
SELECT lane, id, event_id::text, aggregate_type, aggregate_id, event_type, payload::text, payload_bytes, headers,
       created_at
  FROM {table} WHERE lane = %(lane)s AND id = %(id)s"""

_BEHIND: Final = """
SELECT count(*) FROM {events}
 WHERE lane = %(lane)s AND aggregate_type = %(aggregate_type)s AND aggregate_id = %(aggregate_id)s AND id > %(id)s"""

_CHOSEN: Final = """(%(ids)s::uuid[] IS NULL OR event_id = ANY(%(ids)s::uuid[]))
   AND (%(type)s::text IS NULL OR aggregate_type = %(type)s)"""

# Under its old id, so that it comes before the later events of its key; and in failures, so that those wait for it (a
# copy for a dead-letter topic holds nobody up), and so that the relay looks for it below where it has got to.
_PUT_BACK: Final = """
WITH gone AS (
    DELETE FROM {dead_letters} WHERE {chosen} RETURNING *),
back AS (
    INSERT INTO {events} (id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers,
                          created_at) OVERRIDING SYSTEM VALUE
    SELECT id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers, created_at
      FROM gone),
due AS (
    INSERT INTO {failures} (lane, id, event_id, aggregate_type, aggregate_id, blocks, attempts, last_error,
                            first_failed_at, last_failed_at, next_attempt_at)
    SELECT lane, id, event_id, aggregate_type, aggregate_id, NOT coalesce(headers ? %(copy)s, false), 0, last_error,
           first_failed_at, dead_at, clock_timestamp() FROM gone
        ON CONFLICT (lane, id) DO UPDATE SET attempts = 0, next_attempt_at = excluded.next_attempt_at)
SELECT event_id::text FROM gone"""

_HURRY: Final = """
UPDATE {failures} SET next_attempt_at = clock_timestamp()
 WHERE next_attempt_at < 'infinity' AND {chosen} RETURNING event_id::text"""

# Only one that will not be due before this is over (see _TIMEOUT): a relay may be sending one that is.
_DISCARD: Final = """
WITH dead AS (
    DELETE FROM {dead_letters} WHERE {chosen} RETURNING lane, id, event_id, aggregate_type, aggregate_id, event_type,
                                                        attempts, last_error),
waiting AS (
    DELETE FROM {events} AS e USING {failures} AS f
     WHERE f.lane = e.lane AND f.id = e.id AND f.next_attempt_at > clock_timestamp() + interval '5 seconds'
       AND (%(ids)s::uuid[] IS NULL OR f.event_id = ANY(%(ids)s::uuid[]))
       AND (%(type)s::text IS NULL OR f.aggregate_type = %(type)s)
    RETURNING e.lane, e.id, e.event_id, e.aggregate_type, e.aggregate_id, e.event_type, f.attempts, f.last_error),
gone AS (SELECT * FROM dead UNION ALL SELECT * FROM waiting),
free AS (DELETE FROM {failures} AS f USING gone WHERE f.lane = gone.lane AND f.id = gone.id)
SELECT event_id::text, aggregate_type, aggregate_id, event_type, attempts, last_error FROM gone"""

_TIMEOUT: Final = (
    "SELECT set_config('statement_timeout', '2s', true), set_config('idle_in_transaction_session_timeout', '2s', true)"
)

_AUDIT: Final = "INSERT INTO {audit} (what, why, details) VALUES (%s, %s, %s)"


class NoSuchFailure(OutboxError):
    """There is no failed event of that description."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which failed events: by event id, by aggregate type, or all of them when neither is given."""

    event_ids: Sequence[str] | None = None
    aggregate_type: str | None = None

    def bound(self) -> dict[str, Any]:
        """Give the values that the statements bind."""
        return {"ids": list(self.event_ids) if self.event_ids else None, "type": self.aggregate_type}


class DeadLetters:
    """The failed events of one outbox. ``connection`` is in autocommit; each call is one transaction.

    All raise Unavailable when Postgres is away and SchemaError without the tables or the rights.
    """

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection = connection
        names = ("events", "failures", "dead_letters", "audit")
        self._names: dict[str, sql.Composable] = {name: sql.Identifier(schema, name) for name in names}
        self._names["chosen"] = sql.SQL(_CHOSEN)

    def list(self, selection: Selection, limit: int = 100) -> Sequence[dict[str, Any]]:
        """Give up to ``limit`` failed events, the oldest failure first; no payloads."""
        with unavailable_on_error("listing failures"):
            return self._run(_LIST, selection.bound() | {"limit": limit})

    def show(self, event_id: str) -> dict[str, Any]:
        """Give everything about one failed event; ``payload`` is JSON text, as it is sent. Raises NoSuchFailure."""
        with unavailable_on_error("reading a failure"):
            found = self._run(_LIST, Selection([event_id]).bound() | {"limit": 1})
            if not found:
                raise NoSuchFailure(
                    f"no failed event has the id {event_id}; `outbox failures list` shows those there are"
                )
            failure = found[0]
            table = self._names["events" if failure["state"] == "waiting" else "dead_letters"]
            event = self._run(_SHOW, failure, table=table)
            behind = self._run(_BEHIND, failure)
            return failure | (event[0] if event else {}) | {"events_behind_it": behind[0]["count"]}

    def retry(self, selection: Selection) -> Sequence[str]:
        """Have events tried again now; dead ones return to the outbox, in their old place. Gives their event ids."""
        with unavailable_on_error("retrying failures"), self._connection.transaction():
            self._connection.execute(_TIMEOUT)
            back = self._run(_PUT_BACK, selection.bound() | {"copy": DEAD_LETTER})
            rows = [*back, *self._run(_HURRY, selection.bound())]
            ids = list(dict.fromkeys(row["event_id"] for row in rows))
            if ids:
                self._audit("retry", None, {"event_ids": ids})
        return ids

    def discard(self, selection: Selection, reason: str) -> Sequence[dict[str, Any]]:
        """Delete failed events for good; who and why is kept in ``audit``. Gives what was deleted.

        An event that is due within five seconds is left alone: a relay may be sending it.
        """
        with unavailable_on_error("discarding failures"), self._connection.transaction():
            self._connection.execute(_TIMEOUT)
            gone = self._run(_DISCARD, selection.bound())
            for event in gone:
                self._audit("discard", reason, event)
        return gone

    def _audit(self, what: str, why: str | None, details: dict[str, Any]) -> None:
        self._connection.execute(sql.SQL(_AUDIT).format(**self._names), (what, why, Jsonb(details)))

    def _run(self, query: LiteralString, values: dict[str, Any], **names: sql.Composable) -> Sequence[dict[str, Any]]:
        with self._connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(sql.SQL(query).format(**{**self._names, **names}), values).fetchall()
