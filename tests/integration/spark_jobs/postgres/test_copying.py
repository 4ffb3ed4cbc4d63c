"""Rows in the binary format are the rows that CSV would have brought, value by value."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
import random
import uuid
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from spark_jobs.postgres import encoding
from spark_jobs.postgres.copying import Unfit, copy_csv, copy_rows

CHANCE = random.Random(3)
FLOATS = [0.0, -0.0, 1.5, -1e308, 5e-324, math.inf, -math.inf, math.nan]
EVERY = {
    "smallint": (pa.int16(), [0, -1, 2**15 - 1, -(2**15)]),
    "integer": (pa.int32(), [0, -1, 2**31 - 1, -(2**31)]),
    "bigint": (pa.int64(), [0, -1, 2**63 - 1, -(2**63)]),
    "real": (pa.float32(), [*FLOATS[:3], *FLOATS[5:], 3.4e38]),
    "double precision": (pa.float64(), FLOATS),
    "boolean": (pa.bool_(), [True, False]),
    "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(1999, 12, 31), dt.date(2000, 1, 1), dt.date(9999, 12, 31)]),
    "timestamptz": (
        pa.timestamp("us", "UTC"),
        [dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(2026, 3, 4, 5, 6, 7, 89, tzinfo=dt.UTC)],
    ),
    "timestamp": (pa.timestamp("us"), [dt.datetime(1969, 12, 31, 23, 59, 59, 999999), dt.datetime(9999, 12, 31)]),
    "text": (pa.string(), ["", "a", "\u00fc\U0001f600", 'q"uo\n\t\\N,', "x" * 100_000]),
    "jsonb": (pa.string(), ["null", json.dumps({"a": [1, 2.50, "\u00fc"]}), "[]"]),
    "bytea": (pa.binary(), [b"", b"\0\xff\\", bytes(range(256))]),
    "uuid": (pa.string(), [str(uuid.UUID(int=CHANCE.getrandbits(128))) for _ in range(5)]),
}


def decimals(precision: int, scale: int) -> list[Decimal]:
    most = 10**precision - 1
    unscaled = [0, 1, -1, most, -most, 10**scale % (most + 1), *(CHANCE.randint(-most, most) for _ in range(50))]
    unscaled += [CHANCE.randint(0, 10 ** CHANCE.randint(1, precision) - 1) for _ in range(50)]
    return [Decimal(f"{number}E-{scale}") for number in unscaled]


for _precision, _scale in [
    (1, 0),
    (1, 1),
    (4, 0),
    (4, 4),
    (5, 2),
    (9, 3),
    (12, 2),
    (15, 8),
    (18, 0),
    (18, 18),
    (18, 7),
]:
    EVERY[f"numeric({_precision},{_scale})"] = (pa.decimal128(_precision, _scale), decimals(_precision, _scale))
EVERY["numeric(38,10)"] = (pa.decimal128(38, 10), decimals(38, 10))


def brought(url: str, kinds: dict[str, str], batches: list[pa.RecordBatch]) -> list[list[tuple]]:
    """What stands in a table after COPY as values, and after COPY as CSV."""
    fields = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in kinds.items()
    )
    found = []
    with psycopg.connect(url) as connection:
        for way in (copy_rows, copy_csv):
            connection.execute(sql.SQL("DROP TABLE IF EXISTS s; CREATE TABLE s ({})").format(fields))
            way(connection.cursor(), sql.Identifier("s"), kinds if way is copy_rows else list(kinds), batches)
            picked = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in kinds)
            found.append(connection.execute(sql.SQL("SELECT {} FROM s").format(picked)).fetchall())
    return found


def test_values_of_every_type(outbox_postgres):
    for kind, (arrow, values) in EVERY.items():
        columns = [values, [None, *values, None], [None] * 3, []]
        batches = [pa.RecordBatch.from_pydict({"v": pa.array(column, arrow)}) for column in columns]
        # A slice: an Arrow array may begin behind the beginning of its buffers.
        last = pa.RecordBatch.from_pydict({"v": pa.array([*values, None, *values], arrow)})
        batches.append(last.slice(len(values) - 1, 2))
        here, there = brought(outbox_postgres.url, {"v": kind}, batches)
        assert here == there, kind
        assert len(here) == sum(batch.num_rows for batch in batches), kind


def test_rows_of_all_types_together(outbox_postgres, monkeypatch):
    """Every column with and without NULLs, in parts that are smaller than a batch."""
    monkeypatch.setattr(encoding, "_AT_ONCE", 20_000)
    kinds: dict[str, str] = {}
    columns: dict[str, Any] = {}
    for number, (kind, (arrow, values)) in enumerate(EVERY.items()):
        if kind == "numeric(38,10)":
            continue
        full = list(itertools.islice(itertools.cycle(values), 120))
        kinds |= {f"v {number}": kind, f"n{number}": kind}
        columns[f"v {number}"] = pa.array(full, arrow)
        columns[f"n{number}"] = pa.array([CHANCE.choice([None, value]) for value in full], arrow)
    here, there = brought(outbox_postgres.url, kinds, [pa.RecordBatch.from_pydict(columns)])
    assert here == there
    assert len(here) == 120


def test_a_text_that_is_no_uuid_is_no_row(outbox_postgres):
    batch = pa.RecordBatch.from_pydict({"v": ["x", None]})
    with psycopg.connect(outbox_postgres.url) as connection:
        connection.execute("CREATE TABLE s (v uuid)")
        connection.commit()
        with pytest.raises(Unfit):
            copy_rows(connection.cursor(), sql.Identifier("s"), {"v": "uuid"}, [batch])
        connection.rollback()
        assert connection.execute("SELECT count(*) FROM s").fetchone() == (0,)
