"""Reading payloads with a schema: framing, Avro, Protobuf, and a registry that is away."""

from __future__ import annotations

import base64
import json
import math
import re
import uuid
from datetime import UTC, datetime
from decimal import Decimal

import pytest
import schema_registry
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.serde import SchemaId
from decoding_support import ID, avro, order, read
from google.protobuf import descriptor_pb2, empty_pb2, timestamp_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as t

from outbox.consumer.errors import ConsumerUnavailable, JobError
from spark_jobs.payloads import protobuf as protobuf_payload
from spark_jobs.payloads.decoding import PROBLEM, Avro, Protobuf, Raw, _JsonPlan
from spark_jobs.payloads.framing import unframe
from spark_jobs.payloads.reading import Policy, Problem
from spark_jobs.payloads.registry import Client, Registry, Schema

# Framing, held against the official client.

IDS = st.integers(0, 2**32 - 1)
PATHS = st.lists(st.integers(0, 1000), min_size=1, max_size=5)


@settings(deadline=None)
@given(IDS, st.none() | PATHS, st.binary(max_size=20), st.booleans())
def test_framing_is_read_as_it_is_written(number, path, payload, in_header):
    guid = uuid.uuid5(uuid.NAMESPACE_OID, str(number))
    kind = "AVRO" if path is None else "PROTOBUF"
    written = SchemaId(kind, number, str(guid), path)
    if in_header:
        framed = unframe(payload, written.guid_to_bytes(), indexes=path is not None)
        assert framed.schema == guid
    else:
        framed = unframe(written.id_to_bytes() + payload, None, indexes=path is not None)
        assert framed.schema == number
    assert (framed.indexes, framed.payload) == (tuple(path or ()), payload)


@settings(deadline=None)
@given(st.binary(max_size=40), st.none() | st.binary(max_size=40), st.booleans())
def test_any_framing_is_read_or_a_problem(value, header, indexes):
    try:
        framed = unframe(value, header, indexes=indexes)
    except Problem:
        return
    assert framed.payload == (value if header is not None else value[len(value) - len(framed.payload) :])


def test_framing_problems_say_where():
    for value, header, said in (
        (b"", None, "the payload does not begin"),
        (b"{}", None, "the payload does not begin"),
        (b"\0\0\0", None, "the payload ends within"),
        (b"x", b"\1abc", "__value_schema_id ends within"),
        (b"x", b"", "__value_schema_id does not begin"),
        (b"x", b"\0\0\0\0\1\0x", "more than a schema's id"),
    ):
        with pytest.raises(Problem, match=said):
            unframe(value, header, indexes=False)
    for rest in (b"", b"\1", b"\xff\xff\xff\xff\xff\xff", b"\x04\x02", b"\x02\x01"):
        with pytest.raises(Problem, match="which message"):
            unframe(b"\0\0\0\0\1" + rest, None, indexes=True)


# Avro and Protobuf on bytes that are none.

RECORD = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}], "default": None},
        {"name": "lines", "type": {"type": "array", "items": {"type": "map", "values": "double"}}, "default": []},
    ],
}


AVRO_ORDER = avro(RECORD)()


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_give_an_avro_record_or_a_problem(value):
    try:
        row = AVRO_ORDER(value, None)
    except Problem:
        return
    assert len(row) == 4


def test_bare_avro_and_bytes_keep_every_row_in_its_place():
    plain = order(ID, {"name": "amount", "type": "long"})
    found = read(Avro(reader_schema=plain), b"\x02a\x0e", None, b"\x02", b"\x02b\x01")
    assert [(row["id"], row["amount"], row[PROBLEM] is None) for row in found] == [
        ("a", 7, True),
        (None, None, True),
        (None, None, False),
        ("b", -1, True),
    ]
    payloads = [b"\x02a\x0e", None, b"\x02"]
    assert read(Raw(), *payloads) == [{"payload": payload, PROBLEM: None} for payload in payloads]


def test_avro_decimals_are_never_rounded():
    def payload(cents: int) -> bytes:
        digits = cents.to_bytes(8, "big", signed=True)
        return b"\x02x" + b"\x10" + digits + b"\0" + b"\0"

    assert AVRO_ORDER(payload(-123456), None)[1] == Decimal("-1234.56")
    with pytest.raises(Problem, match=r"field price: does not fit decimal\(6,2\)"):
        AVRO_ORDER(payload(1234567), None)
    with pytest.raises(Problem, match="goes on behind"):
        AVRO_ORDER(payload(1) + b"\0", None)


def test_avro_schemas_are_resolved_and_their_differences_known():
    newer = {
        **RECORD,
        "fields": [
            {"name": "id", "type": "string"},
            {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 8, "scale": 3}},
            {"name": "fee", "type": {**RECORD["fields"][1]["type"]}, "default": "\u0001\u0000"},
            {"name": "raw", "type": "bytes", "default": "\u00ff"},
        ],
    }
    payload = b"\x02x\x02\x05\0\0"
    assert avro(newer, RECORD)()(payload, None) == ["x", Decimal("0.050"), Decimal("2.56"), b"\xff"]
    with pytest.raises(JobError, match="field fee: is missing"):
        avro(newer, RECORD, missing="dead-letter")()
    with pytest.raises(JobError, match="field at: is not in the job's schema"):
        avro(newer, RECORD, unknown="dead-letter")()
    plain = {**RECORD, "fields": [RECORD["fields"][0], {"name": "at", "type": "long"}]}
    timed = {**RECORD, "fields": [RECORD["fields"][0], {"name": "at", "type": RECORD["fields"][2]["type"][1]}]}
    with pytest.raises(Problem, match="field at: was not written as timestamp-micros"):
        avro(timed, plain)()(b"\x02x\x02", None)
    must = {**RECORD, "fields": [*RECORD["fields"], {"name": "must", "type": "int"}]}
    with pytest.raises(Problem, match="No default value for field must"):
        avro(must, RECORD)()(payload, None)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (["int", "string"], "a union of several types"),
        ("shop.Order", "holds itself"),
        ("null", "no counterpart"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 40}, "38 digits"),
        ({"type": "record", "name": "E", "fields": []}, "no fields"),
        ("no.such", "no Avro schema"),
    ],
)
def test_avro_that_can_be_no_column_is_refused(field, said):
    with pytest.raises(JobError, match=said):
        avro({**RECORD, "fields": [{"name": "f", "type": field}]}).fields()


def test_declarations_that_can_not_work_are_refused():
    for make, said in (
        (lambda: Avro(), "reader_schema"),
        (lambda: Avro("http://r"), "either subject or reader_schema"),
        (lambda: Avro(subject="s", reader_schema=RECORD), "goes with a registry"),
        (lambda: Avro("http://r", "s", writer_schema=RECORD), "every message names its own"),
        (lambda: Avro(" ", "s"), "must be a URL"),
        (lambda: Protobuf(), "either subject"),
        (lambda: Protobuf(subject="s"), "goes with a registry"),
        (lambda: Protobuf(descriptor=b""), "message"),
        (lambda: Protobuf(descriptor=5), "generated class"),
        (lambda: Protobuf(descriptor=b"\xff", message="m").task_plan(), "descriptor"),
        (lambda: Protobuf(descriptor=b"", message="m").task_plan(), "no message m"),
        (lambda: Avro(reader_schema="{").task_plan(), "no Avro schema"),
        (lambda: Avro(reader_schema='"int"').task_plan(), "must be a record"),
    ):
        with pytest.raises(JobError, match=said):
            make()


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_give_a_protobuf_message_or_a_problem(value):
    try:
        PROTOBUF_FIELD(value, None)
    except Problem:
        return


# A message of Protobuf's own that has most kinds of fields, and enums.
PROTOBUF_FIELD = protobuf_payload.Plan(
    protobuf_payload.from_descriptor(descriptor_pb2.DESCRIPTOR),
    "google.protobuf.FieldDescriptorProto",
    None,
    Policy(),
)()


def test_protobuf_times_enums_and_unknown_fields():
    plan = Protobuf(descriptor=descriptor_pb2.FieldDescriptorProto)
    fields, reading = plan.task_plan()
    place = fields.fieldNames().index("label")
    message = descriptor_pb2.FieldDescriptorProto(name="x", label=3).SerializeToString()
    reader = reading()
    assert reader(message, None)[place] == "LABEL_REPEATED"
    assert reader(b"", None)[place] is None
    strict = Protobuf(descriptor=descriptor_pb2.FieldDescriptorProto, unknown="dead-letter").task_plan()[1]()
    extra = b"\xf8\x07\x01"
    assert reader(message + extra, None) == reader(message, None)
    with pytest.raises(Problem, match="field number 127: is not in the job's descriptor"):
        strict(message + extra, None)
    moment = protobuf_payload._time("at")
    assert moment(timestamp_pb2.Timestamp(seconds=-1, nanos=1000)) == datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=UTC)
    for value, said in ((timestamp_pb2.Timestamp(nanos=1), "finer"), (timestamp_pb2.Timestamp(seconds=2**62), "year")):
        with pytest.raises(Problem, match=said):
            moment(value)
    with pytest.raises(JobError, match="holds itself"):
        Protobuf(descriptor=descriptor_pb2.DescriptorProto).task_plan()
    with pytest.raises(JobError, match=r"message: google\.protobuf\.Empty has no fields"):
        Protobuf(descriptor=empty_pb2.Empty).task_plan()


def with_enums(syntax: str) -> bytes:
    """A message with an enum in each place that a field has: proto3's are open, proto2's closed."""
    file = descriptor_pb2.FileDescriptorProto(name="m.proto", package="p", syntax=syntax)
    status = file.enum_type.add(name="Status")
    status.value.add(name="NEW", number=0)
    status.value.add(name="PAID", number=1)
    inner = file.message_type.add(name="Inner")
    inner.field.add(name="status", number=1, label=1, type=14, type_name=".p.Status")
    message = file.message_type.add(name="M")
    message.oneof_decl.add(name="one")
    entry = message.nested_type.add(name="ByNumberEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=5)
    entry.field.add(name="value", number=2, label=1, type=14, type_name=".p.Status")
    for number, name, label, type_name, more in (
        (1, "single", 1, "Status", {}),
        (2, "several", 3, "Status", {}),
        (3, "by_number", 3, "M.ByNumberEntry", {}),
        (4, "chosen", 1, "Status", {"oneof_index": 0}),
        (5, "inner", 1, "Inner", {}),
        (6, "inners", 3, "Inner", {}),
    ):
        kind = 14 if type_name == "Status" else 11
        message.field.add(name=name, number=number, label=label, type=kind, type_name=f".p.{type_name}", **more)
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


@pytest.mark.parametrize("unknown", ["ignore", "dead-letter"])
@pytest.mark.parametrize("syntax", ["proto2", "proto3"])
@pytest.mark.parametrize(
    ("field", "payload"),
    [
        ("single", b"\x08%c"),
        ("several", b"\x10\1\x10%c"),
        ("several", b"\x12\2\1%c"),
        ("by_number{}", b"\x1a\4\x08\5\x10%c"),
        ("chosen", b"\x20%c"),
        ("inner.status", b"\x2a\2\x08%c"),
        ("inners.status", b"\x32\2\x08\1\x32\2\x08%c"),
    ],
)
def test_an_unknown_number_of_an_enum_is_a_problem_also_where_protobuf_takes_it_for_an_unknown_field(
    syntax, unknown, field, payload
):
    reader = protobuf_payload.Plan(with_enums(syntax), "p.M", None, Policy(unknown))()
    assert "PAID" in repr(reader(payload % 1, None))
    with pytest.raises(Problem, match=f"^field {field}: is a value that the job's enum lacks$"):
        reader(payload % 7, None)
    extra = b"\xf8\x07\x01"
    if unknown == "ignore":
        assert reader(payload % 1 + extra, None) == reader(payload % 1, None)
    else:
        with pytest.raises(Problem, match="field number 127: is not in the job's descriptor"):
            reader(payload % 1 + extra, None)


# The registry, over real HTTP.

IMPATIENT = {"max.retries": 1, "retries.wait.ms": 1, "retries.max.wait.ms": 1, "timeout": 20}


def test_a_registry_that_is_away_is_no_bad_message():
    with schema_registry.running("me", "secret") as server:
        allowed = {"basic.auth.user.info": "me:secret", **IMPATIENT}
        writer = SchemaRegistryClient({"url": server.url, **allowed})
        from confluent_kafka.schema_registry import Schema as Registered

        number = writer.register_schema("orders-value", Registered(json.dumps(RECORD), "AVRO"))
        registry = Registry(server.url, allowed)
        assert "secret" not in repr(registry)
        client = Client(registry, None)
        assert client.latest("orders-value") == client.schema(number) == Schema("AVRO", json.dumps(RECORD))
        assert client.schema(uuid.UUID(server.schemas[0]["guid"])).kind == "AVRO"
        # A number that is no int of Java, and a GUID in a registry that has none, are no address of theirs.
        for unknown, server.guids in (
            (number + 1, True),
            (2**31, True),
            (2**32 - 1, True),
            (uuid.uuid4(), True),
            (uuid.uuid4(), False),
        ):
            with pytest.raises(Problem, match=f"no schema {unknown}"):
                client.schema(unknown)
        with pytest.raises(JobError, match="no subject nothing-value"):
            client.latest("nothing-value")
        # Wrong credentials, a wrong path, an internal error: nobody's message is at fault.
        for wrong in (Registry(server.url, IMPATIENT), Registry(f"{server.url}/elsewhere", allowed)):
            with pytest.raises(ConsumerUnavailable, match=re.escape(wrong.url)):
                Client(wrong, None).schema(number)
            with pytest.raises(ConsumerUnavailable):
                Client(wrong, None).latest("orders-value")
            with pytest.raises(ConsumerUnavailable):
                Client(wrong, None).schema(uuid.uuid4())
        server.failing = 503
        with pytest.raises(ConsumerUnavailable, match="the store is away"):
            Client(registry, None).schema(number)
        server.failing = None
        server.stop()
        with pytest.raises(ConsumerUnavailable):
            client.schema(number + 1)
        # What is known never changes, and needs no registry.
        asked = len(server.asked)
        assert client.schema(number).kind == "AVRO"
        assert len(server.asked) == asked
        server.start()
        with pytest.raises(Problem):
            client.schema(number + 1)


def test_floats_that_are_no_numbers_pass_where_they_can_be_written():
    plan = avro({"type": "record", "name": "R", "fields": [{"name": "x", "type": "double"}]})()
    assert math.isnan(plan(base64.b64decode("AAAAAAAA+H8="), None)[0])


def test_json_that_names_a_schema_is_read_as_declared():
    declared = t.StructType().add("id", t.StringType()).add("amount", t.DecimalType(10, 2))
    read = _JsonPlan(declared, Policy(), framed=True)()
    assert list(read(b'\0\0\0\0\2{"id": "a", "amount": 1.5}', None)) == ["a", Decimal("1.5")]
    assert list(read(b'{"id": "h"}', b"\1" + uuid.uuid4().bytes)) == ["h", None]
    bad = {b'{"id": "a"}': "does not begin with a schema's id", b'\0\0\0\0\2{"id": 1}': "field id"}
    for payload, problem in bad.items():
        with pytest.raises(Problem, match=problem):
            read(payload, None)
    assert list(_JsonPlan(None, Policy(), framed=True)()(b"\0\0\0\0\2{}", None)) == ["{}"]
