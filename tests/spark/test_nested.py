"""Nested values that a task writes as JSON are what Spark's ``to_json`` makes of them, in every kind of job."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from bench import ided

from spark_jobs.effects.mapped import Insert
from spark_jobs.job import ConsumerJob
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.payloads.json_output import json_text
from spark_jobs.spark import rows as spark_rows

pytestmark = pytest.mark.spark

INNER = (
    "t string, b boolean, i int, l bigint, d double, f float, n decimal(20,10), day date, at timestamp, "
    "local timestamp_ntz, raw binary"
)
KIND = f"s struct<{INNER}>, a array<struct<{INNER}>>, m map<string, struct<{INNER}>>, aa array<array<double>>"
# Spark prints more digits of some doubles than it takes to tell them from others: none of these.
DOUBLES = [0.0, -0.0, 1.0, 1.5, -0.25, 1e10, 1e300, 123456.789, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "a", 'q"\\/', "\n\t\x01\x7f", "ü€😀", "</script>", "\u2028"]


def value_of(chance: Any) -> dict[str, Any]:
    day = dt.date(1, 1, 1) + dt.timedelta(chance.randrange(3_000_000))
    at = dt.datetime.combine(day, dt.time(chance.randrange(24), 1, 2, chance.choice([0, 1, 999_999, 120_000])))
    values = {
        "t": chance.choice(TEXTS),
        "b": chance.random() < 0.5,
        "i": chance.choice([0, -(2**31), 2**31 - 1]),
        "l": chance.choice([0, -(2**63), 2**63 - 1]),
        "d": chance.choice(DOUBLES),
        "f": chance.choice([0.0, 1.0, 0.5, 0.1, 16777216.0, float("nan")]),
        "n": Decimal(chance.randrange(-(10**18), 10**18)).scaleb(-10) * chance.choice([1, 0, 100]),
        "day": day,
        "at": at.replace(tzinfo=dt.UTC),
        "local": at,
        "raw": bytes(chance.randrange(256) for _ in range(chance.randrange(5))),
    }
    return {name: value if chance.random() < 0.8 else None for name, value in values.items()}


def some(chance: Any, make: Any) -> Any:
    return None if chance.random() < 0.15 else make()


def test_a_task_writes_what_spark_writes(spark, chance):
    """Of each type, at each depth, with NULL in each place."""
    rows = [
        {
            "s": some(chance, lambda: value_of(chance)),
            "a": some(chance, lambda: [some(chance, lambda: value_of(chance)) for _ in range(chance.randrange(4))]),
            "m": some(chance, lambda: {t: some(chance, lambda: value_of(chance)) for t in chance.sample(TEXTS, 2)}),
            "aa": some(chance, lambda: [some(chance, lambda: chance.sample([*DOUBLES, None], 3)) for _ in range(3)]),
        }
        for _ in range(800)
    ]
    frame = spark.createDataFrame(rows, KIND)
    copied, types = spark_rows.copyable(frame)
    assert set(types.values()) == {"jsonb"}
    table = frame.toArrow().combine_chunks()
    by_spark = copied.toArrow()
    for name in types:
        by_task = json_text(table.column(name).chunk(0)).to_pylist()
        for ours, theirs in zip(by_task, by_spark.column(name).to_pylist(), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert json.loads(ours, parse_float=Decimal) == json.loads(theirs, parse_float=Decimal)


def test_keys_of_a_map_that_are_no_texts(spark):
    """Protobuf has maps with such keys. In JSON the names in an object are texts."""
    keys: dict[str, list[Any]] = {
        "int": [0, -(2**31), 7],
        "bigint": [0, -(2**63), 2**63 - 1],
        "boolean": [True, False],
        "decimal(20,0)": [Decimal(0), Decimal(2**64 - 1)],
    }
    rows = [
        [{key: f"{key}" for key in some} for some in keys.values()],
        [{} for _ in keys],
        [None for _ in keys],
    ]
    frame = spark.createDataFrame(rows, ", ".join(f"`{kind}` map<{kind}, string>" for kind in keys))
    copied, types = spark_rows.copyable(frame)
    assert set(types.values()) == {spark_rows._in_postgres(one.dataType) for one in frame.schema} == {"jsonb"}
    by_spark, table = copied.toArrow(), frame.toArrow().combine_chunks()
    for kind in keys:
        ours, theirs = json_text(table.column(kind).chunk(0)).to_pylist(), by_spark.column(kind).to_pylist()
        assert ours[1:] == theirs[1:] == ["{}", None], kind
        assert json.loads(ours[0]) == json.loads(theirs[0]), kind


def test_keys_of_a_map_that_only_spark_writes(spark):
    """Of days, for example, it writes the numbers."""
    frame = spark.createDataFrame([], "d map<date, string>, b map<binary, string>, x map<double, string>")
    assert [spark_rows._in_postgres(one.dataType) for one in frame.schema] == [None] * 3


SCHEMA = (
    "id string NOT NULL, customer struct<id: int, name: string, vip: boolean>, "
    "lines array<struct<sku: string, cents: bigint, at: timestamp>>, rates map<string, double>"
)
SETUP = "CREATE TABLE IF NOT EXISTS orders (id text, customer jsonb, lines jsonb, rates jsonb)"
# More than Spark hands over at once, with something bad in each batch.
EACH = 1_200
BAD, NUL, LONG = 300, 1_050, 1_100


def order(number: int) -> bytes:
    line = {"sku": f'a "{number % 7}"', "cents": number, "at": "2026-01-31T12:00:00+01:00", "more": number}
    made = {
        "id": f"{number}",
        "customer": {"id": number % 977, "name": None if number % 3 else "x", "vip": number % 2 == 0},
        "lines": [line] * (number % 4),
        "rates": {"eur": 1.5} if number % 5 else None,
    }
    if number == BAD:
        made["customer"] = {"id": "seven"}
    if number == NUL:
        made["lines"] = [{"sku": "\0"}]
    if number == LONG:
        made["lines"] = [line] * 8_000
    return json.dumps(made).encode()


def test_a_job_with_nested_fields_has_the_same_rows_whoever_writes_them(bench, small_batches):
    """1,200 messages in a partition, with a bad one, one that Postgres can't store and one of 700 KB among them."""
    bench.produce((order(number), str(number), 0) for number in range(EACH))
    straight = ConsumerJob("straight", (bench.topic,), Insert("orders"), schema=SCHEMA, setup=SETUP)
    assert spark_rows.task_decoder(straight).columns is not None
    # Few messages would be applied by the driver.
    totals = bench.once(straight, driver_records=0)
    assert (totals.applied, totals.dead) == (EACH - 2, 2)
    dead = (
        "SELECT part, message_offset, reason FROM consumer.dead_letters WHERE grp = '{}' ORDER BY part, message_offset"
    )
    expected = [(0, BAD, "undecodable"), (0, NUL, "failed")]
    assert bench.rows(dead.format("straight")) == expected
    bench.run("ALTER TABLE orders RENAME TO by_tasks")
    for group, changes in (("spark", {"transform": lambda rows: rows.filter("true")}), ("batch", {"atomic": "batch"})):
        assert bench.once(replace(straight, group=group, **changes)).applied == EACH - 2
        assert bench.rows(dead.format(group)) == expected
        differing = (
            "SELECT * FROM (SELECT * FROM orders EXCEPT ALL SELECT * FROM by_tasks) AS more UNION ALL"
            " SELECT * FROM (SELECT * FROM by_tasks EXCEPT ALL SELECT * FROM orders) AS fewer LIMIT 3"
        )
        assert bench.rows(differing) == []
        bench.run("DROP TABLE orders")
    assert bench.rows(f"SELECT count(*), max(jsonb_array_length(lines)) FROM by_tasks WHERE id = '{LONG}'") == [
        (1, 8_000)
    ]


def test_letters_of_nested_jobs_are_tried_again_by_spark(bench):
    """The task writes JSON of what it reads; what is tried again takes Spark's way, and has to fit the same columns."""
    job = ConsumerJob(
        "letters",
        (bench.topic,),
        Insert("orders"),
        schema=SCHEMA,
        setup=SETUP + "; ALTER TABLE orders ADD CHECK (id <> '1')",
    )
    for number in range(3):
        bench.send_raw(order(number), ided(), partition=0)
    totals = bench.once(job)
    assert (totals.applied, totals.dead) == (2, 1)
    bench.run("ALTER TABLE orders DROP CONSTRAINT orders_id_check")
    bench.run("UPDATE consumer.dead_letters SET state = 'retry'")
    assert bench.once(replace(job, setup=SETUP)).applied == 1
    assert bench.rows("SELECT id, customer->>'id', jsonb_array_length(lines) FROM orders ORDER BY id") == [
        (str(number), str(number), number) for number in range(3)
    ]


def test_rows_for_spark_stay_nested(bench):
    """Of the same plan: only what is copied becomes text."""
    decoder = spark_rows.task_decoder(ConsumerJob("g", (bench.topic,), Insert("orders"), schema=SCHEMA))
    assert decoder.columns is not None
    assert {name: kind for name, kind in decoder.columns.items() if kind == "jsonb"}.keys() == {
        "customer",
        "lines",
        "rates",
    }
    assert [pa.types.is_nested(one.type) for one in decoder.kind if one.name in {"customer", PROBLEM}] == [True, False]
