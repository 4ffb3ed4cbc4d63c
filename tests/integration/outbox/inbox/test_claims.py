"""Claims that fail for a while: what Postgres could not answer is no question that Kafka has left unanswered."""

from __future__ import annotations

import psycopg
from inbox_support import Log, apply

from outbox.inbox import _member
from outbox.inbox.errors import KafkaFailed


def test_failures_of_postgres_count_for_no_attempts_of_kafka(outbox_postgres, outbox_kafka, monkeypatch):
    log = Log(outbox_postgres, outbox_kafka, 1)
    errors: list[Exception] = [psycopg.OperationalError("away")] * _member._CLAIM_ATTEMPTS + [KafkaFailed("not yet")]
    claim = _member.Member._claim

    def failing(self, partitions):
        if errors:
            raise errors.pop(0)
        return claim(self, partitions)

    monkeypatch.setattr(_member, "pause", lambda *_: None)
    monkeypatch.setattr(_member.Member, "_claim", failing)
    log.produce(["k"])
    with log.consuming(apply) as running:
        running.wait(lambda: log.run("SELECT next_offset FROM consumer.offsets") == [(1,)], "the message")
    assert errors == []
