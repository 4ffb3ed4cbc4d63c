"""The settling statements, and the SQL that they share with those of the sources. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, LiteralString

from psycopg import sql

from outbox._clients.postgres import SYNCHRONOUS
from relay.core.lease import Lease

TABLES: Final = (
    "events",
    "lanes",
    "relays",
    "failures",
    "published",
    "dead_letters",
    "streams",
    "audit",
    "pauses",
    "scheduled",
    "verified",
    "idempotency_keys",
    "ledger",
    "ledger_state",
)

TIMELINE: Final = "('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int"
"""SQL: the timeline on which a primary writes; pg_control_checkpoint() shows it only after the next checkpoint. An
error on a standby."""

_THIS_OUTBOX: Final = "quote_ident(current_database()) || '.' || quote_ident({schema})"
"""SQL: which of the server's outboxes this is, for markers."""

LEASES: Final = "unnest(%(lanes)s::smallint[], %(epochs)s::bigint[]) AS m(lane, epoch)"
"""SQL for FROM: the leases that ``lease_values`` binds."""

OURS: Final = "l.lane = m.lane AND l.epoch = m.epoch AND l.owner = %(owner)s"
"""SQL: whether the lease ``m`` is the one in the row ``l`` of lanes. The only comparison of leases there is.

The owner too: an asynchronous failover can lose the commit of a take-over, and then the next taker gets the same epoch.
"""

NOT_DELETED: Final = "rows that a DELETE has left: "
"""Part of the message of the error that ALL_GONE raises."""

_ALL_GONE: Final = """
       CASE WHEN (SELECT count(*) FROM gone) < (SELECT cardinality(places) FROM found)
            THEN CAST({} || (SELECT cardinality(places) FROM found) AS int) END"""
"""SQL: an error, which undoes the statement, unless each row in ``found`` is in ``gone``; else NULL.

A BEFORE trigger that returns NULL and a policy of row security both keep rows without an error: these would be
published again with each turn. A row that another session deletes at the same moment is not in ``gone`` either.
"""

_CREATED_AT: Final = "least(greatest(created_at, '0001-01-03'), '9999-12-29')"
"""SQL: when an event was written. A writer may set it, and Postgres has times that Python has not: infinity, and those
before year 1."""

# IS TRUE makes the planner hash the list of lanes instead of joining it row by row. LIMIT prevents it from reversing
# the join. If the statistics are from a moment without rows (between two bursts, while an old snapshot keeps the dead
# ones), it believes that the table is empty and would compare each row with each id: a minute for 2,000 ids and a
# backlog of 100,000. By ctid, nothing is left to join. A failure's row may be updated meanwhile, which changes its
# ctid: it is found by its key, and there are few.
_SETTLING: Final = """
WITH mine AS (
    SELECT * FROM unnest(%(lanes)s::smallint[], %(epochs)s::bigint[], %(expected)s::bigint[], %(batches)s::bigint[],
                         %(lsns)s::bigint[], %(writes)s::boolean[], %(own_ids)s::text[], %(versions)s::tid[])
                  AS m(lane, epoch, expected, batch, lsn, writes, own_id, version)),
held AS MATERIALIZED (
    SELECT l.lane, l.ctid AS version FROM {lanes} AS l JOIN mine AS m ON {ours}{by_version}
     WHERE (m.expected IS NULL OR l.last_batch = m.expected)
       AND (m.own_id IS NULL OR l.transactional_id = m.own_id)
       FOR NO KEY UPDATE OF l SKIP LOCKED),
written AS (
    UPDATE {lanes} AS l SET lease_until = clock_timestamp() + make_interval(secs => %(ttl)s),
           last_batch = coalesce(m.batch, l.last_batch), commit_lsn = greatest(m.lsn, l.commit_lsn)
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
found AS MATERIALIZED (
    SELECT ARRAY(
        SELECT e.place
          FROM settled AS p
         CROSS JOIN LATERAL (SELECT e.ctid AS place FROM ONLY {events} AS e
                              WHERE e.lane = p.row_lane AND e.id = p.row_id AND e.event_id = p.row_event_id
                              LIMIT 1) AS e
         WHERE (p.row_lane IN (SELECT lane FROM held)) IS TRUE) AS places),
gone AS (DELETE FROM ONLY {events} WHERE ctid = ANY((SELECT places FROM found)::tid[]) RETURNING {gone})"""

# The place of each row is looked up by bisection: in a plan for any values, a join of the two lists would compare each
# row with each place, which takes seconds for thousands.
_ARCHIVED: Final = """,
kept AS (
    INSERT INTO {published} (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes,
                             headers, created_at, published_at, topic, partition, "offset")
    SELECT g.lane, g.id, g.event_id, g.aggregate_type, g.aggregate_id, g.event_type, g.payload, g.payload_bytes,
           g.headers, g.created_at, clock_timestamp(), (%(topics)s::text[])[nullif((%(topic_numbers)s::int[])[at], 0)],
           nullif((%(partitions)s::int[])[at], -1), nullif((%(offsets)s::bigint[])[at], -1)
      FROM gone AS g CROSS JOIN LATERAL (SELECT width_bucket(g.id, %(place_ids)s::bigint[]) AS at OFFSET 0) AS place)"""

# Look up the lane's row by its known version, without visiting dead versions, which an old snapshot keeps.
_BY_VERSION: Final = " AND l.ctid = m.version"

_HELD: Final = """
SELECT held.lane, (SELECT {synchronous}), coalesce(written.version, held.version)::text, {all_gone}
  FROM held LEFT JOIN written ON written.lane = held.lane"""

_STILL_HELD: Final = """
SELECT l.lane FROM {lanes} AS l
  JOIN unnest(%(lanes)s::smallint[], %(epochs)s::bigint[], %(versions)s::tid[]) AS m(lane, epoch, version)
    ON {ours}{by_version}"""

_WHY: Final = """
SELECT l.lane, l.last_batch, l.transactional_id FROM {lanes} AS l JOIN {leases} ON {ours}"""


# Without fresh statistics the planner may sort the whole backlog for each batch, or scan all of it for the rows to
# delete; a new outbox has none, and a relay has no right to ANALYZE. The primary key has a lane in id order.
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
STATEMENT_LIMIT: Final = "SELECT set_config('statement_timeout', %s, true)"
END_IDLE: Final = "SELECT set_config('idle_in_transaction_session_timeout', %(ttl_ms)s, true)"


def array(values: Sequence[int | str | None]) -> str:
    """Return numbers or UUIDs as the text of a Postgres array; the driver's conversion costs a microsecond for each."""
    return "{" + ",".join("NULL" if value is None else str(value) for value in values) + "}"


def lease_values(leases: Collection[Lease]) -> dict[str, Any]:
    """Return leases of one relay as the parameters of LEASES and OURS."""
    return {
        "lanes": array([lease.lane for lease in leases]),
        "epochs": array([lease.epoch for lease in leases]),
        "owner": next((lease.owner for lease in leases), None),
    }


# In rows of relays. A beat in the future is from before the clock went back: a living relay soon beats again.
_ALIVE: Final = "alive_until >= clock_timestamp() AND heartbeat_at <= clock_timestamp()"

# For UPDATE of lanes, whatever the lease: its holder must not settle or renew any more.
_RELEASED: Final = "owner = NULL, epoch = epoch + 1, lease_until = '-infinity'"


def names_of(schema: str) -> dict[str, sql.Composable]:
    """Return the names in the statements on one outbox: its tables, and shared pieces of SQL."""
    return {
        **{name: sql.Identifier(schema, name) for name in TABLES},
        "synchronous": sql.SQL(SYNCHRONOUS),
        "timeline": sql.SQL(TIMELINE),
        "all_gone": sql.SQL(_ALL_GONE).format(sql.Literal(NOT_DELETED)),
        "this_outbox": sql.SQL(_THIS_OUTBOX).format(schema=sql.Literal(schema)),
        "leases": sql.SQL(LEASES),
        "ours": sql.SQL(OURS),
        "created_at": sql.SQL(_CREATED_AT),
        "alive": sql.SQL(_ALIVE),
        "released": sql.SQL(_RELEASED),
    }


class SettlingStatements:
    def __init__(self, schema: str, *, archive: bool) -> None:
        names = names_of(schema)

        def query(text: LiteralString, *, by_version: bool = False) -> sql.Composed:
            # What is not archived is not computed: it takes a sixth of the statement's time.
            gone = sql.SQL("*" if archive else "1")
            return sql.SQL(text).format(**names, by_version=sql.SQL(_BY_VERSION if by_version else ""), gone=gone)

        settling: LiteralString = _SETTLING + (_ARCHIVED if archive else "")
        self.settle = query(settling + _HELD)
        self.settle_by_version = query(settling + _HELD, by_version=True)
        self.still_held = query(_STILL_HELD)
        self.still_held_by_version = query(_STILL_HELD, by_version=True)
        self.why = query(_WHY)
