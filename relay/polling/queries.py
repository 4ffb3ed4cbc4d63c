"""The statements that read ``events`` and take over lanes. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from relay.core.ports import Claim
from relay.polling.blocked_keys import DIGEST
from relay.settle.statements import TIMELINE, array, names_of

# In the order of Claim's fields.
COLUMNS: Final = """
id, event_id::text, aggregate_type, aggregate_id, event_type,
       to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
       coalesce(payload_bytes, convert_to(payload::text, 'UTF8')), headers"""

# An event's size in memory. Only a compressed payload has to be unpacked for it; uncompressed jsonb is about as long as
# its text.
SIZE: Final = """CASE WHEN pg_column_compression(payload) IS NULL THEN coalesce(pg_column_size(payload), 0)
                      ELSE octet_length(payload::text) END
                 + coalesce(octet_length(payload_bytes), 0) + coalesce(pg_column_size(headers), 0)"""

# Without the rows of the previous turn, which are not settled yet; rows behind its last one need no check against the
# list. A plan for any values would compare each row with each id of an array; of a subquery it makes a hash table.
_THERE: Final = """lane = {lane} AND id > {above}
                   AND (id > {after} OR id NOT IN (SELECT unnest(%(unsettled)s::bigint[])))"""

# Those that a sweep has found below the mark.
_LATE: Final = """lane = %(lane)s AND id = ANY(%(late)s::bigint[])
                  AND id NOT IN (SELECT unnest(%(unsettled)s::bigint[]))"""

# As many as fit into the bytes, and at least one. The number is computed over narrow rows first. Dead rows before the
# first one, which an old snapshot keeps, are skipped here and not again by the read.
_FITTING: Final = """(SELECT greatest(1, count(*) FILTER (WHERE total <= %(max_bytes)s)) AS fitting, count(*) AS there,
                          coalesce(max(total) FILTER (WHERE total <= %(max_bytes)s), min(total), 0) AS bytes,
                          min(id) AS first
                     FROM (SELECT id, sum(size) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) AS total
                             FROM (SELECT id, {size} AS size FROM ONLY {events} AS e WHERE {conditions}
                                    ORDER BY id LIMIT {most}) AS sized) AS summed)"""

# Lane after lane, until the turn is full. A lane with events but no room is reported by one row without an id, behind
# all others: see ``split_rows``.
_READ: Final = """
SELECT e.*, l.lane
  FROM (SELECT *, sum(bytes) OVER (ROWS UNBOUNDED PRECEDING) AS running
          FROM (SELECT l.*, f.*
                  FROM unnest(%(lanes)s::smallint[], %(above)s::bigint[], %(after)s::bigint[], %(limits)s::bigint[])
                              AS l(lane, above, after, most)
                 CROSS JOIN LATERAL {fitting} AS f) AS l) AS l
  LEFT JOIN LATERAL (
     SELECT {columns}, NULL FROM ONLY {events} AS e
      WHERE (l.running <= %(turn_bytes)s OR l.running = l.bytes) AND id >= l.first AND {conditions}
      ORDER BY id LIMIT l.fitting) AS e ON true
 WHERE e.id IS NOT NULL OR (l.there > 0 AND l.running > %(turn_bytes)s)"""

# Without events that have failed, and without later events of their keys. The hash matches the index (keys can be too
# long for one). OFFSET 0 keeps the planner from comparing all failures with all events, which it does where it takes
# one of the tables for empty. Most of what is passed over is blocked by its key: CASE asks that first.
_NOT_BLOCKED: Final = """ AND CASE
       WHEN NOT EXISTS (SELECT FROM {failures} AS f
                         WHERE f.lane = %(lane)s AND f.aggregate_type = e.aggregate_type
                           AND hashtextextended(f.aggregate_id, 0) = hashtextextended(e.aggregate_id, 0)
                           AND f.aggregate_id = e.aggregate_id AND f.id < e.id AND f.blocks)
            OR e.headers ? %(copy)s
       THEN NOT EXISTS (SELECT FROM {failures} AS f WHERE f.lane = %(lane)s AND f.id = e.id OFFSET 0) END"""

# Without events whose topic can't be written to now. A copy for a dead-letter topic has a topic of its own.
_NOT_LEFT_OUT: Final = """ AND NOT EXISTS (
       SELECT FROM unnest(%(left_types)s::text[], %(left_copies)s::boolean[]) AS o(kind, copy)
        WHERE o.kind = e.aggregate_type AND o.copy = coalesce(e.headers ? %(copy)s, false))"""

_READ_SKIP_BLOCKED: Final = """
SELECT {columns}, NULL, lane FROM ONLY {events} AS e WHERE {conditions}
 ORDER BY id LIMIT (SELECT fitting FROM {fitting} AS f)"""

# Failed events that are due, the first of each key. They may be below the mark if they were put back.
# clock_timestamp() is volatile, and no index can be searched by it. OFFSET 0: as in _NOT_BLOCKED.
_READ_DUE: Final = """
SELECT {columns}, NULL, lane
  FROM ONLY {events} AS e
 WHERE lane = %(lane)s AND id NOT IN (SELECT unnest(%(unsettled)s::bigint[]))
   AND id = ANY(ARRAY(
            SELECT f.id FROM {failures} AS f
              WHERE f.lane = %(lane)s AND f.next_attempt_at < 'infinity' AND f.next_attempt_at <= statement_timestamp()
                AND f.id NOT IN (SELECT unnest(%(unsettled)s::bigint[]))
                AND EXISTS (SELECT FROM ONLY {events} AS e WHERE e.lane = f.lane AND e.id = f.id{usable} OFFSET 0)
                AND (NOT f.blocks OR NOT EXISTS (SELECT FROM {failures} AS g
                                      WHERE g.lane = f.lane AND g.aggregate_type = f.aggregate_type
                                        AND hashtextextended(g.aggregate_id, 0) = hashtextextended(f.aggregate_id, 0)
                                        AND g.aggregate_id = f.aggregate_id AND g.id < f.id AND g.blocks))
              ORDER BY f.next_attempt_at, f.id LIMIT %(due)s))
 ORDER BY id"""

# A window of the rows up to the mark: how many there are, the last one, and those that are free to go. See sweep.py.
_SWEEP: Final = """
WITH there AS MATERIALIZED (
    SELECT id, lane, aggregate_type, aggregate_id, headers FROM ONLY {events} AS e
     WHERE lane = %(lane)s AND id > %(above)s AND id <= %(mark)s
     ORDER BY id LIMIT %(window)s)
SELECT (SELECT count(*) FROM there), (SELECT max(id) FROM there),
       ARRAY(SELECT id FROM there AS e WHERE true{usable} ORDER BY id LIMIT %(most)s)"""

# All failures of lanes, or those with these ids; see blocked_keys.py. OFFSET and LIMIT prevent the planner from
# reversing the join; see settle/statements.py.
_FAILURES: Final = """
SELECT l.lane, f.*
  FROM unnest(%(lanes)s::smallint[]) AS l(lane)
 CROSS JOIN LATERAL (SELECT f.id, aggregate_type, {digest}, blocks
                       FROM {failures} AS f WHERE f.lane = l.lane OFFSET 0) AS f"""

_SOME_FAILURES: Final = """
SELECT l.lane, f.*
  FROM unnest(%(lanes)s::smallint[], %(ids)s::bigint[]) AS l(lane, id)
 CROSS JOIN LATERAL (SELECT f.id, aggregate_type, {digest}, blocks
                       FROM {failures} AS f WHERE f.lane = l.lane AND f.id = l.id LIMIT 1) AS f"""

_FAILURE_SUMS: Final = """
SELECT l.lane, f.*
  FROM unnest(%(lanes)s::smallint[]) AS l(lane)
 CROSS JOIN LATERAL (SELECT count(*), coalesce(sum(f.id), 0)::text FROM {failures} AS f WHERE f.lane = l.lane) AS f"""

_WITH_FAILURES: Final = """
SELECT l.lane FROM unnest(%(lanes)s::smallint[]) AS l(lane)
 WHERE EXISTS (SELECT FROM {failures} AS f WHERE f.lane = l.lane)"""

# The mark may rise to a lane's last id while events wait, so that they are not visited by each read. See
# low_water_mark.py. From the top, dead rows that an old snapshot keeps are visited: it is read once for each rise.
_LAST_IDS: Final = """
SELECT l.lane, (SELECT id FROM ONLY {events} AS e WHERE e.lane = l.lane AND e.id > l.above ORDER BY id DESC LIMIT 1)
  FROM unnest(%(lanes)s::smallint[], %(above)s::bigint[]) AS l(lane, above)"""

# What the next holder of a lane may start from; see row_marks.py. A row that another session has locked is passed.
_KEEP_MARKS: Final = """
WITH free AS (
    SELECT l.lane, k.mark, k.failures
      FROM {lanes} AS l JOIN {leases} ON {ours}
      JOIN unnest(%(mark_lanes)s::smallint[], %(marks)s::bigint[], %(mark_failures)s::text[]) AS k(lane, mark, failures)
           ON k.lane = l.lane
       FOR NO KEY UPDATE OF l SKIP LOCKED)
UPDATE {lanes} AS l SET low_water_mark = free.mark, mark_failures = free.failures
  FROM free WHERE l.lane = free.lane RETURNING l.lane"""

_LEFT_MARKS: Final = """
SELECT l.lane, l.low_water_mark, l.mark_failures, (SELECT system_identifier::text FROM pg_control_system())
  FROM {lanes} AS l
 WHERE l.lane = ANY(%(lanes)s::smallint[]) AND l.low_water_mark IS NOT NULL"""

# By id and event id: after a restore another event may have the id. LIMIT and ctid as in settle/statements.py.
_SETTLE_MARKER: Final = """
WITH found AS MATERIALIZED (
    SELECT ARRAY(
        SELECT e.place
          FROM unnest(%(ids)s::bigint[], %(event_ids)s::uuid[]) AS p(place_id, place_event_id)
         CROSS JOIN LATERAL (SELECT e.ctid AS place FROM ONLY {events} AS e
                              WHERE e.lane = %(lane)s AND e.id = p.place_id AND e.event_id = p.place_event_id
                              LIMIT 1) AS e) AS places),
gone AS (DELETE FROM ONLY {events} WHERE ctid = ANY((SELECT places FROM found)::tid[]) RETURNING *){kept}
SELECT count(*), {all_gone} FROM gone"""

KEPT: Final[LiteralString] = """,
kept AS (
    INSERT INTO {published} (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes,
                             headers, created_at, published_at)
    SELECT lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers, created_at,
           clock_timestamp() FROM gone)"""

_HELD: Final = """
SELECT last_batch, (SELECT system_identifier::text FROM pg_control_system()), {timeline}, {this_outbox},
       (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint
  FROM {lanes} AS l JOIN {leases} ON {ours} FOR UPDATE OF l NOWAIT"""

_STILL_HELD: Final = """
SELECT l.lane, (SELECT system_identifier::text FROM pg_control_system()), {timeline}, {this_outbox}
  FROM {lanes} AS l JOIN {leases} ON {ours}"""

# On the server that ``identity`` has seen: behind a pooler it may be another one by now.
_ADOPT_SETTLED: Final = """
WITH given AS (
    SELECT * FROM unnest(%(lanes)s::smallint[], %(epochs)s::bigint[], %(batches)s::bigint[], %(first)s::boolean[],
                         %(lsns)s::bigint[])
                  AS m(lane, epoch, batch, first, lsn)
     WHERE (SELECT system_identifier::text FROM pg_control_system()) = %(system_identifier)s
       AND {timeline} = %(timeline)s),
free AS (
    SELECT l.lane, m.batch FROM {lanes} AS l JOIN given AS m ON {ours}
     WHERE (l.last_batch IS NOT DISTINCT FROM m.batch
            OR (coalesce(l.last_batch, 0) = 0 AND (m.first OR m.batch IS NULL)))
       AND coalesce(m.lsn <= pg_current_wal_insert_lsn() - '0/0'::pg_lsn, true)
       FOR NO KEY UPDATE OF l SKIP LOCKED)
UPDATE {lanes} AS l SET transactional_id = %(own_id)s, last_batch = coalesce(free.batch, l.last_batch)
  FROM free WHERE l.lane = free.lane
RETURNING l.lane, (SELECT {synchronous})"""

_ADOPTED: Final = """
UPDATE {lanes} SET last_batch = coalesce(%(batch)s, last_batch), transactional_id = %(own_id)s,
       commit_lsn = greatest(commit_lsn, %(commit_lsn)s::bigint)
 WHERE lane = %(lane)s"""

# For multi-statement transactions, which lock the lane's row.
_SEVERAL: Final = "SELECT {synchronous}, set_config('idle_in_transaction_session_timeout', %(ttl_ms)s, true)"

_SERVER: Final[tuple[LiteralString, ...]] = (
    "(SELECT system_identifier::text FROM pg_control_system())",
    TIMELINE,
    "(pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint",
    "extract(epoch FROM pg_postmaster_start_time())::text",
)
"""SQL: the fields of kept_marks.Server."""

SERVER: Final[LiteralString] = "SELECT " + ", ".join(_SERVER)
DRAW_XID: Final[LiteralString] = "SELECT " + ", ".join(("pg_current_xact_id()::text::bigint", *_SERVER))
# Not before the ids that were known when the transaction id was drawn are flushed: a crash could give them out again.
XMIN: Final = """
SELECT CASE WHEN pg_current_wal_flush_lsn() >= '0/0'::pg_lsn + %(wal_position)s::numeric
            THEN pg_snapshot_xmin(pg_current_snapshot())::text::bigint ELSE 0 END"""

# Checks for events only if a transaction has ended since the last check, which changes the snapshot. The pause between
# two checks grows with their cost, so that they take at most a thirtieth of the time. Comparing snapshots costs next to
# nothing, so the first commit after a rest is noticed at once.
_WATCH: Final = """
DECLARE
    seen text := '';
    now_seen text;
    asked_at timestamptz;
    look_at timestamptz := clock_timestamp();
    ends_at timestamptz := look_at + make_interval(secs => {seconds});
    step float8 := 0.001;
BEGIN
    LOOP
        now_seen := pg_current_snapshot()::text;
        asked_at := clock_timestamp();
        IF now_seen <> seen AND asked_at >= look_at THEN
            seen := now_seen;
            PERFORM FROM unnest({lanes}::smallint[], {above}::bigint[]) AS l(lane, above)
              CROSS JOIN LATERAL (SELECT FROM ONLY {events} AS e WHERE e.lane = l.lane AND e.id > l.above LIMIT 1) AS e
              LIMIT 1;
            EXIT WHEN FOUND;
            look_at := clock_timestamp() + 30 * (clock_timestamp() - asked_at);
        END IF;
        EXIT WHEN asked_at >= ends_at;
        PERFORM pg_sleep(step);
        step := least(step + 0.0005, {watch});
    END LOOP;
END"""


def split_rows(rows: Sequence[Claim]) -> tuple[Sequence[Claim], Sequence[int]]:
    """Return the events that a statement has read, and the lanes that have some for which there was no room."""
    if not rows or rows[-1].position:
        return rows, ()
    without_room = [row.lane for row in rows if not row.position]
    return rows[: -len(without_room)], without_room


class Queries:
    """The statements of one outbox, for the source and for the tests of their plans."""

    def __init__(self, schema: str, *, archive: bool = False) -> None:
        names = names_of(schema)
        names["columns"], names["size"] = sql.SQL(COLUMNS), sql.SQL(SIZE)

        def query(text: LiteralString, **more: sql.Composable) -> sql.Composed:
            return sql.SQL(text).format(**names, **more)

        def bounded(text: LiteralString, conditions: sql.Composable, most: sql.Composable) -> sql.Composed:
            fitting = query(_FITTING, conditions=conditions, most=most)
            return query(text, conditions=conditions, fitting=fitting)

        def there(lane: sql.Composable, above: sql.Composable, after: sql.Composable) -> sql.Composed:
            return sql.SQL(_THERE).format(lane=lane, above=above, after=after)

        of_many = there(sql.SQL("l.lane"), sql.SQL("l.above"), sql.SQL("l.after"))
        of_one = there(sql.SQL("%(lane)s"), sql.SQL("%(above)s"), sql.SQL("%(after)s"))
        usable = sql.SQL(_NOT_LEFT_OUT)
        skip_blocked = of_one + query(_NOT_BLOCKED)
        self.read = bounded(_READ, of_many, sql.SQL("l.most"))
        self.read_some = bounded(_READ, of_many + usable, sql.SQL("l.most"))
        self.read_skip_blocked = bounded(_READ_SKIP_BLOCKED, skip_blocked, sql.SQL("%(limit)s"))
        self.read_some_skip_blocked = bounded(_READ_SKIP_BLOCKED, skip_blocked + usable, sql.SQL("%(limit)s"))
        late = sql.SQL(_LATE) + query(_NOT_BLOCKED) + usable
        self.read_late = bounded(_READ_SKIP_BLOCKED, late, sql.SQL("%(limit)s"))
        self.sweep = query(_SWEEP, usable=query(_NOT_BLOCKED) + usable)
        self.read_due = query(_READ_DUE, usable=sql.SQL(""))
        self.read_some_due = query(_READ_DUE, usable=usable)
        digest = sql.SQL(DIGEST)
        self.failures = query(_FAILURES, digest=digest)
        self.some_failures = query(_SOME_FAILURES, digest=digest)
        self.failure_sums = query(_FAILURE_SUMS)
        self.with_failures = query(_WITH_FAILURES)
        self.last_ids = query(_LAST_IDS)
        self.keep_marks = query(_KEEP_MARKS)
        self.left_marks = query(_LEFT_MARKS)
        self.several = query(_SEVERAL)
        self.settle_marker = query(_SETTLE_MARKER, kept=query(KEPT) if archive else sql.SQL(""))
        self.held = query(_HELD)
        self.still_held = query(_STILL_HELD)
        self.adopt_settled = query(_ADOPT_SETTLED)
        self.adopted = query(_ADOPTED)
        self.lane_count = query("SELECT count(*) FROM {lanes}")
        self._events = names["events"]

    def watch(
        self, connection: psycopg.Connection[Any], marks: Mapping[int, int], seconds: float, step_seconds: float
    ) -> str:
        """Return a statement that ends once one of these lanes has an event above its mark, or after ``seconds``."""
        body = sql.SQL(_WATCH).format(
            events=self._events,
            seconds=sql.Literal(seconds),
            watch=sql.Literal(step_seconds),
            lanes=sql.Literal(array(list(marks))),
            above=sql.Literal(array(list(marks.values()))),
        )
        return sql.SQL("DO {}").format(sql.Literal(body.as_string(connection))).as_string(connection)
