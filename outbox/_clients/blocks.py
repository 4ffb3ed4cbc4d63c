"""A table's blocks, for statements that go through all of it in steps, each in a transaction of its own.

One statement over a large table is a long transaction, which holds back VACUUM, and an error undoes all of it. By its
blocks no row is read twice, whichever indexes the table has. (A step by index with a LIMIT would pass over the index
entries that the steps before it have left, as long as an old snapshot keeps them.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import psycopg
from psycopg import sql

STEP: Final = 1_000
"""Blocks: 8 MB, usually."""

_STEPS: Final = "SELECT (pg_relation_size({name}) / current_setting('block_size')::bigint + {step} - 1) / {step}"


def in_step(number: int) -> sql.Composed:
    """Return SQL: whether a row is in this step. As a condition on the only table of a FROM."""
    return sql.SQL("ctid >= {first}::tid AND ctid < {end}::tid").format(
        first=sql.Literal(f"({number * STEP},0)"), end=sql.Literal(f"({(number + 1) * STEP},0)")
    )


def steps(connection: psycopg.Connection[Any], table: sql.Identifier) -> Iterator[sql.Composed]:
    """Return ``in_step`` of each step through the blocks that a table has now."""
    query = sql.SQL(_STEPS).format(name=sql.Literal(table.as_string(connection)), step=sql.Literal(STEP))
    [(count,)] = connection.execute(query)
    return map(in_step, range(count))
