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
    (topic, other), unknown, elsewhere = restored.topics, new_id(), new_id()
    columns, first = ', lane, id, created_at, topic, partition, "offset"', [9_000, 10_000, 8_000]
    options = {"bootstrap.servers": restored.kafka.bootstrap_servers, "queue.buffering.max.messages": 300_000}
    producer, admin = Producer(options), AdminClient(options)
    for number in range(33_000):
        producer.produce(topic, partition=number % 3)
    assert producer.flush(60) == 0
    restored.run(
        f"INSERT INTO outbox.published (event_id, aggregate_type, aggregate_id, event_type{columns}) SELECT "
        "gen_random_uuid(), %s, 'k', 'T', 1, (n - first) * 4 - number - 10, now(), %s, number - 1, n "
        "FROM unnest(%s::integer[]) WITH ORDINALITY AS p(first, number), generate_series(0, first) AS n",
        *(restored.kinds[0], topic, first),
    )
    gone = [one for (one,) in restored.run("SELECT event_id::text FROM outbox.published WHERE id >= -13 ORDER BY id")]
    restored.put("published", unknown, ", lane, id, created_at, topic", f", 1, -7, now(), '{topic}'")
    restored.put("published", elsewhere, columns, f", 1, -6, now(), '{other}', 0, 9")
    for answer in admin.delete_records([TopicPartition(topic, *at) for at in enumerate(first)]).values():
        answer.result()
    found = restored.recover("--dry-run", status=1)
    # Where an event stands that was settled from a marker is not known: it may have been in any partition.
    assert (len(gone), ids(found["missing"]), found["expired"]) == (3, {*gone, elsewhere}, sum(first) + 1)
    refused = restored.command("recover", "--since", restored.since, "--topic", other, "--reason", "x")
    assert (refused.returncode, "--topic limits --resend" in refused.stderr) == (2, True), refused.stderr
    assert restored.recover("--resend", "--topic", other, "--reason", "deleted by mistake")["resent"] == 1
    assert restored.run("SELECT event_id::text FROM outbox.events") == [(elsewhere,)]
    assert [event_id for event_id, _ in resent(restored)] == [*gone, elsewhere]


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
