"""``outbox recover`` where Kafka's retention has deleted what the archive has, and where it can't have done so."""

from __future__ import annotations

import time

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
    producer = Producer(options)
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
    for partition, offset in enumerate(first):
        cut(restored, topic, partition, offset)
    found = restored.recover("--dry-run", status=1)
    # Where an event stands that was settled from a marker is not known: it may have been in any partition.
    assert (len(gone), ids(found["missing"]), found["expired"]) == (3, {*gone, elsewhere}, sum(first) + 1)
    refused = restored.command("recover", "--since", restored.since, "--topic", other, "--reason", "x")
    assert (refused.returncode, "--topic limits --resend" in refused.stderr) == (2, True), refused.stderr
    assert restored.recover("--resend", "--topic", other, "--reason", "deleted by mistake")["resent"] == 1
    assert restored.run("SELECT event_id::text FROM outbox.events") == [(elsewhere,)]
    assert [event_id for event_id, _ in resent(restored)] == [*gone, elsewhere]


DELETED = (
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
)
"""Topics: their partitions with 20 records each, so many days old, of which the first ones were deleted; the retention
in milliseconds; and what counts as expired of two events that were published a moment ago, one of them at an offset
that is known: 9 of partition 0.
"""


def test_what_retention_can_not_have_deleted_is_missing(restored):
    producer = Producer({"bootstrap.servers": restored.kafka.bootstrap_servers})
    topics, names = [], {}
    for number, (partitions, retention_ms, _) in enumerate(DELETED):
        restored.kinds = [restored.kafka.name(f"Old{number}")]
        config = {"retention.ms": str(retention_ms), "message.timestamp.type": "CreateTime"}
        topics.append(restored.kafka.create_topic(f"{restored.kinds[0].lower()}-events", len(partitions), config))
        for partition, (days, _) in enumerate(partitions):
            at = int((time.time() - days * 86_400) * 1000)
            for _ in range(20):
                producer.produce(topics[-1], b"{}", partition=partition, timestamp=at)
        known, unknown = new_id(), new_id()
        names |= {known: (number, "known"), unknown: (number, "unknown")}
        columns, values = ", lane, id, created_at", ", 1, {}, now()"
        place = f", '{topics[-1]}', 0, 9"
        restored.put(
            "published", known, f'{columns}, topic, partition, "offset"', values.format(-2 * number - 2) + place
        )
        # It was settled from a marker.
        restored.put("published", unknown, columns, values.format(-2 * number - 1))
    assert producer.flush(60) == 0
    for topic, (partitions, _, _) in zip(topics, DELETED, strict=True):
        for partition, (_, first) in enumerate(partitions):
            if first:
                cut(restored, topic, partition, first)
    expired = {(number, name) for number, (_, _, gone) in enumerate(DELETED) for name in gone}
    found = restored.recover("--dry-run", status=1)
    assert {names[one] for one in ids(found["missing"])} == set(names.values()) - expired
    assert found["expired"] == len(expired)
    gone = [one for one, name in names.items() if name in expired]
    restored.run("DELETE FROM outbox.published WHERE event_id::text <> ALL(%s)", gone)
    found = restored.recover("--dry-run")
    assert (found["missing"], found["expired"]) == ([], len(expired))
