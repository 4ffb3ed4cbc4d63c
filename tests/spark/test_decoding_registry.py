"""Payloads whose schemas are in a registry, on real Spark, Kafka and Postgres: Avro, Protobuf, JSON Schema.

The bytes are made by the official serializers, which register their schemas at a real HTTP server.
"""

from __future__ import annotations

import json
import threading
import uuid
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pytest
import schema_registry
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from decoding_support import ID, check, dead, order, read, run, send
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2, wrappers_pb2
from support import wait_until

from outbox.consumer.errors import ConsumerUnavailable, JobError
from spark_jobs.payloads.decoding import Avro, Protobuf
from spark_jobs.payloads.registry import Registry

pytestmark = pytest.mark.spark
USER = {"basic.auth.user.info": "consumer:s3cret"}
IMPATIENT = {**USER, "max.retries": 0, "timeout": 20}
NAMED = {"type": "record", "name": "Customer", "namespace": "shop", "fields": [{"name": "name", "type": "string"}]}
OLD = order(ID, {"name": "amount", "type": "int"}, {"name": "gone", "type": "string"})
NEW = order(
    ID,
    {"name": "amount", "type": "long"},
    {
        "name": "price",
        "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}],
        "default": None,
    },
    {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}], "default": None},
    {"name": "local", "type": ["null", {"type": "long", "logicalType": "local-timestamp-millis"}], "default": None},
    {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}], "default": None},
    {"name": "clock", "type": ["null", {"type": "long", "logicalType": "time-micros"}], "default": None},
    {"name": "ref", "type": ["null", {"type": "string", "logicalType": "uuid"}], "default": None},
    {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}, "default": "NEW"},
    {"name": "digest", "type": ["null", {"type": "fixed", "name": "Two", "size": 2}], "default": None},
    {"name": "tags", "type": {"type": "array", "items": ["null", "string"]}, "default": []},
    {"name": "rates", "type": {"type": "map", "values": "double"}, "default": {}},
    {"name": "customer", "type": ["null", "shop.Customer"], "default": None},
)
AVRO_COLUMNS = (
    "id text, amount bigint, price numeric, at timestamptz, local timestamp, day date, clock text, ref text, "
    "state text, digest bytea, tags jsonb, rates jsonb, customer jsonb"
)


@pytest.fixture
def registry():
    with schema_registry.running("consumer", "s3cret") as server:
        yield server


def test_avro_by_a_registry_and_through_its_outage(bench, registry):
    client = SchemaRegistryClient({"url": registry.url, **USER})
    client.register_schema("shop.Customer", Schema(json.dumps(NAMED), "AVRO"))
    context = SerializationContext(bench.topic, MessageField.VALUE)
    subject = f"{bench.topic}-value"
    old = AvroSerializer(client, OLD)
    reference = [SchemaReference("shop.Customer", "shop.Customer", 1)]
    new = AvroSerializer(client, Schema(NEW, "AVRO", reference))
    other = AvroSerializer(
        client, json.dumps({**NAMED, "name": "Else"}), conf={"subject.name.strategy": lambda *_: "else"}
    )
    full = {
        "id": "n",
        "amount": 2**40,
        "price": Decimal("123456789012345678901234567890123456.78"),
        "at": datetime(2026, 1, 31, 12, 0, 0, 1, UTC),
        "local": datetime(2026, 1, 31, 12),
        "day": date(2026, 1, 31),
        "clock": time(23, 59, 59, 999999),
        "ref": uuid.UUID(int=7),
        "state": "PAID",
        "digest": b"\0\xff",
        "tags": ["a", None],
        "rates": {"x": 0.1},
        "customer": {"name": "c"},
    }
    row = {**full, "clock": "23:59:59.999999", "ref": str(full["ref"])}
    written = old({"id": "o", "amount": 7, "gone": "g"}, context)
    headers: list[tuple[str, bytes]] = []
    in_header = AvroSerializer(
        client, Schema(NEW, "AVRO", reference), conf={"schema.id.serializer": header_schema_id_serializer}
    )(full, SerializationContext(bench.topic, MessageField.VALUE, headers))
    resolved = ("o", 7, *[None] * 6, "NEW", None, [], {}, None)
    framed = new(full, context)
    of_json = client.register_schema("json", Schema('{"type": "object"}', "JSON"))
    cases: list[tuple[bytes | None, list[tuple[str, bytes]], Any]] = [
        (written, [], resolved),
        (framed, [], tuple(row.values())),
        (in_header, headers, tuple(row.values())),
        (None, [], None),
        (b"\0\0\0\x03\xe7" + framed[5:], [], "no schema 999"),
        (framed[:-1], [], "does not resolve to the job's Avro schema"),
        (framed + b"x", [], "goes on behind the record"),
        (other({"name": "x"}, context), [], "does not resolve"),
        (b"\0" + of_json.to_bytes(4, "big") + b"{}", [], "is JSON, not AVRO"),
        (b'{"id": "j"}', [], "does not begin with a schema's id"),
        (b"", [], "does not begin with a schema's id"),
    ]
    for value, extra, _ in cases:
        send(bench, value, extra)
    decoder = Avro(Registry(registry.url, IMPATIENT), subject)
    # Without the registry there is nothing to begin with; and no message is at fault.
    registry.stop()
    wait_until(lambda: "schema registry" in unavailable(bench, decoder), 60, "the registry to be missed")
    registry.start()
    totals = run(bench, decoder, "orders", AVRO_COLUMNS)
    assert (totals.read, totals.dead) == (len(cases), 7)
    check(bench, "orders", [expected for *_, expected in cases])

    # A newer writer, while the job runs: its columns stay as they are. The executors ask for what they don't know, and
    # a registry that is away then is waited for: no dead letter, nothing skipped.
    newest = AvroSerializer(client, Schema(NEW[:-2] + ', {"name": "more", "type": "int"}]}', "AVRO", reference))
    latest = {**full, "id": "m", "more": 1}
    send(bench, newest(latest, context))
    registry.stop()
    wait_until(lambda: "schema registry" in unavailable(bench, decoder), 60, "the registry to be missed")
    thread = threading.Thread(target=lambda: (wait_until(lambda: waits(bench), 120), registry.start()))
    bench.reports.clear()
    thread.start()
    totals = run(bench, decoder, "orders", AVRO_COLUMNS, patience=120)
    thread.join()
    assert (totals.read, totals.dead) == (1, 0)
    number = len(cases)
    rows = bench.rows(f"SELECT * FROM orders WHERE number = {number}")
    assert rows == [(number, False, *{**row, "id": "m"}.values())]

    # With a policy what the columns lack is a dead letter; and credentials that are refused are no message's fault.
    strict = Avro(
        Registry(registry.url, IMPATIENT),
        reader_schema=NEW.replace('"shop.Customer"', json.dumps(NAMED)),
        unknown="dead-letter",
    )
    send(bench, newest(latest, context))
    send(bench, framed)
    totals = run(bench, strict, "orders", AVRO_COLUMNS)
    assert (totals.read, totals.dead) == (2, 1)
    assert "field more: is not in the job's schema" in dead(bench)[number + 1]
    stranger = Avro(Registry(registry.url, {"max.retries": 0}), subject)
    send(bench, framed)
    with pytest.raises(ConsumerUnavailable, match="Unauthorized"):
        run(bench, stranger, "orders", AVRO_COLUMNS, patience=0)
    with pytest.raises(JobError, match="no subject nothing"):
        run(bench, Avro(Registry(registry.url, USER), "nothing"), "orders", AVRO_COLUMNS)


def unavailable(bench: Any, decoder: Avro) -> str:
    """Return for which server a job gave up. On a busy machine it may be Kafka, which has answered too late."""
    with pytest.raises(ConsumerUnavailable) as caught:
        run(bench, decoder, "orders", AVRO_COLUMNS, patience=0.5)
    return str(caught.value)


def waits(bench: Any) -> bool:
    return any("schema registry" in str(figures.get("error")) for _, figures in bench.reports)


def messages() -> Any:
    """The classes of two files: shop/order.proto imports shop/line.proto and two of Protobuf's own."""
    kinds = descriptor_pb2.FieldDescriptorProto
    line = descriptor_pb2.FileDescriptorProto(name="shop/line.proto", package="shop", syntax="proto3")
    message = line.message_type.add(name="Line")
    message.field.add(name="sku", number=1, type=kinds.TYPE_STRING, label=1)
    message.field.add(name="n", number=2, type=kinds.TYPE_UINT32, label=1)
    file = descriptor_pb2.FileDescriptorProto(name="shop/order.proto", package="shop", syntax="proto3")
    file.dependency.extend(["shop/line.proto", "google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"])
    state = file.enum_type.add(name="State")
    for number, name in enumerate(("NEW", "PAID")):
        state.value.add(name=name, number=number)
    file.message_type.add(name="Other").field.add(name="x", number=1, type=kinds.TYPE_INT32, label=1)
    order = file.message_type.add(name="Order")
    for number, (name, kind, of, label) in enumerate(
        (
            ("id", kinds.TYPE_STRING, None, 1),
            ("amount", kinds.TYPE_SINT64, None, 1),
            ("big", kinds.TYPE_UINT64, None, 1),
            ("digest", kinds.TYPE_BYTES, None, 1),
            ("state", kinds.TYPE_ENUM, ".shop.State", 1),
            ("at", kinds.TYPE_MESSAGE, ".google.protobuf.Timestamp", 1),
            ("note", kinds.TYPE_MESSAGE, ".google.protobuf.StringValue", 1),
            ("lines", kinds.TYPE_MESSAGE, ".shop.Line", 3),
            ("rates", kinds.TYPE_MESSAGE, ".shop.Order.RatesEntry", 3),
            ("coupon", kinds.TYPE_INT32, None, 1),
        ),
        1,
    ):
        order.field.add(name=name, number=number, type=kind, type_name=of, label=label)
    order.oneof_decl.add(name="_coupon")
    order.field[-1].oneof_index = 0
    order.field[-1].proto3_optional = True
    entry = order.nested_type.add(name="RatesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=kinds.TYPE_DOUBLE, label=1)
    pool = descriptor_pool.DescriptorPool()
    for known in (timestamp_pb2.DESCRIPTOR, wrappers_pb2.DESCRIPTOR):
        pool.AddSerializedFile(known.serialized_pb)
    for added in (line, file):
        pool.Add(added)
    return tuple(
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shop.{name}")) for name in ("Order", "Other")
    )


def test_protobuf_by_a_registry_and_bare(bench, registry):
    client = SchemaRegistryClient({"url": registry.url, **USER})
    context = SerializationContext(bench.topic, MessageField.VALUE)
    order_class, other_class = messages()
    full = order_class(id="a", amount=-(2**62), big=2**64 - 1, digest=b"\0\xff", state=1, note={"value": ""}, coupon=0)
    full.at.FromDatetime(datetime(2026, 1, 31, 12, 0, 0, 1))
    full.lines.add(sku="s", n=2**32 - 1)
    full.rates["x"] = 0.1
    row = (
        "a",
        -(2**62),
        Decimal(2**64 - 1),
        b"\0\xff",
        "PAID",
        datetime(2026, 1, 31, 12, 0, 0, 1, UTC),
        "",
        [{"sku": "s", "n": 2**32 - 1}],
        {"x": 0.1},
        0,
    )
    fine = order_class(id="fine")
    fine.at.nanos = 1
    serialize = ProtobufSerializer(order_class, client)
    others = ProtobufSerializer(other_class, client)
    headers: list[tuple[str, bytes]] = []
    in_header = ProtobufSerializer(order_class, client, {"schema.id.serializer": header_schema_id_serializer})(
        full, SerializationContext(bench.topic, MessageField.VALUE, headers)
    )
    framed = serialize(full, context)
    columns = (
        "id text, amount bigint, big numeric, digest bytea, state text, at timestamptz, note text, lines jsonb, "
        "rates jsonb, coupon int"
    )
    cases: list[tuple[bytes | None, list[tuple[str, bytes]], Any]] = [
        (framed, [], row),
        (in_header, headers, row),
        (serialize(order_class(), context), [], ("", 0, Decimal(0), b"", "NEW", None, None, [], {}, None)),
        (None, [], None),
        (framed + b"\xf8\x07\x01", [], "field number 127: is not in the job's descriptor"),
        (others(other_class(x=1), context), [], "the payload is a shop.Other, not a shop.Order"),
        (serialize(order_class(state=9), context), [], "field state: is a value that the job's enum lacks"),
        (serialize(fine, context), [], "field at: is finer than microseconds"),
        (framed[:-3], [], "the payload is no shop.Order"),
        (b"\0\0\0\x03\xe7\0", [], "no schema 999"),
        (framed[:5] + b"\x02\x12" + b"x", [], "no message at the place"),
        (framed[:3], [], "ends within"),
    ]
    for value, extra, _ in cases:
        send(bench, value, extra)
    where = Registry(registry.url, USER)
    decoder = Protobuf(where, f"{bench.topic}-value", "shop.Order", unknown="dead-letter")
    totals = run(bench, decoder, "orders", columns)
    assert (totals.read, totals.dead) == (len(cases), 8)
    check(bench, "orders", [expected for *_, expected in cases])
    # From a class at hand instead, and without a registry.
    found = read(Protobuf(descriptor=order_class), full.SerializeToString(), None, b"\xff")
    assert [(item["id"], item["lines"], item["message_problem"]) for item in found] == [
        ("a", [{"sku": "s", "n": 2**32 - 1}], None),
        (None, None, None),
        (None, None, "the payload is no shop.Order"),
    ]
