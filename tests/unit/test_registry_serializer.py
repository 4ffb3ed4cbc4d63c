"""The serializer for a schema registry: consumers' decoders read what it writes, and what does not fit is refused."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
import io
import json
import math
from decimal import Decimal
from typing import Any

import fastavro
import pytest
import schema_registry
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pyspark.sql import types as t

from outbox import Event, EventError, PayloadError, SchemaMismatch, SchemaRefused, SchemaRegistryUnavailable
from outbox.errors import ConfigurationError
from outbox.registry import Avro, JsonSchema, Protobuf, RegistrySerializer
from spark_jobs.payloads import decoding, json_schema
from spark_jobs.payloads.reading import Policy
from spark_jobs.payloads.registry import Registry

LINE = {
    "type": "record",
    "name": "Line",
    "fields": [
        {"name": "sku", "type": "string"},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
    ],
}


def field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def optional(kind: Any) -> Any:
    return ["null", kind]


ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        field("id", "string"),
        field("count", "int"),
        field("total", "long", default=7),
        field("weight", optional("double"), default=None),
        field("ratio", optional("float"), default=None),
        field("paid", optional("boolean"), default=None),
        field("raw", optional("bytes"), default=None),
        field("two", optional({"type": "fixed", "name": "Two", "size": 2}), default=None),
        field("state", optional({"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}), default=None),
        field("day", optional({"type": "int", "logicalType": "date"}), default=None),
        field("at", optional({"type": "long", "logicalType": "timestamp-micros"}), default=None),
        field("rough", optional({"type": "long", "logicalType": "timestamp-millis"}), default=None),
        field("local", optional({"type": "long", "logicalType": "local-timestamp-micros"}), default=None),
        field("clock", optional({"type": "long", "logicalType": "time-micros"}), default=None),
        field("ref", optional({"type": "string", "logicalType": "uuid"}), default=None),
        field("lines", {"type": "array", "items": LINE}, default=[]),
        field("rates", {"type": "map", "values": "double"}, default={}),
        field("first", optional("shop.Line"), default=None),
    ],
}
SMALL = {"id": "a", "count": 1}


@pytest.fixture(scope="module")
def server():
    with schema_registry.running() as running:
        yield running


def known(server, subject: str, schema: Any, kind: str = "AVRO") -> str:
    """Register a schema under a subject, as those who own it do."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    SchemaRegistryClient({"url": server.url}).register_schema(subject, Schema(text, kind))
    return subject


def order(payload: Any, event_type: str = "OrderPlaced") -> Event:
    return Event("Order", "4711", event_type, payload)


def decoded(decoder: Any, value: bytes) -> dict[str, Any]:
    """What a consumer's task reads."""
    fields, plan = decoder.task_plan()
    return dict(zip(fields.fieldNames(), plan()(value, None), strict=True))


# --- Avro


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


LINE_OF = {"sku": "tea", "price": Decimal(1)}
NOON = dt.datetime(2026, 1, 31, 12)


@pytest.mark.parametrize(
    ("payload", "where", "problem"),
    [
        ({"count": 1}, "payload['id']", "is missing"),
        ({**SMALL, "ided": 1}, "payload['ided']", "is no field of shop.Order"),
        ({**SMALL, "id": 1}, "payload['id']", "is a int; the schema wants string"),
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
        ({**SMALL, "lines": [{**LINE_OF, "price": Decimal("NaN")}]}, "payload['lines'][0]['price']", "is no number"),
        ({**SMALL, "first": {"sku": 1, "price": Decimal(1)}}, "payload['first']['sku']", "wants string"),
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


@pytest.mark.parametrize("when", [None, dt.date(2026, 1, 31), NOON.replace(tzinfo=dt.UTC)])
@pytest.mark.parametrize("what", [True, 1, "text", LINE_OF, {"a": 1}])
@pytest.mark.parametrize("size", [0.5, 0.1, 1e300])
def test_each_branch_of_a_union_is_written_as_itself(server, when, what, size):
    subject = known(server, "unions", UNION)
    payload = {"when": when, "size": size, "what": what}
    made = RegistrySerializer(server.url, {"Order": Avro(subject, UNION)})(order(payload))
    found = fastavro.schemaless_reader(io.BytesIO(made.payload[5:]), fastavro.parse_schema(UNION))
    assert found == payload
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in payload.items()
    }


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


# --- JSON Schema

INVOICE = {
    "type": "object",
    "properties": {
        "amount": {"type": "number", "minimum": 0},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/L"}},
    },
    "required": ["amount"],
    "$defs": {"L": {"type": "object", "required": ["sku"]}},
}


def test_consumers_read_the_json_that_was_written(server):
    subject = known(server, "invoices-value", INVOICE, "JSON")
    serializer = RegistrySerializer(server.url, {"Order": JsonSchema(subject, INVOICE)})
    made = serializer(order({"amount": 12.5, "lines": [{"sku": "tea"}]}))
    assert made.content_type == "application/vnd.confluent.json"
    columns = t.StructType().add("amount", t.DecimalType(6, 2))
    read = json_schema.Plan(columns, Registry(server.url), validate=True, policy=Policy())()
    assert read(made.payload, None) == [Decimal("12.5")]
    for payload, where, rule in (
        ({"amount": -1}, "payload['amount']", "properties/amount/minimum"),
        ({}, "payload", "required"),
        ({"amount": 1, "lines": [{"sku": "x"}, {}]}, "payload['lines'][1]", "items/required"),
    ):
        with pytest.raises(SchemaMismatch, match=rule) as refused:
            serializer(order(payload))
        assert refused.value.field == where
    # What has no form in JSON at all is refused as without a serializer.
    with pytest.raises(PayloadError, match="nan") as refused:
        serializer(order({"amount": math.nan}))
    assert refused.value.field == "payload['amount']"


# --- Protobuf


def pool() -> Any:
    """Two files: shop.proto imports common.proto and a type of Google's."""
    common = descriptor_pb2.FileDescriptorProto(name="common.proto", package="shop", syntax="proto3")
    common.message_type.add(name="Money").field.add(name="cents", number=1, type=3, label=1)
    shop = descriptor_pb2.FileDescriptorProto(
        name="shop.proto",
        package="shop",
        syntax="proto3",
        dependency=["common.proto", "google/protobuf/timestamp.proto"],
    )
    shop.message_type.add(name="Other").field.add(name="x", number=1, type=9, label=1)
    message = shop.message_type.add(name="Order")
    message.field.add(name="id", number=1, type=9, label=1)
    message.field.add(name="total", number=2, type=11, label=1, type_name=".shop.Money")
    message.field.add(name="at", number=3, type=11, label=1, type_name=".google.protobuf.Timestamp")
    message.nested_type.add(name="Skipped")
    message.nested_type.add(name="Line").field.add(name="sku", number=1, type=9, label=1)
    made = descriptor_pool.DescriptorPool()
    for file in (timestamp_pb2.DESCRIPTOR.serialized_pb, common.SerializeToString(), shop.SerializeToString()):
        made.AddSerializedFile(file)
    return made


def message(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


POOL = pool()


def test_consumers_read_the_protobuf_that_was_written(server):
    order_class = message("shop.Order")
    for file, references in (("common.proto", []), ("shop.proto", ["common.proto"])):
        text = base64.b64encode(POOL.FindFileByName(file).serialized_pb).decode()
        schema = Schema(text, "PROTOBUF", [SchemaReference(name, name, 1) for name in references])
        subject = "proto-orders" if file == "shop.proto" else file
        SchemaRegistryClient({"url": server.url}).register_schema(subject, schema)
    serializer = RegistrySerializer(
        server.url,
        {
            "Order": Protobuf("proto-orders", order_class),
            ("Order", "Other"): Protobuf("proto-orders", message("shop.Other")),
            ("Order", "Line"): Protobuf("proto-orders", message("shop.Order.Line")),
        },
    )
    given_one = order_class(id="a")
    given_one.total.cents = 4200
    given_one.at.FromDatetime(NOON)
    reader = decoding.Protobuf(server.url, "proto-orders", message="shop.Order")
    for payload in (given_one, {"id": "a", "total": {"cents": 4200}, "at": "2026-01-31T12:00:00Z"}):
        made = serializer(order(payload))
        assert made.content_type == "application/vnd.confluent.protobuf"
        found = decoded(reader, made.payload)
        assert (found["id"], found["total"]["cents"], found["at"]) == ("a", 4200, NOON.replace(tzinfo=dt.UTC))
    # Each message of a file is found by its path.
    for event_type, name in (("Other", "shop.Other"), ("Line", "shop.Order.Line")):
        made = serializer(order({"x" if event_type == "Other" else "sku": "s"}, event_type))
        assert list(decoded(decoding.Protobuf(server.url, "proto-orders", message=name), made.payload).values()) == [
            "s"
        ]
    for wrong, where in (
        ({"id": 1}, "payload['id']"),
        ({"ided": "x"}, "payload['ided']"),
        ([1], "payload"),
        (message("shop.Other")(), "payload"),
    ):
        with pytest.raises(SchemaMismatch) as refused:
            serializer(order(wrong))
        assert refused.value.field == where


@pytest.fixture
def empty():
    with schema_registry.running() as running:
        yield running


def test_protobuf_is_registered_with_what_it_imports(empty):
    serializer = RegistrySerializer(empty.url, {"Order": Protobuf("proto", message("shop.Order"))}, auto_register=True)
    made = serializer(order({"id": "a", "total": {"cents": 1}}))
    assert sorted(empty.subjects) == ["common.proto", "proto"]
    found = decoded(decoding.Protobuf(empty.url, "proto", message="shop.Order"), made.payload)
    assert (found["id"], found["total"]["cents"]) == ("a", 1)


# --- The registry


def test_a_schema_that_is_not_registered_is_refused_unless_asked_for(server):
    other = {**ORDER, "name": "Other"}
    serializer = RegistrySerializer(server.url, {"Order": Avro("new-subject", other)})
    with pytest.raises(SchemaRefused, match="no such subject") as refused:
        serializer(order(SMALL))
    assert refused.value.subject == "new-subject"
    assert isinstance(refused.value, EventError)
    assert "new-subject" not in server.subjects
    RegistrySerializer(server.url, {"Order": Avro("new-subject", other)}, auto_register=True).load()
    assert len(server.subjects["new-subject"]) == 1
    # What was refused is asked for again.
    assert serializer(order(SMALL)).payload[:1] == b"\0"


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (field("extra", "string", default=""), "is compatible with the latest one: register it first"),
        (field("extra", "string"), "is not compatible with the latest one"),
    ],
    ids=["compatible", "incompatible"],
)
def test_a_changed_schema_is_refused_and_compared_with_the_latest(server, added, said):
    subject = known(server, "changing", ORDER)
    changed = {**ORDER, "fields": [*ORDER["fields"], added]}
    with pytest.raises(SchemaRefused, match=said):
        RegistrySerializer(server.url, {"Order": Avro(subject, changed)})(order({**SMALL, "extra": "x"}))
    assert len(server.subjects[subject]) == 1


def test_an_incompatible_schema_is_not_registered_either(server, monkeypatch):
    monkeypatch.setattr(server, "backward", True)
    subject = known(server, "strict", ORDER)
    changed = {**ORDER, "fields": [*ORDER["fields"], field("extra", "string")]}
    serializer = RegistrySerializer(server.url, {"Order": Avro(subject, changed)}, auto_register=True)
    with pytest.raises(SchemaRefused, match="incompatible"):
        serializer(order({**SMALL, "extra": "x"}))
    assert len(server.subjects[subject]) == 1


IMPATIENT = {"max.retries": 0, "timeout": 2}


def test_without_the_registry_known_schemas_go_on_and_unknown_ones_are_its_fault():
    with schema_registry.running() as away:
        schemas = {"Order": Avro(known(away, "o", ORDER), ORDER), "Else": Avro(known(away, "e", LINE), LINE)}
        serializer = RegistrySerializer(away.url, schemas, options=IMPATIENT)
        before = serializer(order(SMALL))
        away.stop()
        assert serializer(order(SMALL)) == before
        with pytest.raises(SchemaRegistryUnavailable, match="nothing was written"):
            serializer(Event("Else", "1", "T", LINE_OF))
        # What does not fit is refused all the same.
        with pytest.raises(SchemaMismatch):
            serializer(Event("Else", "1", "T", {}))
        away.start()
        away.failing = 503
        with pytest.raises(SchemaRegistryUnavailable, match="the store is away"):
            serializer(Event("Else", "1", "T", LINE_OF))
        away.failing = None
        assert serializer(Event("Else", "1", "T", LINE_OF)).payload[:1] == b"\0"


def test_credentials_are_sent_and_never_shown():
    with schema_registry.running("writer", "s3cret") as guarded:
        schemas = {"Order": Avro("o", ORDER)}
        info = {"basic.auth.user.info": "writer:s3cret"}
        RegistrySerializer(guarded.url, schemas, options=info, auto_register=True).load()
        wrong = RegistrySerializer(guarded.url, schemas, options={"basic.auth.user.info": "writer:wr0ng"})
        with pytest.raises(SchemaRegistryUnavailable, match="Unauthorized") as refused:
            wrong.load()
        assert "wr0ng" not in str(refused.value) + repr(wrong)


def test_events_without_a_schema_are_refused_or_json(server):
    schemas = {("Order", "OrderPaid"): Avro("orders-value", ORDER)}
    with pytest.raises(PayloadError, match="no schema for 'OrderPlaced' of aggregate type 'Order'"):
        RegistrySerializer(server.url, schemas)(order(SMALL))
    assert RegistrySerializer(server.url, schemas, others="json")(order(SMALL)) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"url": " "}, "must be a URL"),
        ({"url": "http://user:p@registry"}, "basic.auth.user.info"),
        ({"url": "http://r", "options": {"ssl.ca.location": False}}, "turn off the verification"),
        ({"url": "http://r", "options": {"no.such": 1}}, "no.such"),
        ({"url": "http://r", "others": "drop"}, "others must be"),
    ],
)
def test_mistakes_in_the_arguments(arguments, said):
    with pytest.raises(ConfigurationError, match=said):
        RegistrySerializer(**{"schemas": {}, **arguments})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Avro("s", "{"), "Avro schema of s can't be read"),
        (lambda: Avro("s", {"type": "nothing"}), "Avro schema of s can't be read"),
        (lambda: JsonSchema("s", {"type": 1}), "JSON Schema of s can't be read"),
        (lambda: JsonSchema("s", {"$ref": "http://127.0.0.1:1/x"}), "refers to 'http://127.0.0.1:1/x'"),
        (lambda: Protobuf("s", dict), "generated Protobuf class"),
    ],
)
def test_mistakes_in_the_schemas(server, make, said):
    with pytest.raises(ConfigurationError, match=said):
        RegistrySerializer(server.url, {"Order": make()})(order({}))
