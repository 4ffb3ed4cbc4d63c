"""A topic that takes no messages for a while, whose broker is away: it waits by itself, and the others go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from support import drained, end_leases, ends, logged, look_up, numbers_by_key, wait_until, write
from wal_support import to_wal

from outbox import Event
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics

LANES = 4
UNUSABLE = '"topic can\'t be written to; its events wait"'
USABLE = '"topic can be written to again"'
STUCK, HEALTHY = "Stuck", ("Order", "Invoice")


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    """Three brokers, the first of which is killed and comes back."""
    with KafkaCluster(brokers=3) as cluster:
        yield cluster


def create_topic(cluster: KafkaCluster, name: str, replicas: Sequence[Sequence[int]], in_sync: int) -> None:
    """Create a topic whose partitions have these replicas, brokers counted from 1, and wait for their leaders."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    topic = NewTopic(
        name,
        len(replicas),
        replica_assignment=[list(each) for each in replicas],
        config={"min.insync.replicas": str(in_sync)},
    )
    admin.create_topics([topic])[name].result()

    def led() -> bool:
        found = admin.list_topics(timeout=10).topics.get(name)
        return found is not None and [p.leader for p in found.partitions.values()] == [each[0] for each in replicas]

    wait_until(led, what=f"leaders of {name}")


def events(kind: str, sizes: range, keys: int = 40) -> list[Event]:
    """So many events of each of the keys, numbered."""
    return [Event(kind, f"k{key}", "Counted", {"seq": seq}) for seq in sizes for key in range(keys)]


# How a topic is stuck while broker 1 is away: its partitions' replicas, how many must be in sync, what is said of it.
WAYS = {
    "no leader": ([[1]], 1, "no leader"),
    "no leader for one partition of three": ([[2], [1], [3]], 1, "no leader for partition 1"),
    "too few in sync": ([[2, 1]], 2, "too few replicas in sync"),
}


@pytest.mark.parametrize(
    ("delivery", "source", "way", "killed"),
    [
        ("at-least-once", "polling", "no leader for one partition of three", False),
        ("exactly-once", "polling", "no leader", True),
        ("exactly-once", "wal", "too few in sync", False),
    ],
)
def test_a_topic_that_takes_nothing_waits_and_others_go_on(
    outbox_postgres, outbox_relay, cluster, delivery, source, way, killed
):
    url = outbox_postgres.url
    replicas, in_sync, said = WAYS[way]
    with Topics(cluster.bootstrap_servers) as topics:
        kinds = {kind: topics.name(kind) for kind in (STUCK, *HEALTHY)}
        stuck = f"{kinds[STUCK].lower()}-events"
        create_topic(cluster, stuck, replicas, in_sync)
        for kind in HEALTHY:
            create_topic(cluster, f"{kinds[kind].lower()}-events", [[1, 2, 3], [2, 3, 1], [3, 1, 2]], 2)
        settings: dict[str, Any] = {"delivery": delivery, "source": source, "name": topics.name("outbox")}
        if source == "wal":
            slot = settings["name"].replace("-", "_")
            settings |= {"wal__slot": slot}
            to_wal(url, settings)
        settings |= {"bootstrap_servers": cluster.bootstrap_servers, "log_format": "json"}
        settings |= {"relay__lease_seconds": 9, "relay__batch_size": 200}
        relay = outbox_relay(**settings)
        for kind in kinds.values():
            write(url, events(kind, range(2)))
        drained(url)
        cluster.kill_broker(0)
        try:
            # They are the first of every lane, and more than a turn has of it.
            write(url, events(kinds[STUCK], range(2, 42)))
            lowest = "SELECT count(*), bool_and(aggregate_type = %s) FROM (SELECT DISTINCT ON (lane) aggregate_type "
            lowest += "FROM outbox.events ORDER BY lane, id) AS first"
            others = "SELECT count(*) FROM outbox.events WHERE aggregate_type <> %s"
            for number in range(3):
                start = 2 + 20 * number
                if number == 1 and killed:
                    # The next one has to fence this one, and to find out for itself.
                    relay.kill()
                    end_leases(url)
                    relay = outbox_relay(**settings)
                for kind in HEALTHY:
                    write(url, events(kinds[kind], range(start, start + 20)))
                wait_until(
                    lambda: look_up(url, others, kinds[STUCK]) == [(0,)], 60, f"events of other topics, round {number}"
                )
                assert look_up(url, lowest, kinds[STUCK]) == [(LANES, True)]
            [(highest,)] = look_up(url, "SELECT max(id) FROM outbox.events")
            write(url, events(kinds[STUCK], range(42, 44)))
            above = "SELECT count(*) FROM outbox.events WHERE id > %s"
            wait_until(lambda: look_up(url, above, highest) == [(80,)], what="events to wait in the table")
            [reason] = [line["reason"] for line in logged(relay, UNUSABLE) if line["topic"] == stuck]
            assert said in reason
        finally:
            cluster.start_broker(0)
        drained(url, 60)
        assert look_up(url, "SELECT * FROM outbox.failures") == []
        assert look_up(url, "SELECT * FROM outbox.dead_letters") == []
        # Said once, however often it was tried. Of the others' leaders some were away too, for a moment.
        for what in (UNUSABLE, USABLE):
            assert [line["topic"] for line in logged(relay, what)].count(stuck) == 1
        for kind, count in ((STUCK, 44), *((kind, 62) for kind in HEALTHY)):
            seen, repeats = numbers_by_key(topics.consume(f"{kinds[kind].lower()}-events"), "seq")
            assert seen == {f"k{key}": list(range(count)) for key in range(40)}
            if delivery == "exactly-once":
                assert repeats == 0
        ends(relay)
