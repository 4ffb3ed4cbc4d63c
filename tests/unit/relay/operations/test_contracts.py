"""``outbox contracts check``: each change that breaks a reader is named, and no other."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from outbox.models import EventModel
from outbox.registry import Avro
from relay.cli.app import app
from relay.config import load
from relay.operations import asyncapi
from relay.operations.contracts import compare


class State(enum.Enum):
    NEW = "new"
    PAID = "paid"


class Line(BaseModel):
    sku: str
    parent: Line | None = None


@dataclasses.dataclass
class Placed:
    total: str
    state: State
    lines: list[Line]
    note: str | None = None


AVRO = {"type": "record", "name": "Invoice", "fields": [{"name": "cents", "type": "long"}]}
KINDS = {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}
AVRO["fields"] += [{"name": "kind", "type": KINDS}, {"name": "lines", "type": {"type": "array", "items": "string"}}]
MODELS = (
    EventModel("Order", "Placed", Placed, headers={"tenant": {"type": "string"}}),
    EventModel("Order", "Forgotten", None),
    EventModel("Invoice", "Issued", Avro("invoices", AVRO)),
)


def document(models: Any = MODELS, **settings: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(asyncapi.document(models, load(**settings), "Shop", "1")))
    return made


def payload(made: dict[str, Any]) -> dict[str, Any]:
    return made["components"]["schemas"]["Order.Placed"]


@functools.cache
def known() -> dict[str, Any]:
    """The document that consumers know. Not to be changed."""
    return document()


GONE = object()


def found(changes: dict[str, Any]) -> list[str]:
    """Return what is said of a document in which each of these paths has another value, or is gone."""
    new = copy.deepcopy(known())
    for path, value in changes.items():
        *steps, last = (int(step) if step.isdecimal() else step for step in path.split("/"))
        node: Any = functools.reduce(lambda inner, step: inner[step], steps, new)
        if value is GONE:
            del node[last]
        elif isinstance(node, list):
            node.insert(last, value)
        else:
            node[last] = value
    return [str(one) for one in compare(known(), new)]


PLACED, ISSUED = "order-events: Order.Placed: ", "invoice-events: Invoice.Issued: payload"
MESSAGE, OF_ORDERS = "components/messages/Order.Placed", "channels/order-events/messages"
SCHEMA, AVROS = "components/schemas/Order.Placed", "components/schemas/Invoice.Issued/schema"
TOTAL, FIELDS, KIND = f"{SCHEMA}/properties/total", f"{SCHEMA}/properties", f"{AVROS}/fields/1/type"
CHANGES = {
    "topic removed": ({"channels/invoice-events": GONE}, ["invoice-events: the topic is removed"]),
    "topic renamed": ({"channels/invoice-events/address": "bills"}, ["invoice-events: the topic is removed"]),
    "event removed": (
        {f"{OF_ORDERS}/Order.Placed": GONE},
        [PLACED + "the type of events is removed from the topic"],
    ),
    "content type": ({f"{MESSAGE}/contentType": "a/b"}, [PLACED + 'content type "application/json" becomes "a/b"']),
    "tombstone": ({f"{MESSAGE}/payload": {"type": "null"}}, [PLACED + 'payload: type "object" becomes "null"']),
    "field removed": ({f"{FIELDS}/note": GONE}, [PLACED + "payload.note: the field is removed"]),
    "type": ({f"{TOTAL}/type": "number"}, [PLACED + 'payload.total: type "string" becomes "number"']),
    "nullable": (
        {TOTAL: {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        [PLACED + 'payload.total: type "string" becomes ["null", "string"]'],
    ),
    "new required field": (
        {f"{FIELDS}/due": {"type": "string"}, f"{SCHEMA}/required/0": "due"},
        [PLACED + "payload.due: a new field is required, and older events lack it"],
    ),
    "required from now on": (
        {f"{SCHEMA}/required/0": "note"},
        [PLACED + "payload.note: the field is required from now on, and older events may lack it"],
    ),
    "no longer required": (
        {f"{SCHEMA}/required": ["state", "lines"]},
        [PLACED + "payload.total: the field is no longer required, and readers rely on it"],
    ),
    "enum narrowed": (
        {f"{SCHEMA}/$defs/State/enum": ["new"]},
        [PLACED + 'payload.state: the enum no longer has "paid"'],
    ),
    "enum new": ({f"{TOTAL}/enum": ["1"]}, [PLACED + 'payload.total: only "1" is allowed from now on']),
    "in an array": (
        {f"{SCHEMA}/$defs/Line/properties/sku": GONE},
        [PLACED + "payload.lines[].sku: the field is removed"],
    ),
    "bounds": (
        {f"{TOTAL}/minLength": 1, f"{TOTAL}/maxLength": 5, f"{TOTAL}/pattern": "x"},
        [
            PLACED + "payload.total: maxLength none becomes 5",
            PLACED + "payload.total: minLength none becomes 1",
            PLACED + 'payload.total: pattern none becomes "x"',
        ],
    ),
    "others": (
        {f"{SCHEMA}/additionalProperties": False},
        [PLACED + "payload: other fields are no longer allowed (additionalProperties: false)"],
    ),
    "header removed": (
        {f"{MESSAGE}/headers/allOf/1/properties/tenant": GONE},
        [PLACED + "headers.tenant: the field is removed"],
    ),
    "avro removed": ({f"{AVROS}/fields/0": GONE}, [ISSUED + ".cents: the field is removed"]),
    "avro added": (
        {f"{AVROS}/fields/3": {"name": "due", "type": "string"}},
        [ISSUED + ".due: a new field without a default, and older events lack it"],
    ),
    "avro type": ({f"{AVROS}/fields/0/type": "string"}, [ISSUED + '.cents: type "long" becomes "string"']),
    "avro enum": ({f"{KIND}/symbols/0": GONE}, [ISSUED + '.kind: the enum no longer has "A"']),
    "avro enum grown": (
        {f"{KIND}/symbols/2": "C"},
        [ISSUED + '.kind: readers without a default do not know the enum\'s "C"'],
    ),
    "avro enum renamed": ({f"{KIND}/name": "Sort"}, [ISSUED + '.kind: the enum "Kind" is named "Sort"']),
    "avro lists in an object of their own": (
        {f"{AVROS}/fields/2/type": {"type": {"type": "array", "items": "string"}}},
        [],
    ),
    "avro lists become a union": (
        {f"{AVROS}/fields/2/type": {"type": ["null", "string"]}},
        [ISSUED + '.lines: type {"type": "array", "items": "string"} becomes ["null", "string"]'],
    ),
    "avro items": ({f"{AVROS}/fields/2/type/items": "long"}, [ISSUED + '.lines[]: type "string" becomes "long"']),
    "nothing": ({}, []),
    "texts": ({"info/title": "Other", f"{SCHEMA}/description": "x", f"{TOTAL}/title": "T", f"{TOTAL}/x-own": 1}, []),
    "a new field": ({f"{FIELDS}/due": {"type": "string"}}, []),
    "enum grown": ({f"{SCHEMA}/$defs/State/enum/2": "sent"}, []),
    "a new topic": ({"channels/more": {"address": "more", "messages": {}}}, []),
    "a new event": ({f"{OF_ORDERS}/x": {"payload": {}}}, []),
    "avro default": ({f"{AVROS}/fields/3": {"name": "due", "type": "string", "default": ""}}, []),
    "avro doc": ({f"{AVROS}/doc": "x"}, []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_breaks_is_named_and_nothing_else(name):
    changes, said = CHANGES[name]
    assert found(changes) == said


def test_a_field_that_readers_do_not_allow():
    old = copy.deepcopy(known())
    payload(old)["additionalProperties"] = False
    new = copy.deepcopy(old)
    payload(new)["properties"]["due"] = {"type": "string"}
    assert [one.place for one in compare(old, new)] == ["payload.due"]


def test_headers_that_a_relay_no_longer_sends_and_those_that_it_adds():
    fewer = document(headers="cloudevents")
    gone = {one.place for one in compare(known(), fewer)}
    assert gone == {f"headers.{name}" for name in ("id", "event-type", "aggregate-type", "idempotency-key")}
    assert compare(fewer, known()) == []
    assert "ce_source" in {one.place.rpartition(".")[2] for one in compare(known(), document(ce_source="/other"))}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["contracts", "check", *map(str, arguments)])


def test_the_command(tmp_path: Path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    made = copy.deepcopy(known())
    old.write_text(json.dumps(made))
    payload(made)["properties"].pop("note")
    new.write_text(json.dumps(made))
    same, other = run(old, old), run(old, new)
    assert (same.exit_code, same.stdout) == (0, "nothing breaks\n")
    assert (other.exit_code, other.stdout) == (1, f"breaking: {PLACED}payload.note: the field is removed\n")
    assert json.loads(run(old, old, "--json").stdout) == {"breaking": []}
    as_json = run(old, new, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["breaking"] == [
        {"topic": "order-events", "event": "Order.Placed", "place": "payload.note", "change": "the field is removed"}
    ]


def with_message(message: Any) -> str:
    channel = {"address": "order-events", "messages": {"Order.Placed": message}}
    return json.dumps({"asyncapi": "3.0.0", "channels": {"a": channel}})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"asyncapi": "2.6.0", "channels": {}}',
        '{"asyncapi": "3.0.0"}',
        with_message(1),
        with_message({"$ref": "#/nowhere"}),
        with_message({"$ref": "#/channels/a/messages/Order.Placed"}),
    ],
)
def test_a_document_that_can_not_be_read(tmp_path: Path, text):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(known()))
    bad.write_text(text)
    for arguments in ((good, bad), (tmp_path / "none.json", good)):
        done = run(*arguments)
        assert done.exit_code == 2, done.output
        assert "document" in done.stderr or "JSON" in done.stderr
