"""The runbook of a region that is gone: the other one's standby was behind, and its mirror of Kafka was too.

Commands come out of docs/operations/runbooks.md itself; see runbooks.py. The mirror has offsets of its own. The cluster
that is there instead of the lost one is the one that test_kafka.py needs: it has nothing of the tests' outboxes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from confluent_kafka import Producer
from proxy import TcpProxy
from reconcile_support import unverified
from restored import NOW
from runbook_support import of
from runbooks import Operator
from shop import FAST, Shop, applied, in_order, prepare_sink
from standby import Standby, ask
from support import drained, ends, wait_until
from wal_support import streaming, to_wal

from outbox._app import migrate as db
from outbox._topics import STATE_SUFFIX
from outbox.inbox.errors import TopicReplaced
from outbox.sandbox._ports import free_ports
from outbox.sandbox.postgres import PostgresServer
from outbox.testing.fixtures import Database, Topics

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


class Promoted:
    """An outbox of the region that is gone, its group, and its mirror: of two partitions this has one to the end, or
    all markers, and otherwise only what was there at first.

    sink   another database that stays; None: the outbox's own.
    """

    def __init__(
        self,
        follow: Callable[..., Operator],
        database: Database,
        shop: Shop,
        second: Topics,
        sink: str | None = None,
        **settings: Any,
    ) -> None:
        self._follow, self._name, self._shop, self._second, self._sink = follow, database.name, shop, second, sink
        self._there, self._mirror = Shop(second, database.name), Mirror(shop.kafka, second)
        name = shop.kafka.name(database.name)
        # The new cluster has other tests' events too.
        self._settings = settings | {
            "name": name,
            "ce_source": name,
            "wal__slot": f"{database.name}_{shop.kafka.token}",
        }
        self._settings["relay__metrics_address"] = f"127.0.0.1:{free_ports(1)[0]}"
        self._lost: list[str] = []
        shop.prepare(database.url)
        if settings["source"] == "wal":
            to_wal(database.url, self._settings)
        if sink is None:
            db.upgrade_consumer(database.url)
        prepare_sink(sink or database.url)

    def begins(self, server: PostgresServer) -> None:
        """Write what the mirror has, and what it has not yet; and what waits."""
        url = server.url(self._name)
        sink = self._sink or url
        relay = self._follow(url, **self._settings).start()
        self._consumer = self._shop.consumer(sink)
        self._point = ask(url, NOW)
        self._surviving = self._shop.write(url, 3)
        drained(url)
        self._consumer.wait(lambda: len(applied(sink)) == 12, "the first effects")
        self._mirror.copy(self._shop.topic, [0, 1], repeated=2)
        self._surviving += self._shop.write(url, 3)
        drained(url)
        ends(relay)
        self._behind = set(self._surviving[12:])
        self._surviving += self._shop.write(url, 3)

    def loses(self, server: PostgresServer) -> None:
        """Write what the standby does not get, unless the markers are mirrored, which would name it; then all stops."""
        url = server.url(self._name)
        sink, markers = self._sink or url, self._settings["name"] + STATE_SUFFIX
        marked = self._settings["delivery"] == "exactly-once"
        if not marked:
            self._lost = self._shop.write(url, 3)
        relay = self._follow(url, **self._settings).start()
        drained(url)
        self._consumer.wait(lambda: len(applied(sink)) == 36 + len(self._lost), "the last effects")
        self._consumer.end()
        relay.kill()
        if marked:
            self._second.create_topic(markers, 2, {"cleanup.policy": "compact"})
            self._mirror.copy(markers, [0, 1])
        else:
            self._mirror.copy(self._shop.topic, [0])

    def recovers(self, server: PostgresServer) -> Operator:
        """Follow the runbook in the other region. Return who has."""
        url, there, wal = server.url(self._name), self._there, self._settings["source"] == "wal"
        sink = self._sink or url
        mirrored_ids = there.published()
        operator = self._follow(url, **self._settings).follow(LOST)
        shown = operator.look("outbox recover --since TIME --dry-run", TIME=self._point)
        assert shown.status == 1, shown.text
        only_kafka, only_postgres = mirrored_ids.keys() & self._lost, self._behind - mirrored_ids.keys()
        assert 0 < len(only_postgres) <= len(self._behind)
        assert f"Postgres has, and Kafka has lost: {len(only_postgres)} events" in shown.text
        assert bool(only_kafka) == bool(self._lost)
        known = f"{len(only_kafka)} events" if self._lost else "nothing"
        assert f"Kafka has, and Postgres has lost: {known}" in shown.text
        operator.own("outbox recover --since TIME --resend", TIME=self._point)
        if wal:
            operator.own("outbox cdc setup --repair")
        operator.start()
        drained(url)
        if wal:
            wait_until(lambda: streaming(url), what="the lanes to stream")
        self._surviving += self._shop.write(url, 3)
        drained(url)
        published = there.published()
        assert published.keys() == {*self._surviving, *only_kafka}
        assert published - mirrored_ids == dict.fromkeys(published.keys() - mirrored_ids.keys(), 1)
        self._group_goes_on(operator, sink, published, self._lost if self._sink else only_kafka)
        recovered = "SELECT details ->> 'lost' FROM outbox.audit WHERE what = 'recover'"
        assert ask(url, recovered) == str(len(only_kafka))
        return operator

    def _group_goes_on(
        self, operator: Operator, sink: str, published: Collection[str], besides: Collection[str]
    ) -> None:
        """Follow the runbook for the group: what survived has its effect once, and what its sink has ``besides``."""
        assert isinstance(self._there.consumer(sink).error(), TopicReplaced)
        replace(operator, owner=sink).own("outbox offsets reset", GROUP="g", TOPIC=self._shop.topic)
        running = self._there.consumer(sink)
        running.wait(lambda: set(applied(sink)) >= set(published), "the effects of all")
        running.end()
        found = applied(sink)
        assert Counter(found) == dict.fromkeys({*self._surviving, *besides}, 1)
        assert in_order(self._surviving, found)


@of("A second region is promoted")
def test_a_region_is_promoted(follow, private_postgres, outbox_postgres, unverified, outbox_kafka, settings):
    """With two outboxes. The sink of one stays, and its mirror has events that no server has; the other's sink goes."""
    settings |= {"relay__archive_days": 7, "relay__lease_seconds": 10}
    primary = private_postgres(FAST)
    second = Topics(unverified.bootstrap_servers)
    second.token = outbox_kafka.token
    polled, read = (private_postgres.database(primary, name) for name in ("polled", "read"))
    polling = {"delivery": "at-least-once", "source": "polling"}
    wal = {"delivery": "exactly-once", "source": "wal"}
    outboxes = [
        Promoted(follow, polled, Shop(outbox_kafka, polled.name), second, outbox_postgres.url, **polling),
        Promoted(follow, read, Shop(outbox_kafka, read.name), second, **wal),
    ]
    with TcpProxy("127.0.0.1", primary.port) as proxy, Standby(primary, via_port=proxy.port) as standby:
        for one in outboxes:
            one.begins(primary)
        wait_until(standby.caught_up, what="the standby to catch up")
        proxy.stop()
        for one in outboxes:
            one.loses(primary)
        primary.kill()
        standby.promote()
        settings["kafka__bootstrap_servers"] = second.bootstrap_servers
        _, of_wal = (one.recovers(standby) for one in outboxes)
        assert of_wal.typed == of_wal.section.steps
