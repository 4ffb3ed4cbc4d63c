"""The sizes of the tables of a schema, for the operations page. Read-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg

from relay.insights import read_rows

_DOING: Final = "looking at the sizes"

_SIZES: Final = """
SELECT c.relname AS name, pg_total_relation_size(c.oid) AS bytes, greatest(c.reltuples, 0)::bigint AS rows,
       coalesce(s.n_dead_tup, 0) AS dead_rows, greatest(s.last_vacuum, s.last_autovacuum) AS vacuumed_at,
       p.relname AS parent
  FROM pg_class AS c
  JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = %(schema)s
  LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid
  LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid
  LEFT JOIN pg_class AS p ON p.oid = i.inhparent
 WHERE c.relkind = 'r'
 ORDER BY coalesce(p.relname, c.relname), c.relname"""

_SERVER: Final = """
SELECT current_setting('server_version') AS version, current_database() AS database, session_user AS role,
       pg_is_in_recovery() AS standby, current_setting('synchronous_commit') AS synchronous_commit,
       pg_database_size(current_database()) AS bytes,
       (SELECT max(clock_timestamp() - xact_start) FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid()) AS oldest_transaction"""


def table_sizes(connection: psycopg.Connection[Any], schema: str) -> Sequence[Mapping[str, Any]]:
    """Return the tables of a schema, partitions included: bytes with indexes, and the planner's count of rows.

    Raises Unavailable.
    """
    return read_rows(connection, _DOING, _SIZES, {}, {"schema": schema})


def server(connection: psycopg.Connection[Any]) -> Mapping[str, Any]:
    """Return the server's version, the database and its size, our role, and the age of the oldest transaction.

    Raises Unavailable.
    """
    (row,) = read_rows(connection, _DOING, _SERVER, {})
    return row
