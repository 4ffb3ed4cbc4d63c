"""Partitions that are added to topics of events, on a real broker."""

from __future__ import annotations

from typing import Any

from confluent_kafka.admin import AdminClient, NewPartitions
from support import wait_until

from relay.config import load
from relay.core.health import WorkerHealth
from relay.kafka.partition_counts import PartitionCounts
from relay.wiring import build


def grow(kafka: Any, topic: str, count: int) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_partitions([NewPartitions(topic, count)])[topic].result(30)


def test_partitions_that_are_added_to_a_topic_of_events_are_seen_for_a_day(outbox_kafka):
    ours, theirs, quiet = (outbox_kafka.create_topic(outbox_kafka.name(name), 3) for name in ("a", "b", "c"))
    clock = [0.0]
    options = {"bootstrap.servers": outbox_kafka.bootstrap_servers}
    counts = PartitionCounts(options, {ours, quiet}.__contains__, lambda: clock[0])

    def grown() -> dict[str, str]:
        counts.look()
        return dict(counts.grown())

    wait_until(lambda: grown() == {} and counts._known == {ours: 3, quiet: 3}, what="the topics")
    grow(outbox_kafka, ours, 5)
    grow(outbox_kafka, theirs, 5)
    wait_until(lambda: list(grown()) == [ours], what="the added partitions")
    assert "partitions were added (3, now 5)" in grown()[ours]
    # More of them: counted from the first.
    grow(outbox_kafka, ours, 6)
    wait_until(lambda: "(3, now 6)" in grown()[ours], what="one more")
    health = WorkerHealth(30.0).look([], 0.0, grown=counts.grown())
    (line,) = [check.line() for check in health.checks if check.name.startswith("partitions")]
    assert f"partitions-{ours}" in line
    assert "keys are in other partitions than before" in line
    assert not next(check for check in health.checks if check.name.startswith("partitions")).counts
    clock[0] += 86_400.0
    assert grown() == {}


def test_a_topic_that_is_made_anew_with_more_partitions_has_not_grown(outbox_kafka):
    topic = outbox_kafka.create_topic(outbox_kafka.name("a"), 3)
    counts = PartitionCounts({"bootstrap.servers": outbox_kafka.bootstrap_servers}, topic.__eq__)
    admin = AdminClient({"bootstrap.servers": outbox_kafka.bootstrap_servers})

    def there(partitions: int) -> bool:
        counts.look()
        found = admin.list_topics(timeout=30).topics.get(topic)
        return len(found.partitions if found is not None else ()) == partitions

    def grown(partitions: int) -> dict[str, str]:
        wait_until(lambda: there(partitions), what="the broker's metadata")
        counts.look()
        return dict(counts.grown())

    assert grown(3) == {}
    grow(outbox_kafka, topic, 4)
    assert list(grown(4)) == [topic]
    admin.delete_topics([topic])[topic].result(30)
    assert grown(0) == {}
    outbox_kafka.create_topic(topic, 6)
    assert grown(6) == {}


def test_a_relay_counts_them_exactly_once(outbox_kafka):
    for delivery, looks in (("exactly-once", True), ("at-least-once", False)):
        relay = build(
            load(
                database_url="postgresql://127.0.0.1:1/x",
                delivery=delivery,
                kafka={"bootstrap.servers": outbox_kafka.bootstrap_servers},
            )
        )
        assert ("partitions" in {task.name for task in relay._components.upkeep}) is looks
