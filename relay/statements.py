"""The statements of settling, and the pieces of SQL that they share with what the sources read. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, LiteralString

from psycopg import sql

from relay.database import FURTHER
from relay.position import WalPosition

# A role or a database may have synchronous_commit off. It counts at the commit, so the statement itself can set it.
SYNCHRONOUS: Final = """set_config('synchronous_commit',
       CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
            ELSE current_setting('synchronous_commit') END, true)"""

# IS TRUE keeps the list of lanes from being joined row by row: it is hashed. LIMIT keeps the planner from joining the
# other way around. Where the statistics are of a moment without rows (between two bursts, while an old snapshot keeps
# the dead ones), it takes the table for empty and would compare each of its rows with each id: a minute for 2,000 ids
# and a backlog of 100,000. By ctid nothing is left to be joined. A failure's row may be updated meanwhile, and has
# another ctid then: it is found by its key, and there are few of them.
_SETTLING: Final = """
WITH mine AS (
    SELECT * FROM unnest(%(lanes)s::smallint[], %(epochs)s::bigint[], %(expected)s::bigint[], %(batches)s::bigint[],
                         %(lsns)s::bigint[], %(numbers)s::int[], %(writes)s::boolean[], %(own_ids)s::text[],
                         %(versions)s::tid[])
                  AS m(lane, epoch, expected, batch, lsn, number, writes, own_id, version)),
held AS MATERIALIZED (
    SELECT l.lane, l.ctid AS version FROM {lanes} AS l JOIN mine AS m ON m.lane = l.lane{by_version}
     WHERE l.epoch = m.epoch AND (m.expected IS NULL OR l.last_batch = m.expected)
       AND (m.own_id IS NULL OR l.transactional_id = m.own_id)
       FOR NO KEY UPDATE OF l SKIP LOCKED),
written AS (
    UPDATE {lanes} AS l SET lease_until = clock_timestamp() + make_interval(secs => %(ttl)s),
           last_batch = coalesce(m.batch, l.last_batch), commit_lsn = coalesce(m.lsn, l.commit_lsn),
           commit_number = coalesce(m.number, l.commit_number)
      FROM mine AS m JOIN held ON held.lane = m.lane
     WHERE l.lane = m.lane{by_version} AND m.writes
    RETURNING l.lane, l.ctid AS version),
settled AS (
    SELECT * FROM unnest(%(row_lanes)s::smallint[], %(row_ids)s::bigint[], %(row_event_ids)s::uuid[])
                  AS p(row_lane, row_id, row_event_id)),
failed AS MATERIALIZED (
    SELECT p.row_lane, p.row_id
      FROM settled AS p
     CROSS JOIN LATERAL (SELECT FROM {failures} AS f WHERE f.lane = p.row_lane AND f.id = p.row_id LIMIT 1) AS f
     WHERE (SELECT EXISTS (SELECT FROM {failures})) AND (p.row_lane IN (SELECT lane FROM held)) IS TRUE),
freed AS (DELETE FROM {failures} AS f USING failed AS p WHERE f.lane = p.row_lane AND f.id = p.row_id),
gone AS (
    DELETE FROM {events} WHERE ctid = ANY(ARRAY(
        SELECT e.place
          FROM settled AS p
         CROSS JOIN LATERAL (SELECT e.ctid AS place FROM {events} AS e
                              WHERE e.lane = p.row_lane AND e.id = p.row_id AND e.event_id = p.row_event_id
                              LIMIT 1) AS e
         WHERE (p.row_lane IN (SELECT lane FROM held)) IS TRUE))
    RETURNING *)"""

_ARCHIVED: Final = """,
kept AS (
    INSERT INTO {published} (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes,
                             headers, created_at, published_at, topic, partition, "offset")
    SELECT g.lane, g.id, g.event_id, g.aggregate_type, g.aggregate_id, g.event_type, g.payload, g.payload_bytes,
           g.headers, g.created_at, clock_timestamp(), p.topic, p.part, p.off
      FROM gone AS g JOIN unnest(%(row_ids)s::bigint[], %(topics)s::text[], %(partitions)s::int[],
                                 %(offsets)s::bigint[]) AS p(place_id, topic, part, off) ON p.place_id = g.id)"""

# Where the lane's row is known to be. Dead versions of it, which a held xmin keeps, are not looked at on the way.
_BY_VERSION: Final = " AND l.ctid = m.version"

_HELD: Final = """
SELECT held.lane, (SELECT {synchronous}), coalesce(written.version, held.version)::text
  FROM held LEFT JOIN written ON written.lane = held.lane"""

# How many of the events that were just read are there. For connections whose server may have crashed unnoticed.
_THERE: Final = """
SELECT held.lane, (SELECT {synchronous}), coalesce(written.version, held.version)::text,
       (SELECT count(*) FROM unnest(%(next_lanes)s::smallint[], %(next_ids)s::bigint[], %(next_event_ids)s::uuid[])
                             AS n(lane, id, event_id)
         CROSS JOIN LATERAL (SELECT FROM {events} AS e
                              WHERE e.lane = n.lane AND e.id = n.id AND e.event_id = n.event_id LIMIT 1) AS e)
  FROM held LEFT JOIN written ON written.lane = held.lane"""

_STILL_HELD: Final = """
SELECT l.lane FROM {lanes} AS l
  JOIN unnest(%(lanes)s::smallint[], %(epochs)s::bigint[], %(versions)s::tid[]) AS m(lane, epoch, version)
    ON m.lane = l.lane{by_version}
 WHERE l.epoch = m.epoch"""

_WHY: Final = """
SELECT l.lane, l.last_batch, l.transactional_id FROM {lanes} AS l
  JOIN unnest(%(lanes)s::smallint[], %(epochs)s::bigint[]) AS m(lane, epoch) ON l.lane = m.lane AND l.epoch = m.epoch"""


# Without fresh statistics the planner may sort the whole backlog for each batch, or read it from end to end to find the
# rows that go; a new outbox has none, and a relay has no right to ANALYZE. The primary key gives a lane in id order.
_INDEX_ONLY: Final = (
    "enable_sort",
    "enable_bitmapscan",
    "enable_seqscan",
    "enable_hashjoin",
    "enable_mergejoin",
    "jit",
)
KEEP_TO_THE_INDEX: Final[LiteralString] = "SELECT " + ", ".join(
    f"set_config('{name}', 'off', %(local)s)" for name in _INDEX_ONLY
)
END_IDLE: Final = "SELECT set_config('idle_in_transaction_session_timeout', %(ttl_ms)s, true)"


def array(values: Sequence[int | str | None]) -> str:
    """Return numbers or UUIDs as Postgres reads an array; the driver's own way costs a microsecond for each."""
    return "{" + ",".join("NULL" if value is None else str(value) for value in values) + "}"


def position(at: WalPosition | None) -> dict[str, int | None]:
    """Return a place in the WAL as values to bind."""
    return {"commit_lsn": None if at is None else at.commit_lsn, "commit_number": None if at is None else at.number}


def names_of(schema: str) -> dict[str, sql.Composable]:
    """Return what the statements over one outbox name: its tables, and pieces of SQL that they share."""
    tables = ("events", "lanes", "failures", "published", "dead_letters", "streams")
    names: dict[str, sql.Composable] = {name: sql.Identifier(schema, name) for name in tables}
    names["synchronous"], names["further"] = sql.SQL(SYNCHRONOUS), sql.SQL(FURTHER)
    return names


class SettlingStatements:
    """The statements of settlement.py over one outbox, with its names put in."""

    def __init__(self, schema: str, *, archive: bool) -> None:
        names = names_of(schema)

        def query(text: LiteralString, *, by_version: bool = False) -> sql.Composed:
            return sql.SQL(text).format(**names, by_version=sql.SQL(_BY_VERSION if by_version else ""))

        settling: LiteralString = _SETTLING + (_ARCHIVED if archive else "")
        self.settle = query(settling + _HELD)
        self.settle_by_version = query(settling + _HELD, by_version=True)
        self.settle_and_count = query(settling + _THERE)
        self.still_held = query(_STILL_HELD)
        self.still_held_by_version = query(_STILL_HELD, by_version=True)
        self.why = query(_WHY)
