"""Failed events for operators: list, page by page, retry, discard. The relay's own part is retries.py."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, LiteralString, NamedTuple, TypeVar

import psycopg
from psycopg import errors, sql
from psycopg.rows import dict_row

from outbox.consumer.admin.dead_letters import KIND
from outbox.errors import NotFound, OperationRefused
from outbox.event import DEAD_LETTER, REPLAY
from relay.database import unavailable_on_error
from relay.insights import COUNTED, read_rows, without_event
from relay.operations.audit import note
from relay.settle.statements import names_of

PAGE: Final = 50

_LIST: Final = """
SELECT * FROM (
    SELECT f.lane, f.id, f.event_id::text, f.aggregate_type, f.aggregate_id, e.event_type, 'retrying' AS state,
           f.attempts, f.last_error, f.first_failed_at, f.next_attempt_at
      FROM {failures} AS f JOIN {events} AS e ON e.lane = f.lane AND e.id = f.id
     UNION ALL
    SELECT d.lane, d.id, d.event_id::text, d.aggregate_type, d.aggregate_id, d.event_type,
           CASE WHEN f.id IS NULL THEN 'dead' ELSE 'dead, its key waits' END,
           d.attempts, d.last_error, d.first_failed_at, NULL
      FROM {dead_letters} AS d LEFT JOIN {failures} AS f ON f.lane = d.lane AND f.id = d.id
     UNION ALL
    SELECT f.lane, f.id, f.event_id::text, f.aggregate_type, f.aggregate_id, NULL,
           CASE WHEN f.blocks THEN 'its event was deleted, its key waits' ELSE 'its event was deleted' END,
           f.attempts, f.last_error, f.first_failed_at, nullif(f.next_attempt_at, 'infinity')
      FROM {failures} AS f
     WHERE {without_event}) AS failed
 WHERE (%(ids)s::uuid[] IS NULL OR event_id = ANY(%(ids)s::text[]))
   AND (%(type)s::text IS NULL OR aggregate_type = %(type)s)
 ORDER BY first_failed_at, id LIMIT %(limit)s"""

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

_SHOW: Final = """
SELECT lane, id, event_id::text, aggregate_type, aggregate_id, event_type, payload::text, payload_bytes, headers,
       {created_at} AS created_at
  FROM {table} WHERE lane = %(lane)s AND id = %(id)s"""

_BEHIND: Final = """
SELECT count(*) FROM {events}
 WHERE lane = %(lane)s AND aggregate_type = %(aggregate_type)s AND aggregate_id = %(aggregate_id)s AND id > %(id)s"""

_CHOSEN: Final = """(%(ids)s::uuid[] IS NULL OR f.event_id = ANY(%(ids)s::uuid[]))
   AND (%(type)s::text IS NULL OR f.aggregate_type = %(type)s)
   AND (%(lanes)s::bigint[] IS NULL
        OR (f.lane, f.id) IN (SELECT * FROM unnest(%(lanes)s::bigint[], %(row_ids)s::bigint[])))"""
_COPIES: Final = "coalesce(headers ? %(copy)s, false) = %(copies)s"

# The rows that a command selects from a table, read in batches in the order of the primary key.
_DEAD: Final = "{dead_letters} AS f WHERE {chosen} AND {copies}"
_WITH_EVENT: Final = """{failures} AS f WHERE {chosen}
   AND EXISTS (SELECT FROM {events} AS e WHERE e.lane = f.lane AND e.id = f.id AND {copies})"""
_RETRYING: Final = _WITH_EVENT + " AND f.next_attempt_at < 'infinity'"
# Only events that are not due before a batch ends (see _LIMITS): a relay may be sending one that is due.
_RETRYING_LATER: Final = _WITH_EVENT + " AND f.next_attempt_at > clock_timestamp() + interval '5 seconds'"
_WITHOUT_EVENT: Final = "{failures} AS f WHERE {chosen} AND {without_event} AND %(copies)s::boolean IS NOT TRUE"

_PICK: Final = """
SELECT f.lane, f.id, f.event_id::text FROM {rows} AND (f.lane, f.id) > (%(lane)s, %(id)s)
 ORDER BY f.lane, f.id LIMIT %(limit)s"""

_COUNT: Final = "SELECT count(*) FROM {rows}"

# Under its old id, so that it comes before the later events of its key; and in failures, so that those wait for it (a
# copy for a dead-letter topic blocks nothing), and so that the relay looks for it below its current position.
_PUT_BACK: Final = """
WITH gone AS (
    DELETE FROM {dead_letters} WHERE lane = %(lane)s AND id = ANY(%(rows)s::bigint[]) RETURNING *),
back AS (
    INSERT INTO {events} (id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers,
                          created_at, from_relay) OVERRIDING SYSTEM VALUE
    SELECT id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers, created_at, true
      FROM gone),
due AS (
    INSERT INTO {failures} (lane, id, event_id, aggregate_type, aggregate_id, blocks, attempts, last_error,
                            first_failed_at, last_failed_at, next_attempt_at)
    SELECT lane, id, event_id, aggregate_type, aggregate_id, NOT coalesce(headers ? %(copy)s, false), 0, last_error,
           first_failed_at, dead_at, clock_timestamp() FROM gone
        ON CONFLICT (lane, id) DO UPDATE SET attempts = 0, next_attempt_at = excluded.next_attempt_at)
SELECT event_id::text, NOT coalesce(headers ?| %(copies)s, false)
       AND NOT EXISTS (SELECT FROM {failures} AS f WHERE f.lane = gone.lane AND f.id = gone.id) AS overtaken
  FROM gone"""

_HURRY: Final = """
UPDATE {failures} SET next_attempt_at = clock_timestamp()
 WHERE lane = %(lane)s AND id = ANY(%(rows)s::bigint[]) AND next_attempt_at < 'infinity' RETURNING event_id::text"""

_DISCARD_DEAD: Final = """
WITH gone AS (
    DELETE FROM {dead_letters} WHERE lane = %(lane)s AND id = ANY(%(rows)s::bigint[]) RETURNING *),
free AS (DELETE FROM {failures} AS f USING gone WHERE f.lane = gone.lane AND f.id = gone.id),
{kept}"""

_DISCARD_RETRYING: Final = """
WITH gone AS (
    DELETE FROM {events} AS e USING {failures} AS f
     WHERE e.lane = %(lane)s AND e.id = ANY(%(rows)s::bigint[]) AND f.lane = e.lane AND f.id = e.id
       AND f.next_attempt_at > clock_timestamp() + interval '5 seconds'
    RETURNING e.*, f.attempts, f.last_error),
free AS (DELETE FROM {failures} AS f USING gone WHERE f.lane = gone.lane AND f.id = gone.id),
{kept}"""

_DISCARD_WITHOUT_EVENT: Final = """
WITH gone AS (
    DELETE FROM {failures} AS f WHERE lane = %(lane)s AND id = ANY(%(rows)s::bigint[]) AND {without_event}
    RETURNING lane, id, event_id, aggregate_type, aggregate_id, NULL::text AS event_type, NULL::jsonb AS payload,
              NULL::bytea AS payload_bytes, NULL::jsonb AS headers, NULL::timestamptz AS created_at, attempts,
              last_error),
{kept}"""

# The whole event, so that a mistake can be undone. It fitted into a row, so it fits into this one too.
_KEPT: Final = """kept AS (
    INSERT INTO {audit} (what, why, details)
    SELECT 'discard', %(why)s, jsonb_build_object(
               'lane', lane, 'id', id, 'event_id', event_id, 'aggregate_type', aggregate_type,
               'aggregate_id', aggregate_id, 'event_type', event_type, 'attempts', attempts, 'last_error', last_error,
               'created_at', created_at)
           || CASE WHEN %(contents)s::boolean
                   THEN jsonb_build_object('headers', headers, 'payload', payload, 'payload_base64',
                                           translate(encode(payload_bytes, 'base64'), E'\n', ''))
                   ELSE '{{}}' END
      FROM gone ORDER BY id)
SELECT event_id::text, event_type FROM gone ORDER BY id"""

# A batch locks rows that relays may want to settle, so it must be short. Below the server's deadlock_timeout, so that
# in a deadlock the batch fails, not a relay.
_LIMITS: Final = """
SELECT set_config('statement_timeout', '2s', true), set_config('lock_timeout', '500ms', true),
       set_config('idle_in_transaction_session_timeout', '2s', true)"""

# The most failed events that one transaction retries or discards.
_BATCH: Final = 1000
_QUICK_SECONDS: Final = 0.5

COUNTS: Final = {"dead": "dead letter", "retrying": "retrying event", "without_event": "orphaned failure"}
"""What ``DeadLetters.count`` counts, each with its name for operators. An orphaned failure: its event was deleted."""

_Done = TypeVar("_Done")


def locked(event_ids: Sequence[str]) -> OperationRefused:
    """Return the error for failed events that another transaction has locked. They were left as they are."""
    shown = ", ".join(event_ids[:5]) + (", …" if len(event_ids) > 5 else "")
    return OperationRefused(
        f"{len(event_ids)} failed events are locked by another transaction (a relay that settles them, or another "
        f"command) and were left as they are: {shown}. Run the command again"
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects failed events: by event id, by aggregate type, by lane and id, or all if none is given.

    A replay has its event's id, and another id of its row; so has a copy for a dead-letter topic, which an event id
    does not select. ``copies``: copies only.
    """

    event_ids: Sequence[str] | None = None
    aggregate_type: str | None = None
    rows: Sequence[tuple[int, int]] | None = None
    copies: bool = False

    def bound(self) -> dict[str, Any]:
        return {
            "ids": None if self.event_ids is None else list(self.event_ids),
            "type": self.aggregate_type,
            "lanes": None if self.rows is None else [lane for lane, _ in self.rows],
            "row_ids": None if self.rows is None else [id_ for _, id_ in self.rows],
            "copies": self.copies or (None if self.event_ids is None else False),
            "copy": DEAD_LETTER,
        }


class Filter(NamedTuple):
    """Which failed events a page shows: by the kind of their error (``kind`` of a group), aggregate type, and state."""

    kind: str | None = None
    type: str | None = None
    state: str | None = None


class FailureCursor(NamedTuple):
    """The last event of a page."""

    at: dt.datetime
    lane: int
    id: int


class Batches(list[_Done]):
    """The results of a command, and in ``locked`` the event ids that it could not lock."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: list[str] = []


# What is counted, the rows, and what is done with them. Retrying events first: dead letters that are put back become
# retrying events that are due.
_RETRIED: Final = (("retrying", _RETRYING, _HURRY), ("dead", _DEAD, _PUT_BACK))
_DISCARDED: Final = (
    ("dead", _DEAD, _DISCARD_DEAD),
    ("retrying", _RETRYING_LATER, _DISCARD_RETRYING),
    ("without_event", _WITHOUT_EVENT, _DISCARD_WITHOUT_EVENT),
)


class DeadLetters:
    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection = connection
        self._names = names_of(schema)
        self._names["without_event"] = without_event(self._names)
        self._names["kept"] = sql.SQL(_KEPT).format(**self._names)
        self._names["kind"] = sql.SQL(KIND).format(error=sql.Identifier("last_error"))
        self._names["chosen"] = sql.SQL(_CHOSEN)

    def list(self, selection: Selection, limit: int = 100) -> Sequence[dict[str, Any]]:
        """Return up to ``limit`` failed events without payloads, oldest failure first."""
        with unavailable_on_error("listing failures"):
            return self._run(_LIST, selection.bound() | {"limit": limit})

    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Return kind, aggregate_type, state, events, first and last of each group, of at most COUNTED of a state.

        ``sample`` is one of its errors.
        """
        return self._failed(_GROUPS, {}, sql.SQL(" LIMIT {}").format(COUNTED))

    def page(
        self, chosen: Filter, after: FailureCursor | None = None, limit: int = PAGE
    ) -> tuple[Sequence[Mapping[str, Any]], FailureCursor | None]:
        """Return a page of failed events, and where the next one begins; None after the last."""
        place = dict.fromkeys(FailureCursor._fields) if after is None else after._asdict()
        rows = self._failed(_PAGE, chosen._asdict() | place | {"limit": limit + 1}, sql.SQL(""))
        if len(rows) <= limit:
            return rows, None
        last = rows[limit - 1]
        return rows[:limit], FailureCursor(last["first_failed_at"], last["lane"], last["id"])

    def rows(self, chosen: Filter) -> Sequence[tuple[int, int]]:
        """Return lane and id of the first COUNTED."""
        return [(row["lane"], row["id"]) for row in self.page(chosen, limit=COUNTED)[0]]

    def _failed(
        self, query: LiteralString, values: Mapping[str, Any], limit: sql.Composable
    ) -> Sequence[Mapping[str, Any]]:
        failed = sql.SQL(_FAILED).format(**self._names, dead=limit, retrying=limit)
        names = self._names | {"failed": failed}
        return read_rows(self._connection, "looking through the failed events", query, names, values)

    def show(self, event_id: str) -> dict[str, Any]:
        """Return everything about one failed event; ``payload`` is JSON text, as it is sent. Raises NotFound."""
        with unavailable_on_error("reading a failure"):
            found = self._run(_LIST, Selection([event_id]).bound() | {"limit": 1})
            if not found:
                raise NotFound(
                    f"no failed event has the id {event_id}; `outbox dead-letters list` shows those there are"
                )
            failure = found[0]
            table = self._names["events" if failure["state"] == "retrying" else "dead_letters"]
            event = self._run(_SHOW, failure, table=table)
            behind = self._run(_BEHIND, failure)
            return failure | (event[0] if event else {}) | {"events_behind_it": behind[0]["count"]}

    def count(self, selection: Selection, *, discard: bool) -> dict[str, int]:
        with unavailable_on_error("counting failures"):
            return {
                name: int(self._run(_COUNT, selection.bound(), rows=self._picked(rows, selection))[0]["count"])
                for name, rows, _ in (_DISCARDED if discard else _RETRIED)
            }

    def retry(self, selection: Selection, *, progress: Callable[[int], None] | None = None) -> Batches[str]:
        """Retry events now; dead letters return to their old place in the outbox. Returns their event ids.

        Each transaction takes up to _BATCH events and writes a row to ``audit``; then ``progress`` is called with
        the number of events done. A killed run has done whole batches, and the next run does the rest.
        """

        def again(query: LiteralString, lane: int, ids: Sequence[int]) -> Sequence[str]:
            bound = {"lane": lane, "rows": ids, "copy": DEAD_LETTER, "copies": [DEAD_LETTER, REPLAY]}
            found = self._run(query, bound)
            event_ids = [row["event_id"] for row in found]
            # Their keys went on without them: `outbox audit` does not expect them in order.
            overtaken = [row["event_id"] for row in found if row.get("overtaken")]
            if event_ids:
                details = {"event_ids": event_ids} | ({"overtaken": overtaken} if overtaken else {})
                note(self._connection, self._names, "retry", None, details)
            return event_ids

        return self._change("retrying failures", _RETRIED, selection, again, progress)

    def discard(
        self,
        selection: Selection,
        reason: str,
        *,
        keep_payload: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> Batches[dict[str, Any]]:
        """Delete failed events for good, in batches as ``retry`` does. Returns the ids and types of the deleted events.

        ``audit`` keeps who, why, and the whole event, or with ``keep_payload=False`` all but its payload and headers.
        An event that is due within five seconds is left alone: a relay may be sending it.
        """

        def drop(query: LiteralString, lane: int, ids: Sequence[int]) -> Sequence[dict[str, Any]]:
            return self._run(query, {"lane": lane, "rows": ids, "why": reason, "contents": keep_payload})

        return self._change("discarding failures", _DISCARDED, selection, drop, progress)

    def _change(
        self,
        doing: str,
        parts: Iterable[tuple[str, LiteralString, LiteralString]],
        selection: Selection,
        change: Callable[[LiteralString, int, Sequence[int]], Sequence[_Done]],
        progress: Callable[[int], None] | None,
    ) -> Batches[_Done]:
        done: Batches[_Done] = Batches()
        with unavailable_on_error(doing):
            for _, rows, query in parts:
                picked = self._picked(rows, selection)
                for results in self._batches(picked, selection.bound(), partial(change, query), done.locked):
                    done.extend(results)
                    if progress is not None:
                        progress(len(done))
        return done

    def _batches(
        self,
        picked: sql.Composed,
        bound: dict[str, Any],
        change: Callable[[int, Sequence[int]], Sequence[_Done]],
        locked: MutableSequence[str],
    ) -> Iterator[Sequence[_Done]]:
        """Change the rows in transactions of up to _BATCH. Yields the results of each.

        A batch that can't lock a row, or takes too long, is retried with half of the rows. A single row that stays
        locked is added to ``locked`` and skipped.
        """
        lane, last = -1, -1
        quick, suspects = _BATCH, 0
        while True:
            # While looking for a locked row, half of the rows that may be it.
            limit = min(max(suspects // 2, 1), quick) if suspects else quick
            found = self._run(_PICK, bound | {"lane": lane, "id": last, "limit": limit}, rows=picked)
            if not found:
                return
            # One lane at a time, so that the statements can look rows up by the primary key.
            here = [row for row in found if row["lane"] == found[0]["lane"]]
            changed: Sequence[_Done] = ()
            began = time.monotonic()
            try:
                with self._connection.transaction():
                    self._connection.execute(_LIMITS)
                    changed = change(here[0]["lane"], [row["id"] for row in here])
            except (errors.LockNotAvailable, errors.DeadlockDetected):
                suspects = len(here)
                if suspects > 1:
                    continue
                locked.append(here[0]["event_id"])
            except errors.QueryCanceled:
                if len(here) == 1:
                    raise
                quick, suspects = len(here) // 2, 0
                continue
            else:
                if time.monotonic() - began < _QUICK_SECONDS:
                    quick = min(quick * 2, _BATCH)
            suspects = max(suspects - len(here), 0)
            lane, last = here[-1]["lane"], here[-1]["id"]
            if changed:
                yield changed

    def _picked(self, rows: LiteralString, selection: Selection) -> sql.Composed:
        # A monitor may count them all, and has no right to read headers.
        copies = sql.SQL("true" if selection.bound()["copies"] is None else _COPIES)
        return sql.SQL(rows).format(**self._names, copies=copies)

    def _run(self, query: LiteralString, values: dict[str, Any], **names: sql.Composable) -> Sequence[dict[str, Any]]:
        with self._connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(sql.SQL(query).format(**{**self._names, **names}), values).fetchall()
