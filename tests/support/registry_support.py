"""What the tests of the registry's serializer share: a registry, an order's schema, and a consumer's decoder."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pytest
import schema_registry
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from outbox import Event

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


LINE_OF = {"sku": "tea", "price": Decimal(1)}
NOON = dt.datetime(2026, 1, 31, 12)
