"""The runbook of a region that is gone: the other one's standby was behind, and its mirror of Kafka was too.

Commands come out of docs/operations/runbooks.md itself; see runbooks.py. The mirror has offsets of its own. The cluster
that is there instead of the lost one is the one that test_kafka.py needs: it has nothing of the tests' outboxes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
from confluent_kafka import Producer
from proxy import TcpProxy
from reconcile_support import unverified
from restored import NOW
from runbook_support import of
from shop import Shop, applied, in_order, outbox_of, prepare_sink
from standby import Standby, ask
from support import drained, ends, wait_until
from wal_support import streaming

from outbox._app import migrate as db
from outbox._topics import STATE_SUFFIX
from outbox.inbox.errors import TopicReplaced
from outbox.testing.fixtures import Topics

__all__ = ["unverified"]

LOST = "Kafka was lost, or a topic"


class Mirror:
    """Copies committed records to another cluster, with offsets of its own, as MirrorMaker does; when it is asked."""

    def __init__(self, source: Any, target: Any) -> None:
        self._source, self._target = source, target
        self._copied: dict[tuple[str, int], int] = {}

    def copy(self, topic: str, partitions: Collection[int], *, repeated: int = 0) -> None:
        """Copy what was not yet copied; the first ``repeated`` records twice, as after a restart of the mirror."""
        producer = Producer({"bootstrap.servers": self._target.bootstrap_servers, "enable.idempotence": True})
        for number in partitions:
            done = self._copied.get((topic, number), 0)
            found = [one for one in self._source.consume(topic) if one.partition() == number][done:]
            for record in found[:repeated] + found:
                own = {"timestamp": record.timestamp()[1], "headers": record.headers()}
                producer.produce(topic, record.value(), record.key(), number, **own)
            self._copied[topic, number] = done + len(found)
        assert producer.flush(60) == 0


@pytest.mark.parametrize(
    ("delivery", "source", "mirrored", "sink_stays"),
    [
        ("at-least-once", "polling", "events", True),
        ("exactly-once", "wal", "events and markers", False),
    ],
)
@of("A second region is promoted")
def test_a_region_is_promoted(
    follow, private_postgres, outbox_postgres, unverified, shop, settings, delivery, source, mirrored, sink_stays
):
    """Of two partitions the mirror has one to the end, or all markers, and otherwise only what was there at first."""
    settings |= {"delivery": delivery, "source": source, "relay__archive_days": 7, "relay__lease_seconds": 10}
    # The new cluster has other tests' events too.
    settings["ce_source"] = settings["name"]
    markers = settings["name"] + STATE_SUFFIX
    primary, url = outbox_of(private_postgres, shop, settings)
    db.upgrade_consumer(url)
    second = Topics(unverified.bootstrap_servers)
    second.token = shop.kafka.token
    there = Shop(second)
    mirror = Mirror(shop.kafka, second)
    with TcpProxy("127.0.0.1", primary.port) as proxy, Standby(primary, via_port=proxy.port) as standby:
        sink = outbox_postgres.url if sink_stays else url
        prepare_sink(sink)
        relay = follow(url).start()
        consumer = shop.consumer(sink)
        point = ask(url, NOW)
        surviving = shop.write(url, 3)
        drained(url)
        consumer.wait(lambda: len(applied(sink)) == 12, "the first effects")
        mirror.copy(shop.topic, [0, 1], repeated=2)
        surviving += shop.write(url, 3)
        drained(url)
        ends(relay)
        behind = set(surviving[12:])
        waiting = shop.write(url, 3)
        surviving += waiting
        wait_until(standby.caught_up, what="the standby to catch up")
        proxy.stop()
        lost = shop.write(url, 3) if mirrored == "events" else []
        relay = follow(url).start()
        drained(url)
        consumer.wait(lambda: len(applied(sink)) == 36 + len(lost), "the last effects")
        consumer.end()
        relay.kill()
        if mirrored == "events":
            mirror.copy(shop.topic, [0])
        else:
            second.create_topic(markers, 2, {"cleanup.policy": "compact"})
            mirror.copy(markers, [0, 1])
        primary.kill()
        standby.promote()

        url = standby.url("outbox")
        sink = sink if sink_stays else url
        settings["kafka__bootstrap_servers"] = second.bootstrap_servers
        mirrored_ids = there.published()
        operator = follow(url).follow(LOST)
        shown = operator.look("outbox recover --since TIME --dry-run", TIME=point)
        assert shown.status == 1, shown.text
        only_kafka, only_postgres = mirrored_ids.keys() & lost, behind - mirrored_ids.keys()
        assert 0 < len(only_postgres) <= len(behind)
        assert f"Postgres has, and Kafka has lost: {len(only_postgres)} events" in shown.text
        assert bool(only_kafka) == bool(lost)
        known = f"{len(only_kafka)} events" if lost else "nothing"
        assert f"Kafka has, and Postgres has lost: {known}" in shown.text
        operator.own("outbox recover --since TIME --resend", TIME=point)
        if source == "wal":
            operator.own("outbox cdc setup --repair")
        operator.start()
        drained(url)
        if source == "wal":
            wait_until(lambda: streaming(url), what="the lanes to stream")
        surviving += shop.write(url, 3)
        drained(url)
        published = there.published()
        assert published.keys() == {*surviving, *only_kafka}
        assert published - mirrored_ids == dict.fromkeys(published.keys() - mirrored_ids.keys(), 1)
        assert isinstance(there.consumer(sink).error(), TopicReplaced)
        of_sink = follow(sink).follow(LOST)
        of_sink.own("outbox offsets reset", GROUP="g", TOPIC=shop.topic)
        running = there.consumer(sink)
        running.wait(lambda: set(applied(sink)) >= published.keys(), "the effects of all")
        running.end()
        found = applied(sink)
        assert Counter(found) == dict.fromkeys({*surviving, *(lost if sink_stays else only_kafka)}, 1)
        assert in_order(surviving, found)
        assert ask(url, "SELECT details ->> 'lost' FROM outbox.audit WHERE what = 'recover'") == str(len(only_kafka))
        assert source != "wal" or operator.typed | of_sink.typed == operator.section.steps
