"""The rows of lanes, and which of them are on Kafka. For reconcile.py."""

import datetime as dt
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql

from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.event import DEAD_LETTER, REPLAY
from relay.core.marker import Marker
from relay.database import unavailable_on_error
from relay.failpoints import failpoint
from relay.kafka.client import unavailable_on_kafka_error
from relay.kafka.routing import Router
from relay.operations.holding import LEASE_SECONDS, RENEW, taken
from relay.operations.topic_scan import TopicRecord, committed_since
from relay.polling.queries import KEPT

MARGIN: Final = dt.timedelta(hours=1)
"""Messages have the relay's clock, rows the database's."""
_SETTLE_ROWS: Final = 10_000

_COUNT: Final = "SELECT lane, count(*) FROM ONLY {events} WHERE lane = ANY(%s::smallint[]) GROUP BY lane"

# A time to come was made up by the writer: its message may be anywhere.
_KINDS: Final = """
SELECT aggregate_type, coalesce(headers ? %(dead)s, false),
       min(CASE WHEN created_at > clock_timestamp() THEN '1970-01-01' ELSE {created_at} END)
  FROM ONLY {events} WHERE lane = ANY(%(lanes)s::smallint[]) GROUP BY 1, 2"""

_LIST: Final = (
    "DROP TABLE IF EXISTS pg_temp.outbox_reconcile",
    """CREATE TEMPORARY TABLE outbox_reconcile (
           lane smallint NOT NULL, id bigint NOT NULL, event_id uuid NOT NULL, mark text NOT NULL, content bytea,
           copy boolean NOT NULL, aggregate_type text NOT NULL, aggregate_id text NOT NULL,
           created_at timestamptz NOT NULL,
           found boolean NOT NULL DEFAULT false, superseded boolean NOT NULL DEFAULT false)""",
    """INSERT INTO pg_temp.outbox_reconcile (lane, id, event_id, mark, content, copy, aggregate_type, aggregate_id,
                                             created_at)
       SELECT lane, id, event_id, coalesce(nullif(headers ->> %(replay)s, ''), headers ->> %(dead)s, ''),
              sha256(coalesce(payload_bytes, convert_to(payload::text, 'UTF8'))),
              coalesce(headers ? %(dead)s, false), aggregate_type, aggregate_id, created_at
         FROM ONLY {events} WHERE lane = ANY(%(lanes)s::smallint[])""",
    "CREATE INDEX ON pg_temp.outbox_reconcile (event_id)",
    "CREATE INDEX ON pg_temp.outbox_reconcile (lane, id)",
    "ANALYZE pg_temp.outbox_reconcile",
)

# After a restore a writer may write another event under an id of its own making that Kafka has already.
_NOTE: Final = """
UPDATE pg_temp.outbox_reconcile AS r SET found = true
  FROM unnest(%s::uuid[], %s::text[], %s::bytea[]) AS seen(event_id, mark, content)
 WHERE r.event_id = seen.event_id AND r.mark = seen.mark AND r.content IS NOT DISTINCT FROM seen.content
   AND NOT r.found"""

_TYPES: Final = "SELECT DISTINCT aggregate_type FROM pg_temp.outbox_reconcile WHERE NOT found AND NOT copy"

# Compaction deletes an event once Kafka has a later one of its key: one of these rows, or one that Postgres has lost,
# which is later than all rows from before ``since``. Copies for a dead-letter topic have no order.
_SUPERSEDE: Final = """
WITH compacted AS (SELECT * FROM unnest(%(types)s::text[], %(topics)s::text[]) AS c(aggregate_type, topic)),
last AS (
    SELECT aggregate_type, aggregate_id, max(id) AS id, 'infinity'::timestamptz AS before
      FROM pg_temp.outbox_reconcile JOIN compacted USING (aggregate_type)
     WHERE found AND NOT copy GROUP BY aggregate_type, aggregate_id
     UNION ALL
    SELECT DISTINCT aggregate_type, aggregate_id, 9223372036854775807, %(since)s::timestamptz
      FROM unnest(%(lost_topics)s::text[], %(lost_keys)s::text[]) AS l(topic, aggregate_id)
      JOIN compacted USING (topic))
UPDATE pg_temp.outbox_reconcile AS r SET found = true, superseded = true FROM last
 WHERE last.aggregate_type = r.aggregate_type AND last.aggregate_id = r.aggregate_id AND NOT r.found AND NOT r.copy
   AND r.id < last.id AND r.created_at <= last.before"""

_HELD: Final = """
SELECT seen.event_id::text, seen.mark, r.lane FROM unnest(%s::uuid[], %s::text[]) AS seen(event_id, mark)
  JOIN pg_temp.outbox_reconcile AS r ON r.event_id = seen.event_id AND r.mark = seen.mark"""

_FOUND: Final = "SELECT lane, count(*) FROM pg_temp.outbox_reconcile WHERE found GROUP BY lane"

_FOUND_IDS: Final = """
SELECT lane, array_agg(event_id::text ORDER BY id) FROM pg_temp.outbox_reconcile
 WHERE found GROUP BY lane ORDER BY lane"""

_SUPERSEDED: Final = """
SELECT lane, array_agg(event_id::text ORDER BY id) FROM pg_temp.outbox_reconcile
 WHERE superseded GROUP BY lane ORDER BY lane"""

# LIMIT prevents the planner from reversing the join; see settle/statements.py.
_SETTLE: Final = """
WITH picked AS (SELECT id, event_id FROM pg_temp.outbox_reconcile
                 WHERE found AND lane = %(lane)s AND id > %(after)s ORDER BY id LIMIT %(rows)s),
     found AS MATERIALIZED (SELECT ARRAY(
         SELECT e.place
           FROM picked AS p
          CROSS JOIN LATERAL (SELECT e.ctid AS place FROM ONLY {events} AS e
                               WHERE e.lane = %(lane)s AND e.id = p.id AND e.event_id = p.event_id LIMIT 1) AS e)
         AS places),
     gone AS (DELETE FROM ONLY {events} WHERE ctid = ANY((SELECT places FROM found)::tid[]) RETURNING *){kept},
     failed AS MATERIALIZED (
         SELECT p.id FROM picked AS p
          CROSS JOIN LATERAL (SELECT FROM {failures} AS f WHERE f.lane = %(lane)s AND f.id = p.id LIMIT 1) AS f),
     forgotten AS (DELETE FROM {failures} AS f USING failed AS p WHERE f.lane = %(lane)s AND f.id = p.id)
SELECT max(id), {all_gone} FROM picked"""


class Lane(NamedTuple):
    """``outbox``: that of Identity. ``exactly_once``: a lane of this outbox has been published exactly-once."""

    last_batch: int | None
    system: str
    timeline: int
    outbox: str
    insert_lsn: int
    transactional_id: str | None
    exactly_once: bool

    def disowns(self, marker: Marker | None) -> bool:
        """Return whether the marker is of another outbox, which has the same OUTBOX_NAME, as far as it names one."""
        if marker is None or self.exactly_once:
            return False
        return marker.system_identifier != self.system or marker.outbox not in {None, self.outbox}


@dataclass(frozen=True, slots=True)
class LaneComparison:
    """The state of one lane in table, marker and topics.

    ``problem`` is why a relay would stop on it, or None. ``rows`` are in the outbox; of those, ``found`` are on Kafka
    already, or superseded there (looked up only if there is a problem). ``superseded`` are the latter's event ids.
    """

    lane: int
    last_batch: int | None
    marker_batch: int | None
    problem: str | None
    rows: int
    found: int = 0
    superseded: Sequence[str] = ()

    @property
    def next_batch(self) -> int:
        """The batch number to start again from: above the last batch of both sides."""
        return max(self.last_batch or 0, self.marker_batch or 0) + 1


class LaneRows:
    """Looks up the rows of lanes in their topics, and settles those on Kafka.

    ``client_options`` are for readers. ``archive``: keep what is settled.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        names: Mapping[str, sql.Composable],
        router: Router,
        client_options: Mapping[str, str],
        *,
        archive: bool = False,
    ) -> None:
        self._connection = connection
        self._names = {**names, "kept": sql.SQL(KEPT if archive else "").format(**names)}
        self._router = router
        self._client = client_options
        self._may_compact = cache(KafkaAdmin(client_options).may_compact)

    def count(self, lanes: Collection[int]) -> dict[int, int]:
        return dict(self.run(_COUNT, (list(lanes),), "counting events"))

    def list_rows(self, lanes: Collection[int]) -> None:
        """Write the rows of these lanes into the temporary table, which the server keeps in memory or on disk."""
        values = {"lanes": list(lanes), "replay": REPLAY, "dead": DEAD_LETTER}
        with unavailable_on_error("listing events"), self._connection.transaction():
            for statement in _LIST:
                self._connection.execute(
                    sql.SQL(statement).format(**self._names), values if "%(" in statement else None
                )

    def topics(self, lanes: Collection[int]) -> dict[str, int]:
        """Return the topics of these lanes' rows, each with the time (milliseconds) from which it must be read."""
        oldest: dict[str, dt.datetime] = {}
        values = {"lanes": list(lanes), "dead": DEAD_LETTER}
        for aggregate_type, dead, created_at in self.run(_KINDS, values, "reading the kinds of events"):
            if topic := self._router.known_topic(aggregate_type, copy=dead):
                oldest[topic] = min(oldest.get(topic, created_at), created_at)
        return {topic: max(int((since - MARGIN).timestamp() * 1000), 0) for topic, since in oldest.items()}

    def search(self, topics: Mapping[str, int]) -> None:
        """Mark the listed rows that are on Kafka.

        A replay, or a copy for a dead-letter topic, has the same id as its event, and is distinguished by its header.
        """
        for seen in committed_since(self._client, topics):
            found = {(one.event_id, one.mark, content_of(one)) for one in seen if one.event_id is not None}
            if found:
                self.run(_NOTE, [list(column) for column in zip(*found, strict=True)], "noting what stands on Kafka")
        self.supersede()

    def supersede(self, lost: Collection[tuple[str, str]] = (), since: dt.datetime | None = None) -> None:
        """Mark rows of compacted topics that have a later event of their key on Kafka as found, and as superseded.

        Published now, one would be the last of its key, and compaction would delete the later event. ``lost``: topics
        and keys of events that Postgres has lost since the point ``since``.
        """
        topics = self.compacted([kind for (kind,) in self.run(_TYPES, (), "reading the kinds of events")])
        if topics:
            values = {"types": list(topics), "topics": list(topics.values()), "since": since}
            values |= {"lost_topics": [topic for topic, _ in lost], "lost_keys": [key for _, key in lost]}
            self.run(_SUPERSEDE, values, "looking for what compaction may have deleted")

    def compacted(self, types: Collection[str]) -> dict[str, str]:
        """Return the topics of aggregate types, by type, of those that Kafka may compact.

        Raises Unavailable when Kafka does not answer: what is not on Kafka is settled only if compaction explains it.
        """
        topics = {aggregate_type: self._router.known_topic(aggregate_type) for aggregate_type in types}
        with unavailable_on_kafka_error("reading cleanup.policy of topics"):
            return {one: topic for one, topic in topics.items() if topic is not None and self._may_compact(topic)}

    def found(self) -> dict[int, int]:
        return dict(self.run(_FOUND, (), "counting what stands on Kafka"))

    def found_ids(self) -> dict[int, list[str]]:
        """Return the event ids of the listed rows that are on Kafka, or superseded there, by lane."""
        return dict(self.run(_FOUND_IDS, (), "reading what is found"))

    def superseded(self) -> dict[int, list[str]]:
        """Return the event ids of the listed rows that are superseded, by lane."""
        return dict(self.run(_SUPERSEDED, (), "reading what is superseded"))

    def held(self, seen: Sequence[TopicRecord]) -> dict[tuple[str, str], int]:
        """Return event id and mark of those records that have a listed row, each with the row's lane."""
        keys = {(one.event_id, one.mark) for one in seen if one.event_id is not None}
        values = [event_id for event_id, _ in keys], [mark for _, mark in keys]
        rows = self.run(_HELD, values, "looking for the rows of what hangs")
        return {(event_id, mark): lane for event_id, mark, lane in rows}

    def settle(self, lane: int, held: Mapping[str, Any]) -> None:
        """Settle a lane's rows that are on Kafka, under its row lock and only while ``held`` is its lease."""
        after: int | None = 0
        while after is not None:
            with unavailable_on_error(f"settling lane {lane}"), self._connection.transaction():
                self._connection.execute("SET LOCAL idle_in_transaction_session_timeout = '10s'")
                values = {**held, "lane": lane, "lease": LEASE_SECONDS, "after": after, "rows": _SETTLE_ROWS}
                if not self._connection.execute(sql.SQL(RENEW).format(**self._names), values).rowcount:
                    raise taken(lane)
                [(after, _)] = self._connection.execute(sql.SQL(_SETTLE).format(**self._names), values).fetchall()
            failpoint("reconcile.settling")

    def run(self, statement: str, values: Any, doing: str, **names: sql.Composable) -> list[Any]:
        with unavailable_on_error(doing), self._connection.cursor() as cursor:
            cursor.execute(sql.SQL(statement).format(**self._names | names), values)
            return cursor.fetchall() if cursor.description else []


def content_of(record: TopicRecord) -> bytes | None:
    """Return the hash of a record's value; None for a tombstone."""
    return None if record.value is None else sha256(record.value).digest()
