"""Payloads with fields that the schema lacks, as a producer's new version writes them: learned, and dropped."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import types as t

from spark_jobs.payloads import json_text, json_whole
from spark_jobs.payloads.decoding import PROBLEM, arrow_type
from spark_jobs.payloads.json_whole import JsonReader, WholeReader
from spark_jobs.payloads.reading import Policy, columns

DECLARED = t.StructType().add("f", t.LongType()).add("o", t.StructType().add("a", t.StringType()))
EXTRAS = {
    "a number": b'"u":%d',
    "a time": b'"u":"2026-01-01T00:00:%02dZ"',
    "an object": b'"u":{"v":[{"w":%d}],"x":null,"y":{}}',
    "null": b'"u":null,"n":%d',
    "several": b'"u":true,"v":1.5,"w":"","x":[],"y":[%d]',
}


def newer(rows: int, extra: bytes, inner: bytes = b"") -> list[bytes | None]:
    extras = [extra % (n % 60) if b"%" in extra else extra for n in range(rows)]
    return [b'{"f":%d,"o":{"a":"x"%b},%b}' % (n, inner, one) for n, one in enumerate(extras)]


def problems(values: list[bytes | None]) -> list[int]:
    """Return which payloads are refused; read many at once and one by one, with the same result."""
    kind = arrow_type(t.StructType([*DECLARED.fields]).add(PROBLEM, t.StringType()))
    payloads, headers = pa.array(values, pa.binary()), pa.nulls(len(values), pa.binary())
    many, alone = (
        columns(reader, payloads, headers, kind)
        for reader in (JsonReader(DECLARED, Policy()), json_text.reader(DECLARED, Policy()))
    )
    assert many.equals(alone)
    return [n for n, why in enumerate(many.field(PROBLEM).to_pylist()) if why]


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("inner", [b"", b',"b":{"c":1}'])
def test_they_do_not_send_all_to_the_slow_reader(extra, inner):
    reader = WholeReader.of(DECLARED, Policy())
    values = newer(300, extra, inner)
    for batch in (values, [None, *values], [*newer(10, b'"f2":1'), *values[:200]], values):
        found = reader.read(pa.array(batch))
        assert found is not None
        assert len(found[1]) <= json_whole._PIECE
        assert problems(batch) == []
    assert found[1] == set()
    assert [column.type for column in found[0]] == [pa.int64(), pa.struct([("a", pa.string())])]


@pytest.mark.parametrize(
    ("odd", "refused"),
    [
        (b'"u":NaN', True),
        (b'"u":-Infinity', True),
        (b'"u":1,"u":2', True),
        (b'"u":1' + b"0" * 400, True),
        (b'"u":01', True),
        (b'"u":"\\ud800"', True),
        (b'"u":"\xff"', True),
        (b'"u":"text"', False),
        (b'"u":null', False),
        (b'"u":[1,"a"]', False),
        (b'"u":' + b"[" * 300 + b"]" * 300, False),
        (b'"u":' + b"9" * 30, False),
    ],
)
def test_among_known_ones_another_value_is_read_like_one_by_one(odd, refused):
    values = newer(300, b'"u":%d')
    assert problems([*values, *newer(1, odd), *values]) == ([300] if refused else [])


def test_an_object_whose_names_are_keys_is_not_learned():
    """Arrow makes a column of each name."""
    reader = WholeReader.of(DECLARED, Policy())
    keys = [b",".join(b'"%d":1' % (9 * n + k) for k in range(9)) for n in range(300)]
    assert reader.read(pa.array([b'{"f":%d,"u":{%b}}' % each for each in enumerate(keys)])) is None
    assert reader._wide is reader._schema


def test_what_is_very_deep_is_not_learned():
    """Arrow dies of such a type."""
    deep = pa.array([b'{"f":1,"u":%b}' % (b"[" * 20_000 + b"]" * 20_000)] * 100)
    assert WholeReader.of(DECLARED, Policy()).read(deep) is None


def test_where_they_are_refused_they_are_not_learned():
    assert WholeReader.of(DECLARED, Policy(unknown="dead-letter")).read(pa.array(newer(300, b'"u":1'))) is None


def test_few_payloads_are_read_one_by_one():
    """Arrow takes a millisecond for any batch: a hundred payloads' time."""
    reader = JsonReader(DECLARED, Policy())
    assert reader.many(pa.array(newer(99, b'"u":1'))) is None
    assert reader.many(pa.array(newer(100, b'"u":1'))) is not None
