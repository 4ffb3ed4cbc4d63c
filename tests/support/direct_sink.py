"""A sink's table that rows reach straight, or through ``batch``: what the tests of both ways share."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from consumer_group import NOON, ConsumerGroup, rows_of
from uuid_utils import uuid7

from spark_jobs.dedup.strategies import Dedup, Strategy, column_types
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.job import META
from spark_jobs.postgres.direct_copy import DirectCopy, direct_for
from spark_jobs.task import partition as task
from spark_jobs.task.feed import rejected_from
from spark_jobs.task.input import in_memory

PAYLOAD: dict[str, tuple[str, pa.DataType]] = {
    "t": ("text", pa.string()),
    "i": ("integer", pa.int32()),
    "l": ("bigint", pa.int64()),
    "f": ("double precision", pa.float64()),
    "n": ("numeric(20,4)", pa.decimal128(20, 4)),
    "b": ("boolean", pa.bool_()),
    "at": ("timestamptz", pa.timestamp("us", "UTC")),
    "raw": ("bytea", pa.binary()),
    "d": ("date", pa.date32()),
}
COLUMNS = {name: kind for name, (kind, _) in PAYLOAD.items()} | META
# The sink's column, where it comes from, and values; those in the last list have to be refused.
KINDS: dict[str, tuple[str, str, list[Any], list[Any]]] = {
    "text": ("text", "t", ["", "a", None, "q\"uo'te\\\n\t,", "\\N", "\\.", "ü😀", " x "], []),
    "varchar": ("varchar(5)", "t", ["abcde", "abc  ", "abcde   ", "", None], ["abcdef"]),
    "char": ("char(3)", "t", ["a", "abc", "abc   "], ["abcd"]),
    "domain": ("short", "t", ["abc", None], ["abcd", "no"]),
    "domain of a domain": ("shorter", "t", ["abc"], ["abcd"]),
    "texts": ("varchar(3)[]", "t", ["{abc,d}", "{}"], ["{abcd}", "x"]),
    "bits": ("bit varying(3)", "t", ["101"], ["1011"]),
    "uuid": ("uuid", "t", ["0195d9c2-5c00-7abc-8def-0123456789ab", "0195D9C2-5C00-7ABC-8DEF-0123456789AB"], ["x"]),
    "jsonb": ("jsonb", "t", ['{"a": [1, null]}', "null"], ["{", ""]),
    "numeric from text": ("numeric(6,2)", "t", ["1.005", " 7 ", "1e2"], ["12345.6", "x"]),
    "integer from text": ("integer", "t", ["5", " -7"], ["1.5", "99999999999", ""]),
    "day": ("date", "t", ["2026-01-31", "infinity"], ["2026-02-31"]),
    "time": ("timestamptz", "t", ["2026-01-31T12:00:00+02:00"], ["noon"]),
    "mood": ("mood", "t", ["good"], ["so so"]),
    "smallint": ("smallint", "i", [5, None, -32768], [32768]),
    "numeric": ("numeric(5,1)", "l", [5, -9999], [10**4, 2**62]),
    "text from integer": ("text", "l", [2**62, None], []),
    "double": ("double precision", "f", [0.1, -0.0, 1e308, float("inf"), 5e-324, None], []),
    "numeric from double": ("numeric", "f", [0.1, 1 / 3], []),
    "real": ("real", "f", [0.1], [1e300]),
    "decimal": ("numeric(20,2)", "n", [Decimal("1.0050"), Decimal("-3.1400"), None], []),
    "truth": ("boolean", "b", [True, False, None], []),
    "moment": ("timestamptz", "at", [NOON, NOON.replace(year=1, microsecond=5), NOON.replace(year=9999), None], []),
    "seconds": ("timestamptz(0)", "at", [NOON.replace(microsecond=500_000)], []),
    "date": ("date", "d", [dt.date(1, 1, 1), dt.date(9999, 12, 31), None], []),
    "bytes": ("bytea", "raw", [b"\x00\xff", b"", None], []),
    "checked": ("integer CHECK (v < 100)", "i", [5], [100]),
    "generated": ("integer, w integer GENERATED ALWAYS AS (v * 2) STORED", "i", [5], []),
    "not null": ("integer NOT NULL", "i", [5], [None]),
    "numbered": ("text, w bigint GENERATED ALWAYS AS IDENTITY", "t", ["a", "b"], []),
}
NOT_DIRECT = {"texts", "bits", "mood", "numeric from double", "real", "seconds"}


@dataclass
class Sink(ConsumerGroup):
    """A group, and a table ``s`` for each test."""

    next: int = 0

    def direct(self, effect: object, strategy: Strategy | None = None) -> DirectCopy | None:
        with psycopg.connect(self.url) as connection:
            return direct_for(connection.cursor(), effect, strategy or Dedup(), COLUMNS, list(PAYLOAD))

    def statements(self, effect: Insert | Upsert, payload: list[str]) -> str:
        with psycopg.connect(self.url) as connection:
            types = column_types(connection.cursor(), effect.table)
            return ";".join(one.as_string(connection) for one in effect.statements(payload, types))

    def apply(
        self, effect: Insert | Upsert | str, rows: dict[str, list[Any]], direct: DirectCopy | None, **plan: Any
    ) -> tuple[str, list[int]]:
        """Apply rows at the next offsets. Returns the outcome, and the offsets of rejected messages."""
        size = len(next(iter(rows.values())))
        payload = [name for name in plan.get("columns", COLUMNS) if name not in META]
        statements = effect if isinstance(effect, str) else self.statements(effect, payload)
        given = {"columns": COLUMNS, "effect": statements, "direct": direct, **plan}
        made = self.plan(0, self.next, size, **given)
        columns = {
            "message_id": [str(uuid7()) for _ in range(size)],
            **rows,
            **{
                name: pa.array(rows.get(name, [None] * size), PAYLOAD.get(name, ("", pa.string()))[1])
                for name in payload
            },
        }
        batch = rows_of(size, self.next, **columns)
        (report,) = task.apply_rows(made, in_memory([batch]))
        ((outcome, fresh, detail),) = ((one["outcome"], one["fresh"], one["detail"]) for one in report.to_pylist())
        if outcome == "applied":
            self.next += size
            return outcome, [fresh]
        return outcome, [record.place[2] for record in rejected_from(detail)] if outcome == "rejected" else []


@pytest.fixture
def sink(outbox_postgres) -> Sink:
    made = Sink(outbox_postgres.url)
    made.begin([0])
    made.run("CREATE DOMAIN short AS varchar(3) CHECK (VALUE <> 'no'); CREATE DOMAIN shorter AS short")
    made.run("CREATE TYPE mood AS ENUM ('good', 'bad')")
    return made
