"""Many JSON payloads at once: the same as one by one, whatever is in them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
import pytest
from decoding_support import of_any_size
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as t

from spark_jobs.payloads import json_text as json_payload
from spark_jobs.payloads import json_whole
from spark_jobs.payloads.decoding import PROBLEM, arrow_type, as_read
from spark_jobs.payloads.json_whole import JsonReader, WholeReader
from spark_jobs.payloads.reading import Policy, Reader, columns

__all__ = ["of_any_size"]

KINDS = [
    t.StringType(),
    t.BooleanType(),
    t.ByteType(),
    t.IntegerType(),
    t.LongType(),
    t.DoubleType(),
    t.FloatType(),
    t.DecimalType(12, 2),
    t.DecimalType(38, 18),
    t.DecimalType(38, 30),
    t.TimestampType(),
    t.TimestampNTZType(),
    t.DateType(),
    t.BinaryType(),
    t.ArrayType(t.DoubleType()),
    t.ArrayType(t.DecimalType(5, 1)),
    t.StructType().add("x", t.LongType()).add("y", t.StringType(), nullable=False),
    t.MapType(t.StringType(), t.DoubleType()),
]
# As they stand in the text: what two ways of reading could take for different things.
ODD = [
    *("null", "true", "false", '""', '"a"', '"a: b"', '"\\":"', '"x\\u0000"', '"\\ud800"', '"\xff"', "[]", "{}"),
    *("0", "-0", "1", "-1", "127", "128", "2147483648", "9223372036854775807", "9223372036854775808"),
    *("9007199254740993", "18446744073709551616", "100000000000000000001", "1" * 400, "01", "+1", "1.", ".5"),
    *("0.0", "-0.0", "1.0", "1.5", "0.1", "12.34", "12.345", "1e2", "1E-2", "1e400", "1e-400", "0e0", "-0.0e5"),
    *("0.1000000000000000055511151231257827", "123456789012345.6", "1234567890123456", "9999999999.99", "1e-7"),
    *("4503599627370496.5", "16777217", "3.5e38", "NaN", "Infinity", '"12.30"', '"1e2"', "5e-324", "1e22"),
    *('"2026-01-31T12:00:00Z"', '"2026-01-31T12:00:00+02:00"', '"2026-01-31 12:00:00.123456Z"', '"2026-01-31T12:00Z"'),
    *('"2026-01-31T12:00:00"', '"2026-01-31T12:00:00.1234567Z"', '"2026-02-31T12:00:00Z"'),
    '"0001-01-01T00:00:00+14:00"',
    *('"0000-01-01T00:00:00Z"', '"9999-12-31T23:59:59-12:00"', '"2026-01-31T24:00:00Z"', '"2026-01-31T12:00:60Z"'),
    *('"2026-01-31T12:00:00+25:00"', '"2026-01-31T12:00:00+23:59"', '"2026-01-31t12:00:00z"', '"1600-02-29T00:00:00Z"'),
    *('"2026-01-31"', '"2026-1-31"', '"YWJj"', '"YWJ"', "[1.5, 2]", "[100000000000000000001]", '{"x": 1, "y": "z"}'),
    *('{"x": 1}', '{"x": 1, "x": 2, "y": ""}', '{"a":{"b":1,"b":2}}', "[" * 1100 + "]" * 1100),
    *("-1e-9999999999999999999", "1000000000000000000", "123456789012345678", "-84096077443e+8", "1e-41"),
    *("1.2345e-37", "9007199254740993e0"),
    *("99999999", "100000000", "-1e-9999999999999999999", "1e-30", "1.5e-30", "1e-18", "9999999999", "10000000000"),
    "1e10",
    # Integers that 64 bits can't hold, of as few digits as can be.
    *("-9223372036854775808", "-9223372036854775809", "-9425207852242075671"),
    # With 18 zeros more, 256 bits would hold no more of it than a small number.
    "166244703011160610829653453261758546462413783157264152258555375196898921",
    # Decimals of more digits than fit; as texts, in forms that are none of JSON's.
    *("99999999999", "-99999999999", "123456789012345678901234567890", "1" * 38, "1" * 46, "1" * 58, "1" * 60),
    "1" * 76,
    *('"99999999999.99"', '"-1.5"', '"+1.5"', '".5"', '"5."', '"-"', '"\\u002b1"', '"1.5\\n"'),
    *('"0E-8"', '"1E-7"', '"-1.5E+3"', '"1e999"', '"1e1000"', '"1e"', '"1e3.0"'),
    *('"00001.5"', '"1"', '"\uff11"'),
    *('["1.5", 2]', '["1.5", "+2"]', "[99999]", "[-9999.9, null]", "1.50000000000000000000000000000000000000000000000"),
]
NAMES = ["f", "g", "unknown", 'q"', "f:"]
SPACE = st.sampled_from(["", "", "", " ", "\n", "\t "])
SCALAR = st.one_of(
    st.sampled_from(ODD),
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(allow_nan=False, allow_infinity=False, places=2).map(str),
    st.text().map(json.dumps),
    st.datetimes().map(lambda when: f'"{when.isoformat()}Z"'),
)


@st.composite
def payloads(draw: st.DrawFn) -> bytes | None:
    fields = draw(st.lists(st.tuples(st.sampled_from(NAMES), SCALAR, SPACE, SPACE), max_size=4))
    inner = ",".join(
        f"{before}{json.dumps(name)}{after}:{after}{value}{before}" for name, value, before, after in fields
    )
    text = f"{draw(SPACE)}{{{inner}}}{draw(SPACE)}"
    made = text.encode("latin-1", "replace") if "\xff" in text else text.encode()
    return draw(st.sampled_from([made, made, made, made, made[:-1], made + made, b"[" + made + b"]", b"", None]))


@cache
def as_rows(fields: t.StructType) -> pa.StructType:
    return arrow_type(t.StructType([*as_read(fields).fields]).add(PROBLEM, t.StringType()))


def rows_of(reader: Reader, fields: t.StructType, values: Sequence[bytes | None]) -> pa.StructArray:
    return columns(reader, pa.array(values, pa.binary()), pa.nulls(len(values), pa.binary()), as_rows(fields))


def one_by_one(fields: t.StructType, values: Sequence[bytes | None], policy: Policy) -> list[dict[str, Any]]:
    """Read each with the exact parser."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(json_payload, "_may_differ", lambda *_, **__: True)
        return rows_of(json_payload.reader(fields, policy), fields, values).to_pylist()


def together(
    fields: t.StructType, values: Sequence[bytes | None], policy: Policy, alone: list[dict[str, Any]]
) -> pa.StructArray:
    """Read many at once, which has to give the same as one by one."""
    found = rows_of(JsonReader(fields, policy), fields, values)
    assert repr(found.to_pylist()) == repr(alone)
    return found


def read_both_ways(fields: t.StructType, values: list[bytes | None], policy: Policy) -> list[pa.Array]:
    """Read many at once, also divided into pieces, and one by one: all have to give the same.

    Returns the columns and the problems.
    """
    alone = one_by_one(fields, values, policy)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(json_whole, "_PIECE", 1)
        together(fields, values, policy, alone)
    return together(fields, values, policy, alone).flatten()


PLAIN = [*KINDS[:6], t.ShortType(), t.TimestampType(), t.DateType(), t.DecimalType(12, 2), t.DecimalType(38, 18)]
# Pieces of which two lines could make one, or one line two.
TORN = [
    *(b'{"f":"x}', b'{","g":"y"}', b'{"f":"1"}{"f":"2"}', b'{"f":1}{"f":2}', b'{"f":{}', b'{"f":[{}', b"{}]}", b"{}{}"),
    *(b'{"f":"1"}', b'{"f":1}', b"{}", b"{", b"}", b"{}}", b'{"f":1},{"g":2}', b'{"f":1,}', b'{"f":1} {}'),
    b'{"f":"\\"}',
    *(b'{"f":1}\n{"f":2}', b'{"f":"\n{"}', b'{"f":NaN}', b'{"f":-Infinity}', b'{"f":/**/1}', b"{} //}"),
    b'{"f":1}\x00}',
    *(b'{"f":1,"u":1}', b'{"u":1,"u":2}', b'{"u":{"v":1,"v":2},"f":1}', b'{"f":1,"u":NaN}', b'\xef\xbb\xbf{"f":1}'),
    *(b'{"f":"\xff"}', b'{"\xff":1}', b'{"f":"\xed\xa0\x80"}', b'{"f":' + b"[" * 100_000 + b"}"),
]


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.tuples(st.sampled_from(PLAIN), st.sampled_from(PLAIN)),
    optional=st.booleans(),
    values=st.lists(
        st.one_of(
            st.none(),
            st.sampled_from(TORN),
            st.lists(st.tuples(st.sampled_from(["f", "g"]), SCALAR), max_size=2, unique_by=lambda field: field[0]).map(
                lambda fields: ("{" + ",".join(f'"{name}":{value}' for name, value in fields) + "}").encode("utf-8")
            ),
        ),
        max_size=5,
    ),
)
def test_batches_that_are_read_whole(kinds, optional, values):
    fields = t.StructType().add("f", kinds[0], nullable=optional).add("g", kinds[1])
    read_both_ways(fields, values, Policy())


FITTING = {
    t.StringType: ['"a"', '""', '"a: b"', '"\\"{}:"', '"\\u0000"', '"\u00fc"'],
    t.BooleanType: ["true", "false"],
    t.ByteType: ["0", "-0", "127", "-128"],
    t.ShortType: ["0", "32767"],
    t.IntegerType: ["1", "-2147483648"],
    t.LongType: ["2", "9223372036854775807"],
    t.DoubleType: ["0", "1.5", "-2e3", "1", "0.0"],
    t.TimestampType: ['"2026-01-31T12:00:00Z"', '"2026-01-31 12:00:00.123456+02:00"'],
    t.DateType: ['"2026-01-31"'],
    t.DecimalType: ["0", "-0.0", "1.50", "12e1", "9999999999.99"],
}
INNER = [
    t.StructType().add("x", t.LongType()).add("y", t.StringType()),
    t.StructType().add("x", t.ArrayType(t.DoubleType())).add("y", t.TimestampType()),
    t.StructType().add("x", t.StructType().add("x", t.IntegerType()).add("y", t.DateType())),
    t.StructType().add("x", t.StringType()).add("y", t.BooleanType(), nullable=False),
    t.StructType().add("x", t.ArrayType(t.DecimalType(12, 2))).add("y", t.DecimalType(38, 18)),
]
NESTED = [*INNER, *map(t.ArrayType, INNER), *map(t.ArrayType, PLAIN), t.ArrayType(t.ArrayType(t.StringType()))]
NESTED.append(t.ArrayType(t.LongType(), containsNull=False))


@st.composite
def texts_of(draw: st.DrawFn, kind: t.DataType) -> str:
    """A value as it stands in a payload: one in twenty fits by chance only, and one in twenty is null."""
    what = draw(st.integers(0, 19))
    if what == 0:
        return draw(st.sampled_from(ODD))
    if what == 1:
        return "null"
    if isinstance(kind, t.ArrayType):
        return f"[{','.join(draw(st.lists(texts_of(kind.elementType), max_size=3)))}]"
    if isinstance(kind, t.StructType):
        names = draw(st.lists(st.sampled_from(kind.fields), max_size=3, unique=what > 2))
        fields = [f'"{one.name}":{draw(texts_of(one.dataType))}' for one in names]
        more = ['"z":{"z":1}'] if what == 3 else []
        return "{" + ",".join([*fields, *more]) + "}"
    return draw(st.sampled_from(FITTING[type(kind)]))


@st.composite
def nested_batches(draw: st.DrawFn) -> tuple[t.StructType, list[bytes | None]]:
    kinds = draw(st.sampled_from(NESTED)), draw(st.sampled_from([*NESTED, *PLAIN]))
    fields = t.StructType().add("f", kinds[0], nullable=draw(st.booleans())).add("g", kinds[1])
    rows = draw(st.lists(st.tuples(*map(texts_of, kinds)), max_size=4))
    return fields, [*(f'{{"g":{g},"f":{f}}}'.encode("utf-8", "replace") for f, g in rows), draw(st.none())]


@settings(max_examples=80, deadline=None)
@given(batch=nested_batches(), missing=st.sampled_from(["null", "dead-letter"]))
def test_batches_of_nested_values_that_are_read_whole(batch, missing):
    read_both_ways(*batch, Policy(missing=missing))


@pytest.mark.parametrize("kind", NESTED, ids=lambda kind: kind.simpleString())
def test_nested_payloads_are_read_whole(kind):
    """Else nobody would notice but by the time that it takes."""
    strict = kind in (NESTED[3], NESTED[8], NESTED[-1])

    def text(kind: t.DataType, number: int) -> str:
        if isinstance(kind, t.ArrayType):
            return f"[{','.join(text(kind.elementType, n) for n in range(number % 3))}]"
        if isinstance(kind, t.StructType):
            return "{" + ",".join(f'"{one.name}":{text(one.dataType, number)}' for one in kind.fields) + "}"
        some = FITTING[type(kind)]
        return some[number % len(some)]

    fields = t.StructType().add("f", kind)
    values = [f'{{"f":{text(kind, number)}}}'.encode() for number in range(12)] + [None, b"{}", b'{"f":null}']
    whole = WholeReader.of(fields, Policy())
    if strict:
        # Which of the fields inside are missing is not looked at there.
        assert whole is None
    else:
        found = whole.read(pa.array(values))
        assert found is not None
        assert found[1] == set()
        assert WholeReader.of(fields, Policy(missing="dead-letter")) is None or not isinstance(kind, t.StructType)
    read_both_ways(fields, values, Policy())


# Two lines that are joined beside one that is torn are as many as there should be: it takes three.
@pytest.mark.parametrize(("pieces", "count"), [(TORN, 2), (TORN[:9], 3)])
def test_lines_are_never_joined_nor_torn(pieces, count):
    """Every two, or three, of the pieces together: their number alone would not tell."""
    fields = t.StructType().add("f", t.StringType()).add("g", t.StringType())
    alone = list(zip(pieces, one_by_one(fields, pieces, Policy()), strict=True))
    for some in itertools.product(alone, repeat=count):
        together(fields, [piece for piece, _ in some], Policy(), [row for _, row in some])


def test_plain_payloads_are_read_whole():
    fields = t.StructType()
    for number, kind in enumerate(PLAIN):
        fields.add(f"v{number}", kind)
    plain = ["a: b", True, 1, 2, 3, 4.5, 6, "2026-01-31T12:00:00Z", "2026-01-31", 1.5, 99999999999999999999]
    event = dict(zip(fields.fieldNames(), plain, strict=True))
    values = [json.dumps(event, separators=(",", ":")).encode(), None, json.dumps(event).encode(), b"{}"]
    found = WholeReader.of(fields, Policy()).read(pa.array(values))
    assert found is not None
    assert found[1] == set()
    assert [len(column.drop_null()) for column in found[0]] == [2] * len(PLAIN)
    read_both_ways(fields, values, Policy())


@pytest.mark.parametrize(
    ("values", "whole"),
    [
        (['"1.5"', '"-20"', "null"], True),
        (["1.50", "2e1", "null"], True),
        (['"1.5"', "2"], False),
        (['"+1.5"', '"2"'], False),
        (['"1e1"', '"0E-8"', '"1.50E-1"', "null"], True),
        (['"1e39"'], False),
        (['"1e"'], False),
        (["10000000000"], False),
    ],
)
@pytest.mark.parametrize("form", ["{}", "[{}]", '{{"x":[{}]}}'])
def test_decimals_are_read_whole_as_numbers_or_as_texts(values, whole, form):
    kind = t.DecimalType(12, 2)
    inside = {"{}": kind, "[{}]": t.ArrayType(kind)}.get(form, t.StructType().add("x", t.ArrayType(kind)))
    fields = t.StructType().add("f", inside).add("g", t.StringType())
    payloads = [f'{{"f":{form.format(value)},"g":"1.5"}}'.encode() for value in values]
    assert (WholeReader.of(fields, Policy()).read(pa.array(payloads)) is not None) == whole
    read_both_ways(fields, payloads, Policy())


# In a process of its own, because Arrow may crash. It prints payloads that are read in another way than one by one.
READ_TINY = """
import json, sys
import pyarrow as pa
from pyspark.sql import types as t
from spark_jobs.payloads import json_text, json_whole
from spark_jobs.payloads.decoding import PROBLEM, arrow_type
from spark_jobs.payloads.json_whole import JsonReader
from spark_jobs.payloads.reading import Policy, columns

json_whole._FEW = 0
given = json.load(open(sys.argv[1]))
# All texts with two of the scales. With the others every third: each form, and each number in one of the forms.
some = given[::3]
for precision, scale, texts in (12, 2, given), (38, 37, given), (38, 0, some), (38, 18, some):
    kind = t.DecimalType(precision, scale)
    fields = t.StructType().add("f", kind).add("g", t.ArrayType(kind))
    arrow = arrow_type(t.StructType([*fields.fields]).add(PROBLEM, t.StringType()))
    exact = json_text.reader(fields, Policy())
    for text in texts:
        payloads = pa.array([text.encode()])
        readers = JsonReader(fields, Policy()), exact
        many, one = (columns(reader, payloads, pa.nulls(1, pa.binary()), arrow).to_pylist() for reader in readers)
        if many != one:
            print(kind, text, many, one)
"""


def test_tiny_decimals_are_left_to_the_exact_reader(tmp_path):
    small = [8, 15, 16, 18, 19, 20, 37, 38, 39, 55]
    exponents = [*small, *range(76, 82), 99, 120, 99999999, 2000000000, *range(2**31 - 1, 2**31 + 2)]
    numbers = [f"{digits}e{sign}{one}" for digits in ("1", "-5.0", "0") for sign in "-+" for one in exponents]
    numbers += [f"{digits * 38}.{digits * 38}e{sign}{one}" for digits in "19" for sign in "-+" for one in (37, 38, 39)]
    numbers += [
        f"1E-{'0' * 9}80",
        "0." + "0" * 80 + "1",
        "1." + "0" * 75 + "e-9",
        "1" * 56 + "e-19",
        "1" + "0" * 55 + "e-56",
    ]
    forms = ['{"f":%s}', '{"f":"%s"}', '{"g":[1, %s ]}']
    # The place of a number is found by other code than its value, so a part of the numbers is enough.
    others = ['{"f":\t%s\t,"g":null}', '{"f":1,"f":"%s"}', '{"f":"%s","f":1}']
    texts = [form % number for form in forms for number in numbers]
    texts += [form % number for form in others for number in numbers[::5]]
    texts += ['{"f":"\\u0031e-99999999"}', '{"f":"1\\u0065-99999999"}']
    given = tmp_path / "payloads"
    given.write_text(json.dumps(texts))
    done = subprocess.run(
        [sys.executable, "-c", READ_TINY, given], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("payload", "whole"),
    [
        ('{"f":0.00,"d":1e-05,"g":"12345678e-1234"}', True),
        ('{"f":0.00,"d":1.5,"g":"1234567e-1234-4e-99"}', True),
        ('{"f":2.5,"d":1e-300,"g":""}', True),
        ('{"f":0.00,"d":1e-300,"g":""}', False),
    ],
)
def test_other_tiny_numbers_beside_decimals_are_read_whole(payload, whole):
    fields = t.StructType().add("f", t.DecimalType(12, 2)).add("d", t.DoubleType()).add("g", t.StringType())
    assert (WholeReader.of(fields, Policy()).read(pa.array([payload.encode()])) is not None) == whole


ORDER = t.StructType().add("f", t.DecimalType(12, 2)).add("g", t.TimestampType()).add("h", t.ArrayType(t.StringType()))
PLAIN_ORDER = b'{"f":%d,"g":"2026-01-31T12:00:00Z","h":["%d"]}'
ODD_ORDER = b'{"f":%d,"g":"2026-01-31T12:00Z","h":["%d"]}'


def orders(rows: int, odd: Callable[[int], bool]) -> list[bytes]:
    return [(ODD_ORDER if odd(number) else PLAIN_ORDER) % (number, number) for number in range(rows)]


@pytest.mark.parametrize("odd", [{0}, {9999}, {5, 3000, 4321, 9998}])
def test_an_odd_payload_sends_only_its_neighbours_to_the_slow_reader(odd):
    values: list[bytes | None] = [*orders(10_000, odd.__contains__)]
    values[17:17] = [None] * 3
    found = WholeReader.of(ORDER, Policy()).read(pa.array(values))
    assert found is not None
    places = {number + 3 * (number >= 17) for number in odd}
    assert places <= found[1]
    assert len(found[1]) <= len(odd) * json_whole._PIECE
    f, g, h, problems = read_both_ways(ORDER, values, Policy())
    assert problems.null_count == len(values)
    assert {column.null_count for column in (f, g, h)} == {3}


@pytest.mark.parametrize("batches", [1, 3, 31])
def test_odd_batches_are_followed_by_some_without_a_try_and_then_by_tries(batches):
    some_odd, plain = (pa.array(orders(300, odd)) for odd in (lambda number: number % 2 == 0, lambda _: False))
    reader = WholeReader.of(ORDER, Policy())
    tried = []
    read, reader._read = reader._read, lambda values: tried.append(len(values)) or read(values)
    for _ in range(batches):
        assert reader.read(some_odd) is None
    assert tried.count(300) == {1: 1, 3: 2, 31: 5}[batches]
    found = [reader.read(plain) for _ in range(17)]
    assert [one and one[1] for one in found[-2:]] == [set(), set()]


def test_a_batch_of_odd_payloads_alone_is_not_divided():
    reader = WholeReader.of(ORDER, Policy())
    tried = []
    read, reader._read = reader._read, lambda values: tried.append(len(values)) or read(values)
    assert reader.read(pa.array(orders(300, lambda _: True))) is None
    assert tried == [300, 1, 1]


POLICIES = [
    Policy(unknown, missing, wrong)
    for unknown, missing, wrong in itertools.product(
        ("ignore", "dead-letter"), ("null", "dead-letter"), ("dead-letter", "null")
    )
]


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    optional=st.tuples(st.booleans(), st.booleans()),
    values=st.lists(payloads(), max_size=6),
    policy=st.sampled_from(POLICIES),
)
def test_many_are_read_as_one_by_one(kinds, optional, values, policy):
    fields = t.StructType()
    for name, kind, may_be_null in zip(("f", "g"), kinds, optional, strict=True):
        fields.add(name, kind, nullable=may_be_null)
    read_both_ways(fields, values, policy)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.simpleString())
def test_every_odd_value_in_every_kind_of_column(kind):
    """All together, where most are read one by one; and each with a plain one, where a column is taken whole."""
    odd = [b'{"f":' + (text.encode("latin-1") if "\xff" in text else text.encode()) + b"}" for text in ODD]
    fields = t.StructType().add("f", kind)
    read_both_ways(fields, odd, Policy())
    plain = [b'{"f":null}', None]
    *alone, null, nothing = one_by_one(fields, [*odd, *plain], Policy())
    for value, row in zip(odd, alone, strict=True):
        together(fields, [value, *plain], Policy(), [row, null, nothing])
