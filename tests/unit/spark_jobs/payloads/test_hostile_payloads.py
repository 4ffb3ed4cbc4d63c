"""Payloads made to take long, or to end the one who reads them: a value or a problem, in time that grows as they do."""

from __future__ import annotations

import gc
import io
import itertools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from decoding_support import of_any_size, read_with
from google.protobuf import descriptor_pb2
from pyspark.sql import types as t
from range_support import task_decoder

from outbox.consumer.errors import JobError
from spark_jobs.effects.produce import Traced
from spark_jobs.job import ConsumerJob
from spark_jobs.payloads import avro as avro_payload
from spark_jobs.payloads import json_text as json_payload
from spark_jobs.payloads import protobuf as protobuf_payload
from spark_jobs.payloads.avro_limits import MOST_WEIGHTLESS
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.payloads.json_whole import JsonReader
from spark_jobs.payloads.reading import Policy, Problem, limited
from spark_jobs.payloads.registry import Schema
from spark_jobs.spark import rows as spark_rows
from spark_jobs.task.incoming import Messages

__all__ = ["of_any_size"]

NESTED = t.StructType(
    [
        t.StructField("text", t.StringType()),
        t.StructField("whole", t.LongType()),
        t.StructField("real", t.DoubleType()),
        t.StructField("money", t.DecimalType(10, 2)),
        t.StructField("moment", t.TimestampType()),
        t.StructField("lines", t.ArrayType(t.StructType().add("sku", t.StringType()))),
        t.StructField("rates", t.MapType(t.StringType(), t.LongType())),
    ]
)
PLAIN = t.StructType([field for field in NESTED.fields[:5] if field.name != "money"])
TEXT = t.StructType([t.StructField("payload", t.StringType())])

READERS: dict[str, tuple[t.StructType, Any]] = {
    "plain": (PLAIN, JsonReader(PLAIN, Policy())),
    "strict": (PLAIN, JsonReader(PLAIN, Policy("dead-letter", "null", "null"))),
    "nested": (NESTED, JsonReader(NESTED, Policy())),
    "variant": (TEXT, json_payload.variant_reader),
}


every_reader = pytest.mark.parametrize("way", READERS)


def with_two_readers(cases: Iterable[str]) -> list[Any]:
    """Pair each case with the reader of every kind of column, and with one of the others in turn."""
    others = itertools.cycle(way for way in READERS if way != "nested")
    return [pytest.param(case, way, id=f"{case}-{way}") for case in cases for way in ("nested", next(others))]


def read(way: str, values: list[bytes | None]) -> list[dict[str, Any]]:
    """Read a batch as a task does."""
    fields, reader = READERS[way]
    return read_with(reader, fields, values)


def cost(work: Callable[[], object]) -> float:
    """Processor seconds of this thread: what else runs does not count, nor what looks through all objects that live."""
    taken = []
    gc.disable()
    try:
        for _ in range(3):
            began = time.thread_time()
            work()
            taken.append(time.thread_time() - began)
    finally:
        gc.enable()
    return min(taken)


def assert_linear(work: Callable[[bytes], object], make: Callable[[int], bytes]) -> None:
    """Assert that a payload of four times the size takes about four times as long; quadratic would be sixteen.

    Three tries: who shares the processor's caches changes what the same work costs.
    """

    def taken(size: int) -> float:
        payload = make(size)
        return cost(lambda: work(payload))

    size = 500
    while taken(size) < 0.005 and size < 250_000:
        size *= 2
    assert any(taken(4 * size) < 9 * taken(size) for _ in range(3)), size


def fields(count: int) -> bytes:
    """So many fields, of which the last two have one name."""
    names = [f"f{number}" for number in range(count // 11)] + ["last", "last"]
    return b"{" + b",".join(b'"%s":1' % name.encode() for name in names) + b"}"


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "fields": fields,
    "inner fields": lambda size: b'{"text":"x","other":%s}' % fields(size),
    "equal fields": lambda size: b"{" + b",".join([b'"f":1'] * (size // 6)) + b"}",
    "objects with two": lambda size: b'{"other":[' + b",".join([b'{"a":1}'] * (size // 8)) + b',{"a":1,"a":2}]}',
    "digits": lambda size: b'{"text":"' + b"1" * size + b'"}',
    "digits of another": lambda size: b'{"other":"' + b"1" * size + b'"}',
    "digits and dots": lambda size: b'{"text":"' + b"1." * (size // 2) + b'"}',
    "short digits": lambda size: b'{"text":"' + b"1111111111111111 " * (size // 17) + b'"}',
    "fraction": lambda size: b'{"real":0.' + b"1" * size + b"}",
    "fraction of money": lambda size: b'{"money":0.' + b"1" * size + b"}",
    "zeros of money": lambda size: b'{"money":1.' + b"0" * size + b"}",
    "money as text": lambda size: b'{"money":"' + b"1" * size + b'"}',
    "fraction of another": lambda size: b'{"other":0.' + b"1" * size + b"}",
    "fraction of a second": lambda size: b'{"moment":"2026-01-31T12:00:00.' + b"0" * size + b'Z"}',
    "fractions": lambda size: b'{"other":[' + b",".join([b"0.1234567890123456789"] * (size // 22)) + b"]}",
    "exponents": lambda size: b'{"other":[' + b",".join([b"1e300"] * (size // 6)) + b"]}",
    "quotes": lambda size: b'{"text":"' + b'\\"' * (size // 2) + b'"}',
    "quotes and colons": lambda size: b'{"text":"' + b'\\":' * (size // 3) + b'"}',
    "colons": lambda size: b'{"text":"' + b":" * size + b'"}',
    "spaces": lambda size: b'{"text"' + b" " * size + b':"x"}',
    "spaces in a text": lambda size: b'{"text":"\\"' + b" " * size + b'"}',
    "arrays": lambda size: b'{"lines":[' + b",".join([b"[]"] * (size // 3)) + b"]}",
    "rates": lambda size: b'{"rates":' + fields(size) + b"}",
    "lines": lambda size: b'{"lines":[' + b",".join([b'{"sku":"a"}'] * (size // 12)) + b"]}",
    "brackets": lambda size: b'{"other":' + b"[" * size + b"]" * size + b"}",
    "open": lambda size: b'{"a":' * (size // 5),
    "whole": lambda size: b'{"whole":' + b"1" * size + b"}",
}


@pytest.mark.parametrize(("kind", "way"), with_two_readers(HOSTILE))
def test_no_payload_takes_more_than_in_proportion_to_its_size(way, kind):
    assert_linear(lambda payload: read(way, [payload]), HOSTILE[kind])


@every_reader
def test_a_field_that_stands_twice_among_very_many(way):
    """176 KB of it took half a minute."""
    payload = fields(16_000 * 11)
    assert len(payload) > 150_000
    good, bad, last = read(way, [b'{"text":"a"}', payload, b'{"text":"b"}'])
    assert "stands twice in one object" in bad[PROBLEM]
    assert good[PROBLEM] is last[PROBLEM] is None


def test_which_field_stands_twice_is_said_as_before():
    with pytest.raises(Problem, match="field b: stands twice"):
        json_payload.parse(b'{"a":1,"b":1,"c":1,"c":2,"b":2}', exact=True)


@every_reader
def test_a_text_of_very_many_digits_is_a_text(way):
    """40,000 of them took seven seconds."""
    (row,) = read(way, [b'{"text":"' + b"7" * 40_000 + b'"}'])
    assert row[PROBLEM] is None
    assert row["text"] == "7" * 40_000 if way != "variant" else json.loads(row["payload"])["text"] == "7" * 40_000


@pytest.mark.parametrize(
    "number",
    [
        "0.1234567890123456789",
        "-12345678901234567.8",
        "1234567890123456e1",
        "01234567890123456.0",
        "1.0000000000000001",
    ],
)
def test_numbers_with_more_digits_than_a_double_holds_are_still_found(number, monkeypatch):
    """The search for them was made linear: it has to find what it found."""
    values = [f'{{"money":{number}}}'.encode(), f'{{"x":"1.2 {number} 3.4"}}'.encode()]
    found = read("nested", values)
    monkeypatch.setattr(json_payload, "_may_differ", lambda *_, **__: True)
    assert found == read("nested", values)


DEEP = 100_000
UNREADABLE = {
    "brackets": b"[" * DEEP,
    "closed brackets": b"[" * DEEP + b"]" * DEEP,
    "braces": b'{"a":' * DEEP,
    "closed braces": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    **{
        f"{name} {what}": b'{"' + name.encode() + b'":' + text + b"}"
        for name in ("text", "whole", "real", "money", "lines", "other")
        for what, text in {
            "too deep": b"[" * DEEP + b"]" * DEEP,
            "cut off": b"[" * DEEP,
            "objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
            "huge": b"1e400000",
            "lower": b"-1e400000",
            "digits": b"1" * 10**5,
            "minus digits": b"-" + b"1" * 10**5,
        }.items()
    },
}


@pytest.mark.parametrize(("kind", "way"), with_two_readers(UNREADABLE))
def test_what_can_not_be_read_is_a_problem_and_spoils_nothing_else(way, kind):
    first, bad, last = read(way, [b'{"text":"a"}', UNREADABLE[kind], b'{"text":"b"}'])
    assert bad.pop(PROBLEM)
    assert len(READERS[way][0]) == len(bad)
    assert set(bad.values()) == {None}
    assert first[PROBLEM] is last[PROBLEM] is None
    assert first == read(way, [b'{"text":"a"}'])[0]


ORDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]}


def avro(writer: Any, reader: Any = None) -> tuple[t.StructType, Any]:
    plan = avro_payload.Plan(
        Schema("AVRO", json.dumps(reader or writer)), Schema("AVRO", json.dumps(writer)), None, Policy()
    )
    return plan.fields(), plan()


def written(schema: Any, record: Any) -> bytes:
    from fastavro import parse_schema, schemaless_writer

    target = io.BytesIO()
    schemaless_writer(target, parse_schema(json.loads(json.dumps(schema))), record)
    return target.getvalue()


def varint(number: int) -> bytes:
    """A long as Avro writes it."""
    number = (number << 1) ^ (number >> 63)
    found = b""
    while number > 0x7F:
        found += bytes([number & 0x7F | 0x80])
        number >>= 7
    return found + bytes([number])


def test_avro_decimals_of_any_length():
    of = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
    schema = {"type": "record", "name": "Paid", "fields": [{"name": "amount", "type": of}]}
    kind, reader = avro(schema)
    good = written({**schema, "fields": [{"name": "amount", "type": "bytes"}]}, {"amount": b"\x04\xd2"})

    def long(size: int) -> bytes:
        return varint(size) + b"\x7f" * size

    first, bad, last = read_with(reader, kind, [good, long(1_000_000), good])
    assert first == last == {"amount": Decimal("12.34"), PROBLEM: None}
    assert bad["amount"] is None
    assert bad[PROBLEM]
    assert_linear(lambda payload: read_with(reader, kind, [payload]), long)


def test_avro_that_is_nested_without_an_end():
    """In a field that the columns lack: it is read over, by the schema that it was written with."""
    node = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}
    writer = {**ORDER, "fields": [{"name": "tree", "type": node}, *ORDER["fields"]]}
    kind, reader = avro(writer, ORDER)
    payloads = [varint(1) * levels + varint(0) + varint(1) + b"a" for levels in (10, 900, 100_000)]
    payloads.append(varint(1) * 100 + varint(0) + varint(2000) + b"a" * 2000)
    good, deep, bad, large = read_with(reader, kind, payloads)
    assert good == deep == {"id": "a", PROBLEM: None}
    assert large == {"id": "a" * 2000, PROBLEM: None}
    assert bad["id"] is None
    assert "RecursionError" in bad[PROBLEM]


def test_avro_lengths_that_promise_more_than_there_is():
    kind, reader = avro(ORDER)
    good = varint(1) + b"a"
    for length in (2**20, 2**31, 2**40, 2**62, -1, -(2**40)):
        first, bad = read_with(reader, kind, [good, varint(length) + b"a"])
        assert first["id"] == "a"
        assert bad[PROBLEM]


EMPTY = {"type": "record", "name": "Empty", "fields": []}
BESIDE = {"type": "record", "name": "Beside", "fields": [{"name": "a", "type": EMPTY}, {"name": "b", "type": "null"}]}
WEIGHTLESS = {
    "null": "null",
    "fixed of no bytes": {"type": "fixed", "name": "Nothing", "size": 0},
    "record of no fields": EMPTY,
    "record of such fields": BESIDE,
    "array of nulls": {"type": "array", "items": "null"},
}


@pytest.mark.parametrize("where", ["in a column", "in a field that the columns lack"])
@pytest.mark.parametrize("items", WEIGHTLESS)
def test_avro_arrays_of_items_without_a_byte_are_bounded(where, items):
    """Nine bytes say how many there are. Nobody would live to see the end of 2^60."""
    array = {"type": "array", "items": WEIGHTLESS[items]}
    writer = {**ORDER, "fields": [{"name": "many", "type": array}, *ORDER["fields"]]}
    nullable_ints = {"name": "many", "type": {"type": "array", "items": ["null", "int"]}}
    in_column = where == "in a column" and items == "null"
    reader_schema = {**ORDER, "fields": [nullable_ints, *ORDER["fields"]]} if in_column else ORDER
    kind, reader = avro(writer, reader_schema)
    of_arrays = items == "array of nulls"

    def payload(*counts: int) -> bytes:
        """An array, or one of arrays, and an id. A negative count stands before the block's size in bytes."""
        blocks = b"".join(varint(count) + (varint(0) if count < 0 else b"") for count in counts) + varint(0)
        return (varint(1) + blocks + varint(0) if of_arrays else blocks) + varint(1) + b"a"

    most = MOST_WEIGHTLESS
    good = [payload(3), payload(most // 2, most // 3), payload(-most // 2)]
    bad = [payload(most + 100), payload(most // 2, most, 1), payload(2**60), payload(-(2**60)), payload(2**62)]
    rows = read_with(reader, kind, [*good, *bad])
    assert [row["id"] for row in rows] == ["a"] * len(good) + [None] * len(bad)
    assert [row[PROBLEM] for row in rows[: len(good)]] == [None] * len(good)
    assert all(f"more than {most} items without a byte" in row[PROBLEM] for row in rows[len(good) :])
    if in_column:
        assert rows[0]["many"] == [None] * 3


def test_avro_items_with_bytes_are_not_bounded_by_it():
    """Also beside such an array: as many as there are bytes for."""
    many = {"name": "many", "type": {"type": "array", "items": "int"}}
    none = {"name": "none", "type": {"type": "array", "items": "null"}}
    writer = {**ORDER, "fields": [many, none, *ORDER["fields"]]}
    kind, reader = avro(writer, {**ORDER, "fields": [many, *ORDER["fields"]]})
    count = MOST_WEIGHTLESS + 50_000
    [row] = read_with(reader, kind, [written(writer, {"many": [1] * count, "none": [None] * 10, "id": "a"})])
    assert (row["id"], row[PROBLEM], len(row["many"])) == ("a", None, count)


def test_an_avro_schema_whose_record_always_holds_itself_is_refused_and_not_read():
    """fastavro's compiled reader goes down until the process is gone, and takes no byte for it."""
    for inner in ("Node", {"type": "record", "name": "Other", "fields": [{"name": "back", "type": "Node"}]}):
        node = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": inner}]}
        writer = {**ORDER, "fields": [{"name": "tree", "type": node}, *ORDER["fields"]]}
        with pytest.raises(JobError, match="record Node always holds itself"):
            avro(writer, ORDER)
    # With a choice there is an end.
    for inner in (["null", "Node"], {"type": "array", "items": "Node"}, {"type": "map", "values": "Node"}):
        node = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": inner}]}
        kind, reader = avro({**ORDER, "fields": [{"name": "tree", "type": node}, *ORDER["fields"]]}, ORDER)
        [row] = read_with(reader, kind, [varint(0) + varint(1) + b"a"])
        assert row == {"id": "a", PROBLEM: None}


def test_an_avro_number_without_an_end():
    """In a field that holds itself, which Python's reader reads: each byte would have made the number longer."""
    node = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}
    writer = {**ORDER, "fields": [{"name": "tree", "type": node}, *ORDER["fields"]]}
    kind, reader = avro(writer, ORDER)
    [row] = read_with(reader, kind, [b"\xff" * 2000 + b"\x01" + varint(1) + b"a"])
    assert "a number of more than 10 bytes" in row[PROBLEM]


def test_protobuf_that_is_nested_without_an_end():
    file = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    message = file.message_type.add(name="Order")
    message.field.add(name="id", number=1, type=9, label=1)
    plan = protobuf_payload.Plan(
        descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString(), "shop.Order", None, Policy()
    )
    # Groups of a field that the message has not.
    payloads = [b"\x0a\x01a", b"\x13" * 100_000 + b"\x14" * 100_000, b"\x0a\x01b"]
    first, bad, last = read_with(plan(), plan.fields(), payloads)
    assert (first["id"], bad["id"], last["id"]) == ("a", None, "b")
    assert bad[PROBLEM]


def read_limited(way: str, values: list[bytes | None], most: int) -> list[dict[str, Any]]:
    """Read a batch as the task of a job with this ``max_payload_bytes`` does."""
    payloads, problems = limited(pa.array(values, pa.binary()), most)
    rows = read(way, payloads.to_pylist())
    return [row | {PROBLEM: large or row[PROBLEM]} for row, large in zip(rows, problems.to_pylist(), strict=True)]


@pytest.mark.parametrize("way", ["plain", "nested"])
def test_a_payload_beyond_the_limit_is_not_read(way):
    fits, large = b'{"text":"123456789"}', b'{"text":"1234567890"}'
    assert (len(fits), len(large)) == (20, 21)
    # What would not decode either is not even looked at.
    rows = read_limited(way, [fits, large, None, fits, b"[" * 21], 20)
    assert [row["text"] for row in rows] == ["123456789", None, None, "123456789", None]
    said = "the payload has 21 bytes, and the job takes 20 at most (max_payload_bytes)"
    assert [row[PROBLEM] for row in rows] == [None, said, None, None, said]


def test_the_limit_is_above_what_kafka_takes_by_default():
    text = "x" * (16 * 2**20 - len('{"text":""}'))
    most = ConsumerJob("g", ["t"], "SELECT 1").max_payload_bytes
    rows = read_limited("plain", [b'{"text":"%s"}' % text.encode(), b'{"text":"%sx"}' % text.encode()], most)
    assert [row["text"] == text for row in rows] == [True, False]
    assert "16777217 bytes" in rows[1][PROBLEM]


def test_a_task_limits_the_payloads_that_it_decodes():
    messages = Messages("t", 0, [0, 1], [0, 0], [None, None], [b'{"n": 1}', b'{"n": 10}'], [[], []])
    (rows,) = replace(task_decoder(), most=8).decoding([messages])
    assert rows.column("n").to_pylist() == [1, None]
    assert rows.column("message_tombstone").to_pylist() == [False, False]
    assert [row is not None for row in rows.column(PROBLEM).to_pylist()] == [False, True]


@pytest.mark.parametrize("schema", ["variant", Traced("variant")])
def test_the_rows_of_a_variant_go_through_spark(schema):
    fields, _ = ConsumerJob("g", ["t"], "SELECT 1", schema=schema).decoder.task_plan()
    assert [spark_rows._in_postgres(field.dataType) for field in fields] == [None]
