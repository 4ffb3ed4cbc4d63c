"""Three brokers, one of which is away: a topic that takes no messages waits by itself, and the others go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from support import Load, check, drained, end_leases, ends, logged, look_up, numbers_by_key, wait_until, write
from wal_support import to_wal

from outbox import Event
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics

UNUSABLE = '"topic can\'t be written to; its events wait"'
USABLE = '"topic can be written to again"'
STUCK, HEALTHY = "Stuck", ("Order", "Invoice")
BATCH, FIRST = 50, 2
MANY = FIRST + 2 * 4 * BATCH // 40
"""From FIRST on, so many events of each of 40 keys are two turns: a batch of each of four lanes."""


@pytest.fixture
def topics(three_brokers) -> Iterator[Topics]:
    with Topics(three_brokers.bootstrap_servers) as made:
        yield made


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
        found = admin.list_topics(timeout=30).topics.get(name)
        return found is not None and [p.leader for p in found.partitions.values()] == [each[0] for each in replicas]

    wait_until(led, what=f"leaders of {name}")


# How a topic is stuck while broker 1 is away: its partitions' replicas, how many must be in sync, what is said of it.
WAYS = {
    "no leader": ([[1]], 1, "no leader"),
    "no leader for one partition of three": ([[2], [1], [3]], 1, "no leader for partition 1"),
    "too few in sync": ([[2, 1]], 2, "too few replicas in sync"),
}


class Stuck:
    """An outbox with a topic that is stuck in one of these ways while broker 1 is away, and two that are not."""

    def __init__(self, url: str, cluster: KafkaCluster, topics: Topics, start: Any, way: str, **settings: Any) -> None:
        self.url, self._topics, self._start = url, topics, start
        own = way.replace(" ", "")
        replicas, in_sync, self._said = WAYS[way]
        self._kinds = {kind: topics.name(kind + own) for kind in (STUCK, *HEALTHY)}
        self._topic = f"{self._kinds[STUCK].lower()}-events"
        create_topic(cluster, self._topic, replicas, in_sync)
        for kind in HEALTHY:
            create_topic(cluster, f"{self._kinds[kind].lower()}-events", [[1, 2, 3], [2, 3, 1], [3, 1, 2]], 2)
        self.settings = settings | {"name": topics.name(own), "bootstrap_servers": cluster.bootstrap_servers}
        self.settings |= {"log_format": "json", "relay__lease_seconds": 9, "relay__batch_size": BATCH}
        self.settings |= {"kafka__delivery_timeout_ms": 2000, "relay__max_backoff_seconds": 0.5}
        if settings["source"] == "wal":
            self.settings["wal__slot"] = self.settings["name"].replace("-", "_")
            to_wal(url, self.settings)
        self._relay = start(database_url=url, **self.settings)
        self._before = dict.fromkeys((UNUSABLE, USABLE), 0)

    def forget_what_was_said(self) -> None:
        """Count what is said of the topic from now on: brokers that have just started are slow."""
        self._before = {what: len(self._lines(what)) for what in self._before}

    def _lines(self, what: str) -> list[dict[str, Any]]:
        """Return what the relay has said of the topic."""
        return [line for line in logged(self._relay, what) if line["topic"] == self._topic]

    def write(self, kinds: Sequence[str], sizes: range) -> None:
        """Write so many events of each of 40 keys, numbered."""
        for kind in kinds:
            name = self._kinds[kind]
            write(self.url, (Event(name, f"k{key}", "Counted", {"seq": seq}) for seq in sizes for key in range(40)))

    def has_no_leader(self) -> None:
        """Wait until the other brokers miss the one that is away: by then nothing hangs in it, and a try is short."""
        admin = AdminClient({"bootstrap.servers": self._topics.bootstrap_servers})

        def leader() -> int:
            return admin.list_topics(self._topic, timeout=30).topics[self._topic].partitions[0].leader

        wait_until(lambda: leader() == -1, what="a broker to be missed")

    def kill(self) -> None:
        """Kill the relay. The next one has to fence this one, and to find out for itself."""
        self._relay.kill()
        end_leases(self.url)
        self._relay = self._start(database_url=self.url, **self.settings)
        self._before = dict.fromkeys((UNUSABLE, USABLE), 0)

    def others_go_on(self) -> None:
        """Wait until all events but those of the stuck topic have left the table: they are the first of every lane."""
        others = "SELECT count(*) FROM outbox.events WHERE aggregate_type <> %s"
        wait_until(lambda: look_up(self.url, others, self._kinds[STUCK]) == [(0,)], 60, "events of other topics")
        # A lane may have none left: its keys can all belong to partitions that have a leader.
        lowest = "SELECT bool_and(aggregate_type = %s) FROM (SELECT DISTINCT ON (lane) aggregate_type "
        lowest += "FROM outbox.events ORDER BY lane, id) AS first"
        assert look_up(self.url, lowest, self._kinds[STUCK]) == [(True,)]

    def waits(self) -> None:
        """Write more for the stuck topic: it waits too, and why was said."""
        [(highest,)] = look_up(self.url, "SELECT max(id) FROM outbox.events")
        self.write([STUCK], range(MANY, MANY + 2))
        above = "SELECT count(*) FROM outbox.events WHERE id > %s"
        wait_until(lambda: look_up(self.url, above, highest) == [(80,)], what="events to wait in the table")
        [line] = self._lines(UNUSABLE)[self._before[UNUSABLE] :]
        assert self._said in line["reason"]

    def whole(self) -> None:
        """Wait until all is published, and look at all of it."""
        drained(self.url, 60)
        assert look_up(self.url, "SELECT * FROM outbox.failures") == []
        assert look_up(self.url, "SELECT * FROM outbox.dead_letters") == []
        # Said once, however often it was tried. Of the others' leaders some were away too, for a moment.
        for what in (UNUSABLE, USABLE):
            assert len(self._lines(what)[self._before[what] :]) == 1
        for kind, count in ((STUCK, MANY + 2), *((kind, 12) for kind in HEALTHY)):
            messages = self._topics.consume(f"{self._kinds[kind].lower()}-events")
            seen, repeats = numbers_by_key(messages, "seq")
            assert seen == {f"k{key}": list(range(count)) for key in range(40)}
            if self.settings["delivery"] == "exactly-once":
                assert repeats == 0
        ends(self._relay)


class Replicated:
    """An outbox under load whose topics all have three replicas, and its two relays, exactly-once."""

    def __init__(self, url: str, cluster: KafkaCluster, topics: Topics, start: Any) -> None:
        self._url, self._cluster, self._topics = url, cluster, topics
        kind, self._name = topics.name("Load"), topics.name("outbox")
        self._topic = topics.create_topic(f"{kind.lower()}-events", 3)
        self.load = Load(url, kind)
        settings = {"delivery": "exactly-once", "name": self._name, "bootstrap_servers": cluster.bootstrap_servers}
        settings |= {"relay__lease_seconds": 9, "relay__batch_size": BATCH}
        # Without long pauses between attempts: a server is killed on purpose here.
        settings |= {"relay__max_backoff_seconds": 0.5, "kafka__reconnect_backoff_max_ms": 500}
        self._relays = [start(database_url=url, **settings) for _ in range(2)]

    def begins(self) -> None:
        self._relays[0].wait_for_log("lanes acquired")
        self.load.more(150)

    def outlives_it(self) -> None:
        """Wait until more is written, and all is published, while a broker is away; and look at all of it."""
        self.load.more(300)
        self.load.drain(120)
        assert [relay.running for relay in self._relays] == [True, True]
        assert check(self._url, self._topics.consume(self._topic, timeout=60)) == 0
        known = AdminClient({"bootstrap.servers": self._cluster.bootstrap_servers}).list_topics(timeout=30).topics
        partitions = known[f"{self._name}.relay.state"].partitions
        assert [len(partition.replicas) for partition in partitions.values()] == [3] * 4
        for relay in self._relays:
            ends(relay)


def stands(outboxes: Sequence[Stuck], killed: Stuck) -> None:
    """Write to the stuck topics of these, and to the others, of which all is published. The relay of one is killed."""
    for outbox in outboxes:
        outbox.write([STUCK], range(FIRST, MANY))
        outbox.write(HEALTHY, range(FIRST, 7))
    for outbox in outboxes:
        outbox.others_go_on()
    # Not before: nothing is known of its last transaction as long as this can't end.
    killed.kill()
    for outbox in outboxes:
        outbox.write(HEALTHY, range(7, 12))
    for outbox in outboxes:
        outbox.others_go_on()
        outbox.waits()


def test_a_broker_is_killed_and_a_topic_that_takes_nothing_then_waits_and_others_go_on(
    another_outbox, topics, outbox_relay, three_brokers
):
    """Three outboxes with such a topic, a way each, one with none, and one outage: to restart a broker takes long."""
    ways = [
        ("too few in sync", "wal", "exactly-once"),
        ("no leader", "polling", "exactly-once"),
        ("no leader for one partition of three", "polling", "at-least-once"),
    ]
    outboxes = [
        Stuck(another_outbox(), three_brokers, topics, outbox_relay, way, source=source, delivery=delivery)
        for way, source, delivery in ways
    ]
    for outbox in outboxes:
        outbox.write([STUCK, *HEALTHY], range(FIRST))
    for outbox in outboxes:
        drained(outbox.url)
    healthy = Replicated(another_outbox(), three_brokers, topics, outbox_relay)
    with healthy.load:
        healthy.begins()
        for outbox in outboxes:
            outbox.forget_what_was_said()
        three_brokers.kill_broker(0)
        try:
            healthy.outlives_it()
            outboxes[1].has_no_leader()
            stands(outboxes[1:], outboxes[1])
            # Last, and no longer than it takes to see it: while a replica is missing where a transaction is to end,
            # brokers try it without a pause.
            outboxes[0].write([STUCK], range(FIRST, MANY))
            outboxes[0].write(HEALTHY, range(FIRST, 12))
            outboxes[0].others_go_on()
            outboxes[0].waits()
        finally:
            three_brokers.start_broker(0)
    for outbox in outboxes:
        outbox.whole()
