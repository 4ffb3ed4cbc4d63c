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


def payload(made: dict[str, Any], name: str = "Order.Placed") -> dict[str, Any]:
    return made["components"]["schemas"][name]


def avro(made: dict[str, Any]) -> dict[str, Any]:
    return payload(made, "Invoice.Issued")["schema"]


@functools.cache
def known() -> dict[str, Any]:
    """The document that consumers know. Not to be changed."""
    return document()


def found(change: Any) -> list[str]:
    new = copy.deepcopy(known())
    change(new)
    return [str(one) for one in compare(known(), new)]


PLACED, ISSUED = "order-events: Order.Placed: ", "invoice-events: Invoice.Issued: payload"
BREAKING = {
    "topic removed": (lambda new: new["channels"].pop("invoice-events"), ["invoice-events: the topic is removed"]),
    "topic renamed": (
        lambda new: new["channels"]["invoice-events"].update(address="bills"),
        ["invoice-events: the topic is removed"],
    ),
    "event removed": (
        lambda new: new["channels"]["order-events"]["messages"].pop("Order.Placed"),
        ["order-events: Order.Placed: the type of events is removed from the topic"],
    ),
    "content type": (
        lambda new: new["components"]["messages"]["Order.Placed"].update(contentType="a/b"),
        [PLACED + 'content type "application/json" becomes "a/b"'],
    ),
    "tombstone": (
        lambda new: new["components"]["messages"]["Order.Placed"].update(payload={"type": "null"}),
        [PLACED + 'payload: type "object" becomes "null"'],
    ),
    "field removed": (
        lambda new: payload(new)["properties"].pop("note"),
        [PLACED + "payload.note: the field is removed"],
    ),
    "type": (
        lambda new: payload(new)["properties"]["total"].update(type="number"),
        [PLACED + 'payload.total: type "string" becomes "number"'],
    ),
    "nullable": (
        lambda new: payload(new)["properties"].update(total={"anyOf": [{"type": "string"}, {"type": "null"}]}),
        [PLACED + 'payload.total: type "string" becomes ["null", "string"]'],
    ),
    "new required field": (
        lambda new: (payload(new)["properties"].update(due={"type": "string"}), payload(new)["required"].append("due")),
        [PLACED + "payload.due: a new field is required, and older events lack it"],
    ),
    "required from now on": (
        lambda new: payload(new)["required"].append("note"),
        [PLACED + "payload.note: the field is required from now on, and older events may lack it"],
    ),
    "no longer required": (
        lambda new: payload(new)["required"].remove("total"),
        [PLACED + "payload.total: the field is no longer required, and readers rely on it"],
    ),
    "enum narrowed": (
        lambda new: payload(new)["$defs"]["State"]["enum"].remove("paid"),
        [PLACED + 'payload.state: the enum no longer has "paid"'],
    ),
    "enum new": (
        lambda new: payload(new)["properties"]["total"].update(enum=["1"]),
        [PLACED + 'payload.total: only "1" is allowed from now on'],
    ),
    "in an array": (
        lambda new: payload(new)["$defs"]["Line"]["properties"].pop("sku"),
        [PLACED + "payload.lines[].sku: the field is removed"],
    ),
    "bounds": (
        lambda new: payload(new)["properties"]["total"].update(minLength=1, maxLength=5, pattern="x"),
        [
            PLACED + "payload.total: maxLength none becomes 5",
            PLACED + "payload.total: minLength none becomes 1",
            PLACED + 'payload.total: pattern none becomes "x"',
        ],
    ),
    "others": (
        lambda new: payload(new).update(additionalProperties=False),
        [PLACED + "payload: other fields are no longer allowed (additionalProperties: false)"],
    ),
    "header removed": (
        lambda new: new["components"]["messages"]["Order.Placed"]["headers"]["allOf"][1]["properties"].pop("tenant"),
        [PLACED + "headers.tenant: the field is removed"],
    ),
    "avro removed": (lambda new: avro(new)["fields"].pop(0), [ISSUED + ".cents: the field is removed"]),
    "avro added": (
        lambda new: avro(new)["fields"].append({"name": "due", "type": "string"}),
        [ISSUED + ".due: a new field without a default, and older events lack it"],
    ),
    "avro type": (
        lambda new: avro(new)["fields"][0].update(type="string"),
        [ISSUED + '.cents: type "long" becomes "string"'],
    ),
    "avro enum": (
        lambda new: avro(new)["fields"][1]["type"]["symbols"].remove("A"),
        [ISSUED + '.kind: the enum no longer has "A"'],
    ),
    "avro enum grown": (
        lambda new: avro(new)["fields"][1]["type"]["symbols"].append("C"),
        [ISSUED + '.kind: readers without a default do not know the enum\'s "C"'],
    ),
    "avro enum renamed": (
        lambda new: avro(new)["fields"][1]["type"].update(name="Sort"),
        [ISSUED + '.kind: the enum "Kind" is named "Sort"'],
    ),
    "avro items": (
        lambda new: avro(new)["fields"][2]["type"].update(items="long"),
        [ISSUED + '.lines[]: type "string" becomes "long"'],
    ),
}


@pytest.mark.parametrize("name", BREAKING)
def test_what_breaks_is_named(name):
    change, said = BREAKING[name]
    assert found(change) == said


HARMLESS = {
    "nothing": lambda new: None,
    "texts": lambda new: (
        new["info"].update(title="Other", version="9"),
        payload(new).update(description="x", examples=[1]),
        payload(new)["properties"]["total"].update({"title": "T", "x-own": 1}),
    ),
    "field": lambda new: payload(new)["properties"].update(due={"type": "string"}),
    "enum": lambda new: payload(new)["$defs"]["State"]["enum"].append("sent"),
    "topic": lambda new: new["channels"].update(more={"address": "more", "messages": {}}),
    "event": lambda new: new["channels"]["order-events"]["messages"].update(x=copy.deepcopy({"payload": {}})),
    "avro": lambda new: avro(new)["fields"].append({"name": "due", "type": "string", "default": ""}),
    "avro doc": lambda new: avro(new).update(doc="x"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_breaks_nothing(name):
    assert found(HARMLESS[name]) == []


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
