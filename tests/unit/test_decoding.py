"""Reading payloads: a value for each field exactly as it was sent, or a problem that says which field."""

from __future__ import annotations

import base64
import json
import math
import re
import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction

import pyarrow as pa
import pytest
import schema_registry
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.serde import SchemaId
from google.protobuf import descriptor_pb2, timestamp_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as t

from spark_jobs.errors import JobError
from spark_jobs.payloads import avro as avro_payload
from spark_jobs.payloads import json_text as json_payload
from spark_jobs.payloads import protobuf as protobuf_payload
from spark_jobs.payloads.decoding import Avro, Json, Protobuf
from spark_jobs.payloads.framing import unframe
from spark_jobs.payloads.json_text import decimal_that_fits, parse, variant_reader
from spark_jobs.payloads.reading import Policy, Problem, columns
from spark_jobs.payloads.registry import Client, Registry, RegistryUnavailable, Schema

FIELDS = t.StructType(
    [
        t.StructField("text", t.StringType()),
        t.StructField("whole", t.LongType()),
        t.StructField("small", t.IntegerType()),
        t.StructField("tiny", t.ByteType()),
        t.StructField("real", t.DoubleType()),
        t.StructField("single", t.FloatType()),
        t.StructField("money", t.DecimalType(10, 2)),
        t.StructField("truth", t.BooleanType()),
        t.StructField("day", t.DateType()),
        t.StructField("moment", t.TimestampType()),
        t.StructField("local", t.TimestampNTZType()),
        t.StructField("blob", t.BinaryType()),
        t.StructField("lines", t.ArrayType(t.StructType().add("sku", t.StringType(), nullable=False))),
        t.StructField("rates", t.MapType(t.StringType(), t.LongType())),
    ]
)
WITHOUT_DECIMAL = t.StructType([field for field in FIELDS.fields if field.name != "money"])


def read(payload: str | bytes, fields: t.StructType = FIELDS, **policy: str) -> dict:
    """The fields that are not null."""
    value = payload if isinstance(payload, bytes) else payload.encode()
    row = json_payload.reader(fields, Policy(**policy))(value, None)
    return {name: item for name, item in zip(fields.fieldNames(), row, strict=True) if item is not None}


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ('"text": "5"', "5"),
        ('"text": ""', ""),
        ('"whole": -9223372036854775808', -(2**63)),
        ('"small": 2147483647', 2**31 - 1),
        ('"tiny": -128', -128),
        ('"real": 1', 1.0),
        ('"real": 0.1', 0.1),
        ('"real": -1e-7', -1e-7),
        ('"real": 9007199254740992', 2.0**53),
        ('"single": 16777216', 2.0**24),
        ('"money": 12.3', Decimal("12.30")),
        ('"money": 99999999.99', Decimal("99999999.99")),
        ('"money": 1e3', Decimal("1000.00")),
        ('"money": 1.500000000000000000000000000000000', Decimal("1.50")),
        ('"money": 0.00000', Decimal("0.00")),
        ('"money": 7', Decimal("7.00")),
        ('"money": "-12.34"', Decimal("-12.34")),
        ('"truth": true', True),
        ('"day": "2024-02-29"', date(2024, 2, 29)),
        ('"moment": "2026-01-31T12:00:00Z"', datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ('"moment": "2026-01-31 12:00:00.1234560+02:00"', datetime(2026, 1, 31, 10, 0, 0, 123456, tzinfo=UTC)),
        ('"local": "2026-01-31T12:00"', datetime(2026, 1, 31, 12)),
        ('"blob": "aGk="', b"hi"),
        ('"lines": [{"sku": "a"}, null]', [{"sku": "a"}, None]),
        ('"rates": {"x": 1, "y": null}', [("x", 1), ("y", None)]),
    ],
)
def test_what_fits_is_read_as_it_is(given_, expected):
    name = given_.split('"')[1]
    # The times have colons and some texts quotes: both of the parsers have to agree.
    for payload in ("{" + given_ + "}", '{"extra": "\\": \\"x\\": ", ' + given_ + "}"):
        assert read(payload) == {name: expected}
        if name != "money":
            assert read(payload, WITHOUT_DECIMAL) == {name: expected}


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ('"text": 5', "not a text"),
        ('"text": {"a": 1}', "not a text"),
        ('"whole": 1.5', "not a whole number"),
        ('"whole": 1.0', "not a whole number"),
        ('"whole": 1e3', "not a whole number"),
        ('"whole": "1"', "not a whole number"),
        ('"whole": true', "not a whole number"),
        ('"whole": 9223372036854775808', "whole: "),
        ('"whole": 92233720368547758080000', "whole: "),
        ('"small": 2147483648', "does not fit int"),
        ('"tiny": 128', "does not fit tinyint"),
        ('"real": "NaN"', "not a number"),
        ('"real": 9007199254740993', "more digits"),
        ('"real": 100000000000000000000001', "more digits"),
        ('"single": 1e39', "too large"),
        ('"single": 16777217', "more digits"),
        ('"money": 12.345', r"does not fit decimal\(10,2\)"),
        ('"money": 100000000', r"does not fit decimal\(10,2\)"),
        ('"money": 1.0000000000000000000000000001', "does not fit"),
        ('"money": 1e300', "money: "),
        ('"money": 1e-99999999', "money: "),
        ('"money": "1e3"', "not a decimal"),
        ('"money": "ten"', "not a decimal"),
        ('"money": true', "not a decimal"),
        ('"truth": 1', "neither true nor false"),
        ('"truth": "true"', "neither true nor false"),
        ('"day": "2023-02-29"', "not a date"),
        ('"day": "20230228"', "not a date"),
        ('"day": 19000', "not a date"),
        ('"moment": "2026-01-31T12:00:00"', "with an offset"),
        ('"moment": "2026-01-31T12:00:60Z"', "not a time"),
        ('"moment": "2026-01-31T12:00:00.1234567Z"', "finer than microseconds"),
        ('"moment": "0001-01-01T00:00:00+10:00"', "not a time"),
        ('"moment": 1700000000', "not a time"),
        ('"local": "2026-01-31T12:00:00Z"', "without an offset"),
        ('"blob": "aGk"', "base64"),
        ('"blob": "\\u00e4"', "base64"),
        ('"lines": {"sku": "a"}', "not an array"),
        ('"lines": [{"sku": 1}]', r"lines\[\]\.sku: is not a text"),
        ('"lines": ["a"]', r"lines\[\]: is not an object"),
        ('"rates": {"x": "1"}', r"rates\{\}: is not a whole number"),
        ('"rates": []', "not an object"),
    ],
)
def test_what_does_not_fit_is_a_problem_of_that_field_or_null(payload, said):
    name = payload.split('"')[1]
    with pytest.raises(Problem, match=said) as caught:
        read("{" + payload + "}")
    assert str(caught.value).startswith(f"field {name}")
    if name != "money":
        # The faster parser, which has to leave to the other one what it would have altered.
        with pytest.raises(Problem, match=said):
            read("{" + payload + "}", WITHOUT_DECIMAL)
    # Null where the value stands; the others are as they were.
    if name == "lines" and "sku" in said:
        with pytest.raises(Problem):
            read("{" + payload + "}", wrong="null")
    else:
        left = read('{"text": "kept", ' + payload + "}", wrong="null") if name != "text" else {"text": "kept"}
        nested = {"lines": [None]} if r"lines\[\]" in said else {"rates": [("x", None)]} if r"{\}" in said else {}
        assert left == {"text": "kept", **nested}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"5",
        b"[]",
        b'[{"whole": 1}]',
        b'"{}"',
        b"{} {}",
        b'{"whole": 1} x',
        b"{whole: 1}",
        b"{'whole': 1}",
        b'{"whole": 1,}',
        b'{"real": NaN}',
        b'{"real": -Infinity}',
        b'{"real": 1e400}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'\xef\xbb\xbf{"whole": 1}',
        b'{"whole": 01}',
        '{"whole": 1}'.encode("utf-16"),
        b'{"lines":' * 2000 + b"1" + b"}" * 2000,
        b'{"lines":' * 1000 + b"1" + b"}" * 1000,
        b'{"whole": ' + b"1" * 5000 + b"}",
    ],
)
def test_what_is_no_object_is_a_problem_whatever_the_policy(payload):
    for fields in (FIELDS, WITHOUT_DECIMAL):
        with pytest.raises(Problem, match=r"JSON|object|deep|lines|whole"):
            read(payload, fields, unknown="ignore", missing="null", wrong="dead-letter")


@pytest.mark.parametrize(
    ("payload", "name"),
    [
        ('{"whole": 1, "whole": 1}', "whole"),
        ('{"whole" : 1, "whole":2}', "whole"),
        ('{"whole"\n:\t1, "\\u0077hole":2}', "whole"),
        ('{"rates": {"x": 1, "x": 2}}', "x"),
        ('{"else": [[{"deep": 1, "deep": 2}]]}', "deep"),
        ('{"text": "a\\":", "whole": 1, "whole": 1}', "whole"),
    ],
)
def test_two_fields_of_one_name_are_a_problem(payload, name):
    for fields in (FIELDS, WITHOUT_DECIMAL):
        with pytest.raises(Problem, match=f"field {name}: stands twice"):
            read(payload, fields)
    with pytest.raises(Problem, match="stands twice"):
        variant_reader(payload.encode(), None)


NESTED = t.StructType(
    [
        t.StructField("id", t.StringType(), nullable=False),
        t.StructField("inner", t.StructType().add("a", t.LongType(), nullable=False).add("b", t.LongType())),
    ]
)


def test_missing_null_and_unknown_fields_by_policy():
    assert read('{"id": "x"}', NESTED) == {"id": "x"}
    assert read('{"id": "x", "inner": {"a": 1}}', NESTED) == {"id": "x", "inner": {"a": 1, "b": None}}
    for policy in ({}, {"missing": "dead-letter"}, {"wrong": "null"}):
        for payload, said in (
            ("{}", "field id: is missing"),
            ('{"id": null, "inner": null}', "field id: is null"),
            ('{"id": "x", "inner": {"b": 1}}', r"field inner\.a: is missing"),
            ('{"id": "x", "inner": {"a": null, "b": 1}}', r"field inner\.a: is null"),
        ):
            with pytest.raises(Problem, match=said):
                read(payload, NESTED, **policy)
    with pytest.raises(Problem, match="field id: is not a text"):
        read('{"id": 1}', NESTED, wrong="null")
    with pytest.raises(Problem, match="field inner: is missing"):
        read('{"id": "x"}', NESTED, missing="dead-letter")
    assert read('{"id": "x", "inner": null}', NESTED, missing="dead-letter") == {"id": "x"}
    assert read('{"id": "x", "more": 1, "inner": {"a": 1, "c": 2}}', NESTED)["inner"] == {"a": 1, "b": None}
    with pytest.raises(Problem, match=r"field more: is not declared"):
        read('{"id": "x", "more": 1}', NESTED, unknown="dead-letter")
    with pytest.raises(Problem, match=r"field c in inner: is not declared"):
        read('{"id": "x", "inner": {"a": 1, "c": 2}}', NESTED, unknown="dead-letter")


def test_a_problem_never_repeats_what_the_payload_holds():
    for payload in (
        '{"id": "x", "4111 1111 1111 1111": 1}',
        '{"id": "x", "a\\nb": 1}',
        '{"id": "x", "' + "k" * 99 + '": 1}',
    ):
        with pytest.raises(Problem) as caught:
            read(payload, NESTED, unknown="dead-letter")
        assert str(caught.value) == "a field: is not declared"
    for payload in (
        '{"id": ["secret"]}',
        '{"id": "x", "inner": "secret"}',
        '{"id": "x", "inner": {"a": "secret"}}',
        "secret",
    ):
        with pytest.raises(Problem) as caught:
            read(payload, NESTED)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (t.VariantType(), "variant"),
        (t.DayTimeIntervalType(), "interval"),
        (t.VarcharType(3), "varchar"),
        (t.MapType(t.LongType(), t.StringType()), "map"),
        (t.StructType().add("x", t.StringType()).add("X", t.StringType()), "twice"),
    ],
)
def test_types_that_json_has_not_are_refused(kind, said):
    with pytest.raises(JobError, match=said):
        json_payload.reader(t.StructType().add("f", kind), Policy())


@pytest.mark.parametrize("name", ["unknown", "missing", "wrong"])
def test_policies_are_checked(name):
    with pytest.raises(JobError, match=name):
        Json("a long", **{name: "perhaps"})


# VARIANT takes numbers of up to 38 digits.
INTEGERS = st.integers(1 - 10**38, 10**38 - 1)
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.booleans(), st.sampled_from([None, 2]))
def test_any_object_is_parsed_as_python_itself_does(value, exact, indent):
    payload = json.dumps(value, indent=indent, ensure_ascii=exact)
    try:
        payload.encode()
    except UnicodeEncodeError:
        return
    if "\\ud" in payload:
        # Halves of a pair, alone: no Unicode, and refused.
        return
    assert parse(payload.encode(), exact=exact) == json.loads(payload, parse_float=Decimal if exact else float)
    assert json.loads(variant_reader(payload.encode(), None)[0]) == value


@settings(deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_give_a_row_or_a_problem(value):
    for fields, policy in ((FIELDS, Policy()), (NESTED, Policy("dead-letter", "dead-letter", "null"))):
        try:
            json_payload.reader(fields, policy)(value, None)
        except Problem:
            continue


@settings(deadline=None)
@given(
    st.decimals(allow_nan=False, allow_infinity=False, min_value=Decimal("-1e12"), max_value=Decimal("1e12")),
    st.integers(1, 38).flatmap(lambda precision: st.tuples(st.just(precision), st.integers(0, precision))),
)
def test_a_decimal_fits_exactly_or_not_at_all(value, size):
    precision, scale = size
    fitting = decimal_that_fits(value, precision, scale)
    digits = Fraction(value) * 10**scale
    assert (fitting is not None) == (digits.denominator == 1 and abs(digits) < 10**precision)
    if fitting is not None:
        assert fitting == value
        assert pa.array([fitting], pa.decimal128(precision, scale))[0].as_py() == value


@pytest.mark.parametrize(
    ("number", "held"),
    [
        ("12345678901234567890123456789012345678", True),
        ("123456789012345678901234567890123456789", False),
        ("1.2345678901234567890123456789012345678", True),
        ("1.23456789012345678901234567890123456789", False),
        ("1e3", True),
        ("1.25E-7", True),
        ("1.234567890123456789e3", False),
        ("1" + "0" * 39, True),
        ("-0.5", True),
    ],
)
def test_numbers_that_variant_would_round_are_a_problem(number, held):
    payload = f'{{"n": [{number}]}}'.encode()
    if held:
        assert variant_reader(payload, None) == [payload.decode()]
    else:
        with pytest.raises(Problem, match="more digits than VARIANT"):
            variant_reader(payload, None)


def test_a_value_that_a_column_can_not_hold_spoils_its_own_row_only():
    kind = pa.struct([("a", pa.int32()), ("problem", pa.string())])
    values = [b"1", None, b"99999999999", b"2"]
    rows = columns(lambda value, header: [int(value)], pa.array(values), pa.nulls(4, pa.binary()), kind).to_pylist()
    assert [row["a"] for row in rows] == [1, None, None, 2]
    assert [row["problem"] for row in rows] == [None, None, "field a: holds a value that int32 can't have", None]


# Framing, held against the official client.

IDS = st.integers(0, 2**32 - 1)
PATHS = st.lists(st.integers(0, 1000), min_size=1, max_size=5)


@settings(deadline=None)
@given(IDS, st.none() | PATHS, st.binary(max_size=20), st.booleans())
def test_framing_is_read_as_it_is_written(number, path, payload, in_header):
    guid = uuid.uuid5(uuid.NAMESPACE_OID, str(number))
    kind = "AVRO" if path is None else "PROTOBUF"
    written = SchemaId(kind, number, str(guid), path)
    if in_header:
        framed = unframe(payload, written.guid_to_bytes(), indexes=path is not None)
        assert framed.schema == guid
    else:
        framed = unframe(written.id_to_bytes() + payload, None, indexes=path is not None)
        assert framed.schema == number
    assert (framed.indexes, framed.payload) == (tuple(path or ()), payload)


@settings(deadline=None)
@given(st.binary(max_size=40), st.none() | st.binary(max_size=40), st.booleans())
def test_any_framing_is_read_or_a_problem(value, header, indexes):
    try:
        framed = unframe(value, header, indexes=indexes)
    except Problem:
        return
    assert framed.payload == (value if header is not None else value[len(value) - len(framed.payload) :])


def test_framing_problems_say_where():
    for value, header, said in (
        (b"", None, "the payload does not begin"),
        (b"{}", None, "the payload does not begin"),
        (b"\0\0\0", None, "the payload ends within"),
        (b"x", b"\1abc", "__value_schema_id ends within"),
        (b"x", b"", "__value_schema_id does not begin"),
        (b"x", b"\0\0\0\0\1\0x", "more than a schema's id"),
    ):
        with pytest.raises(Problem, match=said):
            unframe(value, header, indexes=False)
    for rest in (b"", b"\1", b"\xff\xff\xff\xff\xff\xff", b"\x04\x02", b"\x02\x01"):
        with pytest.raises(Problem, match="which message"):
            unframe(b"\0\0\0\0\1" + rest, None, indexes=True)


# Avro and Protobuf on bytes that are none.

RECORD = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}], "default": None},
        {"name": "lines", "type": {"type": "array", "items": {"type": "map", "values": "double"}}, "default": []},
    ],
}


def avro(reader: dict, writer: dict | None = None, **policy: str) -> avro_payload.Plan:
    return avro_payload.Plan(
        Schema("AVRO", json.dumps(reader)), Schema("AVRO", json.dumps(writer or reader)), None, Policy(**policy)
    )


AVRO_ORDER = avro(RECORD)()


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_give_an_avro_record_or_a_problem(value):
    try:
        row = AVRO_ORDER(value, None)
    except Problem:
        return
    assert len(row) == 4


def test_avro_decimals_are_never_rounded():
    def payload(cents: int) -> bytes:
        digits = cents.to_bytes(8, "big", signed=True)
        return b"\x02x" + b"\x10" + digits + b"\0" + b"\0"

    assert AVRO_ORDER(payload(-123456), None)[1] == Decimal("-1234.56")
    with pytest.raises(Problem, match=r"field price: does not fit decimal\(6,2\)"):
        AVRO_ORDER(payload(1234567), None)
    with pytest.raises(Problem, match="goes on behind"):
        AVRO_ORDER(payload(1) + b"\0", None)


def test_avro_schemas_are_resolved_and_their_differences_known():
    newer = {
        **RECORD,
        "fields": [
            {"name": "id", "type": "string"},
            {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 8, "scale": 3}},
            {"name": "fee", "type": {**RECORD["fields"][1]["type"]}, "default": "\u0001\u0000"},
            {"name": "raw", "type": "bytes", "default": "\u00ff"},
        ],
    }
    payload = b"\x02x\x02\x05\0\0"
    assert avro(newer, RECORD)()(payload, None) == ["x", Decimal("0.050"), Decimal("2.56"), b"\xff"]
    with pytest.raises(JobError, match="field fee: is missing"):
        avro(newer, RECORD, missing="dead-letter")()
    with pytest.raises(JobError, match="field at: is not in the job's schema"):
        avro(newer, RECORD, unknown="dead-letter")()
    plain = {**RECORD, "fields": [RECORD["fields"][0], {"name": "at", "type": "long"}]}
    timed = {**RECORD, "fields": [RECORD["fields"][0], {"name": "at", "type": RECORD["fields"][2]["type"][1]}]}
    with pytest.raises(Problem, match="field at: was not written as timestamp-micros"):
        avro(timed, plain)()(b"\x02x\x02", None)
    must = {**RECORD, "fields": [*RECORD["fields"], {"name": "must", "type": "int"}]}
    with pytest.raises(Problem, match="No default value for field must"):
        avro(must, RECORD)()(payload, None)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (["int", "string"], "a union of several types"),
        ("shop.Order", "holds itself"),
        ("null", "no counterpart"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 40}, "38 digits"),
        ({"type": "record", "name": "E", "fields": []}, "no fields"),
        ("no.such", "no Avro schema"),
    ],
)
def test_avro_that_can_be_no_column_is_refused(field, said):
    with pytest.raises(JobError, match=said):
        avro({**RECORD, "fields": [{"name": "f", "type": field}]}).fields()


def test_declarations_that_can_not_work_are_refused():
    for make, said in (
        (lambda: Avro(), "reader_schema"),
        (lambda: Avro("http://r"), "either subject or reader_schema"),
        (lambda: Avro(subject="s", reader_schema=RECORD), "goes with a registry"),
        (lambda: Avro("http://r", "s", writer_schema=RECORD), "every message names its own"),
        (lambda: Avro(" ", "s"), "must be a URL"),
        (lambda: Protobuf(), "either subject"),
        (lambda: Protobuf(subject="s"), "goes with a registry"),
        (lambda: Protobuf(descriptor=b""), "message"),
        (lambda: Protobuf(descriptor=5), "generated class"),
        (lambda: Protobuf(descriptor=b"\xff", message="m").names(), "descriptor"),
        (lambda: Protobuf(descriptor=b"", message="m").names(), "no message m"),
        (lambda: Avro(reader_schema="{").names(), "no Avro schema"),
        (lambda: Avro(reader_schema='"int"').names(), "must be a record"),
    ):
        with pytest.raises(JobError, match=said):
            make()


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_give_a_protobuf_message_or_a_problem(value):
    try:
        PROTOBUF_FIELD(value, None)
    except Problem:
        return


# A message of Protobuf's own that has most kinds of fields, and enums.
PROTOBUF_FIELD = protobuf_payload.Plan(
    protobuf_payload.from_descriptor([descriptor_pb2.DESCRIPTOR]),
    "google.protobuf.FieldDescriptorProto",
    None,
    Policy(),
)()


def test_protobuf_times_enums_and_unknown_fields():
    plan = Protobuf(descriptor=descriptor_pb2.FieldDescriptorProto)
    place = plan.names().index("label")
    message = descriptor_pb2.FieldDescriptorProto(name="x", label=3).SerializeToString()
    reader = plan._plan()
    assert reader(message, None)[place] == "LABEL_REPEATED"
    assert reader(b"", None)[place] is None
    strict = Protobuf(descriptor=descriptor_pb2.FieldDescriptorProto, unknown="dead-letter")._plan()
    extra = b"\xf8\x07\x01"
    assert reader(message + extra, None) == reader(message, None)
    with pytest.raises(Problem, match="field number 127: is not in the job's descriptor"):
        strict(message + extra, None)
    moment = protobuf_payload._time("at")
    assert moment(timestamp_pb2.Timestamp(seconds=-1, nanos=1000)) == datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=UTC)
    for value, said in ((timestamp_pb2.Timestamp(nanos=1), "finer"), (timestamp_pb2.Timestamp(seconds=2**62), "year")):
        with pytest.raises(Problem, match=said):
            moment(value)
    with pytest.raises(JobError, match="holds itself"):
        Protobuf(descriptor=descriptor_pb2.DescriptorProto).names()


# The registry, over real HTTP.

IMPATIENT = {"max.retries": 1, "retries.wait.ms": 1, "retries.max.wait.ms": 1, "timeout": 20}


def test_a_registry_that_is_away_is_no_bad_message():
    with schema_registry.running("me", "secret") as server:
        allowed = {"basic.auth.user.info": "me:secret", **IMPATIENT}
        writer = SchemaRegistryClient({"url": server.url, **allowed})
        from confluent_kafka.schema_registry import Schema as Registered

        number = writer.register_schema("orders-value", Registered(json.dumps(RECORD), "AVRO"))
        registry = Registry(server.url, allowed)
        assert "secret" not in repr(registry)
        client = Client(registry, None)
        assert client.latest("orders-value") == client.schema(number) == Schema("AVRO", json.dumps(RECORD))
        assert client.schema(uuid.UUID(server.schemas[0]["guid"])).kind == "AVRO"
        for unknown in (number + 1, uuid.uuid4()):
            with pytest.raises(Problem, match=f"no schema {unknown}"):
                client.schema(unknown)
        with pytest.raises(JobError, match="no subject nothing-value"):
            client.latest("nothing-value")
        # Wrong credentials, a wrong path, an internal error: nobody's message is at fault.
        for wrong in (Registry(server.url, IMPATIENT), Registry(f"{server.url}/elsewhere", allowed)):
            with pytest.raises(RegistryUnavailable, match=re.escape(wrong.url)):
                Client(wrong, None).schema(number)
            with pytest.raises(RegistryUnavailable):
                Client(wrong, None).latest("orders-value")
        server.failing = 503
        with pytest.raises(RegistryUnavailable, match="the store is away"):
            Client(registry, None).schema(number)
        server.failing = None
        server.stop()
        with pytest.raises(RegistryUnavailable):
            client.schema(number + 1)
        # What is known never changes, and needs no registry.
        asked = len(server.asked)
        assert client.schema(number).kind == "AVRO"
        assert len(server.asked) == asked
        server.start()
        with pytest.raises(Problem):
            client.schema(number + 1)


def test_floats_that_are_no_numbers_pass_where_they_can_be_written():
    plan = avro({"type": "record", "name": "R", "fields": [{"name": "x", "type": "double"}]})()
    assert math.isnan(plan(base64.b64decode("AAAAAAAA+H8="), None)[0])
