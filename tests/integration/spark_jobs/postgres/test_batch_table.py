"""What is done with the rows of ``batch``: how they are read for functions, and how repeated ids are dropped."""

from __future__ import annotations

import datetime as dt

import psycopg
import pytest
from plans import nodes
from psycopg import sql

from spark_jobs.dedup import strategies
from spark_jobs.postgres.batch_table import read_rows

MANY = 20_000


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
def test_the_first_and_the_last_times_are_read_whatever_the_zone_of_the_session(outbox_postgres, zone):
    edges = [dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999999, dt.UTC)]
    with psycopg.connect(outbox_postgres.url) as connection:
        connection.execute("CREATE TEMPORARY TABLE batch (at timestamptz, day date)")
        for edge in edges:
            # Without a zone: psycopg would give the server that of the session.
            connection.execute(
                "INSERT INTO batch VALUES (%s::timestamp AT TIME ZONE 'UTC', %s)",
                (edge.replace(tzinfo=None), edge.date()),
            )
        connection.execute("SELECT set_config('TimeZone', %s, false)", (zone,))
        columns = {"at": "timestamptz", "day": "date"}
        found = read_rows(connection.cursor(), columns, sql.Identifier("batch"), sql.SQL("at"))
    assert found.to_pydict() == {"at": edges, "day": [edge.date() for edge in edges]}


@pytest.mark.parametrize("rows", [1, 4])
def test_one_id_for_all_is_no_search_of_each_row_for_each_other(outbox_postgres, rows):
    """All rows of the first message stay: a transform has made several of it."""
    with psycopg.connect(outbox_postgres.url) as connection:
        connection.execute(
            "CREATE TEMPORARY TABLE batch AS SELECT 't' AS message_topic, 0 AS message_part, n / %s AS message_offset,"
            " '00000000-0000-4000-8000-000000000000'::uuid AS message_id FROM generate_series(0, %s - 1) AS n",
            (rows, MANY),
        )
        query = strategies.keep_first(sql.SQL("message_id"), strategies._EARLIEST)
        ((plan,),) = connection.execute(sql.SQL("EXPLAIN (ANALYZE, FORMAT JSON) ") + query).fetchall()
        left = connection.execute("SELECT message_offset, count(*) FROM batch GROUP BY 1").fetchall()
    assert left == [(0, rows)]
    looked_at = [
        (node["Actual Rows"] + node.get("Rows Removed by Join Filter", 0)) * node["Actual Loops"]
        for node in nodes(plan[0]["Plan"])
    ]
    assert max(looked_at) <= MANY
