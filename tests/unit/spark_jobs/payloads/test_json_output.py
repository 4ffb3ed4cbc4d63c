"""Nested values as JSON text: what a JSON parser reads from it is what the value was."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.payloads.json_output import has_json, json_text

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
TIMES = st.datetimes(min_value=dt.datetime(1, 1, 2), max_value=dt.datetime(9999, 12, 30))
PLAIN: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.string(): TEXTS,
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(),
    pa.float32(): st.floats(width=32),
    pa.decimal128(20, 10): st.decimals(min_value=-(10**9), max_value=10**9, places=10),
    pa.date32(): st.dates(),
    pa.timestamp("us", "UTC"): TIMES.map(lambda one: one.replace(tzinfo=dt.UTC)),
    pa.timestamp("us"): TIMES,
    pa.binary(): st.binary(max_size=5),
}


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, NULL among them."""
    if pa.types.is_struct(kind):
        inner = st.fixed_dictionaries({one.name: values_of(one.type) for one in kind})
    elif pa.types.is_list(kind):
        inner = st.lists(values_of(kind.value_type), max_size=3)
    elif pa.types.is_map(kind):
        inner = st.dictionaries(TEXTS, values_of(kind.item_type), max_size=3).map(lambda one: list(one.items()))
    else:
        inner = PLAIN[kind]
    return st.none() | inner


@st.composite
def kinds(draw: st.DrawFn, depth: int = 3) -> pa.DataType:
    shape = draw(st.integers(0, 4 if depth else 0))
    if shape < 2:
        return draw(st.sampled_from(list(PLAIN)))
    if shape == 2:
        return pa.list_(draw(kinds(depth - 1)))
    if shape == 3:
        return pa.map_(pa.string(), draw(kinds(depth - 1)))
    names = draw(st.lists(st.sampled_from(["a", "b", 'q"\\', "ü"]), min_size=1, max_size=3, unique=True))
    return pa.struct([(name, draw(kinds(depth - 1))) for name in names])


def expected(value: Any, kind: pa.DataType) -> Any:
    """Return what the JSON parser is to find, doubles and decimals as Decimal."""
    if value is None or isinstance(value, str | bool):
        return value
    if pa.types.is_struct(kind):
        return {one.name: expected(value[one.name], one.type) for one in kind if value[one.name] is not None}
    if pa.types.is_list(kind):
        return [expected(one, kind.value_type) for one in value]
    if pa.types.is_map(kind):
        return {name: expected(one, kind.item_type) for name, one in value}
    if isinstance(value, float):
        if math.isfinite(value):
            # The shortest text for a float is not that of the double which Python holds.
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=None).isoformat(timespec="microseconds") + ("Z" if value.tzinfo else "")
    return value.isoformat() if isinstance(value, dt.date) else value


def same(found: Any, wanted: Any, kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind) and wanted is not None:
        return set(found) == set(wanted) and all(
            same(found[one.name], wanted[one.name], one.type) for one in kind if one.name in wanted
        )
    if pa.types.is_list(kind) and wanted is not None:
        return len(found) == len(wanted) and all(
            same(one, other, kind.value_type) for one, other in zip(found, wanted, strict=True)
        )
    if pa.types.is_map(kind) and wanted is not None:
        return set(found) == set(wanted) and all(same(found[name], wanted[name], kind.item_type) for name in wanted)
    if kind == pa.float32() and isinstance(wanted, float):
        return bool(pa.scalar(float(found), kind) == pa.scalar(wanted, kind))
    if isinstance(wanted, float):
        return float(found) == wanted
    return type(found) is type(wanted) and found == wanted


@st.composite
def columns(draw: st.DrawFn) -> tuple[pa.DataType, list[Any]]:
    kind = draw(kinds())
    return kind, draw(st.lists(values_of(kind), max_size=5))


@settings(max_examples=150, deadline=None)
@given(column=columns(), start=st.integers(0, 2))
def test_a_parser_reads_the_values(column, start):
    kind, values = column
    made = json_text(pa.array(values, kind).slice(start))
    assert made.type == pa.string()
    for text, value in zip(made.to_pylist(), values[start:], strict=True):
        assert (text is None) == (value is None)
        if text is not None:
            found = json.loads(text, parse_float=Decimal)
            assert same(found, expected(value, kind), kind), (text, value)


def test_as_it_is_written():
    kind = pa.struct(
        [
            ("n", pa.int32()),
            ("f", pa.float64()),
            ("at", pa.timestamp("us", "UTC")),
            ("tags", pa.list_(pa.string())),
            ("rates", pa.map_(pa.string(), pa.float64())),
        ]
    )
    noon = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
    values = [
        {"n": 1, "f": 2.0, "at": noon, "tags": ["a", None, "\n"], "rates": [("x", 0.1), ("y", None)]},
        {"n": None, "f": None, "at": None, "tags": [], "rates": []},
        None,
    ]
    assert json_text(pa.array(values, kind)).to_pylist() == [
        '{"n":1,"f":2.0,"at":"2026-01-31T12:00:00.000000Z","tags":["a",null,"\\n"],"rates":{"x":0.1,"y":null}}',
        '{"tags":[],"rates":{}}',
        None,
    ]
    assert json_text(pa.array([{}, None], pa.struct([]))).to_pylist() == ["{}", None]


def test_what_a_null_hides_is_not_written():
    """A struct or list that is NULL may still have values below it in memory."""
    items = pa.array([1, 2, 3, 4])
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 3, 4], pa.int32()), items, mask=pa.array([False, True, False]))
    assert json_text(lists).to_pylist() == ["[1,2]", None, "[4]"]
    assert json_text(lists.slice(1)).to_pylist() == [None, "[4]"]
    structs = pa.StructArray.from_arrays([items], names=["n"], mask=pa.array([False, True, False, False]))
    assert json_text(structs).to_pylist() == ['{"n":1}', None, '{"n":3}', '{"n":4}']
    nested = pa.ListArray.from_arrays(pa.array([0, 3, 4], pa.int32()), structs)
    assert json_text(nested).to_pylist() == ['[{"n":1},null,{"n":3}]', '[{"n":4}]']


@pytest.mark.parametrize("kind", [pa.duration("us"), pa.time64("us"), pa.month_day_nano_interval()], ids=str)
def test_types_without_json(kind):
    for within in (kind, pa.list_(kind), pa.struct([("a", kind)]), pa.map_(pa.string(), kind)):
        assert not has_json(within)
    assert has_json(pa.list_(pa.string()))


@pytest.mark.parametrize(
    ("kind", "keys", "names"),
    [
        (pa.int32(), [0, -(2**31)], ["0", "-2147483648"]),
        (pa.bool_(), [True, False], ["true", "false"]),
        (pa.decimal128(20, 0), [Decimal(2**64 - 1)], ["18446744073709551615"]),
    ],
)
def test_names_in_an_object_are_texts_whatever_the_keys_of_a_map_are(kind, keys, names):
    (text,) = json_text(pa.array([[(key, 1) for key in keys]], pa.map_(kind, pa.int64()))).to_pylist()
    assert list(json.loads(text)) == names


@pytest.mark.parametrize("kind", [pa.date32(), pa.binary(), pa.float64(), pa.timestamp("us")])
def test_keys_of_a_map_of_which_spark_makes_something_else(kind):
    assert not has_json(pa.map_(kind, pa.int64()))
    assert not has_json(pa.struct([("m", pa.list_(pa.map_(kind, pa.int64())))]))
