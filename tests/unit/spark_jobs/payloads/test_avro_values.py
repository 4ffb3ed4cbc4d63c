"""Avro by the job's schema: the fields that a message lacks, and logical types that only one of the schemas has."""

from __future__ import annotations

import io
import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from decoding_support import avro
from fastavro import schemaless_writer
from pyspark.sql import types as t

from spark_jobs.payloads.reading import Problem


def of(kind: object, logical: str, **more: object) -> dict:
    return {"type": kind, "logicalType": logical, **more}


def record(*fields: dict) -> dict:
    return {"type": "record", "name": "R", "fields": list(fields)}


def nested(**more: object) -> dict:
    fields = [{"name": "x", "type": "int", "default": 1}, {"name": "at", "type": of("int", "date"), "default": 1}]
    return {"type": "record", "name": "Inner", "fields": fields, **more}


@pytest.mark.parametrize(
    ("kind", "default", "value"),
    [
        (of("int", "date"), 1, date(1970, 1, 2)),
        (of("long", "timestamp-millis"), 1000, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)),
        (of("long", "timestamp-micros"), 1, datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC)),
        (of("long", "local-timestamp-micros"), 1, datetime(1970, 1, 1, 0, 0, 0, 1)),
        (of("int", "time-millis"), 1, "00:00:00.001000"),
        (of("string", "uuid"), str(uuid.UUID(int=7)), str(uuid.UUID(int=7))),
        ([of("int", "date"), "null"], 0, date(1970, 1, 1)),
        (["null", of("int", "date")], None, None),
        (of("bytes", "decimal", precision=6, scale=2), "\u0001\u0000", Decimal("2.56")),
        ({"type": "fixed", "name": "Two", "size": 2}, "\u0000\u00ff", b"\0\xff"),
        (nested(), {}, {"x": 1, "at": date(1970, 1, 2)}),
        ({"type": "array", "items": nested()}, [{}, {"x": 2}], [{"x": n, "at": date(1970, 1, 2)} for n in (1, 2)]),
        ({"type": "map", "values": "bytes"}, {"k": "\u00ff"}, [("k", b"\xff")]),
    ],
    ids=repr,
)
def test_an_avro_default_is_what_its_field_would_have(kind, default, value):
    """In a schema it is JSON: a number of days, a text for bytes, an object that lacks the fields with defaults."""
    id_ = {"name": "id", "type": "string"}
    reader = record(id_, {"name": "f", "type": kind, "default": default})
    assert avro(reader, record(id_))()(b"\x02x", None) == ["x", value]
    # Written with the same schema, no default is needed.
    assert avro(reader).fields() == avro(reader, record(id_)).fields()


def test_an_avro_default_that_its_field_can_not_have_is_none():
    reader = record({"name": "r", "type": {**nested(), "fields": [{"name": "x", "type": "int"}]}, "default": {}})
    assert avro(reader)()(b"\x02", None) == [{"x": 1}]
    with pytest.raises(Problem, match="No default value for field r"):
        avro(reader, {**record(), "fields": []})()(b"", None)


FIXED = {"type": "fixed", "name": "Two", "size": 2}


@pytest.mark.parametrize(
    ("kind", "written", "payload", "value"),
    [
        ("string", of("string", "uuid"), b"\x48" + str(uuid.UUID(int=7)).encode(), str(uuid.UUID(int=7))),
        ("bytes", of("string", "uuid"), b"\x48" + str(uuid.UUID(int=7)).encode(), str(uuid.UUID(int=7)).encode()),
        ("long", of("long", "timestamp-millis"), b"\x04", 2),
        ("long", of("long", "time-micros"), b"\x04", 2),
        ("int", of("int", "date"), b"\x04", 2),
        ("double", of("int", "date"), b"\x04", 2.0),
        ("bytes", of("bytes", "decimal", precision=4, scale=2), b"\x02\x07", b"\x07"),
        (FIXED, {**FIXED, "logicalType": "decimal", "precision": 4}, b"ab", b"ab"),
        (["null", "long"], ["null", of("long", "timestamp-micros")], b"\x02\x04", 2),
        ({"type": "array", "items": "int"}, {"type": "array", "items": of("int", "date")}, b"\x02\x04\0", [2]),
        # Of another precision, and of a unit that the column has not.
        (
            of("long", "timestamp-micros"),
            of("long", "timestamp-millis"),
            b"\x02",
            datetime(1970, 1, 1, 0, 0, 0, 1000, UTC),
        ),
    ],
    ids=repr,
)
def test_a_logical_type_that_only_the_avro_writer_has_changes_nothing(kind, written, payload, value):
    row = avro(record({"name": "f", "type": kind}), record({"name": "f", "type": written}))()(payload, None)
    assert [(type(item), item) for item in row] == [(type(value), value)]


@pytest.mark.parametrize(
    "field",
    [
        {"type": ["null", "bytes"], "default": None, "logicalType": "decimal", "precision": 10, "scale": 2},
        {"type": ["null", of("bytes", "decimal")]},
        {"type": ["null", of("bytes", "decimal", precision=2, scale=3)]},
        {"type": ["null", of("bytes", "decimal", precision="many")]},
        {"type": ["null", of("bytes", "date")]},
        {"type": ["null", of("bytes", ["decimal"])]},
    ],
    ids=repr,
)
def test_a_logical_type_that_avro_has_to_ignore_is_ignored(field):
    plan = avro(record({"name": "f", **field}))
    assert plan.fields() == t.StructType().add("f", t.BinaryType())
    assert plan()(b"\x02\x02a", None) == [b"a"]


@pytest.mark.parametrize(
    "kind", ["string", "bytes", {"type": "fixed", "name": "F", "size": 8}, {"type": "map", "values": "bytes"}], ids=repr
)
def test_an_avro_payload_that_ends_within_a_field_that_no_column_has_is_a_problem(kind):
    record_and_more = record({"name": "a", "type": "int"}, {"name": "more", "type": kind})
    reader = avro(record({"name": "a", "type": "int"}), record_and_more)()
    written = io.BytesIO()
    more: Any = {"k": b"12345678"} if isinstance(kind, dict) and kind["type"] == "map" else b"12345678"
    schemaless_writer(written, record_and_more, {"a": 1, "more": more.decode() if kind == "string" else more})
    payload = written.getvalue()
    assert reader(payload, None) == [1]
    for size in range(len(payload)):
        with pytest.raises(Problem, match="does not resolve to the job's Avro schema: EOFError"):
            reader(payload[:size], None)
    with pytest.raises(Problem, match="goes on behind the record"):
        reader(payload + b"\0", None)
