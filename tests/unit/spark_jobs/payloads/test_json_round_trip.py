"""What a service writes as JSON is what a job reads: decimals, and doubles after jsonb has printed them."""

from __future__ import annotations

import json
import sys
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pydantic
import pytest
from decoding_support import of_any_size, read_with
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql import types as t

from outbox._payload import to_json
from spark_jobs.payloads import json_text
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.payloads.json_whole import JsonReader, WholeReader
from spark_jobs.payloads.reading import Policy, Problem

__all__ = ["of_any_size"]

MONEY = t.StructType().add("m", t.DecimalType(38, 18))
DOUBLE = t.StructType().add("d", t.DoubleType())
SINGLE = t.StructType().add("f", t.FloatType())


class Wallet(pydantic.BaseModel):
    m: Decimal


def read(fields: t.StructType, payloads: list[bytes]) -> list[Any]:
    """The values of the only field, read as many and one by one, which has to give the same."""
    many = read_with(JsonReader(fields, Policy()), fields, payloads)
    assert many == read_with(json_text.reader(fields, Policy()), fields, payloads)
    assert [row[PROBLEM] for row in many] == [None] * len(payloads)
    return [row[fields.fieldNames()[0]] for row in many]


# Python prints these with an exponent: each 0 of a numeric(20,8), small amounts of a numeric(38,18), and what
# normalize() returns.
EXPONENTS = ["0E-8", "-0E-8", "0E-18", "0E-38", "1E-7", "-1.5E-8", "1E-18", "0E+3", "1E+3", "1.2E+19"]
FITTING = st.decimals("-99999999999999999999", "99999999999999999999", places=18)
NORMAL = FITTING.map(Context(prec=38).normalize)


@pytest.mark.parametrize("model", [dict, Wallet])
@pytest.mark.parametrize("text", EXPONENTS)
def test_a_decimal_that_prints_with_an_exponent_is_read_as_it_was(model, text):
    value = Decimal(text)
    payloads = [to_json(model(m=value))] * 3
    assert read(MONEY, payloads) == [value] * 3
    found = WholeReader.of(MONEY, Policy()).read(pa.array(payloads))
    assert found is not None, "read one by one, which is slow"
    assert found[1] == set()


@settings(deadline=None)
@given(st.lists(FITTING | NORMAL, max_size=5), st.sampled_from([dict, Wallet]))
def test_any_decimal_that_fits_is_read_as_it_was(values, model):
    assert read(MONEY, [to_json(model(m=value)) for value in values]) == values


def in_jsonb(payload: bytes) -> bytes:
    """The payload as jsonb prints it: without exponents, so that a large double has no sign of being one."""
    ((name, number),) = json.loads(payload, parse_float=Decimal).items()
    return f'{{"{name}": {number:f}}}'.encode()


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.floats(2.0**53, 1e25), max_size=5))
@example([6.02214076e23, 1.2345678901234566e17, 1e22, 1e23, 2.0**53, sys.float_info.max, -sys.float_info.max, 5e-324])
def test_any_double_is_read_as_it_was(values):
    payloads = [to_json({"d": value}) for value in values]
    assert read(DOUBLE, payloads) == read(DOUBLE, [in_jsonb(one) for one in payloads]) == values


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=5))
@example([*map(float, np.float32([2**24, 2**25 + 4, 3.4e10, 1e20])), float(np.finfo(np.float32).max)])
def test_any_float_is_read_as_it_was(values):
    """From its own shortest digits, as other languages write it."""
    payloads = [b'{"f": %s}' % str(np.float32(value)).encode() for value in values]
    assert read(SINGLE, [in_jsonb(one) for one in payloads]) == values


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        (DOUBLE, 2**53 + 1),
        (DOUBLE, 10**23 + 1),
        (DOUBLE, 602214076000000000000001),
        (SINGLE, 2**24 + 1),
        (SINGLE, 602214076000000000000000),
        (SINGLE, 10**40),
    ],
)
def test_a_whole_number_that_is_no_double_is_a_problem(fields, number):
    payload = b'{"%s": %d}' % (fields.fieldNames()[0].encode(), number)
    with pytest.raises(Problem, match=r"more digits than it can hold|is too large"):
        JsonReader(fields, Policy())(payload, None)
