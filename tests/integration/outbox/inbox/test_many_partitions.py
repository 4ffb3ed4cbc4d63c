"""A member with hundreds of partitions: what it reads into memory does not grow with their number."""

from __future__ import annotations

import json
import threading
from typing import Any

from confluent_kafka import Producer
from inbox_support import Log
from uuid_utils.compat import uuid7

from outbox.inbox import _member
from outbox.inbox._assigned import Assigned
from outbox.inbox._member import Member

PARTITIONS = 200


KINDS = ((10, 1000, 5), (3, 8000, 1))
"""Of half of them and of the other half: how many messages each has, their size, and how many of them are its share.

The larger ones are larger than a partition's share.
"""


def fill(log: Log) -> None:
    """Write so many messages of this size, and a little more, into each partition."""
    producer = Producer({"bootstrap.servers": log.servers, "linger.ms": 20, "enable.idempotence": True})
    for kind, (each, size, _) in enumerate(KINDS):
        for number in range(each):
            for part in range(kind, PARTITIONS, len(KINDS)):
                value = json.dumps({"n": number, "more": "x" * size})
                producer.produce(log.topic, value, f"k{part}", partition=part, headers={"ce_id": str(uuid7())})
                log.written[f"k{part}"].append(number)
    assert producer.flush(120) == 0


def test_what_is_queued_of_hundreds_of_partitions(outbox_postgres, outbox_kafka, monkeypatch):
    """Nothing is applied until all wait, and then everything. By their number: test_failing_messages.py."""
    log = Log(outbox_postgres, outbox_kafka, PARTITIONS)
    fill(log)
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
        running.wait(lambda: log.count() == PARTITIONS // 2 * sum(each for each, _, _ in KINDS), "the effects")
    assert full.is_set()
    messages, sizes = map(max, zip(*queued, strict=True))
    assert messages == PARTITIONS // 2 * sum(share for _, _, share in KINDS)
    assert sizes <= PARTITIONS // 2 * sum(share * (size + 50) for _, size, share in KINDS)
    log.check()
