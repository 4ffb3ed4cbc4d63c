"""What was committed: the events in the outbox's tables and its archive, by topic and minute."""

from __future__ import annotations

import datetime as dt
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, LiteralString, NamedTuple

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from relay.audit.content import content
from relay.audit.findings import STATEMENT_SECONDS
from relay.audit.retried import behind
from relay.audit.sums import (
    NOTHING,
    Sum,
    Window,
    event_minute,
    first_id,
    halves,
    minute_of,
    minute_start,
    reduced,
    total,
)
from relay.audit.transactions import LATE_MINUTES
from relay.database import one_snapshot, unavailable_on_error
from relay.kafka.offsets import Partition
from relay.kafka.routing import Router
from relay.settle.statements import names_of

_ROWS_AT_ONCE: Final = 5000

# Copies for a dead-letter topic and replays have their event's id, and are no events of their own.
_ORIGINAL: Final = "NOT coalesce(headers ?| ARRAY['outbox-replay', 'outbox-dead-letter'], false)"

# By the index on event_id where the ids have a time. The others, which few writers make, are found by reading the
# partitions from the first day on.
_ARCHIVED: Final = """(
    SELECT * FROM {published}
     WHERE event_id >= %(low)s::uuid AND event_id < %(high)s::uuid AND {has_time} AND {original}
    UNION ALL
    SELECT * FROM {published}
     WHERE %(ce_time)s AND published_at >= %(since)s AND created_at >= %(since)s AND created_at < %(until)s
       AND NOT {has_time} AND {original})"""

_WHOLE: Final = (
    'pg_catalog.uuid_send(event_id) || pg_catalog.int4send(partition) || pg_catalog.int8send("offset") || {content}'
)

_SUMS: Final = """
SELECT aggregate_type, topic, {minute} AS minute, count(*), {ids}, count(topic), {wholes}
  FROM {archived} AS e {hashed_ids} {hashed_wholes} GROUP BY 1, 2, 3"""

_WAITING: Final = """
SELECT aggregate_type, {minute} AS minute, count(*), {ids}
  FROM {table} AS e {hashed_ids} WHERE {original} GROUP BY 1, 2"""

_EVENTS: Final = """
SELECT aggregate_type, topic, {minute} AS minute, event_id, partition, "offset",
       pg_catalog.substr(pg_catalog.sha256({content}), 1, 16)
  FROM {archived} AS e WHERE {minute} = ANY(%(minutes)s::bigint[])"""

_IDS: Final = """
SELECT aggregate_type, {minute} AS minute, event_id
  FROM {table} AS e WHERE {original} AND {minute} = ANY(%(minutes)s::bigint[])"""

# Events that an operator has discarded, as far as the audit has them.
_DISCARDED: Final = """(
    SELECT (details->>'event_id')::uuid AS event_id, details->>'aggregate_type' AS aggregate_type,
           coalesce((details->>'created_at')::timestamptz, at) AS created_at,
           CASE pg_catalog.jsonb_typeof(details->'headers') WHEN 'object' THEN details->'headers' END AS headers
      FROM {audit} WHERE what = 'discard' AND details ? 'event_id')"""

# Those whose ids have a time. The others get theirs when they are due.
_SCHEDULED: Final = """
SELECT aggregate_type, {minute_of_id} AS minute, count(*), NULL FROM {scheduled}
 WHERE event_id >= %(low)s::uuid AND event_id < %(high)s::uuid AND {has_time} GROUP BY 1, 2"""

_LEDGER: Final = """
SELECT aggregate_type, minute, sum(events), sum(hashes) FROM {ledger}
 WHERE minute >= %(first_minute)s AND minute < %(end_minute)s GROUP BY 1, 2"""

# The lowest offsets at which events of the range were acknowledged; NULL for those of which that is not known.
_PLACES: Final = """
SELECT aggregate_type, topic, partition, min("offset") FROM {archived} AS e GROUP BY 1, 2, 3"""

# The archive with the places that Kafka has of events that were settled from a marker.
_PLACED: Final = """(
    SELECT a.id, a.event_id, a.aggregate_type, a.aggregate_id, a.created_at, coalesce(a.topic, p.topic) AS topic,
           coalesce(a.partition, p.partition) AS partition, coalesce(a."offset", p."offset") AS "offset"
      FROM {archived} AS a
      LEFT JOIN unnest(%(ids)s::uuid[], %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[])
                AS p(event_id, topic, partition, "offset") ON p.event_id = a.event_id)"""

# Events that an operator has put back when later ones of their keys had gone out, and when.
_RETRIED: Final = """
SELECT one.event_id::uuid, max(at)
  FROM {audit} CROSS JOIN LATERAL jsonb_array_elements_text(details->'overtaken') AS one(event_id)
 WHERE what = 'retry' GROUP BY 1"""

# These, and the later events of their keys, each key in the order of the retries and of what was written: for
# ``behind``. What was written after a retry waits for the event. (Until the retry is committed, it does not: that takes
# seconds.)
_OF_RETRIED: Final = """
WITH retried AS (
    SELECT e.event_id, e.id, e.topic, e.aggregate_type, e.aggregate_id, e.partition, e."offset",
           t.at + interval '10 seconds' AS at,
           dense_rank() OVER (ORDER BY e.topic, e.aggregate_type, e.aggregate_id) AS key
      FROM unnest(%(retried)s::uuid[], %(retried_at)s::timestamptz[]) AS t(event_id, at)
      JOIN {table} AS e ON e.event_id = t.event_id
     WHERE e.topic IS NOT NULL),
keys AS (
    SELECT key, topic, aggregate_type, aggregate_id, min(id) AS first_id, max(at) AS last_at
      FROM retried GROUP BY key, topic, aggregate_type, aggregate_id)
SELECT key, id, event_id, partition, "offset"
  FROM (SELECT key, at, id, event_id, partition, "offset" FROM retried
        UNION ALL
        SELECT key, o.created_at, o.id, NULL, o.partition, o."offset"
          FROM keys JOIN {table} AS o USING (topic, aggregate_type, aggregate_id)
         WHERE o.id > first_id AND o.created_at < last_at) AS of_keys
 ORDER BY key, at, event_id IS NULL"""

# Each event whose record comes before that of an event of its key with a lower id, or is in a partition that its key
# had left: where partitions are added, a key may change its partition, and does not come back.
_ORDER: Final = """
SELECT aggregate_type, aggregate_id, topic, minute, event_id, partition, "offset", before_id, before_partition,
       before_offset
  FROM (SELECT *, partition = first_value(before_partition) OVER moves
                  OR row_number() OVER (PARTITION BY topic, aggregate_type, aggregate_id, moved, partition
                                        ORDER BY number) > 1 AS back
          FROM (SELECT *, partition <> before_partition AS moved
                  FROM (SELECT id, aggregate_type, aggregate_id, topic, {minute} AS minute, event_id, partition,
                               "offset", lag(event_id) OVER key AS before_id,
                               lag(partition) OVER key AS before_partition, lag("offset") OVER key AS before_offset,
                               row_number() OVER key AS number
                          FROM {table} AS e
                          LEFT JOIN unnest(%(retried)s::uuid[], %(behind)s::bigint[]) AS b(event_id, behind)
                               USING (event_id)
                         WHERE topic IS NOT NULL
                           AND (%(chosen)s::text[] IS NULL OR topic = ANY(%(chosen)s::text[]))
                        WINDOW key AS (PARTITION BY topic, aggregate_type, aggregate_id
                                       ORDER BY coalesce(behind, id), behind IS NOT NULL, "offset")) AS pairs
                 WHERE partition <> before_partition OR "offset" < before_offset) AS breaks
        WINDOW moves AS (PARTITION BY topic, aggregate_type, aggregate_id, moved ORDER BY number)) AS found
 WHERE (NOT moved OR back) AND minute >= %(first_minute)s
ORDER BY minute, id LIMIT %(most)s"""

_EARLIER: Final = "SELECT EXISTS (SELECT FROM {published} WHERE published_at < %(since)s LIMIT 1)"

_KEPT: Final = "SELECT min(published_at), max(published_at) FROM {published} WHERE published_at >= %(since)s"


MOST_MISPLACED: Final = 20_000
"""So many events that are out of order are found by one audit at most: those of its first minutes."""

UNPUBLISHED: Final = ("events", "dead_letters", "discarded")
"""Where an event is that is not in the archive: it waits, is a dead letter, or an operator has discarded it."""


class Committed(NamedTuple):
    """What the archive has of one window.

    ids     the sum over the events' ids.
    wholes  the sum over ids, places and contents of those whose place is known.
    """

    ids: Sum = NOTHING
    wholes: Sum = NOTHING

    @property
    def complete(self) -> bool:
        """Return whether each event's place is known: it is not where an event was settled from a marker."""
        return self.ids.events == self.wholes.events


class Archived(NamedTuple):
    """An archived event. ``place`` and ``offset`` are None if it was settled from a marker after a crash."""

    place: Partition | None
    offset: int | None
    content: bytes


class Misplaced(NamedTuple):
    """Two events of one key whose records are not in the order of their ids, or not in one partition."""

    window: Window
    key: str
    event_id: str
    place: Partition
    offset: int
    before_id: str
    before: Partition
    before_offset: int


def out_of_order(misplaced: Iterable[Misplaced]) -> Iterator[tuple[Window, str, str, str]]:
    """Yield events that stand before an earlier one of their key, or outside of the partition of their key.

    With the kind of the difference, the event's id and a text.
    """
    for pair in misplaced:
        if pair.place == pair.before:
            text = (
                f"offset {pair.offset} of partition {pair.place.number} comes before {pair.before_id} at "
                f"{pair.before_offset}, an event of its key {pair.key} with a lower number. Either the order was "
                "broken, or two transactions wrote the key at the same time (see lock_key)"
            )
            yield pair.window, "order", pair.event_id, text
        else:
            text = (
                f"stands in partition {pair.before.number}, and events of its key {pair.key} before and after it "
                f"in partition {pair.place.number}"
            )
            yield pair.window, "partition", pair.before_id, text


class Tables:
    """Reads the tables of one outbox in one snapshot: use it in a ``with`` block.

    router  of the relays, for the topics of events that have not been published.
    topics  those that are audited; None for all.
    minutes the range of minutes.
    order_minutes  so many minutes before it are compared with for the order of keys.
    ce_time  whether records have this header: without it, events whose ids have no time count only for the order.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        schema: str,
        router: Router,
        topics: Collection[str] | None,
        minutes: range,
        key: bytes,
        *,
        order_minutes: int = 0,
        ce_time: bool = True,
    ) -> None:
        self._connection = connection
        self._names = _pieces(names_of(schema))
        self._router = router
        self._topics = topics
        self._bound: dict[str, Any] = {
            "key": key,
            "low": first_id(minutes.start),
            "high": first_id(minutes.stop),
            "since": minute_start(minutes.start),
            "until": minute_start(minutes.stop),
            "first_minute": minutes.start,
            "end_minute": minutes.stop,
            "ce_time": ce_time,
        }
        self._minutes = minutes
        first = max(minutes.start - order_minutes, 0)
        self._of_order: dict[str, Any] = {"low": first_id(first), "since": minute_start(first), "ce_time": True}

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read everything in this block in one snapshot. Raises Unavailable and SchemaError."""
        with unavailable_on_error("reading the events to audit"), one_snapshot(self._connection, STATEMENT_SECONDS):
            yield

    def archived(self) -> tuple[int, dt.datetime] | None:
        """Return the minute since which the archive is known to have been on, and the time of its last event.

        None if it has no events of the range, or later ones.
        """
        earlier, ((first, last),) = self._rows(_EARLIER)[0][0], self._rows(_KEPT)
        if first is None:
            return None
        # In the minute of its first event it may have been on for a part; and the clocks of writers may be ahead.
        return self._minutes.start if earlier else minute_of(first) + 1 + LATE_MINUTES, last

    def archived_since(self) -> int | None:
        """Return only the first of the two. That is fast as long as the archive has earlier events."""
        if self._rows(_EARLIER)[0][0]:
            return self._minutes.start
        found = self.archived()
        return None if found is None else found[0]

    def now(self) -> dt.datetime:
        found: dt.datetime = self._rows("SELECT clock_timestamp()")[0][0]
        return found

    def committed(self, *, ids: bool) -> dict[Window, Committed]:
        """Return the sums over the archived events of each window; those of the ids only if they are wanted."""
        found: dict[Window, Committed] = {}
        query = _SUMS if ids else _SUMS.replace("{ids}", "0").replace("{hashed_ids}", "")
        for kind, topic, minute, count, hashes, placed, wholes in self._rows(query):
            window = self._window(kind, topic, minute)
            if window is not None:
                known = found.get(window, Committed())
                found[window] = Committed(
                    known.ids + Sum(count, reduced(hashes)), known.wholes + Sum(placed, reduced(wholes))
                )
        return found

    def unpublished(self) -> list[dict[Window, Sum]]:
        """Return the sums over the ids in each table of UNPUBLISHED."""
        return [self._summed(_WAITING, table) for table in UNPUBLISHED]

    def scheduled(self) -> dict[Window, Sum]:
        """Return the numbers of scheduled events, without sums: archive and ledger have an event once it is due."""
        return self._summed(_SCHEDULED)

    def ledger(self) -> dict[Window, Sum]:
        return self._summed(_LEDGER)

    def places(self) -> tuple[Collection[str], Mapping[Partition, int], bool]:
        """Return the topics to which the archived events of the range went, and the lowest offset of each partition.

        And whether all their offsets are known: not where an event was settled from a marker.
        """
        lowest: dict[Partition, int] = {}
        topics, complete = set[str](), True
        for kind, topic, number, offset in self._rows(_PLACES):
            window = self._window(kind, topic, 0)
            if topic is not None:
                place = Partition(topic, number)
                lowest[place] = min(offset, lowest.get(place, offset))
            complete = complete and topic is not None
            topics |= set() if window is None else {window.topic}
        return topics, lowest, complete

    def events(self, windows: Collection[Window]) -> dict[Window, dict[bytes, Archived]]:
        """Return the archived events of these windows, by their ids (16 bytes)."""
        found: dict[Window, dict[bytes, Archived]] = {window: {} for window in windows}
        places: dict[tuple[str, int], Partition] = {}
        minutes = sorted({window.minute for window in windows})
        ids = {"low": first_id(minutes[0]), "high": first_id(minutes[-1] + 1)}
        bound = self._bound | ids | {"minutes": minutes}
        # Row by row: there may be hundreds of thousands in a minute.
        with self._connection.cursor("audit", row_factory=tuple_row) as cursor:
            cursor.itersize = _ROWS_AT_ONCE
            cursor.execute(sql.SQL(_EVENTS).format(**self._names), bound)
            for kind, topic, minute, event_id, number, offset, said in cursor:
                window = self._window(kind, topic, minute)
                if window in found:
                    place = None if topic is None else places.setdefault((topic, number), Partition(topic, number))
                    found[window][event_id.bytes] = Archived(place, offset, bytes(said))
        return found

    def ids(self, table: str, windows: Collection[Window]) -> dict[Window, set[bytes]]:
        """Return the ids of the events of these windows in a table of UNPUBLISHED."""
        found: dict[Window, set[bytes]] = {window: set() for window in windows}
        minutes = sorted({window.minute for window in windows})
        for kind, minute, event_id in self._rows(_IDS, table=table, minutes=minutes):
            window = self._window(kind, None, minute)
            if window in found:
                found[window].add(event_id.bytes)
        return found

    def misplaced(self, places: Mapping[bytes, tuple[Partition, int]] | None = None) -> list[Misplaced]:
        """Return events that stand before one of their key with a lower id, or in a partition that their key had left.

        The first MOST_MISPLACED of them, in the order of the minutes. An event that an operator has put back comes
        behind the later ones that had gone out by then.

        places   by id (16 bytes), those of events of which the archive has none.
        """
        found = []
        table, values = "archived", dict(self._of_order)
        if places:
            table = "placed"
            values |= {
                "ids": [uuid.UUID(bytes=one) for one in places],
                "topics": [place.topic for place, _ in places.values()],
                "partitions": [place.number for place, _ in places.values()],
                "offsets": [offset for _, offset in places.values()],
            }
        last = self._behind(table, values)
        values |= {"retried": list(last), "behind": list(last.values()), "most": MOST_MISPLACED}
        values["chosen"] = None if self._topics is None else list(self._topics)
        rows = self._rows(_ORDER, table, **values)
        for kind, key, topic, minute, event_id, number, offset, before_id, before, before_offset in rows:
            window = self._window(kind, topic, minute)
            if window is not None:
                found.append(
                    Misplaced(
                        *(window, key, str(event_id), Partition(topic, number), offset),
                        *(str(before_id), Partition(topic, before), before_offset),
                    )
                )
        return found

    def _behind(self, table: str, values: Mapping[str, Any]) -> dict[uuid.UUID, int]:
        """Return the events that an operator has put back behind later ones of their keys, each with the last one."""
        retried = self._rows(_RETRIED)
        if not retried:
            return {}
        names = self._names | {"table": self._names[table]}
        retries = {"retried": [one for one, _ in retried], "retried_at": [at for _, at in retried]}
        # Row by row: a key may have millions of events.
        with self._connection.cursor("retried", row_factory=tuple_row) as cursor:
            cursor.itersize = _ROWS_AT_ONCE
            return behind(cursor.execute(sql.SQL(_OF_RETRIED).format(**names), {**self._bound, **values, **retries}))

    def _summed(self, query: LiteralString, table: str | None = None) -> dict[Window, Sum]:
        found: dict[Window, Sum] = defaultdict(Sum)
        for kind, minute, count, hashes in self._rows(query, table=table):
            window = self._window(kind, None, minute)
            if window is not None and minute in self._minutes:
                found[window] += Sum(int(count), reduced(hashes))
        return found

    def _window(self, kind: str, topic: str | None, minute: int) -> Window | None:
        topic = topic or self._router.known_topic(kind)
        return Window(topic, minute) if topic and (self._topics is None or topic in self._topics) else None

    def _rows(self, query: LiteralString, table: str | None = None, **values: Any) -> list[tuple[Any, ...]]:
        names = self._names
        if table is not None:
            names = names | {"table": names[table]}
        return psycopg.Cursor(self._connection).execute(sql.SQL(query).format(**names), self._bound | values).fetchall()


def _pieces(names: dict[str, sql.Composable]) -> dict[str, sql.Composable]:
    pieces = names | event_minute(names) | {"original": sql.SQL(_ORIGINAL), "content": content()}
    for name, text in (("archived", _ARCHIVED), ("placed", _PLACED), ("whole", _WHOLE), ("discarded", _DISCARDED)):
        pieces[name] = sql.SQL(text).format(**pieces)
    return pieces | {
        "ids": total("ids"),
        "wholes": total("wholes", "topic IS NOT NULL"),
        "hashed_ids": halves("ids", sql.SQL("pg_catalog.uuid_send(event_id)")),
        "hashed_wholes": halves("wholes", pieces["whole"]),
    }
