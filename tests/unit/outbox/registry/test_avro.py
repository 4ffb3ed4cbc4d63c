"""The serializer for a schema registry and Avro: consumers read what it writes, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import io
import itertools
import math
import sys
import uuid
from decimal import Decimal
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from registry_support import LINE, LINE_OF, NOON, ORDER, SMALL, field, known, optional, order, server

from outbox import MissingExtra, PayloadError, SchemaMismatch
from outbox.registry import Avro, JsonSchema, RegistrySerializer
from outbox.serializing import Serialized, serialize
from spark_jobs.payloads import decoding

__all__ = ["server"]


def texts(most: int = 20) -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=most)


MOMENTS = st.datetimes(dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30))
PRICES = st.decimals(Decimal("-9999.99"), Decimal("9999.99"), places=2)
LINES = st.fixed_dictionaries({"sku": texts(), "price": PRICES})
ORDERS = st.fixed_dictionaries(
    {"id": texts(), "count": st.integers(-(2**31), 2**31 - 1)},
    optional={
        "total": st.integers(-(2**63), 2**63 - 1),
        "weight": st.none() | st.floats(allow_nan=False),
        "ratio": st.none() | st.floats(width=32, allow_nan=False),
        "paid": st.none() | st.booleans(),
        "raw": st.none() | st.binary(max_size=20),
        "two": st.none() | st.binary(min_size=2, max_size=2),
        "state": st.none() | st.sampled_from(["NEW", "PAID"]),
        "day": st.none() | st.dates(),
        "at": st.none() | MOMENTS.map(lambda moment: moment.replace(tzinfo=dt.UTC)),
        "rough": st.none() | MOMENTS.map(lambda moment: moment.replace(microsecond=5000, tzinfo=dt.UTC)),
        "local": st.none() | MOMENTS,
        "clock": st.none() | st.times(),
        "ref": st.none() | st.uuids(),
        "lines": st.lists(LINES, max_size=3),
        "rates": st.dictionaries(texts(5), st.floats(allow_nan=False), max_size=3),
        "first": st.none() | LINES,
    },
)


@pytest.fixture(scope="module")
def avro(server):
    """A serializer, and a reader of what it writes."""
    subject = known(server, "orders-value", ORDER)
    fields, plan = decoding.Avro(server.url, subject).task_plan()
    reader = plan()
    serializer = RegistrySerializer(server.url, {"Order": Avro(subject, ORDER)})
    return serializer, lambda value: dict(zip(fields.fieldNames(), reader(value, None), strict=True))


@settings(deadline=None, max_examples=100)
@given(ORDERS)
def test_consumers_read_the_avro_that_was_written(avro, payload):
    serializer, read = avro
    made = serializer(order(payload))
    assert made.content_type == "application/vnd.confluent.avro"
    defaults = dict.fromkeys((each["name"] for each in ORDER["fields"]), None) | {"total": 7, "lines": [], "rates": {}}
    expected = defaults | payload
    for name in ("clock", "ref"):  # text for consumers
        expected[name] = None if expected[name] is None else str(expected[name])
    found = read(made.payload)
    found["rates"] = dict(found["rates"])  # pairs, as Arrow takes them
    assert found == expected
    for line, given_line in zip(found["lines"], payload.get("lines", []), strict=True):
        assert line["price"].as_tuple().exponent == -2
        assert line["price"] == given_line["price"]


@pytest.mark.parametrize("given", [uuid.UUID(int=7), str(uuid.UUID(int=7)), uuid.UUID(int=7).bytes])
@pytest.mark.parametrize("optional", [False, True])
def test_a_uuid_may_be_carried_by_sixteen_bytes(given, optional):
    carrier: Any = {"type": "fixed", "name": "Id", "size": 16, "logicalType": "uuid"}
    schema = {"type": "record", "name": "R", "fields": [field("id", ["null", carrier] if optional else carrier)]}
    assert Avro("s", schema).encode({"id": given}) == b"\x02" * optional + uuid.UUID(int=7).bytes
    with pytest.raises(SchemaMismatch):
        Avro("s", schema).encode({"id": "seven"})


@pytest.mark.parametrize(
    ("schema", "package"), [(Avro("s", '"int"'), "fastavro"), (JsonSchema("s", "{}"), "jsonschema")]
)
def test_without_its_package_a_schema_names_the_extra(monkeypatch, schema, package):
    monkeypatch.setitem(sys.modules, package, None)
    said = rf"{package} is not installed; run: pip install 'outbox-kafka\[registry\]'"
    with pytest.raises(MissingExtra, match=said):
        serialize(lambda event: Serialized(schema.encode(event.payload), "x"), order({"a": 1}))


@dataclasses.dataclass
class Line:
    sku: str
    price: Decimal


class State(enum.Enum):
    NEW = "NEW"


class OrderModel(BaseModel):
    id: str
    count: int
    state: State = State.NEW
    lines: list[Line] = []


def test_dataclasses_models_and_enums_are_written_like_dicts(avro):
    serializer, read = avro
    found = read(serializer(order(OrderModel(id="a", count=1, lines=[Line("tea", Decimal("1.5"))]))).payload)
    assert (found["id"], found["state"], found["lines"]) == ("a", "NEW", [{"sku": "tea", "price": Decimal("1.50")}])


@pytest.mark.parametrize(
    ("payload", "where", "problem"),
    [
        ({"count": 1}, "payload['id']", "is missing"),
        ({**SMALL, "ided": 1}, "payload['ided']", "is not a field of shop.Order"),
        ({**SMALL, "id": 1}, "payload['id']", "is a int; the schema requires string"),
        ({**SMALL, "id": "\ud800"}, "payload['id']", "surrogate"),
        # What fastavro alone writes as something else.
        ({**SMALL, "count": 1.7}, "payload['count']", "is a float"),
        ({**SMALL, "count": True}, "payload['count']", "is a bool"),
        ({**SMALL, "count": 2**31}, "payload['count']", "out of the range of int"),
        ({**SMALL, "total": 2**63}, "payload['total']", "out of the range of long"),
        ({**SMALL, "paid": "no"}, "payload['paid']", "one of null, boolean"),
        ({**SMALL, "ratio": 1e300}, "payload['ratio']", "one of null, float"),
        ({**SMALL, "weight": 2**53 + 1}, "payload['weight']", "one of null, double"),
        ({**SMALL, "two": b"abc"}, "payload['two']", "shop.Two"),
        ({**SMALL, "state": "LOST"}, "payload['state']", "shop.State"),
        ({**SMALL, "day": NOON}, "payload['day']", "date"),
        ({**SMALL, "at": NOON}, "payload['at']", "timestamp-micros"),
        ({**SMALL, "local": NOON.replace(tzinfo=dt.UTC)}, "payload['local']", "local-timestamp-micros"),
        ({**SMALL, "rough": dt.datetime(2026, 1, 1, 0, 0, 0, 1, dt.UTC)}, "payload['rough']", "timestamp-millis"),
        ({**SMALL, "ref": "x"}, "payload['ref']", "uuid"),
        ({**SMALL, "rates": {1: 1.0}}, "payload['rates']", "map with keys of text"),
        ({**SMALL, "lines": {"sku": "x"}}, "payload['lines']", "an array"),
        ({**SMALL, "lines": [LINE_OF, {"sku": "x"}]}, "payload['lines'][1]['price']", "is missing"),
        ({**SMALL, "lines": [{**LINE_OF, "price": Decimal("1.234")}]}, "payload['lines'][0]['price']", "more digits"),
        ({**SMALL, "lines": [{**LINE_OF, "price": Decimal(10000)}]}, "payload['lines'][0]['price']", "more digits"),
        ({**SMALL, "lines": [{**LINE_OF, "price": Decimal("NaN")}]}, "payload['lines'][0]['price']", "is not a number"),
        ({**SMALL, "first": {"sku": 1, "price": Decimal(1)}}, "payload['first']['sku']", "requires string"),
        ([], "payload", "the record shop.Order"),
    ],
)
def test_what_the_avro_schema_does_not_take_is_refused_by_its_place(avro, payload, where, problem):
    with pytest.raises(SchemaMismatch, match=problem) as refused:
        avro[0](order(payload))
    assert (refused.value.field, refused.value.subject) == (where, "orders-value")
    assert isinstance(refused.value, PayloadError)


def test_infinity_is_a_double(avro):
    serializer, read = avro
    assert read(serializer(order({**SMALL, "weight": math.inf})).payload)["weight"] == math.inf


UNION = {
    "type": "record",
    "name": "U",
    "fields": [
        field(
            "when",
            ["null", {"type": "int", "logicalType": "date"}, {"type": "long", "logicalType": "timestamp-micros"}],
        ),
        field("size", ["float", "double"]),
        field("what", ["boolean", "long", "string", LINE, {"type": "map", "values": "long"}]),
    ],
}


def test_each_branch_of_a_union_is_written_as_itself(server):
    serializer = RegistrySerializer(server.url, {"Order": Avro(known(server, "unions", UNION), UNION)})
    moments = (None, dt.date(2026, 1, 31), NOON.replace(tzinfo=dt.UTC))
    for values in itertools.product(moments, (0.5, 0.1, 1e300), (True, 1, "text", LINE_OF, {"a": 1})):
        payload = dict(zip(("when", "size", "what"), values, strict=True))
        made = serializer(order(payload)).payload[5:]
        found = fastavro.schemaless_reader(io.BytesIO(made), fastavro.parse_schema(UNION))
        assert found == payload
        assert list(map(type, found.values())) == list(map(type, values))


def test_a_record_that_holds_itself_is_not_written_for_ever(server):
    subject = known(
        server, "trees", tree := {"type": "record", "name": "T", "fields": [field("t", optional("T"), default=None)]}
    )
    serializer = RegistrySerializer(server.url, {"Order": Avro(subject, tree)})
    assert serializer(order({"t": {"t": None}})).payload[5:] == b"\x02\x00"
    endless: dict[str, Any] = {}
    endless["t"] = endless
    with pytest.raises(SchemaMismatch, match="levels deep"):
        serializer(order(endless))


DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}
INNER = {
    "type": "record",
    "name": "Inner",
    "fields": [
        field("raw", "bytes", default="\u0000\u00ff"),
        field("two", {"type": "fixed", "name": "Two", "size": 2}, default="\u0001\u0002"),
    ],
}
DEFAULTS = {
    "type": "record",
    "name": "Defaults",
    "fields": [
        field("inner", INNER, default={"raw": "\u00e9"}),
        field("again", "Inner", default={}),
        field("amount", DECIMAL, default="\u0001\u0000"),
        field("maybe", [DECIMAL, "null"], default="\u0002"),
        field("none", ["null", "bytes"], default=None),
        field("twos", {"type": "array", "items": "Two"}, default=["ab"]),
        field("raws", {"type": "map", "values": ["bytes", "string"]}, default={"a": "\u00ff"}),
        field("text", ["string", "bytes"], default="\u00e9"),
    ],
}


def test_fields_of_bytes_may_be_left_out():
    """Their defaults are text in a schema: a character for each byte."""
    written = io.BytesIO(Avro("defaults", DEFAULTS).encode({}))
    assert fastavro.schemaless_reader(written, fastavro.parse_schema(DEFAULTS)) == {
        "inner": {"raw": b"\xe9", "two": b"\1\2"},
        "again": {"raw": b"\0\xff", "two": b"\1\2"},
        "amount": Decimal("2.56"),
        "maybe": Decimal("0.02"),
        "none": None,
        "twos": [b"ab"],
        "raws": {"a": b"\xff"},
        "text": "\u00e9",
    }
