"""What is under way keeps its minute open: nothing is certified of it, and it is no difference."""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from audit_support import EVENTS, Pipeline, an_id, pipeline
from plans import nodes
from psycopg import sql
from reconcile_support import other_program
from support import order

from outbox import Event, Outbox
from relay.audit import transactions
from relay.audit.sums import minute_of
from relay.audit.tables import _SCHEDULED, Tables
from relay.kafka.routing import Router

__all__ = ["order", "pipeline"]


def certified(pipeline: Pipeline, file: Path) -> tuple[set[str], int]:
    """Audit; return the states of its windows, and how many events are certified. There are no differences."""
    status, found = pipeline.audit("--certificate", str(file), "--topic", pipeline.topic)
    equal = [one for one in found["windows"] if one["state"] == "equal"]
    # With nothing to be certified, none is written.
    assert (status, found["differences"]) == (0 if equal else 1, []), found
    assert not equal or len(file.read_bytes().splitlines()) == 2 + len(equal)
    return {one["state"] for one in found["windows"]}, sum(one["kafka"] for one in equal)


@pytest.mark.parametrize("counted", [False, True])
def test_the_minute_of_a_scheduled_event_is_open_until_it_is_published(pipeline, tmp_path, counted):
    """Its id keeps the minute in which it was scheduled. The ledger counts it once it is due."""
    if counted:
        pipeline.keep_ledger()
    # In the middle of a minute.
    ago = int(1200 + time.time() % 60 - 30)
    pipeline.add(EVENTS, ago=ago)
    event_id = pipeline.schedule(ago=ago)
    # Of another minute.
    pipeline.sent(1)
    pipeline.published()
    file = tmp_path / "certificate"
    assert certified(pipeline, file) == ({"open", "equal"}, 1)
    status, found = pipeline.audit()
    assert (status, sum(one["scheduled"] for one in found["windows"])) == (0, 1)
    assert any("1 event scheduled" in note for note in found["notes"])
    pipeline.due()
    assert certified(pipeline, file) == ({"equal"}, EVENTS + 2)
    pipeline.command("audit", "verify", str(file))
    # A loss is found, whatever else of its minute is scheduled.
    pipeline.schedule(ago=1200)
    pipeline.run(f"UPDATE outbox.published SET payload = '[]' WHERE event_id = '{event_id}'")
    assert pipeline.differences() == [("payload", event_id)]


def test_what_is_scheduled_in_other_minutes_costs_nothing(pipeline):
    with psycopg.connect(pipeline.database.url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO outbox.scheduled (event_id, aggregate_type, aggregate_id, event_type, not_before) SELECT "
            "(lpad(to_hex((extract(epoch FROM now() - n * interval '10 seconds') * 1000)::bigint), 12, '0') || '7000' "
            "|| '8000' || lpad(to_hex(n), 12, '0'))::uuid, 'A', 'k', 'E', now() + interval '1 day' "
            "FROM generate_series(1, 100000) AS n"
        )
        hour = range(minute_of(dt.datetime.now(dt.UTC)) - 60, minute_of(dt.datetime.now(dt.UTC)))
        tables = Tables(connection, "outbox", Router({}), None, hour, b"key")
        query = sql.SQL("EXPLAIN (ANALYZE, FORMAT JSON) ") + sql.SQL(_SCHEDULED).format(**tables._names)
        ((plan,),) = connection.execute(query, tables._bound).fetchall()
        with tables.snapshot():
            assert sum(some.events for some in tables.scheduled().values()) == pytest.approx(360, abs=7)
    found = nodes(plan[0]["Plan"])
    assert "Seq Scan" not in {node["Node Type"] for node in found}
    assert max(node["Actual Rows"] for node in found) < 400


def test_a_transaction_that_is_open_may_bring_events_of_a_minute(pipeline, tmp_path, monkeypatch):
    """Since when it is open is not shown to each role: then of any minute."""
    pipeline.sent()
    file = tmp_path / "certificate"
    with pipeline.operator() as theirs:
        with psycopg.connect(pipeline.database.url) as writer, monkeypatch.context() as hurried:
            hurried.setattr(transactions, "_WAIT_SECONDS", 0.3)
            Outbox().add(writer, Event(pipeline.kind, "key", "Placed", {}, event_id=an_id(0)))
            assert certified(pipeline, file) == ({"equal"}, EVENTS)
            assert any("a transaction is open since" in note for note in notes(pipeline))
            with monkeypatch.context() as patched:
                patched.setattr(Pipeline, "environment", theirs)
                assert certified(pipeline, file) == ({"open"}, 0)
                assert any("this role does not see since when" in note for note in notes(pipeline))
        pipeline.published()
        with monkeypatch.context() as patched:
            patched.setattr(Pipeline, "environment", theirs)
            assert certified(pipeline, file) == ({"equal", "open"}, EVENTS)
            assert not any("transaction" in note for note in notes(pipeline))


def test_a_transaction_of_another_database_keeps_no_minute_open(pipeline, tmp_path, monkeypatch):
    monkeypatch.setattr(transactions, "_WAIT_SECONDS", 1.0)
    pipeline.sent()
    elsewhere = psycopg.conninfo.make_conninfo(pipeline.database.url, dbname="postgres")
    with psycopg.connect(elsewhere) as neighbour:
        neighbour.execute("SELECT pg_current_xact_id()")
        assert certified(pipeline, tmp_path / "certificate") == ({"equal"}, EVENTS)
        assert not any("transaction" in note for note in notes(pipeline))


def test_a_certificate_of_which_nothing_is_left_is_not_verified(pipeline, tmp_path):
    pipeline.sent()
    file = tmp_path / "certificate"
    assert certified(pipeline, file) == ({"equal"}, EVENTS)
    for partition in pipeline.ends():
        pipeline.cut(partition)
    pipeline.run("DELETE FROM outbox.published")
    assert "of its 1 window none can be compared" in pipeline.command("audit", "verify", str(file), status=1)


def notes(pipeline: Pipeline) -> Any:
    return pipeline.audit()[1]["notes"]


def test_the_last_minutes_are_open(pipeline, tmp_path):
    """A transaction that begins now may bring an event whose id was made a little before."""
    pipeline.add(ago=120)
    pipeline.published()
    assert certified(pipeline, tmp_path / "certificate") == ({"open"}, 0)


def test_an_event_that_is_published_and_not_settled_yet(pipeline, tmp_path):
    ids = pipeline.sent()
    pipeline.command("relay", "pause", "--reason", "a test")
    pipeline.run(
        "WITH back AS (DELETE FROM outbox.published WHERE event_id = '" + ids[3] + "' RETURNING *) "
        "INSERT INTO outbox.events (id, event_id, aggregate_type, aggregate_id, event_type, payload, headers, "
        "created_at) OVERRIDING SYSTEM VALUE SELECT id, event_id, aggregate_type, aggregate_id, event_type, payload, "
        "headers, created_at FROM back"
    )
    states, _ = certified(pipeline, tmp_path / "certificate")
    assert "open" in states
    assert sum(one["waiting"] for one in pipeline.audit()[1]["windows"]) == 1


def test_what_an_open_transaction_hides_on_kafka(pipeline, tmp_path):
    """Another program's, in front of events that were acknowledged."""
    producer = other_program(pipeline.kafka, pipeline.topic, *range(3))
    pipeline.sent()
    assert certified(pipeline, tmp_path / "certificate") == ({"open"}, 0)
    assert sum(one["waiting"] for one in pipeline.audit()[1]["windows"]) == EVENTS
    producer.abort_transaction(30)
    assert certified(pipeline, tmp_path / "certificate") == ({"equal"}, EVENTS)
