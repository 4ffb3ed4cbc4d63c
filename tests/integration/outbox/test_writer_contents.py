"""What is stored: sizes counted as the database counts them, any JSON back as it went in, the writer's trace."""

from __future__ import annotations

import asyncio
import json
import sys
from decimal import Decimal

import psycopg
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import TraceState
from psycopg.types.json import Jsonb
from pyspark.sql import types as t
from writer_targets import both_ways, event, on_target, opened, stored

from outbox import Event, EventTooLarge, Outbox, _payload
from relay.core.ports import Claim
from relay.polling.queries import COLUMNS
from spark_jobs.payloads import json_text
from spark_jobs.payloads.reading import Policy

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
).filter(lambda value: isinstance(value, dict | list))

on_one_database = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)


@on_one_database
@given(payload=JSON)
def test_any_json_comes_back_equal_and_is_counted_exactly(outbox_postgres, payload):
    with psycopg.connect(outbox_postgres.url) as connection:
        Outbox().add(connection, Event("Order", "1", "T", payload))
        (found,) = connection.execute("SELECT payload::text FROM outbox.events").fetchone()
        connection.rollback()
    # Numbers as Decimal: all their digits are compared, and 6e16 equals 60000000000000000.
    numbers = {"parse_int": Decimal, "parse_float": Decimal}
    assert json.loads(found, **numbers) == json.loads(json.dumps(payload), **numbers)
    encoded = _payload.encode(Event("Order", "1", "T", payload)).json
    assert _payload.exact_size(encoded) == len(found.encode()) <= _payload.largest_size(encoded)


class Numbers(pydantic.BaseModel):
    money: Decimal
    real: float


# Python prints these decimals with an exponent, and jsonb these doubles without one.
NUMBERS = [
    (Decimal("0E-8"), 6.02214076e23),
    (Decimal("1E-7"), 1.2345678901234566e17),
    (Decimal("1E+3"), 1e23),
    (Decimal("-1.5E-17"), -sys.float_info.max),
    (Decimal("-1.20"), 5e-324),
    (Decimal(0), 0.1),
]


@pytest.mark.parametrize("model", [dict, Numbers])
def test_a_job_reads_the_numbers_that_were_written(outbox_postgres, model):
    fields = t.StructType().add("money", t.DecimalType(38, 18)).add("real", t.DoubleType())
    with psycopg.connect(outbox_postgres.url) as connection:
        Outbox().add_many(
            connection, [Event("Order", "1", "T", model(money=money, real=real)) for money, real in NUMBERS]
        )
        rows = connection.execute(f"SELECT {COLUMNS} FROM outbox.events ORDER BY id").fetchall()
        connection.rollback()
    reader = json_text.reader(fields, Policy())
    assert [tuple(reader(Claim(*row).value, None)) for row in rows] == NUMBERS


# --- sizes -----------------------------------------------------------------------------------------------------------


@both_ways
@on_target
async def test_a_subject_is_a_header_of_the_row_and_the_lane_is_the_keys(target, outbox_postgres):
    about = [Event("Order", "customer-7", "T", {"n": n}, subject=f"order-ü{n}") for n in range(3)]
    await target.add(about[0])
    await target.add_many(about[1:], lock_key=True)
    await target.commit()
    rows = stored(outbox_postgres)
    assert [row["headers"]["ce_subject"] for row in rows] == [one.subject for one in about]
    assert len({(row["lane"], row["aggregate_id"]) for row in rows}) == 1


SHAPES = {
    "commas": [1] * 300_000,
    "punctuation in text": {"k": ["a,b:c 1e5" * 10] * 9_900},
    "exponents": [1e300] * 3_000,
    "floats": [1e-7, 12345.678e10, -0.5, -0.0] * 20_000,
    "objects": {f"key{n}": {"a": 'ü\n"\x01' * 3} for n in range(15_000)},
}


def takes(connection: psycopg.Connection, payload: object, headers: dict[str, str]) -> int:
    """Let the database count, as its CHECK does for the key "k"."""
    return connection.execute(
        "SELECT 1 + octet_length(%s::jsonb::text) + octet_length(%s::jsonb::text)", (Jsonb(payload), Jsonb(headers))
    ).fetchone()[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_limit_is_the_databases_to_the_byte(outbox_postgres, shape):
    """Fill up to the limit with one more header: that byte goes in, the next one is refused, and by both."""
    payload = SHAPES[shape]
    with outbox_postgres.connect(autocommit=True) as connection:
        room = 1_000_000 - takes(connection, payload, {"note": "1e5,:", "fill": ""})
        assert 0 < room < 400_000
        full = {"note": "1e5,:", "fill": "x" * room}
        with connection.transaction():
            Outbox().add(connection, Event("Order", "k", "T", payload, headers=full))
        over = {**full, "fill": "x" * (room + 1)}
        with pytest.raises(EventTooLarge) as caught, connection.transaction():
            Outbox().add(connection, Event("Order", "k", "T", payload, headers=over))
        assert (caught.value.size, caught.value.limit) == (1_000_001, 1_000_000)
        with pytest.raises(psycopg.errors.CheckViolation) as violated:
            connection.execute(
                "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload, headers) "
                "VALUES ('Order', 'k', 'T', %s, %s)",
                (Jsonb(payload), Jsonb(over)),
            )
        assert violated.value.diag.constraint_name == "events_size"
    assert len(stored(outbox_postgres)) == 1


@pytest.mark.parametrize("payload", [b"x" * 999_900, None], ids=["bytes", "tombstone"])
def test_the_limit_counts_bytes_key_and_headers(outbox_postgres, payload):
    beside = len('{"fill": "", "content-type": "a/b"}') + len("ü".encode())
    room = 1_000_000 - len(payload or b"") - beside
    with outbox_postgres.connect() as connection:
        for fill in (room, room + 1):
            over = fill > room
            given = Event("Order", "ü", "T", payload, headers={"fill": "x" * fill}, content_type="a/b")
            if over:
                with pytest.raises(EventTooLarge):
                    Outbox().add(connection, given)
            else:
                Outbox().add(connection, given)
    assert len(stored(outbox_postgres)) == 1


# --- trace -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tracer():
    return TracerProvider().get_tracer("test")


@pytest.mark.parametrize("name", ["Session, psycopg", "asyncpg Connection"])
def test_the_writers_trace_travels_with_the_event(outbox_postgres, tracer, name):
    async def scenario() -> str:
        async with opened(name, outbox_postgres) as target:
            with tracer.start_as_current_span("placing") as span:
                await target.add(event(1))
                await target.add_many([event(2), event(3)])
            await target.add(event(4))
            await target.commit()
        context = span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    traceparent = asyncio.run(scenario())
    headers = [row["headers"] for row in stored(outbox_postgres)]
    assert headers == [{"traceparent": traceparent}] * 3 + [None]


def test_a_trace_of_the_events_own_wins_whole(outbox_postgres):
    context = trace.SpanContext(1, 2, is_remote=True, trace_state=TraceState([("vendor", "x")]))
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with outbox_postgres.connect() as connection, trace.use_span(trace.NonRecordingSpan(context)):
        Outbox().add(connection, Event("Order", "1", "T", headers={"tenant": "acme"}))
        Outbox().add(connection, Event("Order", "1", "T", headers={"traceparent": own}))
        Outbox().add(connection, Event("Order", "1", "T", headers={"traceparent": own, "tracestate": "a=b"}))
    assert [row["headers"] for row in stored(outbox_postgres)] == [
        {"tenant": "acme", "traceparent": f"00-{1:032x}-{2:016x}-00", "tracestate": "vendor=x"},
        # The tracestate of one trace says nothing about another.
        {"traceparent": own},
        {"traceparent": own, "tracestate": "a=b"},
    ]
