"""The statements of the WAL source. No I/O."""

from __future__ import annotations

from typing import Final, LiteralString

from psycopg import sql

from relay.polling.queries import COLUMNS, SIZE
from relay.settle.statements import names_of

_STATE: Final = """
SELECT l.lane, streaming, commit_lsn, EXISTS (SELECT FROM {failures} AS f WHERE f.lane = l.lane),
       {timeline}
  FROM {lanes} AS l JOIN {leases} ON {ours}"""

# Does not wait for a lock on a row, because the other lanes would wait as well.
_SET_STREAMING: Final = """
UPDATE {lanes} SET streaming = %(streaming)s
 WHERE lane IN (SELECT l.lane FROM {lanes} AS l JOIN {leases} ON {ours} FOR NO KEY UPDATE OF l SKIP LOCKED)
RETURNING lane, set_config('synchronous_commit', 'on', true)"""

_HIGHEST_IDS: Final = """
SELECT a.lane, (SELECT coalesce(max(e.id), 0) FROM ONLY {events} AS e WHERE e.lane = a.lane)
  FROM unnest(%(lanes)s::smallint[]) AS a(lane)"""

_ANY_UP_TO: Final = """
SELECT a.lane, EXISTS (SELECT FROM ONLY {events} AS e WHERE e.lane = a.lane AND e.id <= a.id)
  FROM unnest(%(lanes)s::smallint[], %(ids)s::bigint[]) AS a(lane, id)"""

_MORE: Final = """
SELECT a.lane, (SELECT count(*)
                  FROM (SELECT FROM ONLY {events} AS e WHERE e.lane = a.lane AND e.id > a.id LIMIT a.most) AS more)
  FROM unnest(%(lanes)s::smallint[], %(ids)s::bigint[], %(most)s::bigint[]) AS a(lane, id, most)"""

# The end of the WAL, and whether the transactions that were open when the slot was made have ended.
_END: Final = """
SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint >= coalesce(max(opened_xid), 0)
  FROM {streams}"""

_LOWEST: Final = """
SELECT min(id), (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint FROM ONLY {events} WHERE lane = %(lane)s"""

_WHICH: Final = """
SELECT l.lane, ARRAY(SELECT e.id FROM ONLY {events} AS e WHERE e.lane = l.lane AND e.id = ANY(m.ids::bigint[])),
       pg_current_snapshot()::text
  FROM {lanes} AS l
  JOIN unnest(%(lanes)s::smallint[], %(epochs)s::bigint[], %(ids)s::text[]) AS m(lane, epoch, ids) ON {ours}"""

# Of each lane as many rows as fit into its room, and at least one; ``cut`` is the number of the first that does not
# fit. OFFSET 0 prevents the planner from reversing the join, which would compare each row of the table with each id.
_READ: Final = """
SELECT e.*, s.lane, s.cut
  FROM (SELECT *, min(n) FILTER (WHERE before >= room) OVER (PARTITION BY lane) AS cut
          FROM (SELECT a.*,
                       sum(e.size) OVER (PARTITION BY a.lane ORDER BY a.n ROWS UNBOUNDED PRECEDING) - e.size AS before
                  FROM unnest(%(lanes)s::smallint[], %(ids)s::bigint[], %(numbers)s::int[], %(rooms)s::bigint[])
                              AS a(lane, id, n, room)
                 CROSS JOIN LATERAL (SELECT {size} AS size FROM ONLY {events} AS e
                                      WHERE e.lane = a.lane AND e.id = a.id OFFSET 0) AS e) AS sized) AS s
 CROSS JOIN LATERAL (SELECT {columns} FROM ONLY {events} AS e WHERE e.lane = s.lane AND e.id = s.id OFFSET 0) AS e
 WHERE s.before < s.room"""

# Of each lane all of its rows, in one scan of the index (from Postgres 17 on); or one row without an id, if there are
# none, or if they do not fit. The statement above looks each row up twice, from the root of the index.
_READ_ALL: Final = """
SELECT e.*, l.lane, NULL::int
  FROM (SELECT l.*, s.bytes
          FROM unnest(%(lanes)s::smallint[], %(ids)s::text[], %(rooms)s::bigint[]) AS l(lane, ids, room)
         CROSS JOIN LATERAL (SELECT sum({size}) AS bytes FROM ONLY {events} AS e
                              WHERE e.lane = l.lane AND e.id = ANY(l.ids::bigint[])) AS s) AS l
  LEFT JOIN LATERAL (SELECT {columns} FROM ONLY {events} AS e
                      WHERE l.bytes <= l.room AND e.lane = l.lane AND e.id = ANY(l.ids::bigint[])
                     OFFSET 0) AS e ON true"""


class StreamQueries:
    def __init__(self, schema: str) -> None:
        names = names_of(schema)
        names["columns"] = sql.SQL(COLUMNS.replace("id, event_id", "e.id, e.event_id", 1))
        names["size"] = sql.SQL(SIZE)

        def query(text: LiteralString) -> sql.Composed:
            return sql.SQL(text).format(**names)

        self.state = query(_STATE)
        self.set_streaming = query(_SET_STREAMING)
        self.highest_ids = query(_HIGHEST_IDS)
        self.any_up_to = query(_ANY_UP_TO)
        self.more = query(_MORE)
        self.end = query(_END)
        self.lowest = query(_LOWEST)
        self.which = query(_WHICH)
        self.by_ids = query(_READ)
        self.all_by_ids = query(_READ_ALL)
