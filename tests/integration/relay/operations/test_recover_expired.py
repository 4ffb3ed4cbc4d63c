"""``outbox recover`` where Kafka's retention has deleted what the archive has, and where it can't have done so."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from reconcile_support import outbox
from recover_support import Restored, ids, new_id, resent, restored

__all__ = ["outbox", "restored"]


def cut(restored: Restored, topic: str, partition: int, offset: int) -> None:
    """Delete a partition's records before an offset, as retention does."""
    admin = AdminClient({"bootstrap.servers": restored.kafka.bootstrap_servers})
    for answer in admin.delete_records([TopicPartition(topic, partition, offset)]).values():
        answer.result()


def test_what_retention_has_deleted_is_not_put_back(restored):
    """One topic was lost, the other one is as it was: its archived events, too, are no longer on Kafka."""
    topic, other = restored.topics
    deleted, gone, unknown, elsewhere = (new_id() for _ in range(4))
    columns, values = ', lane, id, created_at, topic, partition, "offset"', ", 1, {}, now(), '{}', {}, {}"
    restored.send(*(new_id() for _ in range(20)))
    [partition] = {message.partition() for message in restored.kafka.consume(topic)}
    restored.key = "another"
    restored.put("published", deleted, columns, values.format(-9, topic, partition, 9))
    restored.put("published", gone, columns, values.format(-8, topic, partition, 10))
    restored.put("published", unknown, ", lane, id, created_at, topic", f", 1, -7, now(), '{topic}'")
    restored.put("published", elsewhere, columns, values.format(-6, other, 0, 9))
    cut(restored, topic, partition, 10)
    found = restored.recover("--dry-run", status=1)
    assert (ids(found["missing"]), found["expired"]) == ({gone, unknown, elsewhere}, 1)
    refused = restored.command("recover", "--since", restored.since, "--topic", other, "--reason", "x")
    assert (refused.returncode, "--topic limits --resend" in refused.stderr) == (2, True), refused.stderr
    assert restored.recover("--resend", "--topic", other, "--reason", "deleted by mistake")["resent"] == 1
    assert restored.run("SELECT event_id::text FROM outbox.events") == [(elsewhere,)]
    assert [event_id for event_id, _ in resent(restored)] == [gone, unknown, elsewhere]


@pytest.mark.parametrize(
    ("partitions", "retention_ms", "expired"),
    [
        ([(0, 10)], -1, {"known", "unknown"}),
        # A mirror, or the topic of before a failover.
        ([(2, 10)], -1, set()),
        # In the other partition, it was not deleted.
        ([(0, 10), (2, 10)], -1, {"known"}),
        ([(0, 10), (0, 0)], -1, {"known"}),
        ([(0, 10), (0, 15)], -1, {"known", "unknown"}),
        # Nothing is left.
        ([(0, 20)], 1000, {"known", "unknown"}),
        ([(0, 20)], 86_400_000, set()),
        ([(0, 20)], -1, set()),
    ],
)
def test_what_retention_can_not_have_deleted_is_missing(restored, partitions, retention_ms, expired):
    """Two events were published a moment ago, one of them at an offset that is known: 9 of partition 0.

    partitions   each has had 20 records, which are so many days old; the first ones were deleted.
    """
    restored.kinds = [restored.kafka.name("Old")]
    config = {"retention.ms": str(retention_ms), "message.timestamp.type": "CreateTime"}
    topic = restored.kafka.create_topic(f"{restored.kinds[0].lower()}-events", len(partitions), config)
    producer = Producer({"bootstrap.servers": restored.kafka.bootstrap_servers})
    for partition, (days, _) in enumerate(partitions):
        for _ in range(20):
            producer.produce(topic, b"{}", partition=partition, timestamp=int((time.time() - days * 86_400) * 1000))
    assert producer.flush(60) == 0
    for partition, (_, first) in enumerate(partitions):
        if first:
            cut(restored, topic, partition, first)
    names = {new_id(): name for name in ("known", "unknown")}
    known, unknown = names
    place = (', topic, partition, "offset"', f", '{topic}', 0, 9")
    restored.put("published", known, f", lane, id, created_at{place[0]}", f", 1, -2, now(){place[1]}")
    # It was settled from a marker.
    restored.put("published", unknown, ", lane, id, created_at", ", 1, -1, now()")
    found = restored.recover("--dry-run", status=int(len(expired) < 2))
    assert {names[one] for one in ids(found["missing"])} == set(names.values()) - expired
    assert found["expired"] == len(expired)
