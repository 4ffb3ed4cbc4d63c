"""``outbox contracts check`` with a consumer job: what it can't read of the events is named, and nothing else."""

from __future__ import annotations

import dataclasses
import enum
import json
import subprocess
import sys
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import relay
from outbox.errors import ConfigurationError
from outbox.models import EventModel
from outbox.registry import Avro as AvroModel
from outbox.registry import JsonSchema
from relay.cli.app import app
from relay.config import load
from relay.operations import asyncapi
from relay.operations.job_contract import compare_job, compare_jobs, read_job
from spark_jobs import Avro, ConsumerJob, Json, Protobuf, Raw, Traced


class State(enum.Enum):
    NEW = "new"


@dataclasses.dataclass
class Line:
    sku: str
    amount: int


@dataclasses.dataclass
class Placed:
    order_id: str
    total: Decimal
    state: State
    placed_at: datetime
    due: date | None
    lines: list[Line]
    first: Line | None
    labels: dict[str, str]
    anything: Any
    open: dict[str, Any]
    note: str = ""
    cents: int = 0


@dataclasses.dataclass
class Shipped:
    order_id: str
    carrier: str


BILL = {
    "type": "record",
    "name": "shop.Bill",
    "fields": [
        {"name": "cents", "type": "int"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "other", "type": "Kind"},
        {"name": "lines", "type": {"type": "array", "items": "string"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    ],
}
TICKET = {"type": "object", "properties": {"id": {"type": "integer", "maximum": 2**40}}, "required": ["id"]}
MODELS = (
    EventModel("Order", "Placed", Placed),
    EventModel("Order", "Shipped", Shipped),
    EventModel("Order", "Forgotten", None),
    EventModel("Invoice", "Issued", AvroModel("invoices", BILL)),
    EventModel("Ticket", "Opened", JsonSchema("tickets", TICKET)),
)
DOCUMENT = json.loads(json.dumps(asyncapi.document(MODELS, load(), "Shop", "1")))
PLACED, ISSUED, OPENED = (
    f"{topic}: {event}: payload"
    for topic, event in (
        ("order-events", "Order.Placed"),
        ("invoice-events", "Invoice.Issued"),
        ("ticket-events", "Ticket.Opened"),
    )
)

job: ConsumerJob
"""What the command reads by name."""


def declare(schema: Any, topic: str = "order-events", types: Any = ("Placed",), **more: Any) -> str:
    global job
    job = ConsumerJob(group="g", topics=[topic], types=types, schema=schema, effect="SELECT 1", **more)
    return f"{__name__}:job"


def found(schema: Any, *place: Any, topics: Any = ()) -> list[str]:
    return [str(one) for one in compare_job(read_job(declare(schema, *place)), DOCUMENT, topics)]


READABLE = [
    None,
    Raw(),
    "variant",
    Json(" VARIANT "),
    "order_id string NOT NULL, total decimal(12, 2), state string NOT NULL, placed_at timestamp NOT NULL, due date",
    "lines array<struct<sku: string NOT NULL, amount: bigint NOT NULL>> NOT NULL, first struct<sku string NOT NULL>",
    "labels map<string, string> NOT NULL, anything array<int>, open struct<x: int NOT NULL>, note string, cents int",
    Json("order_id string", wrong="null"),
    Json("order_id string NOT NULL, due date", missing="dead-letter"),
    Traced("order_id string"),
]


@pytest.mark.parametrize("schema", READABLE, ids=str)
def test_what_a_job_can_read(schema):
    assert found(schema) == []


BREAKING = [
    ("gone string NOT NULL", [".gone: the field is missing, and the job needs it"]),
    ("Order_ID string NOT NULL", [".Order_ID: the field is missing, and the job needs it"]),
    ("note string NOT NULL", [".note: the field is optional, and the job needs it"]),
    ("due date NOT NULL", [".due: may be null, and the job needs a value"]),
    (Json("note string", missing="dead-letter"), [".note: the field is optional, and the job needs it"]),
    ("order_id bigint", ['.order_id: type "string", and the job reads it as bigint']),
    ("lines string", ['.lines: type "array", and the job reads it as string']),
    ("due int", ['.due: type ["null", "string"], and the job reads it as int']),
    ("placed_at date", ['.placed_at: format "date-time", and the job reads it as date']),
    ("due timestamp", ['.due: format "date", and the job reads it as timestamp']),
    ("lines array<struct<sku: int>>", ['.lines[].sku: type "string", and the job reads it as int']),
    ("first struct<sku: boolean>", ['.first.sku: type "string", and the job reads it as boolean']),
    ("first struct<n: int NOT NULL>", [".first.n: the field is missing, and the job needs it"]),
    ("labels map<string, int>", ['.labels.*: type "string", and the job reads it as int']),
    ("first map<string, int>", ['.first.sku: type "string", and the job reads it as int']),
    (Json("order_id string", framed=True), [": has no schema id, and the job expects one"]),
    (Avro(reader_schema=BILL), [": is JSON, and the job reads Avro"]),
    (Protobuf(descriptor=b"", message="shop.Bill"), [": is JSON, and the job reads Protobuf"]),
]


@pytest.mark.parametrize(("schema", "said"), BREAKING, ids=str)
def test_what_a_job_can_not_read(schema, said):
    assert found(schema) == [PLACED + one for one in said]


def test_unknown_fields_that_the_job_refuses():
    schema = Json("order_id string, first struct<sku: string>", unknown="dead-letter")
    refused = "the job refuses events with a field that it does not know"
    assert f"{PLACED}.note: {refused}" in found(schema)
    assert f"{PLACED}.first.amount: {refused}" in found(schema)
    assert found(Json("order_id string, carrier string", unknown="dead-letter"), "order-events", ["Shipped"]) == []


def test_a_field_may_be_in_another_event():
    """The columns of a job that reads several types of events are those of all."""
    assert found("order_id string NOT NULL, note string, carrier string", "order-events", None) == []
    nowhere = "the job reads the field, and no event has it"
    assert found("note string, first struct<n: int>, gone int", "order-events", None) == [
        f"order-events: payload.first.n: {nowhere}",
        f"order-events: payload.gone: {nowhere}",
    ]
    assert found("carrier string") == [f"order-events: payload.carrier: {nowhere}"]
    [missing] = found("carrier string NOT NULL", "order-events", None)
    assert missing == f"{PLACED}.carrier: the field is missing, and the job needs it"


def test_topics_and_types():
    assert found(None, "orders") == [
        "orders: the job reads the topic, and the document lacks it",
        "orders: Placed: the job applies this type of events, and the document lacks it",
    ]
    assert found("order_id string", "order-events", ["Placed", "Forgotten", "Paid"]) == [
        "order-events: Paid: the job applies this type of events, and the document lacks it"
    ]
    assert found("order_id string", "orders", topics=["order-events"]) == []
    with pytest.raises(ConfigurationError, match="--topic"):
        compare_job(read_job(declare(None))._replace(topics=()), DOCUMENT)


def test_only_some_of_the_topics():
    """The others may be another service's, whose events have the other types and fields."""
    both = read_job(declare("order_id string, id bigint, x int NOT NULL", types=["Shipped", "Opened"]))
    both = both._replace(topics=("order-events", "elsewhere"))
    [one] = compare_job(both, DOCUMENT, ["order-events"])
    assert one.place == "payload.x"


def test_json_with_a_schema_id():
    assert found(Json("id bigint NOT NULL", framed=True), "ticket-events", None) == []
    assert found("id bigint", "ticket-events", None) == [OPENED + ": has a schema id, and the job expects none"]
    beyond = f"{OPENED}.id: maximum {2**40}, and the job reads it as int"
    assert found(Json("id int", framed=True), "ticket-events", None) == [beyond]


AVRO = [
    (Avro(registry="http://localhost", subject="x"), []),
    (Avro(reader_schema=BILL), [": has a schema id, and the job expects none"]),
    ("cents int", [": is Avro, and the job reads JSON"]),
]


@pytest.mark.parametrize(("schema", "said"), AVRO)
def test_avro(schema, said):
    assert found(schema, "invoice-events", None) == [ISSUED + one for one in said]


VERSIONS = [
    ("a int NOT NULL, b string", "a int", []),
    ("a int", "a bigint, b string", []),
    ("a int", "a double", []),
    ("a int", None, []),
    (None, "a int NOT NULL", []),
    ("variant", "a int NOT NULL", []),
    ("a int", "a int NOT NULL", ["payload.a: the field is optional, and the job needs it"]),
    ("a int", "a int, b int NOT NULL", ["payload.b: the field is missing, and the job needs it"]),
    ("a int", "a string", ['payload.a: type ["integer", "null"], and the job reads it as string']),
    (
        "a bigint",
        "a int",
        [
            f"payload.a: maximum {2**63 - 1}, and the job reads it as int",
            f"payload.a: minimum {-(2**63)}, and the job reads it as int",
        ],
    ),
    ("a int", Json("a int", framed=True), ["payload: has no schema id, and the job expects one"]),
    ("a int", Avro(reader_schema=BILL), ["payload: is JSON, and the job reads Avro"]),
]


@pytest.mark.parametrize(("old", "new", "said"), VERSIONS, ids=str)
def test_two_versions_of_a_job(old, new, said):
    before, after = read_job(declare(old)), read_job(declare(new))
    assert sorted(str(one) for one in compare_jobs(before, after)) == said


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["contracts", "check", *map(str, arguments)])


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "asyncapi.json"
    path.write_text(json.dumps(DOCUMENT))
    return path


def test_the_command(document: Path):
    spec = declare("order_id string, note string NOT NULL")
    said = f"breaking: {PLACED}.note: the field is optional, and the job needs it\n"
    for arguments in ((spec, document), (document, spec)):
        done = run(*arguments)
        assert (done.exit_code, done.stdout) == (1, said)
    as_json = run(spec, document, "--json")
    assert as_json.exit_code == 1
    assert [one["place"] for one in json.loads(as_json.stdout)["breaking"]] == ["payload.note"]
    declare("order_id string")
    assert (done := run(spec, document)).exit_code == 0, done.output
    assert run(spec, spec).stdout == "nothing breaks\n"
    elsewhere = run(spec, document, "--topic", "orders")
    assert (elsewhere.exit_code, elsewhere.stdout.count("breaking")) == (1, 1)


class Own:
    def task_plan(self) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("a", "at its end"),
        ("a int,", "at its end"),
        ("a interval", "'interval'"),
        ("a map<int, int>", "'int'"),
        ("a int NOT", "at its end"),
        ("a decimal(1", "at its end"),
        ("a int COMMENT b", "'b'"),
        ("a int) ", r"'\)'"),
        (Own(), "Own"),
    ],
)
def test_a_schema_that_can_not_be_read(schema, said):
    with pytest.raises(ConfigurationError, match=said):
        read_job(declare(schema))


def written(payload: Any) -> dict[str, Any]:
    """Return a document as others may write it."""
    channel = {"address": "order-events", "messages": {"Placed": {"payload": payload}}}
    return {"asyncapi": "3.0.0", "channels": {"a": channel}}


THING = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
NOT_INT = [f'{PLACED[:14]}Placed: payload.a: type "string", and the job reads it as int']
NOWHERE = ["order-events: payload.a: the job reads the field, and no event has it"]
OTHERS = [
    ("a int NOT NULL", {}, []),
    ("a int NOT NULL", {"type": "object"}, []),
    ("a int", {"type": "object", "properties": {}}, NOWHERE),
    ("a int", {"schemaFormat": "application/schema+json;version=draft-07", "schema": THING}, NOT_INT),
    ("a int", {"schemaFormat": "application/vnd.aai.asyncapi;version=3.0.0", "schema": THING}, NOT_INT),
    ("a int", {**THING, "oneOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]}, NOT_INT),
    ("a int", {"anyOf": [True, THING]}, NOT_INT),
    ("a int", {"anyOf": [{"oneOf": [THING]}, {"allOf": [THING, {"title": "x"}]}]}, NOT_INT),
]


@pytest.mark.parametrize(("schema", "payload", "said"), OTHERS)
def test_documents_that_others_write(schema, payload, said):
    job = read_job(declare(schema, types=None))
    assert [str(one) for one in compare_job(job, written(payload))] == said


@pytest.mark.parametrize(
    "payload",
    [
        {"$ref": "#/nowhere"},
        {"$ref": "#/channels/a/messages/Placed/payload"},
        {"anyOf": [{"$ref": "#/channels/a/messages/Placed/payload"}]},
        [],
    ],
)
def test_a_document_that_can_not_be_read(payload):
    with pytest.raises(ConfigurationError, match=r"in its document|not the form"):
        compare_job(read_job(declare("a int", types=None)), written(payload))


def test_what_can_not_be_compared(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Status 1 says that something breaks."""
    spec = declare("order_id string")
    (tmp_path / "a_job_that_fails.py").write_text("1 / 0")
    other = tmp_path / "other.json"
    other.write_text('{"asyncapi": "3.0.0"}')
    monkeypatch.syspath_prepend(tmp_path)
    for arguments, said in (
        (("a_job_that_fails:job", document), "ZeroDivisionError"),
        (("no_such_module:job", document), "no module no_such_module"),
        ((f"{__name__}:jobs", document), "its ConsumerJobs: job"),
        ((f"{__name__}:DOCUMENT", document), "not a ConsumerJob"),
        ((spec, other), "KeyError 'channels'"),
        ((spec, tmp_path / "none.json"), "none.json"),
        ((document, document, "--topic", "a"), "--topic"),
        ((spec, spec, "--topic", "a"), "--topic"),
    ):
        done = run(*arguments)
        assert (done.exit_code, said in done.stderr) == (2, True), (arguments, done.output)


def test_the_command_needs_no_spark(document: Path, tmp_path: Path):
    """A service's pipeline checks its consumers' jobs with what the relay needs, and those in its directory."""
    (tmp_path / "a_job_here.py").write_text("from spark_jobs.order_totals import job")
    code = (
        "import sys; sys.modules['pyspark'] = sys.modules['pyarrow'] = None; sys.path.append(sys.argv.pop(1)); "
        "from relay.cli import main; main()"
    )
    arguments = [str(Path(relay.__file__).parents[1]), "contracts", "check", "a_job_here:job", str(document)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "payload.seq: the job reads the field, and no event has it" in done.stdout
