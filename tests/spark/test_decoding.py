"""Payloads of all kinds on real Spark, Kafka and Postgres: what reaches a sink's table, and what a dead letter says."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from decoding_support import check, dead, run, send

from outbox.consumer.errors import JobError
from spark_jobs.job import ConsumerJob
from spark_jobs.payloads.ddl import json_schema
from spark_jobs.payloads.decoding import Json
from spark_jobs.payloads.reading import Policy

pytestmark = pytest.mark.spark


def test_json_reaches_the_table_to_the_letter(bench):
    """Fields named like Kafka's columns too; and NULL in every column for a tombstone, NOT NULL or not."""
    schema = (
        "key string NOT NULL, value decimal(38,2), offset int, timestamp timestamp, local timestamp_ntz, day date, "
        "bin binary, real double, single float, small smallint, ok boolean, "
        "lines array<struct<sku: string NOT NULL, n: decimal(20,10)>>, rates map<string, bigint>"
    )
    columns = (
        "key text, value numeric, offset_ int, timestamp timestamptz, local timestamp, day date, bin bytea, "
        "real double precision, single real, small smallint, ok boolean, lines jsonb, rates jsonb"
    )
    full = {
        "key": 'quote " comma , line \n \\N tab\t',
        "value": 0,
        "offset": -(2**31),
        "timestamp": "2026-01-31T12:00:00.000001+01:00",
        "local": "2026-01-31T12:00:00",
        "day": "0001-01-01",
        "bin": "AP8=",
        "real": 0.1,
        "single": 0.5,
        "small": -32768,
        "ok": False,
        "lines": [{"sku": "a", "n": 1.5, "more": 1}, None],
        "rates": {"x": 2**63 - 1, "y": None},
    }
    exact = "123456789012345678901234567890123456.78"
    nothing = [None] * 12
    cases: list[tuple[bytes | None, Any]] = [
        (
            json.dumps(full).replace('"value": 0', f'"value": {exact}').encode(),
            (
                full["key"],
                Decimal(exact),
                -(2**31),
                datetime(2026, 1, 31, 11, 0, 0, 1, UTC),
                datetime(2026, 1, 31, 12),
                date(1, 1, 1),
                b"\0\xff",
                0.1,
                0.5,
                -32768,
                False,
                [{"sku": "a", "n": 1.5}, None],
                {"x": 2**63 - 1, "y": None},
            ),
        ),
        (b'{"key": ""}', ("", *nothing)),
        (None, None),
        (b"{}", "field key: is missing"),
        (b'{"key": null}', "field key: is null"),
        (b'{"key": 5}', "field key: is not a text"),
        (b'{"key": "a", "offset": 1.5}', "field offset: is not a whole number"),
        (b'{"key": "a", "value": 0.001}', "field value: does not fit decimal(38,2)"),
        (b'{"key": "a", "key": "b"}', "field key: stands twice"),
        (b'{"key": "a"} {"key": "b"}', "not JSON"),
        (b'[{"key": "a"}]', "not a JSON object"),
        (b"", "not JSON"),
        (b'{"key": "a", "lines": [{"n": 1}]}', "field lines[].sku: is missing"),
        (b'{"key": "last"}', ("last", *nothing)),
    ]
    for value, _ in cases:
        send(bench, value)
    # A column called offset would need quotes in the helper.
    job = ConsumerJob(
        "json",
        [bench.topic],
        'INSERT INTO sink SELECT message_offset, message_tombstone, key, value, "offset", "timestamp", local, day, '
        "bin, real, single, small, ok, lines, rates FROM batch",
        schema=schema,
        setup=f"CREATE TABLE sink (number bigint PRIMARY KEY, tombstone boolean, {columns})",
    )
    totals = bench.once(job)
    assert (totals.read, totals.dead) == (len(cases), 10)
    check(bench, "sink", [expected for _, expected in cases])


def test_the_open_schema(bench):
    """Fields by their names and policies: tests/unit/spark_jobs/payloads/test_decoding.py."""
    exact = '{"n": [12345678901234567890123456789012345678, 0.10000000000000000000000000000000000001, 1e20, 1.50]}'
    for value in (b'{"a": 1, "more": 2}', exact.encode(), None, b"[]"):
        send(bench, value)
    run(bench, Json("variant"), "whole", "payload jsonb", "open")
    check(bench, "whole", [({"a": 1, "more": 2},), (json.loads(exact),), None, "not a JSON object"])
    # Postgres, whose numbers have no limit that matters here, compares them digit by digit.
    assert bench.rows(f"SELECT payload = '{exact}'::jsonb FROM whole WHERE number = 1") == [(True,)]


def test_a_hostile_payload_costs_one_row(bench):
    """Each between two good messages, all in one round."""
    job = ConsumerJob(
        "hostile",
        [bench.topic],
        "INSERT INTO hostile SELECT message_offset, id, amount FROM batch",
        schema="id string, amount decimal(12,2)",
        setup="CREATE TABLE IF NOT EXISTS hostile (number bigint PRIMARY KEY, id text, amount numeric)",
        max_payload_bytes=300_000,
    )
    digits = b"7" * 40_000
    hostile = {
        "stands twice": b"{%s}" % b",".join(b'"f%d":1' % number for number in [*range(16_000), 0]),
        "not JSON": b"[" * 100_000,
        "not JSON ": b'{"id":"a","other":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "not JSON  ": b'{"id":"a","amount":1e400000}',
        "not JSON   ": b'{"id":"a","amount":' + b"1" * 10**5 + b"}",
        "300001 bytes": b'{"id":"' + b"a" * (300_001 - 9) + b'"}',
    }
    for value in hostile.values():
        send(bench, b'{"id":"%s","amount":1.5}' % digits)
        send(bench, value)
    send(bench, None)
    totals = bench.once(job)
    assert (totals.applied, totals.dead) == (len(hostile) + 1, len(hostile))
    found = dead(bench)
    assert sorted(found) == list(range(1, 2 * len(hostile), 2))
    for said, error in zip(hostile, (found[offset] for offset in sorted(found)), strict=True):
        assert said.strip() in error
    assert bench.rows("SELECT DISTINCT reason FROM consumer.dead_letters") == [("undecodable",)]
    assert bench.rows("SELECT count(*), min(amount) FROM hostile WHERE id = repeat('7', 40000)") == [
        (len(hostile), Decimal("1.5"))
    ]
    assert bench.positions() == {0: 2 * len(hostile) + 1, 1: 0}
    # What was too large is read when the job allows it, as any other dead letter that is tried again.
    bench.run("UPDATE consumer.dead_letters SET state = 'retry' WHERE error LIKE '%bytes%'")
    assert bench.once(replace(job, max_payload_bytes=300_001)).applied == 1
    assert bench.rows("SELECT length(id) FROM hostile WHERE number = 11") == [(300_001 - 9,)]


def test_the_limit_is_for_every_decoder(bench):
    """Bytes as well."""
    send(bench, b"1234")
    send(bench, b"12345")
    send(bench, None)
    job = ConsumerJob(
        "bytes",
        [bench.topic],
        "INSERT INTO sizes SELECT message_offset, length(payload), message_tombstone FROM batch",
        setup="CREATE TABLE IF NOT EXISTS sizes (number bigint PRIMARY KEY, size int, tombstone boolean)",
        max_payload_bytes=4,
    )
    assert bench.once(job).dead == 1
    assert bench.rows("SELECT * FROM sizes ORDER BY 1") == [(0, 4, False), (2, None, True)]
    ((offset, value, error),) = bench.rows("SELECT message_offset, message_value, error FROM consumer.dead_letters")
    assert (offset, bytes(value)) == (1, b"12345")
    assert error == "the payload has 5 bytes, and the job takes 4 at most (max_payload_bytes)"


DDL = (
    "a int",
    "A: INT, b: String not null comment 'x, y''z', `c d``e` decimal( 12 , 2 )",
    'a array<struct<n: int NOT NULL COMMENT "x", m: map<string, array<bigint>>>> NOT NULL, b struct<c: date>',
    "b boolean, t tinyint, by byte, s smallint, sh short, i integer, l long, f float, r real, d double, de dec(3)",
    "n numeric, bi binary, da date, ts timestamp, tl timestamp_ltz, tn timestamp_ntz, key string, value string",
    "struct<a: int>",
    "a int, -- one, 'two\n/* three,\n */ b int",
    *("a", "a int,", "a int b int", "a nothing", "a array<int", "a map<string>", "a int NOT", "a int COMMENT 5"),
    *("a decimal(", "a decimal(1", "1 + 1", "a int)", "struct<a: int"),
)


@pytest.mark.parametrize("ddl", DDL)
def test_contracts_check_reads_ddl_as_spark_does(spark, ddl):
    """It starts no JVM, so it has a parser of its own."""

    def untitled(schema: Any) -> Any:
        # Spark has its own names of types.
        if not isinstance(schema, dict):
            return schema
        return {name: untitled(part) for name, part in schema.items() if name != "title" or isinstance(part, dict)}

    declared = None
    with contextlib.suppress(JobError):
        declared = Json(ddl).task_plan()[0]
    if declared is None:
        with pytest.raises(JobError):
            json_schema(ddl, Policy())
    else:
        assert untitled(json_schema(ddl, Policy())) == untitled(json_schema(declared.toDDL(), Policy()))
        assert list(json_schema(ddl, Policy())["properties"]) == declared.fieldNames()
