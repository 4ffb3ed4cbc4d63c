"""A writer of rows may set created_at to anything, also to what Python has no time for: no command breaks on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from rows_and_roles import bury
from typer.testing import CliRunner

from relay.cli.app import app
from relay.kafka.routing import Router
from relay.operations.lane_rows import LaneRows
from relay.settle.statements import names_of

TIMES = ("infinity", "-infinity", "0044-03-15 BC", "294276-12-31", "2999-01-01")


@pytest.fixture
def run(outbox_postgres, outbox_kafka, monkeypatch) -> Callable[..., str]:
    monkeypatch.setenv("OUTBOX_DATABASE_URL", outbox_postgres.url)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", outbox_kafka.bootstrap_servers)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
        return result.output

    return run


def ids_of(connection: psycopg.Connection[Any], kind: str, times: tuple[str, ...]) -> list[str]:
    return [
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, created_at) "
            "VALUES (%s, 'k', 'T', %s) RETURNING event_id::text",
            (kind, time),
        ).fetchone()[0]
        for time in times
    ]


def test_every_command_shows_them(run, outbox_postgres, outbox_kafka):
    kind = outbox_kafka.name("Order")
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        ids = ids_of(connection, kind, TIMES)
        json.loads(run("status", "--json"))
        run("doctor")
        assert all(event_id in run("trace", event_id) for event_id in ids)
        assert len(json.loads(run("trace", "--aggregate", f"{kind}/k", "--json"))["events"]) == len(ids)
        bury(connection)
        for event_id in ids:
            assert "a dead letter since" in run("trace", event_id)
            assert event_id in run("dead-letters", "show", event_id)


def test_reconcile_finds_the_message_of_an_event_from_the_future(outbox_postgres, outbox_kafka):
    """Its topic is read from the beginning. Otherwise the event would be published again."""
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 1)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        ids = ids_of(connection, kind, TIMES)
        producer = Producer({"bootstrap.servers": outbox_kafka.bootstrap_servers})
        for event_id in ids:
            producer.produce(topic, None, b"k", headers={"ce_id": event_id})
        assert producer.flush(30) == 0
        [(lane,)] = connection.execute("SELECT DISTINCT lane FROM outbox.events").fetchall()
        rows = LaneRows(
            connection,
            names_of("outbox"),
            Router(template="{aggregate_type}-events"),
            {"bootstrap.servers": outbox_kafka.bootstrap_servers},
        )
        for time in TIMES:
            connection.execute("UPDATE outbox.events SET created_at = %s", (time,))
            assert rows.topics([lane]) == {topic: 0}
        rows.list_rows([lane])
        rows.search(rows.topics([lane]))
        assert connection.execute("SELECT count(*) FROM pg_temp.outbox_reconcile WHERE found").fetchone() == (5,)
