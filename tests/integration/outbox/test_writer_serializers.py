"""``Outbox(serializer=…)``: payloads are serialized before anything is sent; a refused one leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import psycopg
import pytest
import schema_registry
from writer_targets import stored

from outbox import (
    AsyncOutbox,
    Event,
    Outbox,
    PayloadError,
    SchemaMismatch,
    SchemaRefused,
    SchemaRegistryUnavailable,
    Serialized,
)
from outbox.registry import Avro, RegistrySerializer
from spark_jobs.payloads import decoding

SCHEMA = {"type": "record", "name": "Order", "fields": [{"name": "total", "type": "long"}]}


def event(payload: Any, key: str = "1") -> Event:
    return Event("Order", key, "OrderPlaced", payload, {"tenant": "acme"})


def upper(event: Event) -> Serialized | None:
    """Serialize text; leave anything else alone."""
    if isinstance(event.payload, str):
        return Serialized(event.payload.upper().encode(), "text/plain")
    return None


def written(database) -> list[tuple[Any, Any, Any]]:
    return [
        (row["payload"], None if row["payload_bytes"] is None else bytes(row["payload_bytes"]), row["headers"])
        for row in stored(database)
    ]


EVENTS = [event("tea"), event({"n": 1}), event(b"\x00"), event(None)]
ROWS = [
    (None, b"TEA", {"tenant": "acme", "content-type": "text/plain"}),
    ({"n": 1}, None, {"tenant": "acme"}),
    (None, b"\x00", {"tenant": "acme", "content-type": "application/octet-stream"}),
    (None, None, {"tenant": "acme"}),
]


def test_payloads_are_written_as_the_serializer_returns_them(outbox_postgres):
    with outbox_postgres.connect() as connection:
        ids = Outbox(serializer=upper).add_many(connection, EVENTS)
    assert ids == [row["event_id"] for row in stored(outbox_postgres)]
    assert written(outbox_postgres) == ROWS


def test_an_async_outbox_serializes_in_a_thread(outbox_postgres):
    threads = []

    def watched(event: Event) -> Serialized | None:
        threads.append(threading.current_thread())
        return upper(event)

    async def scenario() -> None:
        async with await psycopg.AsyncConnection.connect(outbox_postgres.url) as connection:
            await AsyncOutbox(serializer=watched).add_many(connection, EVENTS)
            with pytest.raises(PayloadError, match="the serializer failed: KeyError"):
                await AsyncOutbox(serializer=lambda _: {}["x"]).add(connection, event({}))

    asyncio.run(scenario())
    assert written(outbox_postgres) == ROWS
    assert len(threads) == 2
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("serializer", "said"),
    [
        (lambda event: 1 / 0, "the serializer failed: ZeroDivisionError"),
        (lambda event: b"bytes", "returned a bytes, not outbox.Serialized or None"),
    ],
)
def test_a_serializer_that_fails_refuses_the_event(outbox_postgres, serializer, said):
    with outbox_postgres.connect() as connection:
        with pytest.raises(PayloadError, match=said):
            Outbox(serializer=serializer).add_many(connection, [event(b"before"), event({})])
        Outbox().add(connection, event({"n": 2}))
    assert [payload for payload, *_ in written(outbox_postgres)] == [{"n": 2}]


def test_a_registrys_refusals_come_before_the_commit_and_leave_the_transaction_usable(outbox_postgres):
    with schema_registry.running() as registry:
        options = {"max.retries": 0, "timeout": 2}
        strict = RegistrySerializer(registry.url, {"Order": Avro("orders", SCHEMA)}, options=options)
        generous = RegistrySerializer(registry.url, {"Order": Avro("orders", SCHEMA)}, auto_register=True)
        with outbox_postgres.connect() as connection:
            connection.execute("CREATE TABLE business (n int)")
            connection.execute("INSERT INTO business VALUES (1)")
            with pytest.raises(SchemaRefused, match="no such subject"):
                Outbox(serializer=strict).add(connection, event({"total": 1}))
            registry.stop()
            with pytest.raises(SchemaRegistryUnavailable):
                Outbox(serializer=strict).add(connection, event({"total": 1}))
            registry.start()
            with pytest.raises(SchemaMismatch) as refused:
                Outbox(serializer=generous).add_many(connection, [event({"total": 1}), event({"total": "1"})])
            assert refused.value.field == "payload['total']"
            Outbox(serializer=generous).add(connection, event({"total": 42}))
            # Looked up before, so the registry is not needed any more.
            registry.stop()
            Outbox(serializer=generous).add(connection, event({"total": 43}))
            registry.start()
            assert connection.execute("SELECT n FROM business").fetchall() == [(1,)]
        payloads = [raw for _, raw, _ in written(outbox_postgres)]
        fields, plan = decoding.Avro(registry.url, "orders").task_plan()
        assert fields.fieldNames() == ["total"]
        assert [list(plan()(payload, None)) for payload in payloads] == [[42], [43]]


def test_a_serializer_sees_the_id_that_the_event_gets(outbox_postgres):
    """For envelopes that repeat it."""

    def enveloped(event: Event) -> Serialized:
        return Serialized(str(event.event_id).encode(), "text/plain")

    with outbox_postgres.connect() as connection:
        made = Outbox(serializer=enveloped).add_many(connection, [event({"n": 1})] * 2)
    assert [bytes(row["payload_bytes"]).decode() for row in stored(outbox_postgres)] == [str(one) for one in made]
    assert made[0] != made[1]
