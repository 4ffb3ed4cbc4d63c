"""The spans of the write and of the relay's turns, on real servers, and what stays as it was without a provider."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from uuid import uuid4

import pytest
import sqlalchemy as sa
from docs_support import DOCS, blocks
from opentelemetry import trace
from opentelemetry.sdk.trace.export import ConsoleSpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from spans import (
    assert_without,
    check,
    context_of,
    error_attributes,
    failed,
    linked,
    messaging,
    no_provider,
    relay,
    spans,
    traceparent,
)
from support import drained, order, wait_until
from wal_support import streaming, to_wal, wal
from writer_targets import event, opened, stored

from outbox import Event, EventTooLarge, IdempotencyKeyReused, Outbox, _trace
from outbox._app import tracing
from outbox.errors import ConfigurationError
from outbox.urls import sqlalchemy_url
from relay.core.ports import Claim, Completed, Confirm, DatabaseUnavailable, LaneLost, Receipt, Unconfirmed
from relay.kafka.routing import Router
from relay.kafka.tracing import traced

__all__ = ["order", "spans", "wal"]

# --- the write -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SQLAlchemy Connection, psycopg2", "psycopg Cursor", "asyncpg Connection"])
def test_the_events_have_the_context_of_the_span_of_their_write(outbox_postgres, spans, name):
    async def scenario():
        async with opened(name, outbox_postgres) as target:
            with trace.get_tracer("service").start_as_current_span("placing") as placing:
                first = await target.add(event(1))
                await target.add_many([event(2), event(3)])
            last = await target.add(event(4))
            await target.commit()
        return placing, first, last

    placing, first, last = asyncio.run(scenario())
    one, many, alone = spans.of("create")
    for span, given in ((one, {"MESSAGING_MESSAGE_ID": str(first)}), (alone, {"MESSAGING_MESSAGE_ID": str(last)})):
        check(span, SpanKind.PRODUCER, "create", **given, MESSAGING_BATCH_MESSAGE_COUNT=None)
    check(many, SpanKind.PRODUCER, "create", MESSAGING_MESSAGE_ID=None, MESSAGING_BATCH_MESSAGE_COUNT=2)
    for span in (one, many, alone):
        own = {name: value for name, value in span.attributes.items() if name.startswith("outbox.")}
        assert own == {"outbox.aggregate.type": "Order", "outbox.event.type": "OrderPlaced"}
        assert span.status.status_code is StatusCode.UNSET
    # Children of the service's span; without one, a trace of its own.
    assert [span.parent and span.parent.span_id for span in (one, many, alone)] == [
        *[placing.get_span_context().span_id] * 2,
        None,
    ]
    written = [traceparent(context_of(span)) for span in (one, many, many, alone)]
    assert [row["headers"] for row in stored(outbox_postgres)] == [{"traceparent": one} for one in written]
    assert_without([one, many, alone], "o-1", '"n"')


@pytest.mark.parametrize("name", ["Session, psycopg", "asyncpg Connection"])
def test_the_span_of_a_repeated_key_names_the_event_that_has_it(outbox_postgres, spans, name):
    async def scenario():
        async with opened(name, outbox_postgres) as target:
            target.options = {"unique_keys": True}
            first = await target.add(Event("Order", "o-1", "Placed", idempotency_key="k"))
            repeated = Event("Order", "o-1", "Placed", idempotency_key="k", event_id=uuid4())
            assert await target.add(repeated) == first
            with pytest.raises(IdempotencyKeyReused):
                await target.add(Event("Order", "o-2", "Placed", idempotency_key="k"))
        return first

    first = asyncio.run(scenario())
    ids = [span.attributes.get(messaging.MESSAGING_MESSAGE_ID) for span in spans.of("create")]
    # The last one names none: it wrote no event.
    assert ids == [str(first), str(first), None]


def test_a_batch_of_several_types_names_none(outbox_postgres, spans):
    with outbox_postgres.connect() as connection:
        Outbox().add_many(connection, [Event("Order", "1", "Placed"), Event("Stock", "1", "Placed")])
    attributes = spans.one("create").attributes
    assert ("outbox.aggregate.type" in attributes, attributes["outbox.event.type"]) == (False, "Placed")


def test_a_write_that_fails_is_an_error_without_what_the_server_quotes(outbox_postgres, spans):
    engine = sa.create_engine(sqlalchemy_url(outbox_postgres.url))
    twice = Event("Order", "the-key", "T", {"secret": "1234-5678"}, event_id=uuid4())
    with engine.connect() as connection:
        connection.execute(sa.text("CREATE UNIQUE INDEX ON outbox.events (event_id, lane)"))
        Outbox().add(connection, twice)
        with pytest.raises(sa.exc.IntegrityError, match="1234-5678"):
            Outbox().add(connection, twice)
        connection.rollback()
        with pytest.raises(EventTooLarge):
            Outbox(max_event_bytes=100).add(connection, Event("Order", "the-key", "T", {"secret": "1234-5678" * 20}))
    engine.dispose()
    _, broken, refused = spans.of("create")
    failed(broken, "sqlalchemy.exc.IntegrityError", "the-key", "1234-5678")
    failed(refused, "outbox.errors.EventTooLarge", "the-key", "1234-5678")


def test_a_span_costs_no_statement(outbox_postgres, spans):
    engine = sa.create_engine(sqlalchemy_url(outbox_postgres.url))
    seen = []
    sa.event.listen(engine, "before_cursor_execute", lambda c, cur, statement, *rest: seen.append(statement))
    with engine.begin() as connection:
        connection.execute(sa.text("SELECT 1"))
        seen.clear()
        Outbox().add(connection, event(1))
        Outbox().add_many(connection, [event(2), event(3)])
    engine.dispose()
    assert len(seen) == len(spans.of("create")) == 2


def test_the_library_imports_nothing_of_opentelemetry(outbox_postgres):
    """It is installed here. Where the service has not imported it, the writer does not either."""
    code = """
import sys
import sqlalchemy as sa
from outbox import Event, Outbox

with sa.create_engine(sys.argv[1]).begin() as connection:
    Outbox().add(connection, Event("Order", "1", "T", {"n": 1}))
    Outbox().add_many(connection, [Event("Order", "1", "T", {"n": n}) for n in (2, 3)])
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, sqlalchemy_url(outbox_postgres.url)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert [row["headers"] for row in stored(outbox_postgres)] == [None] * 3


# --- the relay's turn ------------------------------------------------------------------------------------------------


def write(database, kind: str, count: int = 1) -> None:
    """Each event has a span and a trace of its own; all of them are committed at once."""
    with database.connect() as connection:
        for number in range(count):
            Outbox().add(connection, Event(kind, f"key-{number}", "Placed", {"secret": "1234-5678"}))


@pytest.mark.parametrize("how", ["polling", "wal, exactly-once"])
def test_a_turn_is_linked_to_the_writes_of_its_events(outbox_postgres, outbox_kafka, spans, wal, order, how):
    kind, topic = order
    source, _, delivery = how.partition(", ")
    # The lease bounds how long a turn waits for Kafka: in the fixture's one second, turns fail on a slow machine.
    settings = wal | {"source": source, "delivery": delivery or "at-least-once", "relay__lease_seconds": 30}
    if source == "wal":
        to_wal(outbox_postgres.url, settings)
    with relay(outbox_postgres, outbox_kafka, **settings):
        if source == "wal":
            wait_until(lambda: streaming(outbox_postgres.url), what="the lanes to stream")
        write(outbox_postgres, kind, 3)
        drained(outbox_postgres.url)
    written = [traceparent(context_of(span)) for span in spans.of("create")]
    assert len(set(written)) == 3
    turns = spans.of("send")
    for turn in turns:
        count = turn.attributes[messaging.MESSAGING_BATCH_MESSAGE_COUNT]
        check(
            turn,
            SpanKind.PRODUCER,
            "send",
            MESSAGING_DESTINATION_NAME=topic,
            MESSAGING_MESSAGE_ID=None,
            MESSAGING_BATCH_MESSAGE_COUNT=len(turn.links),
        )
        assert (turn.parent, turn.status.status_code) == (None, StatusCode.UNSET)
        assert (1 <= turn.attributes["outbox.lanes"] <= count, turn.attributes["outbox.links.left_out"]) == (True, 0)
    assert sorted(link for turn in turns for link in linked(turn)) == sorted(written)
    # The messages name the write, and not the turn.
    messages = [dict(message.headers()) for message in outbox_kafka.consume(topic)]
    assert sorted(one["traceparent"].decode() for one in messages) == sorted(written)
    assert all(one["ce_traceparent"] == one["traceparent"] for one in messages)
    assert_without(turns, "key-", "1234-5678", "secret")


def test_a_turn_that_fails_is_an_error(outbox_postgres, outbox_kafka, spans):
    small, secret = outbox_kafka.name("Small"), secrets.token_hex(4000)
    topic = outbox_kafka.create_topic(f"{small.lower()}-events", 1, {"max.message.bytes": "2000"})
    with outbox_postgres.connect() as connection:
        Outbox().add(connection, Event(small, "key-1", "T", {"secret": secret}))
    with relay(outbox_postgres, outbox_kafka, failures__max_attempts=1):
        drained(outbox_postgres.url)
    broken = spans.of("send")[0]
    failed(broken, "relay.core.ports.BatchRefused", "key-1", secret)
    check(broken, SpanKind.PRODUCER, "send", MESSAGING_DESTINATION_NAME=topic, MESSAGING_BATCH_MESSAGE_COUNT=1)


class OneAnswer:
    """A publisher that gives one answer, for what depends on the turn and the answer alone."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.sending = SimpleNamespace(router=Router(), outbox="orders")

    @traced
    def publish(self, batches, confirm: Confirm | None = None):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def claim(headers) -> Claim:
    return Claim(1, "id", "Order", "k", "T", "2026-01-02T03:04:05Z", b"", headers)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Unconfirmed({0: LaneLost("the lane went")}), "relay.core.ports.LaneLost"),
        (DatabaseUnavailable("away"), "relay.core.ports.DatabaseUnavailable"),
    ],
)
def test_a_turn_that_is_not_confirmed_is_an_error(spans, answer, kind):
    with pytest.raises(DatabaseUnavailable) if isinstance(answer, Exception) else nullcontext():
        assert OneAnswer(answer).publish({0: [claim(None)]}) is answer
    failed(spans.one("send"), kind, "the lane went", "away")


def test_a_turn_has_a_bounded_number_of_links_to_different_traces(spans):
    many = [f"00-{n:032x}-{n:016x}-01" for n in range(1, 301)]
    given = [many, many[:1] * 200, ["00-not-a-trace", many[0]]]
    for traces in given:
        OneAnswer(Completed({})).publish({0: [claim({"traceparent": each}) for each in traces]})
    turns = spans.of("send")
    assert [linked(turn) for turn in turns] == [many[:128], many[:1], many[:1]]
    assert [turn.attributes["outbox.links.left_out"] for turn in turns] == [172, 0, 0]
    assert [turn.attributes[messaging.MESSAGING_BATCH_MESSAGE_COUNT] for turn in turns] == [300, 200, 2]


def test_a_refused_event_is_counted_and_is_no_error_of_its_turn(spans):
    refused = claim(None)._replace(aggregate_type="ä")
    OneAnswer(Completed({0: Receipt(refused=[(refused, "no route")])})).publish({0: [refused]})
    turn = spans.one("send")
    check(turn, SpanKind.PRODUCER, "send", MESSAGING_DESTINATION_NAME=None)
    assert (turn.attributes["outbox.refused"], turn.status.status_code) == (1, StatusCode.UNSET)


def test_a_turn_of_several_topics_names_none(spans):
    claims = [claim(None), claim(None)._replace(aggregate_type="Stock"), claim(None)._replace(aggregate_type="ä")]
    OneAnswer(Completed({})).publish({0: claims})
    check(spans.one("send"), SpanKind.PRODUCER, "send", MESSAGING_DESTINATION_NAME=None)


def test_no_header_is_looked_at_without_a_provider(monkeypatch):
    class Untouched(dict):
        def __contains__(self, name):
            raise AssertionError("a header was looked at")

    with no_provider(monkeypatch):
        done = Completed({})
        assert OneAnswer(done).publish({0: [claim(Untouched())]}) is done


def test_a_consumers_driver_needs_no_opentelemetry():
    """As on a cluster that has what executors need: a round is then done without a span."""
    code = """
import sys
sys.modules["opentelemetry"] = None
from spark_jobs import run
from spark_jobs.driver.round_context import Counts
from spark_jobs.driver.round_spans import RoundSpans
from spark_jobs.driver.runner import Runner

with RoundSpans(None).traced([("topic", 0)], Counts()):
    print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")


# --- turning it on ---------------------------------------------------------------------------------------------------


@contextmanager
def unconfigured(monkeypatch) -> Iterator[None]:
    """A process of its own state: nothing is configured, and what is set here is gone afterwards."""
    with no_provider(monkeypatch), monkeypatch.context() as patched:
        patched.setattr(trace, "set_tracer_provider", lambda given: patched.setattr(trace, "_TRACER_PROVIDER", given))
        yield


@pytest.mark.parametrize("named", [None, "", "none"])
def test_nothing_is_configured_unless_an_exporter_is_named(monkeypatch, named):
    if named is not None:
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", named)
    with unconfigured(monkeypatch):
        tracing.configure("outbox-relay")
        assert not tracing.configured()


@pytest.mark.parametrize(
    ("variable", "value", "service"),
    [
        ("OTEL_SERVICE_NAME", "mine", "mine"),
        ("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine", "mine"),
        ("OTEL_RESOURCE_ATTRIBUTES", "team=shop", "outbox-relay"),
    ],
)
def test_the_sdk_is_configured_by_its_environment(monkeypatch, variable, value, service):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv(variable, value)
    with unconfigured(monkeypatch):
        tracing.configure("outbox-relay")
        provider = trace.get_tracer_provider()
        # A second time it is left as it is.
        tracing.configure("another")
        assert trace.get_tracer_provider() is provider
        provider.shutdown()
    (processor,) = provider._active_span_processor._span_processors
    assert (type(processor.span_exporter), provider.resource.attributes["service.name"]) == (
        ConsoleSpanExporter,
        service,
    )


def test_an_exporter_that_is_not_installed(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "carrier-pigeon")
    with unconfigured(monkeypatch), pytest.raises(ConfigurationError, match="OTEL_TRACES_EXPORTER=carrier-pigeon"):
        tracing.configure("outbox-relay")


def test_without_the_sdk_it_is_named(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with unconfigured(monkeypatch), pytest.raises(ConfigurationError, match="pip install opentelemetry-sdk"):
        tracing.configure("outbox-relay")


def test_what_the_page_shows_is_what_a_relay_prints(outbox_postgres, outbox_kafka, spans, tmp_path):
    """Its commands, without the installation; and the span of a turn, attribute by attribute."""
    page = "docs/operations/tracing.md"
    (shell,) = [block.text for block in blocks("sh") if block.page == page and "console" in block.text]
    (shown,) = [json.loads(block.text) for block in blocks("json") if block.page == page]
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events")
    write(outbox_postgres, kind, 3)
    written = [context_of(span) for span in spans.of("create")]
    install, *lines = shell.splitlines()
    assert install == "pip install opentelemetry-sdk"
    lines[-1] = lines[-1].replace("outbox", f"exec {shlex.quote(sys.executable)} -m relay.cli", 1)
    environment = os.environ | {
        "OUTBOX_DATABASE_URL": outbox_postgres.url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
    }
    with (tmp_path / "out").open("wb") as out:
        running = subprocess.Popen(["bash", "-c", "\n".join(lines)], env=environment, stdout=out, stderr=out)
        try:
            drained(outbox_postgres.url)
        finally:
            running.terminate()
            assert running.wait(60) == 0
    printed = [json.loads(text) for text in re.findall(r"^\{\n.*?^\}$", (tmp_path / "out").read_text(), re.M | re.S)]
    for turn in printed:
        assert turn["name"] == shown["name"].replace("order-events", topic)
        assert turn["kind"] == shown["kind"]
        constant = {name: value for name, value in shown["attributes"].items() if isinstance(value, str)}
        constant[messaging.MESSAGING_DESTINATION_NAME] = topic
        assert turn["attributes"].keys() == shown["attributes"].keys()
        assert constant.items() <= turn["attributes"].items()
        assert turn["resource"]["attributes"]["service.name"] == "outbox-relay"
    links = [link["context"] for turn in printed for link in turn["links"]]
    assert sorted(int(link["span_id"], 16) for link in links) == sorted(context.span_id for context in written)


def test_the_pages_attributes_are_those_of_the_code():
    text = (DOCS / "operations" / "tracing.md").read_text()
    rows = re.findall(r"^\| ((?:`[a-z_.]+`(?:, )?)+) \|", text, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([a-z_]+\.[a-z_.]+)`", row)}
    constants = {
        value
        for module in (_trace, tracing)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }
    # Those of every span are in sentences.
    common = {
        messaging.MESSAGING_SYSTEM,
        messaging.MESSAGING_OPERATION_TYPE,
        messaging.MESSAGING_OPERATION_NAME,
        error_attributes.ERROR_TYPE,
    }
    assert documented == {value for value in constants if "." in str(value)} - common
