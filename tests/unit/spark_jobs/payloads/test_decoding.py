"""Reading payloads: a value for each field exactly as it was sent, or a problem that says which field."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as t

from outbox.consumer.errors import JobError
from spark_jobs.payloads import json_text as json_payload
from spark_jobs.payloads.decoding import Json
from spark_jobs.payloads.json_text import decimal_that_fits, parse, variant_reader
from spark_jobs.payloads.reading import Policy, Problem, Wrong, columns

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
        # As jsonb prints 6.02214076e+23, and 3.4e+10 of a float: their shortest digits.
        ('"real": 602214076000000000000000', 6.02214076e23),
        ('"single": 16777216', 2.0**24),
        ('"single": 34000000000', 3.4e10),
        ('"money": 12.3', Decimal("12.30")),
        ('"money": 99999999.99', Decimal("99999999.99")),
        ('"money": 1e3', Decimal("1000.00")),
        ('"money": 1.500000000000000000000000000000000', Decimal("1.50")),
        ('"money": 0.00000', Decimal("0.00")),
        ('"money": 7', Decimal("7.00")),
        ('"money": "-12.34"', Decimal("-12.34")),
        ('"money": "0E-8"', Decimal("0.00")),
        ('"money": "1.50e-1"', Decimal("0.15")),
        ('"money": "1E+3"', Decimal("1000.00")),
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
        ('"money": "1E-7"', r"does not fit decimal\(10,2\)"),
        ('"money": "1E+999"', r"does not fit decimal\(10,2\)"),
        ('"money": "1e1000"', "not a decimal"),
        ('"money": "1e3.0"', "not a decimal"),
        ('"money": "e3"', "not a decimal"),
        ('"money": "ten"', "not a decimal"),
        ('"money": true', "not a decimal"),
        ('"truth": 1', "neither true nor false"),
        ('"truth": "true"', "neither true nor false"),
        ('"day": "2023-02-29"', "must be a date"),
        ('"day": "20230228"', "must be a date"),
        ('"day": 19000', "must be a date"),
        ('"moment": "2026-01-31T12:00:00"', "with an offset"),
        ('"moment": "2026-01-31T12:00:60Z"', "must be a time"),
        ('"moment": "2026-01-31T12:00:00.1234567Z"', "finer than microseconds"),
        ('"moment": "0001-01-01T00:00:00+10:00"', "must be a time"),
        ('"moment": 1700000000', "must be a time"),
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


def digits(value):
    """Return a parsed value with decimals instead of doubles."""
    match value:
        case dict():
            return {name: digits(inner) for name, inner in value.items()}
        case list():
            return [digits(inner) for inner in value]
        case float():
            return Decimal(repr(value))
    return value


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
    parsed = parse(payload.encode(), exact=exact)
    # A double stands for the digits of its repr(): 0.2 is not equal to Decimal("0.2").
    assert (digits(parsed) if exact else parsed) == json.loads(payload, parse_float=Decimal if exact else float)
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
    digits = Fraction(value) * 10**scale
    if digits.denominator == 1 and abs(digits) < 10**precision:
        fitting = decimal_that_fits("f", value, precision, scale)
        assert fitting == value
        assert pa.array([fitting], pa.decimal128(precision, scale))[0].as_py() == value
    else:
        with pytest.raises(Wrong, match=rf"^field f: does not fit decimal\({precision},{scale}\)$"):
            decimal_that_fits("f", value, precision, scale)


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
