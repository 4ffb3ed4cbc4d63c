"""Payloads of all kinds on real Spark, Kafka and Postgres: what reaches a sink's table, and what a dead letter says.

The bytes are made by the official serializers, which register their schemas at a real HTTP server.
"""

from __future__ import annotations

import json
import threading
import uuid
from dataclasses import replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import psycopg
import pytest
import schema_registry
from confluent_kafka.schema_registry import (
    Schema,
    SchemaReference,
    SchemaRegistryClient,
    header_schema_id_serializer,
)
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2, wrappers_pb2
from support import wait_until
from uuid_utils.compat import uuid7

from spark_jobs.errors import ConsumerUnavailable, JobError
from spark_jobs.job import ConsumerJob
from spark_jobs.payloads.decoding import Avro, Json, JsonSchema, Protobuf, Raw
from spark_jobs.payloads.registry import Registry

pytestmark = pytest.mark.spark

USER = {"basic.auth.user.info": "consumer:s3cret"}
IMPATIENT = {**USER, "max.retries": 0, "timeout": 20}


@pytest.fixture
def registry():
    with schema_registry.running("consumer", "s3cret") as server:
        yield server


def send(bench: Any, value: bytes | None, headers: list[tuple[str, bytes]] | None = None) -> None:
    """All into one partition: the number of the message is its offset."""
    bench.send_raw(value, [("ce_id", str(uuid7()).encode()), *(headers or [])], "k", partition=0)


def run(bench: Any, decoder: Any, table: str, columns: str, group: str = "decoding", **options: Any) -> Any:
    """Apply what is there; ``columns`` as in CREATE TABLE, all of them columns of ``batch``."""
    names = ", ".join(f'"{column.split()[0]}"' for column in columns.split(", "))
    job = ConsumerJob(
        group,
        [bench.topic],
        f"INSERT INTO {table} SELECT message_offset, message_tombstone, {names} FROM batch",
        schema=decoder,
        setup=f"CREATE TABLE IF NOT EXISTS {table} (number bigint PRIMARY KEY, tombstone boolean, {columns})",
    )
    return bench.once(job, **options)


def dead(bench: Any) -> dict[int, str]:
    return dict(bench.rows("SELECT message_offset, error FROM consumer.dead_letters"))


def check(bench: Any, table: str, expected: list[Any]) -> None:
    """``expected``, by offset: a tuple of the row, None for a tombstone, or a part of what the dead letter says."""
    rows = {row[0]: row[1:] for row in bench.rows(f"SELECT * FROM {table}")}
    letters = dead(bench)
    for number, wanted in enumerate(expected):
        if isinstance(wanted, str):
            assert wanted in letters.pop(number, "no dead letter"), number
            assert number not in rows
        else:
            row = rows.pop(number, None)
            assert row is not None, letters.get(number)
            assert row == ((True, *[None] * (len(row) - 1)) if wanted is None else (False, *wanted)), number
    assert (rows, letters) == ({}, {})


def test_json_reaches_the_table_to_the_letter(bench):
    """Fields named like Kafka's columns too; and NULL in every column for a tombstone, NOT NULL or not."""
    schema = (
        "key string NOT NULL, value decimal(38,2), offset int, timestamp timestamp, local timestamp_ntz, day date, "
        "bin binary, real double, single float, small smallint, ok boolean, "
        "lines array<struct<sku: string NOT NULL, n: decimal(20,10)>>, rates map<string, bigint>"
    )
    columns = (
        "key text, value numeric, offset_ int, timestamp timestamptz, local timestamp, day date, bin bytea, "
        "real double precision, single real, small smallint, ok boolean, lines jsonb, rates jsonb"
    )
    full = {
        "key": 'quote " comma , line \n \\N tab\t',
        "value": 0,
        "offset": -(2**31),
        "timestamp": "2026-01-31T12:00:00.000001+01:00",
        "local": "2026-01-31T12:00:00",
        "day": "0001-01-01",
        "bin": "AP8=",
        "real": 0.1,
        "single": 0.5,
        "small": -32768,
        "ok": False,
        "lines": [{"sku": "a", "n": 1.5, "more": 1}, None],
        "rates": {"x": 2**63 - 1, "y": None},
    }
    exact = "123456789012345678901234567890123456.78"
    nothing = [None] * 12
    cases: list[tuple[bytes | None, Any]] = [
        (
            json.dumps(full).replace('"value": 0', f'"value": {exact}').encode(),
            (
                full["key"],
                Decimal(exact),
                -(2**31),
                datetime(2026, 1, 31, 11, 0, 0, 1, UTC),
                datetime(2026, 1, 31, 12),
                date(1, 1, 1),
                b"\0\xff",
                0.1,
                0.5,
                -32768,
                False,
                [{"sku": "a", "n": 1.5}, None],
                {"x": 2**63 - 1, "y": None},
            ),
        ),
        (b'{"key": ""}', ("", *nothing)),
        (None, None),
        (b"{}", "field key: is missing"),
        (b'{"key": null}', "field key: is null"),
        (b'{"key": 5}', "field key: is not a text"),
        (b'{"key": "a", "offset": 1.5}', "field offset: is not a whole number"),
        (b'{"key": "a", "value": 0.001}', "field value: does not fit decimal(38,2)"),
        (b'{"key": "a", "key": "b"}', "field key: stands twice"),
        (b'{"key": "a"} {"key": "b"}', "not JSON"),
        (b'[{"key": "a"}]', "not a JSON object"),
        (b"", "not JSON"),
        (b'{"key": "a", "lines": [{"n": 1}]}', "field lines[].sku: is missing"),
        (b'{"key": "last"}', ("last", *nothing)),
    ]
    for value, _ in cases:
        send(bench, value)
    # A column called offset would need quotes in the helper.
    job = ConsumerJob(
        "json",
        [bench.topic],
        'INSERT INTO sink SELECT message_offset, message_tombstone, key, value, "offset", "timestamp", local, day, '
        "bin, real, single, small, ok, lines, rates FROM batch",
        schema=schema,
        setup=f"CREATE TABLE sink (number bigint PRIMARY KEY, tombstone boolean, {columns})",
    )
    totals = bench.once(job)
    assert (totals.read, totals.dead) == (len(cases), 10)
    check(bench, "sink", [expected for _, expected in cases])


def test_policies_and_the_open_schema(bench):
    exact = '{"n": [12345678901234567890123456789012345678, 0.10000000000000000000000000000000000001, 1e20, 1.50]}'
    for value in (b'{"a": 1, "more": 2}', b'{"b": 1}', b'{"a": "1", "b": 2}', exact.encode(), None, b"[]"):
        send(bench, value)
    run(bench, Json("a long, b long", "dead-letter", "dead-letter"), "strict", "a bigint, b bigint", "strict")
    check(
        bench,
        "strict",
        [
            "field b: is missing",
            "field a: is missing",
            "field a: is not",
            "field a: is missing",
            None,
            "not a JSON object",
        ],
    )
    with psycopg.connect(bench.database.url) as connection:
        connection.execute("DELETE FROM consumer.dead_letters")
    run(bench, Json("a long, b long", wrong="null"), "lax", "a bigint, b bigint", "lax")
    check(bench, "lax", [(1, None), (None, 1), (None, 2), (None, None), None, "not a JSON object"])
    with psycopg.connect(bench.database.url) as connection:
        connection.execute("DELETE FROM consumer.dead_letters")
    run(bench, Json("variant"), "whole", "payload jsonb", "open")
    check(
        bench,
        "whole",
        [({"a": 1, "more": 2},), ({"b": 1},), ({"a": "1", "b": 2},), (json.loads(exact),), None, "not a JSON object"],
    )
    # Postgres, whose numbers have no limit that matters here, compares them digit by digit.
    assert bench.rows(f"SELECT payload = '{exact}'::jsonb FROM whole WHERE number = 3") == [(True,)]


NAMED = {"type": "record", "name": "Customer", "namespace": "shop", "fields": [{"name": "name", "type": "string"}]}


def order(*fields: dict[str, Any]) -> str:
    return json.dumps({"type": "record", "name": "Order", "namespace": "shop", "fields": list(fields)})


ID = {"name": "id", "type": "string"}
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
    with pytest.raises(ConsumerUnavailable, match="schema registry"):
        run(bench, decoder, "orders", AVRO_COLUMNS, patience=0.5)
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
    with pytest.raises(ConsumerUnavailable, match="schema registry"):
        run(bench, decoder, "orders", AVRO_COLUMNS, patience=0.5)
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
        (serialize(order_class(state=9), context), [], "field state: is a value that the job's enum has not"),
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
    rows = source(bench.spark, full.SerializeToString(), None, b"\xff")
    found = Protobuf(descriptor=order_class).decode(rows).select("id", "lines", "message_problem").collect()
    assert [tuple(item) for item in found] == [
        ("a", [(("s"), 2**32 - 1)], None),
        (None, None, None),
        (None, None, "the payload is no shop.Order"),
    ]


def source(spark: Any, *values: bytes | None) -> Any:
    """Rows as Spark's Kafka source has them."""
    return spark.createDataFrame(
        [(b"k", value, "t", 0, number, None, None) for number, value in enumerate(values)],
        "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
        "headers array<struct<key: string, value: binary>>",
    ).coalesce(1)


def test_json_schema_by_a_registry(bench, registry):
    client = SchemaRegistryClient({"url": registry.url, **USER})
    context = SerializationContext(bench.topic, MessageField.VALUE)
    line = {"$id": "line.json", "title": "Line", "type": "object", "properties": {"sku": {"type": "string"}}}
    client.register_schema("line", Schema(json.dumps(line), "JSON"))
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Order",
        "type": "object",
        "required": ["id"],
        "properties": {
            "id": {"type": "string"},
            "amount": {"type": "number", "minimum": 0},
            "lines": {"type": "array", "items": {"$ref": "line.json"}},
        },
    }
    registered = Schema(json.dumps(schema), "JSON", [SchemaReference("line.json", "line", 1)])
    serialize = JSONSerializer(registered, client, conf={"validate": False})
    headers: list[tuple[str, bytes]] = []
    in_header = JSONSerializer(
        registered, client, conf={"validate": False, "schema.id.serializer": header_schema_id_serializer}
    )({"id": "h"}, SerializationContext(bench.topic, MessageField.VALUE, headers))
    good = serialize({"id": "a", "amount": 12.34, "lines": [{"sku": "s"}]}, context)
    cases: list[tuple[bytes | None, list[tuple[str, bytes]], Any]] = [
        (good, [], ("a", Decimal("12.34"), [{"sku": "s"}])),
        (in_header, headers, ("h", None, None)),
        (None, [], None),
        (serialize({"id": "a", "amount": -1}, context), [], "properties/amount/minimum"),
        (serialize({"amount": 1}, context), [], "as schema 2 has it: required"),
        (serialize({"id": "a", "lines": [{"sku": 1}]}, context), [], "field lines[].sku: is not a text"),
        (serialize({"id": "a", "amount": 0.001}, context), [], "field amount: does not fit"),
        (good[:5] + b'{"id": "a", "id": "a"}', [], "stands twice"),
        (b"\0\0\0\x03\xe7{}", [], "no schema 999"),
        (b'{"id": "a"}', [], "does not begin with a schema's id"),
    ]
    for value, extra, _ in cases:
        send(bench, value, extra)
    where = Registry(registry.url, USER)
    decoder = JsonSchema(where, "id string, amount decimal(10,2), lines array<struct<sku: string>>")
    totals = run(bench, decoder, "orders", "id text, amount numeric, lines jsonb")
    assert (totals.read, totals.dead) == (len(cases), 7)
    check(bench, "orders", [expected for *_, expected in cases])
    found = JsonSchema(where, "variant", validate=False).decode(source(bench.spark, good, cases[3][0], b"")).collect()
    assert [item.payload is not None and json.loads(item.payload.toJson())["id"] for item in found] == ["a", "a", False]
    assert [item.message_problem is None for item in found] == [True, True, False]


@pytest.mark.parametrize("transform", [None, lambda rows: rows], ids=["task", "spark"])
@pytest.mark.parametrize("atomic", ["partition", "batch"])
def test_a_hostile_payload_costs_one_row(bench, transform, atomic):
    """Each between two good messages, all in one round."""
    job = ConsumerJob(
        "hostile",
        [bench.topic],
        "INSERT INTO hostile SELECT message_offset, id, amount FROM batch",
        schema="id string, amount decimal(12,2)",
        setup="CREATE TABLE IF NOT EXISTS hostile (number bigint PRIMARY KEY, id text, amount numeric)",
        transform=transform,
        atomic=atomic,
        max_payload_bytes=300_000,
    )
    digits = b"7" * 40_000
    hostile = {
        "stands twice": b"{%s}" % b",".join(b'"f%d":1' % number for number in [*range(16_000), 0]),
        "not JSON": b"[" * 100_000,
        "not JSON ": b'{"id":"a","other":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "not JSON  ": b'{"id":"a","amount":1e400000}',
        "not JSON   ": b'{"id":"a","amount":' + b"1" * 10**5 + b"}",
        "300001 bytes": b'{"id":"' + b"a" * (300_001 - 9) + b'"}',
    }
    for value in hostile.values():
        send(bench, b'{"id":"%s","amount":1.5}' % digits)
        send(bench, value)
    send(bench, None)
    totals = bench.once(job)
    assert (totals.applied, totals.dead) == (len(hostile) + 1, len(hostile))
    found = dead(bench)
    assert sorted(found) == list(range(1, 2 * len(hostile), 2))
    for said, error in zip(hostile, (found[offset] for offset in sorted(found)), strict=True):
        assert said.strip() in error
    assert bench.rows("SELECT DISTINCT reason FROM consumer.dead_letters") == [("undecodable",)]
    assert bench.rows("SELECT count(*), min(amount) FROM hostile WHERE id = repeat('7', 40000)") == [
        (len(hostile), Decimal("1.5"))
    ]
    assert bench.positions() == {0: 2 * len(hostile) + 1, 1: 0}
    # What was too large is read when the job allows it, as any other dead letter that is tried again.
    bench.run("UPDATE consumer.dead_letters SET state = 'retry' WHERE error LIKE '%bytes%'")
    assert bench.once(replace(job, max_payload_bytes=300_001)).applied == 1
    assert bench.rows("SELECT length(id) FROM hostile WHERE number = 11") == [(300_001 - 9,)]


def test_the_limit_is_for_every_decoder(bench):
    """Bytes as well, and a decoder that works in Spark only."""
    send(bench, b"1234")
    send(bench, b"12345")
    send(bench, None)
    job = ConsumerJob(
        "bytes",
        [bench.topic],
        "INSERT INTO sizes SELECT message_offset, length(payload), message_tombstone FROM batch",
        setup="CREATE TABLE IF NOT EXISTS sizes (number bigint PRIMARY KEY, size int, tombstone boolean)",
        max_payload_bytes=4,
    )
    assert bench.once(job).dead == 1
    assert bench.rows("SELECT * FROM sizes ORDER BY 1") == [(0, 4, False), (2, None, True)]
    ((offset, value, error),) = bench.rows("SELECT message_offset, message_value, error FROM consumer.dead_letters")
    assert (offset, bytes(value)) == (1, b"12345")
    assert error == "the payload has 5 bytes, and the job takes 4 at most (max_payload_bytes)"


def test_bare_avro_and_bytes_keep_every_row_in_its_place(bench):
    plain = order(ID, {"name": "amount", "type": "long"})
    rows = source(bench.spark, b"\x02a\x0e", None, b"\x02", b"\x02b\x01")
    found = Avro(reader_schema=plain).decode(rows)
    assert [(row.offset, row.id, row.amount, row.message_problem is None) for row in found.collect()] == [
        (0, "a", 7, True),
        (1, None, None, True),
        (2, None, None, False),
        (3, "b", -1, True),
    ]
    # A filter of the transform's meets decoded rows; it is not moved below the decoder, which then ran twice.
    filtered = found.filter("amount > 0 OR amount IS NULL")
    assert [row.offset for row in filtered.collect()] == [0, 1, 2]
    assert filtered._jdf.queryExecution().executedPlan().toString().count("ArrowEvalPython") == 1
    assert [row.payload for row in Raw().decode(rows).collect()] == [b"\x02a\x0e", None, b"\x02", b"\x02b\x01"]
