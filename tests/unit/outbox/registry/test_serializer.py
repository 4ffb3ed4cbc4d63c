"""The serializer for a schema registry: consumers' decoders read what it writes, and what does not fit is refused."""

from __future__ import annotations

import base64
import datetime as dt
import math
import subprocess
import sys
from decimal import Decimal
from typing import Any

import pytest
import schema_registry
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from pyspark.sql import types as t
from registry_support import LINE, LINE_OF, NOON, ORDER, SMALL, decoded, field, known, order, server

from outbox import Event, EventError, PayloadError, SchemaMismatch, SchemaRefused, SchemaRegistryUnavailable
from outbox.errors import ConfigurationError
from outbox.registry import Avro, JsonSchema, Protobuf, RegistrySerializer
from spark_jobs.payloads import decoding
from spark_jobs.payloads.reading import Policy

__all__ = ["server"]


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
    read = decoding._JsonPlan(columns, Policy(), framed=True)()
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


FORKS = """
import os, sys
from outbox import Event
from outbox.registry import JsonSchema, RegistrySerializer

def number(kind):
    return int.from_bytes(serializer(Event(kind, "1", "T", {})).payload[1:5], "big")

schemas = {kind: JsonSchema(kind, {"title": kind}) for kind in ("a", "b", "c")}
serializer = RegistrySerializer(sys.argv[1], schemas)
print(number("a"), flush=True)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    print(number("c"))
else:
    print(number("a"), number("b"), flush=True)
    os._exit(0)
"""


def test_a_fork_asks_on_a_connection_of_its_own():
    """Two forks on one would each read whichever answer comes first. What the parent knew is not asked again."""
    with schema_registry.running() as alive:
        for kind in ("a", "b", "c"):
            known(alive, kind, {"title": kind}, "JSON")
        alive.keep_alive, before = True, len(alive.connections)
        command = [sys.executable, "-c", FORKS, alive.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split() == ["1", "1", "2", "3"]
        assert len(alive.connections) == before + 2


@pytest.mark.parametrize(
    ("answered", "taken"), [("orders", True), (":.shop:orders", True), (None, True), ("invoices", False), ("", False)]
)
def test_an_answer_for_another_subject_is_not_taken(server, monkeypatch, answered, taken):
    known(server, "orders", ORDER)
    shown = type(server)._shown
    monkeypatch.setattr(type(server), "_shown", lambda *given: shown(*given) | {"subject": answered})
    serializer = RegistrySerializer(server.url, {"Order": Avro("orders", ORDER)})
    if taken:
        assert serializer(order(SMALL)).payload[:1] == b"\0"
    else:
        with pytest.raises(SchemaRegistryUnavailable, match=f"asked for subject orders, it answered for {answered}"):
            serializer(order(SMALL))


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
