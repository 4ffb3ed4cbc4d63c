"""The spans of the write and of the relay's turns, on real servers, and what stays as it was without a provider."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
import sqlalchemy as sa
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from spans import assert_without, check, context_of, failed, no_provider, spans, traceparent
from writer_targets import TARGETS, event, opened, stored

from outbox import Event, EventTooLarge, Outbox
from outbox.urls import sqlalchemy_url

__all__ = ["spans"]

# --- the write -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
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
        assert own == {
            "outbox.aggregate.type": "Order",
            "outbox.event.type": "OrderPlaced",
            "outbox.transport": "table",
        }
        assert span.status.status_code is StatusCode.UNSET
    # Children of the service's span; without one, a trace of its own.
    assert [span.parent and span.parent.span_id for span in (one, many, alone)] == [
        *[placing.get_span_context().span_id] * 2,
        None,
    ]
    written = [traceparent(context_of(span)) for span in (one, many, many, alone)]
    assert [row["headers"] for row in stored(outbox_postgres)] == [{"traceparent": one} for one in written]
    assert_without([one, many, alone], "o-1", '"n"')


def test_a_batch_of_several_types_names_none(outbox_postgres, spans):
    with outbox_postgres.connect() as connection:
        Outbox().add_many(connection, [Event("Order", "1", "Placed"), Event("Stock", "1", "Placed")])
    attributes = spans.one("create").attributes
    assert ("outbox.aggregate.type" in attributes, attributes["outbox.event.type"]) == (False, "Placed")


def test_messages_without_rows_have_a_span_too(outbox_postgres, spans):
    with outbox_postgres.connect() as connection:
        slot = outbox_postgres.name
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
        connection.commit()
        try:
            Outbox(transport="message", slot=slot).add(connection, event(1))
            connection.rollback()
        finally:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
    assert spans.one("create").attributes["outbox.transport"] == "message"


def test_a_write_that_fails_is_an_error_without_what_the_server_quotes(outbox_postgres, spans):
    engine = sa.create_engine(sqlalchemy_url(outbox_postgres.url))
    twice = Event("Order", "the-key", "T", {"secret": "1234-5678"})
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


def test_a_trace_of_the_events_own_stays(outbox_postgres, spans):
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with outbox_postgres.connect() as connection:
        Outbox().add(connection, Event("Order", "1", "T", headers={"traceparent": own}))
    assert stored(outbox_postgres)[0]["headers"] == {"traceparent": own}
    assert len(spans.of("create")) == 1


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


def test_nothing_is_written_where_no_provider_is_configured(outbox_postgres, monkeypatch):
    with no_provider(monkeypatch), outbox_postgres.connect() as connection:
        Outbox().add(connection, event(1))
    assert [row["headers"] for row in stored(outbox_postgres)] == [None]


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
