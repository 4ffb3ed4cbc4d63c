"""The sizes of the tables of a schema and of the server's files, for the operations page and metrics. Read-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import psycopg

from relay.insights import read_rows

_DOING: Final = "looking at the sizes"

_SIZES: Final = r"""
SELECT c.relname AS name, coalesce(pg_total_relation_size(c.oid), 0) AS bytes,
       greatest(c.reltuples, 0)::bigint AS rows,
       coalesce(s.n_live_tup, 0) AS live_rows, coalesce(s.n_dead_tup, 0) AS dead_rows,
       greatest(s.last_vacuum, s.last_autovacuum) AS vacuumed_at, p.relname AS parent,
       coalesce(pg_get_expr(c.relpartbound, c.oid) = 'DEFAULT', false) AS stray, pg_relation_size(c.oid) > 0 AS filled,
       CASE WHEN k.atttypid IN ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype)
            THEN extract(epoch FROM clock_timestamp() - (regexp_match(
                     pg_get_expr(c.relpartbound, c.oid),
                     $r$TO \('(\d\d\d\d-\d\d-\d\d[^']*)'\)$r$))[1]::timestamptz)::float8 END AS over_seconds
  FROM pg_class AS c
  JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = %(schema)s
  LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid
  LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid
  LEFT JOIN pg_class AS p ON p.oid = i.inhparent
  LEFT JOIN pg_partitioned_table AS t ON t.partrelid = p.oid
  LEFT JOIN pg_attribute AS k ON k.attrelid = p.oid AND k.attnum = t.partattrs[0]
 WHERE c.relkind = 'r'
 ORDER BY coalesce(p.relname, c.relname), c.relname"""

_SERVER: Final = """
SELECT current_setting('server_version') AS version, current_database() AS database, session_user AS role,
       pg_is_in_recovery() AS standby, current_setting('synchronous_commit') AS synchronous_commit,
       pg_database_size(current_database()) AS bytes,
       (SELECT max(clock_timestamp() - xact_start) FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid()) AS oldest_transaction"""


_DISK: Final = """
SELECT pg_database_size(current_database()) AS database_bytes,
       has_function_privilege('pg_ls_waldir()', 'EXECUTE') AS may_list,
       (SELECT max(pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                                        ELSE pg_current_wal_lsn() END, restart_lsn))::bigint
          FROM pg_replication_slots) AS kept_bytes"""
_WAL_DIRECTORY: Final = "SELECT sum(size)::bigint AS bytes FROM pg_ls_waldir()"


class Disk(NamedTuple):
    """What the database takes on the server's disk.

    wal_bytes   the WAL directory; None for a role without pg_monitor.
    kept_bytes  the WAL that is kept for the slot that is furthest behind, of any application.
    """

    database_bytes: int
    wal_bytes: int | None
    kept_bytes: int


def disk(connection: psycopg.Connection[Any]) -> Disk:
    """Return what the database takes on the server's disk. Raises Unavailable."""
    (row,) = read_rows(connection, _DOING, _DISK, {})
    wal = read_rows(connection, _DOING, _WAL_DIRECTORY, {})[0]["bytes"] if row["may_list"] else None
    return Disk(row["database_bytes"], wal, row["kept_bytes"] or 0)


def table_sizes(connection: psycopg.Connection[Any], schema: str) -> Sequence[Mapping[str, Any]]:
    """Return the tables of a schema, partitions included: bytes with indexes, and the planner's count of rows.

    ``live_rows`` and ``dead_rows`` are those of the server's statistics. For a partition, ``stray`` says whether it is
    the default one, ``filled`` whether it ever had rows, and ``over_seconds`` how long ago its time ended; None without
    an end.

    Raises Unavailable.
    """
    return read_rows(connection, _DOING, _SIZES, {}, {"schema": schema})


def server(connection: psycopg.Connection[Any]) -> Mapping[str, Any]:
    """Return the server's version, the database and its size, our role, and the age of the oldest transaction.

    Raises Unavailable.
    """
    (row,) = read_rows(connection, _DOING, _SERVER, {})
    return row
