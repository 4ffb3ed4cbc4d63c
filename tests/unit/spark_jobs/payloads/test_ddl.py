"""The JSON Schema of a DDL: the types of JSON that a column takes are those that the decoder reads."""

from __future__ import annotations

import pytest
from pyspark.sql import types as t

from spark_jobs.payloads import json_text
from spark_jobs.payloads.ddl import json_schema
from spark_jobs.payloads.reading import Policy, Problem

TEXTS = ("x", "1.5", "2026-01-31", "2026-01-31T12:00:00Z", "2026-01-31T12:00:00", "AP8=")
VALUES = {
    "array": ([],),
    "boolean": (True,),
    "integer": (1,),
    "null": (None,),
    "number": (1.5,),
    "object": ({},),
    "string": TEXTS,
}
COLUMNS = {
    "boolean": t.BooleanType(),
    "tinyint": t.ByteType(),
    "short": t.ShortType(),
    "INT": t.IntegerType(),
    "long": t.LongType(),
    "float": t.FloatType(),
    "double": t.DoubleType(),
    "decimal(10, 2)": t.DecimalType(10, 2),
    "string": t.StringType(),
    "binary": t.BinaryType(),
    "date": t.DateType(),
    "timestamp": t.TimestampType(),
    "timestamp_ntz": t.TimestampNTZType(),
    "array<int>": t.ArrayType(t.IntegerType()),
    "map<string, int>": t.MapType(t.StringType(), t.IntegerType()),
    "struct<b: int>": t.StructType().add("b", t.IntegerType()),
}


def is_read(kind, nullable, value):
    convert = json_text._fields(t.StructType().add("a", kind, nullable), "", Policy())
    try:
        convert({"a": value})
    except Problem:
        return False
    return True


@pytest.mark.parametrize("nullable", [True, False])
@pytest.mark.parametrize("ddl", COLUMNS)
def test_types(ddl, nullable):
    read = {name for name, values in VALUES.items() if any(is_read(COLUMNS[ddl], nullable, one) for one in values)}
    schema = json_schema(f"a {ddl}{'' if nullable else ' NOT NULL'}", Policy())
    assert set(schema["properties"]["a"]["type"]) == read
    assert schema["required"] == ([] if nullable else ["a"])


@pytest.mark.parametrize("ddl", ["tinyint", "short", "INT", "long"])
def test_bounds(ddl):
    column = json_schema(f"a {ddl}", Policy())["properties"]["a"]
    for bound, beyond in ((column["minimum"], -1), (column["maximum"], 1)):
        assert is_read(COLUMNS[ddl], True, bound)
        assert not is_read(COLUMNS[ddl], True, bound + beyond)


def test_names_and_what_is_inside():
    schema = json_schema(
        "struct<`a ``b`: array<struct<n: int NOT NULL COMMENT 'it''s, \\'so\\'', struct: map<string,decimal(9,2)>>>>",
        Policy(unknown="dead-letter", missing="dead-letter"),
    )
    assert (schema["required"], schema["additionalProperties"]) == (["a `b"], False)
    inside = schema["properties"]["a `b"]["items"]
    assert (inside["required"], inside["additionalProperties"]) == (["n", "struct"], False)
    assert inside["properties"]["struct"]["additionalProperties"]["title"] == "decimal(9,2)"
    assert inside["type"] == ["object", "null"]
