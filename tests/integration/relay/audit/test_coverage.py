"""What Kafka, the archive and the ledger have deleted, before an audit or while it reads, is no difference."""

from __future__ import annotations

from typing import Any

import pytest
from audit_support import EVENTS, Pipeline, an_id, pipeline
from spans import relay
from support import order, write
from uuid_utils.compat import uuid4

from outbox import Event
from relay.audit.comparison import _Comparison
from relay.audit.topics import Topics

__all__ = ["order", "pipeline"]


@pytest.fixture
def one_partition(pipeline: Pipeline) -> Pipeline:
    """Of a topic that need not have what is older than five minutes."""
    pipeline.kind = pipeline.kafka.name("Gone")
    pipeline.topic = pipeline.kafka.create_topic(f"{pipeline.kind.lower()}-events", 1, {"retention.ms": "300000"})
    return pipeline


def states(pipeline: Pipeline) -> set[str]:
    """Return the states of all windows, in which there are no differences."""
    status, found = pipeline.audit()
    assert (status, found["differences"]) == (0, []), found
    return {one["state"] for one in found["windows"]}


@pytest.mark.parametrize(
    ("settled", "retention"),
    [
        ("with places", {}),
        ("with places", {"retention.ms": "-1"}),
        ("from a marker", {"retention.ms": "300000"}),
        ("from a marker", {"retention.ms": "-1"}),
    ],
)
def test_what_kafka_has_deleted_is_not_missing(pipeline, settled, retention):
    """Where the places are known, whatever has deleted it; where not, what is older than the topic's retention.

    Without a retention records were deleted by hand: then whatever is older than what is left.
    """
    pipeline.kind = pipeline.kafka.name("Gone")
    pipeline.topic = pipeline.kafka.create_topic(f"{pipeline.kind.lower()}-events", 1, retention)
    pipeline.sent(5)
    if settled == "from a marker":
        pipeline.run('UPDATE outbox.published SET topic = NULL, partition = NULL, "offset" = NULL')
    pipeline.cut(0)
    status, found = pipeline.audit()
    assert (status, found["differences"]) == (0, [])
    assert {one["state"] for one in found["windows"]} == {"expired"}
    assert any("Kafka has deleted records of" in note for note in found["notes"])


@pytest.mark.parametrize("archived", [True, False])
@pytest.mark.parametrize("reading", ["sums", "events"])
def test_what_kafka_deletes_meanwhile_is_not_missing(one_partition, monkeypatch, reading, archived):
    """Nor is what a group has applied unknown."""
    pipeline, real = one_partition, getattr(Topics, reading)
    ids = pipeline.sent()
    pipeline.applied(EVENTS)
    if reading == "events":
        # So that the events are compared one by one.
        pipeline.run(f"DELETE FROM consumer.processed_messages WHERE message_id = '{ids[0]}'")
    if not archived:
        pipeline.run("DELETE FROM outbox.published")

    def read(topics: Topics, *given: Any, **named: Any) -> Any:
        pipeline.cut(0)
        return real(topics, *given, **named)

    monkeypatch.setattr(Topics, reading, read)
    # Nothing is known any more of a minute that only Kafka had.
    assert states(pipeline) == ({"expired"} if archived or reading == "events" else set())


@pytest.mark.parametrize("reading", ["_read_archive", "_compare"])
def test_what_the_archive_deletes_meanwhile_is_not_unknown(pipeline, monkeypatch, reading):
    ids, real = pipeline.sent(), getattr(_Comparison, reading)
    repeated = []
    if reading == "_compare":
        # So that the events are compared one by one.
        pipeline.repeat(ids[3])
        repeated = [("repeated", ids[3])]

    def read(comparison: _Comparison, *given: Any) -> Any:
        pipeline.run("DELETE FROM outbox.published")
        return real(comparison, *given)

    monkeypatch.setattr(_Comparison, reading, read)
    assert pipeline.differences() == repeated


def test_what_the_ledger_deletes_meanwhile_is_not_unknown(pipeline, monkeypatch):
    pipeline.keep_ledger()
    pipeline.sent()
    assert states(pipeline) == {"equal"}
    real = _Comparison.run

    def run(comparison: _Comparison) -> Any:
        pipeline.run("UPDATE outbox.ledger_state SET since = now(); DELETE FROM outbox.ledger")
        return real(comparison)

    monkeypatch.setattr(_Comparison, "run", run)
    assert states(pipeline) == {"equal"}


def test_what_kafka_has_deleted_of_another_outboxs_topic_is_not_unknown(pipeline):
    """A group that reads both has applied it. The archive, which has the places of all events, has none of these."""
    pipeline.sent()
    topic = pipeline.kafka.create_topic(f"{pipeline.kafka.name('cart').lower()}-events", 1, {"retention.ms": "300000"})
    for _ in range(5):
        pipeline.produce(topic=topic, value=b"{}", headers={"ce_id": str(an_id()), "ce_source": "/outbox"})
    pipeline.applied(EVENTS + 5, topics=[topic])
    assert pipeline.differences() == []
    Pipeline(pipeline.database, pipeline.kafka, "Cart", topic).cut(0)
    assert "equal" in states(pipeline)


@pytest.mark.parametrize("kept", ["archive", "ledger"])
def test_what_was_published_with_another_source_is_not_missing(outbox_postgres, outbox_kafka, order, monkeypatch, kept):
    """It is known by its place, or by the ledger. Whether groups have applied it is not compared."""
    pipeline = Pipeline(outbox_postgres, outbox_kafka, *order)
    if kept == "archive":
        pipeline.kept_before()
    else:
        pipeline.keep_ledger()
    with relay(outbox_postgres, outbox_kafka, relay__archive_days=int(kept == "archive")):
        ids = pipeline.sent(5)
    topic = ("--topic", pipeline.topic)
    assert pipeline.differences(*topic) == []
    monkeypatch.setenv("OUTBOX_CE_SOURCE", "/orders")
    status, found = pipeline.audit(*topic)
    assert (status, found["differences"], {one["state"] for one in found["windows"]}) == (0, [], {"expired"})
    assert any("with another OUTBOX_CE_SOURCE" in note for note in found["notes"])
    if kept == "archive":
        pipeline.run(f'UPDATE outbox.published SET "offset" = "offset" + 500 WHERE event_id = \'{ids[3]}\'')
        assert pipeline.differences(*topic) == [("missing", ids[3])]
    else:
        pipeline.run("UPDATE outbox.ledger SET events = events + 1")
        assert ("missing", None) in pipeline.differences(*topic)


def test_events_without_any_time_on_kafka_are_left_out(outbox_postgres, outbox_kafka, order, monkeypatch):
    """Debezium's headers have none, and neither have their ids. The ledger, which counts them, is not compared."""
    pipeline = Pipeline(outbox_postgres, outbox_kafka, *order)
    pipeline.kept_before()
    pipeline.keep_ledger()
    write(pipeline.database.url, [Event(pipeline.kind, "k", "Placed", {}, event_id=uuid4()) for _ in range(3)])
    for table, change in (
        ("events", "created_at = created_at - interval '10 minutes'"),
        ("ledger", "minute = minute - 10"),
    ):
        pipeline.run(f"UPDATE outbox.{table} SET {change}")
    monkeypatch.setenv("OUTBOX_HEADERS", "debezium")
    ids = pipeline.add(3, ago=600)
    assert pipeline.differences() == []
    with relay(outbox_postgres, outbox_kafka, relay__archive_days=1):
        pipeline.published()
    status, found = pipeline.audit()
    assert (status, found["differences"], sum(one["committed"] for one in found["windows"])) == (0, [], 3)
    assert any("OUTBOX_HEADERS=debezium sends none" in note for note in found["notes"])
    pipeline.run(f"UPDATE outbox.published SET payload = '[]' WHERE event_id = '{ids[1]}'")
    assert pipeline.differences() == [("payload", ids[1])]
