"""``outbox asyncapi``: the document is held against AsyncAPI's own schema, and events against the document."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import jsonschema
import pydantic
import pytest
from google.protobuf import timestamp_pb2
from pydantic import BaseModel, ConfigDict, Field, computed_field
from typer.testing import CliRunner

from outbox import ConfigurationError, Event, EventError, _payload, models
from outbox._app.choices import HeaderSet
from outbox.models import EventModel, register
from outbox.registry import Avro, JsonSchema, Protobuf
from relay.cli.app import app
from relay.config import load
from relay.core.ports import Claim
from relay.kafka.headers import MessageHeaders
from relay.operations import asyncapi

SPECIFICATION = json.loads((Path(__file__).parents[3] / "support" / "asyncapi-3.0.0.json").read_text())
VALIDATOR = jsonschema.Draft7Validator(SPECIFICATION)


@dataclasses.dataclass
class Line:
    sku: str
    price: Decimal


class OrderPlaced(BaseModel):
    number: UUID
    lines: list[Line]
    parent: OrderPlaced | None = None


TREE = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#/$defs/leaf"}},
    "$defs": {"leaf": {"type": "string"}},
}
AVRO = {"type": "record", "name": "Invoice", "fields": [{"name": "cents", "type": "long"}]}
ALL = (
    EventModel("Order", "OrderPlaced", OrderPlaced, "Somebody has ordered.", headers={"tenant": {"type": "string"}}),
    EventModel("Order", "OrderForgotten", None),
    EventModel("Order", "Line changed", Line, content_type="application/merge-patch+json"),
    EventModel("Tree", "Grown", TREE),
    EventModel("Invoice", "Issued", Avro("invoices", AVRO)),
    EventModel("Invoice", "Paid", JsonSchema("paid", TREE)),
)


def document(given_models: Any = ALL, **settings: Any) -> dict[str, Any]:
    return asyncapi.document(given_models, load(**settings), "Shop", "2.1.0")


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def resolved(made: Any, reference: str) -> Any:
    node = made
    for step in reference.removeprefix("#/").split("/"):
        node = node[step]
    return node


@pytest.mark.parametrize("headers", list(HeaderSet))
def test_the_document_keeps_the_specification_and_its_references_lead_somewhere(headers):
    made = document(headers=headers, routes={"Order": "orders.v1", "Tree": "forest", "Invoice": "orders.v1"})
    assert [error.message for error in VALIDATOR.iter_errors(made)] == []
    found = set(references(made))
    assert len(found) > 12
    for reference in found:
        assert isinstance(resolved(made, reference), dict), reference
    assert (made["asyncapi"], made["info"]) == ("3.0.0", {"title": "Shop", "version": "2.1.0"})
    assert {name: sorted(channel["messages"]) for name, channel in made["channels"].items()} == {
        "orders.v1": [
            *("Invoice.Issued", "Invoice.Paid", "Order.Line_changed", "Order.OrderForgotten", "Order.OrderPlaced")
        ],
        "forest": ["Tree.Grown"],
    }
    # The specification's schema does refuse what is wrong.
    for broken in (
        {key: value for key, value in made.items() if key != "info"},
        made | {"channels": {"forest": {"adress": "forest"}}},
        made | {"operations": {"publish": {"action": "publish", "channel": {"$ref": "#/channels/forest"}}}},
    ):
        assert list(VALIDATOR.iter_errors(broken)), broken


def test_without_routes_a_channel_is_the_templates_topic():
    assert sorted(document()["channels"]) == ["invoice-events", "order-events", "tree-events"]
    with pytest.raises(Exception, match="Tree"):
        document(routes={"Order": "orders"})


def validated(made: dict[str, Any], schema: Any, value: Any) -> None:
    """Hold a value against a schema of the document, as a draft that knows $defs."""
    jsonschema.Draft202012Validator({**schema, "components": made["components"]}).validate(value)


@pytest.mark.parametrize("which", list(HeaderSet))
def test_a_published_event_fits_its_message(which):
    made = document(headers=which, ce_source="/shop")
    message = made["components"]["messages"]["Order.OrderPlaced"]
    payload = OrderPlaced(number=UUID(int=7), lines=[Line("tea", Decimal("1.50"))])
    value = _payload.encode(Event("Order", "1", "OrderPlaced", payload)).json
    assert value is not None
    own = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tenant": "acme"}
    claim = Claim(1, str(UUID(int=1)), "Order", "1", "OrderPlaced", "2026-01-01T00:00:00.000000Z", value, own)
    headers = dict(MessageHeaders("/shop", which).of(claim))
    validated(made, message["payload"], json.loads(value))
    validated(made, message["headers"], headers)
    assert message["description"] == "Somebody has ordered."
    assert message["contentType"] == headers["content-type"] == "application/json"
    for wrong in ({**headers, "content-type": "text/plain"}, {k: v for k, v in headers.items() if k != "ce_id"}):
        with pytest.raises(jsonschema.ValidationError):
            validated(made, message["headers"], wrong)
    with pytest.raises(jsonschema.ValidationError):
        validated(made, message["payload"], {"number": "x"})


class ByName(BaseModel):
    unit_price: int = Field(default=1, serialization_alias="unitPrice")


class ByAlias(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True)
    unit_price: int = Field(default=1, alias="unitPrice")
    inner: ByName = ByName()

    @computed_field(alias="sumTotal")
    def total(self) -> int:
        return 1


@dataclasses.dataclass
class Plain:
    by_name: ByName = dataclasses.field(default_factory=ByName)
    by_alias: ByAlias = dataclasses.field(default_factory=ByAlias)
    _private: int = 1


@pydantic.dataclasses.dataclass(config=ConfigDict(serialize_by_alias=True))
class Checked:
    unit_price: int = Field(default=1, alias="unitPrice")
    plain: Plain = dataclasses.field(default_factory=Plain)


class Whole(BaseModel):
    order_id: int = Field(default=1, alias="orderId")
    lines: list[ByAlias | ByName] = [ByAlias(), ByName()]
    checked: Checked = dataclasses.field(default_factory=Checked)
    by_name: ByName = ByName()


def closed(node: Any) -> Any:
    """Return a schema of which every object has all of its properties and no others."""
    if isinstance(node, list):
        return [closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    inside = {key: closed(part) for key, part in node.items()}
    names = node.get("properties")
    return inside | ({"required": list(names), "additionalProperties": False} if isinstance(names, dict) else {})


@pytest.mark.parametrize("model", [ByName, ByAlias, Plain, Checked, Whole])
def test_properties_have_the_names_that_the_events_have(model):
    """With aliases, of which a model may write all or none, private fields and one kind of model in another."""
    register = EventModel("Order", "Placed", model)
    made = asyncapi.document([register], load(), "Shop", "1.0.0")
    value = json.loads(_payload.to_json(model()))
    schemas = closed(made["components"]["schemas"])
    validated({"components": {"schemas": schemas}}, made["components"]["messages"]["Order.Placed"]["payload"], value)


def test_schemas_of_a_registry_tombstones_and_keys():
    messages = (made := document())["components"]["messages"]
    issued, paid, forgotten = (messages[name] for name in ("Invoice.Issued", "Invoice.Paid", "Order.OrderForgotten"))
    assert issued["contentType"] == "application/vnd.confluent.avro"
    assert resolved(made, issued["payload"]["$ref"]) == {
        "schemaFormat": "application/vnd.apache.avro+json;version=1.9.0",
        "schema": AVRO,
    }
    for message in (issued, paid):
        assert message["bindings"]["kafka"]["schemaIdLocation"] == "payload"
    assert (forgotten["payload"]["type"], "contentType" in forgotten) == ("null", False)
    assert forgotten["bindings"]["kafka"]["key"]["type"] == "string"


@pytest.mark.parametrize(
    ("given_models", "said"),
    [
        ([EventModel("Order", "A", int)], "must be a pydantic model"),
        ([EventModel("Order", "A", Protobuf("p", timestamp_pb2.Timestamp))], "no Protobuf"),
        ([EventModel("Order", "A", dataclasses.make_dataclass("Odd", [("x", object.__class__)]))], "Odd has no JSON"),
        ([EventModel("Order", "a b", None), EventModel("Order", "a_b", None)], "have the name Order.a_b"),
    ],
)
def test_what_has_no_place_in_a_document(given_models, said):
    with pytest.raises(ConfigurationError, match=said):
        document(given_models)


MODULE = """
import dataclasses

from outbox.models import register


@dataclasses.dataclass
class Placed:
    number: int


register("Order", "OrderPlaced", Placed, description="yes: no")
"""


@pytest.fixture
def empty(monkeypatch):
    monkeypatch.setattr(models, "_registered", {})


@pytest.mark.usefixtures("empty")
def test_the_command_prints_the_document(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shop_models.py").write_text(MODULE)
    done = CliRunner().invoke(app, ["asyncapi", "--models", "shop_models", "--title", "Shop: events"])
    assert (done.exit_code, done.stderr) == (0, "")
    made = json.loads(done.stdout)
    assert list(VALIDATOR.iter_errors(made)) == []
    assert made["info"] == {"title": "Shop: events", "version": "1.0.0"}
    assert made["components"]["schemas"]["Order.OrderPlaced"]["properties"]["number"]["type"] == "integer"


@pytest.mark.usefixtures("empty")
def test_the_command_names_a_module_that_is_not_there_or_registers_nothing():
    for module, said in (("no_such_module", "no_such_module"), ("json", "register no models")):
        done = CliRunner().invoke(app, ["asyncapi", "--models", module])
        assert done.exit_code == 2
        assert said in done.stderr


@pytest.mark.usefixtures("empty")
def test_a_type_is_registered_once():
    for _ in range(2):
        register("Order", "OrderPlaced", OrderPlaced)
    register("Order", "Another", None)
    with pytest.raises(ConfigurationError, match="another model"):
        register("Order", "OrderPlaced", Line)
    with pytest.raises(EventError):
        register("", "OrderPlaced", Line)
    assert [model.event_type for model in models.registered()] == ["Another", "OrderPlaced"]


def test_registering_needs_no_pydantic():
    code = "import sys, outbox.models; outbox.models.register('A', 'B', {}); print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")
