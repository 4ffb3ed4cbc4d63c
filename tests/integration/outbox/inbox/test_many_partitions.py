"""A member with hundreds of partitions: what it reads into memory does not grow with their number."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from confluent_kafka import Producer
from inbox_support import Log
from uuid_utils.compat import uuid7

from outbox.inbox import _member
from outbox.inbox._assigned import Assigned
from outbox.inbox._member import Member

PARTITIONS = 200


def fill(log: Log, each: int, size: int) -> None:
    """Write so many messages of this size, and a little more, into each partition."""
    producer = Producer({"bootstrap.servers": log.servers, "linger.ms": 20, "enable.idempotence": True})
    for number in range(each):
        for partition in range(PARTITIONS):
            value = json.dumps({"n": number, "more": "x" * size})
            producer.produce(log.topic, value, f"k{partition}", partition=partition, headers={"ce_id": str(uuid7())})
            log.written[f"k{partition}"].append(number)
    assert producer.flush(120) == 0


@pytest.mark.parametrize(
    ("each", "size", "share"),
    [
        pytest.param(10, 1000, 5, id="bytes"),
        # Each is larger than its partition's share.
        pytest.param(3, 8000, 1, id="large messages"),
    ],
)
def test_what_is_queued_of_hundreds_of_partitions(outbox_postgres, outbox_kafka, monkeypatch, each, size, share):
    """Nothing is applied until all wait, and then everything. By their number: test_failing_messages.py."""
    log = Log(outbox_postgres, outbox_kafka, PARTITIONS)
    fill(log, each, size)
    queued: list[tuple[int, int]] = []
    full = threading.Event()
    limit_queues, work = Member._limit_queues, Member._work

    def limited(member: Member, some: Any) -> None:
        limit_queues(member, some)
        parts = member._parts.values()
        queued.append((sum(len(part.queue) for part in parts), sum(part.size for part in parts)))
        if len(parts) == PARTITIONS and all(part.paused for part in parts):
            full.set()

    def worked(member: Member, part: Assigned, until: float) -> Any:
        return work(member, part, until) if full.is_set() else None

    monkeypatch.setattr(_member, "_ALL_QUEUED_BYTES", 1_000_000)
    monkeypatch.setattr(Member, "_limit_queues", limited)
    monkeypatch.setattr(Member, "_work", worked)
    with log.consuming() as running:
        running.wait(lambda: log.count() == PARTITIONS * each, "the effects")
    assert full.is_set()
    messages, sizes = map(max, zip(*queued, strict=True))
    assert messages == PARTITIONS * share
    assert sizes <= PARTITIONS * share * (size + 50)
    log.check()
