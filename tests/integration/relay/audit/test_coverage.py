"""What Kafka, the archive and the ledger have deleted, before an audit or while it reads, is no difference."""

from __future__ import annotations

from typing import Any

import pytest
from audit_support import EVENTS, Pipeline, pipeline
from support import order

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
