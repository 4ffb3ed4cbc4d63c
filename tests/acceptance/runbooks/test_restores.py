"""The runbooks of restores and losses, with real ones: of Postgres by its WAL to a point, of a sink, of a Kafka.

Commands come out of docs/operations/runbooks.md itself; see runbooks.py. Each test shows what is lost and what is
repeated, and how it is seen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from external_support import Sink, payments, provider
from inbox_support import Log
from pgbouncer import PgBouncer
from proxy import TcpProxy
from reconcile_support import unverified
from restored import NOW, Backup, snapshot
from rows_and_roles import execute
from runbook_support import every_step_was_taken, of
from runbooks import Operator
from shop import FAST, Shop, applied, outbox_of, prepare_sink
from standby import ask
from support import MUTANT, await_stops, drained, ends, look_up, owners, wait_until
from wal_support import streaming

from outbox._app import migrate as db
from outbox.external import External
from outbox.inbox.errors import TopicReplaced
from outbox.sandbox.postgres import PostgresServer
from outbox.testing.fixtures import RelayProcess, Topics
from outbox.urls import with_database
from relay.tasks.archive import Retention

__all__ = ["provider", "unverified"]

LAST_ID = "SELECT last_value FROM outbox.events_id_seq"


def row_ids(url: str) -> set[int]:
    with psycopg.connect(url) as connection:
        return {id_ for (id_,) in connection.execute("SELECT id FROM outbox.events")}


class Shops:
    """Shops in databases of one server, by the names of these."""

    def __init__(self, shops: Mapping[str, Shop]) -> None:
        self._shops = shops

    def urls(self, server: PostgresServer) -> list[str]:
        return [server.url(name) for name in self._shops]

    def write(self, server: PostgresServer, rounds: int) -> list[str]:
        """Write so many rounds in each, and return the ids of the first shop's events before the next one's."""
        return [event_id for name, shop in self._shops.items() for event_id in shop.write(server.url(name), rounds)]

    def drained(self, server: PostgresServer) -> None:
        for url in self.urls(server):
            drained(url, 120)

    def published(self) -> Counter[str]:
        return sum((shop.published() for shop in self._shops.values()), Counter[str]())

    def in_order(self, ids: list[str]) -> bool:
        """Whether the events of one ``write`` are read in the order of their keys."""
        each = len(ids) // len(self._shops)
        return all(shop.in_order(ids[at * each : (at + 1) * each]) for at, shop in enumerate(self._shops.values()))


def start_relays(follow: Callable[[str], Operator], via: str, marked: str, neighbour: str) -> list[RelayProcess]:
    """Start a relay; behind a pooler two of them, and one of the outbox ``neighbour``."""
    more: dict[str, Any] = {"program": (MUTANT, "quick_marks")} if marked else {}
    relays = [follow(via).start(**more)]
    if marked == "pooled":
        more["relay__metrics_address"] = None
        relays.append(follow(via).start(**more))
        relays.append(follow(with_database(via, "neighbour")).start(name=neighbour, **more))
    return relays


# The other pairs of delivery and source: the next test, and that of a second region.
@pytest.mark.parametrize(
    ("delivery", "source", "archive"), [("at-least-once", "wal", 0), ("exactly-once", "polling", 7)]
)
@of("Postgres was restored to an earlier point")
def test_postgres_is_restored(follow, private_postgres, shop, settings, delivery, source, archive):
    """By a base backup and the WAL up to a point; ids, revisions and batches are given out again."""
    settings |= {"delivery": delivery, "source": source, "relay__archive_days": archive, "relay__lease_seconds": 10}
    primary, url = outbox_of(private_postgres, shop, settings)
    relay = follow(url).start()
    settled = shop.write(url, 5)
    drained(url)
    backup = Backup(primary)
    settled += shop.write(url, 5)
    drained(url)
    ends(relay)
    waiting = shop.write(url, 5)
    point = backup.here()
    relay = follow(url).start()
    lost = shop.write(url, 20)
    last = ask(url, LAST_ID)
    drained(url)
    ends(relay)
    primary.stop()
    with backup.restore() as restored:
        url = restored.url("outbox")
        operator = follow(url)
        assert ask(url, "SELECT count(*) FROM outbox.events") == len(waiting)
        if delivery == "exactly-once" and source == "polling":
            relay = operator.start()
            await_stops(relay, 2)
            ends(relay)
            assert shop.published() == dict.fromkeys(settled + waiting + lost, 1)
        shown = operator.look("outbox recover --since TIME --dry-run", TIME=point)
        assert shown.status == 1, shown.text
        assert f"Kafka has, and Postgres has lost: {len(lost)} events of 4 keys" in shown.text
        perhaps = f"perhaps, from within a minute of the point: {len(settled)} events"
        assert (perhaps in shown.text) == (not archive)
        assert f"{len(waiting)} published already; settled, not published again" in shown.text
        assert "Postgres has, and Kafka has lost: nothing" in shown.text
        assert ask(url, "SELECT count(*) FROM outbox.events") == len(waiting)
        operator.own("outbox recover --since TIME --reason", TIME=point)
        assert ask(url, "SELECT count(*) FROM outbox.events") == 0
        if source == "wal":
            operator.own("outbox cdc setup --repair")
        new = shop.write(url, 20)
        assert min(row_ids(url)) <= last
        operator.start()
        drained(url)
        if source == "wal":
            wait_until(lambda: streaming(url), what="the lanes to stream")
        new += shop.write(url, 1)
        drained(url)
        assert shop.published() == dict.fromkeys(settled + waiting + lost + new, 1)
        assert ask(url, "SELECT details ->> 'lost' FROM outbox.audit WHERE what = 'recover'") == str(len(lost))


@pytest.mark.parametrize(
    ("delivery", "source", "marked"),
    [
        ("at-least-once", "polling", "direct"),
        ("at-least-once", "polling", "pooled"),
        ("at-least-once", "wal", ""),
        ("exactly-once", "wal", ""),
    ],
)
@of("Postgres was restored to an earlier point")
def test_a_copy_of_the_files_comes_back_under_a_relay_that_runs(
    follow, private_postgres, shop, settings, delivery, source, marked
):
    """As a snapshot of a disk does: the same timeline, whose positions are given out again; the slot is there.

    marked   the relay knows that no id up to a mark can be committed any more, and these are given out again; its
             session may be a pooler's, which does not end with the server. There each of two relays has a lane, and
             another outbox of the server is behind the same pooler.
    """
    pooled = marked == "pooled"
    settings |= {"delivery": delivery, "source": source, "relay__lease_seconds": 300 if pooled else 60}
    primary, url = outbox_of(private_postgres, shop, settings)
    others = {"neighbour": Shop(shop.kafka, "Bill")} if pooled else {}
    for name, other in others.items():
        other.prepare(private_postgres.database(primary, name).url)
    shops = Shops({"outbox": shop, **others})
    with TcpProxy("127.0.0.1", primary.port) as proxy, ExitStack() as opened:
        via = f"postgresql://postgres@127.0.0.1:{proxy.port}/outbox"
        if pooled:
            pooler = opened.enter_context(PgBouncer(via, size=4))
            via = pooler.url
        relays = start_relays(follow, via, marked, shop.kafka.name("neighbour"))
        wait_until(lambda: len(owners(url)) == len(relays) - len(others), 60, "each relay to have a lane")
        settled = shops.write(primary, 5)
        shops.drained(primary)
        proxy.stop()
        copy = snapshot(primary)
        point = ask(url, NOW)
        proxy.start()
        lost = []
        for _ in range(3):
            lost += shops.write(primary, 10)
            shops.drained(primary)
        before = [ask(one, LAST_ID) for one in shops.urls(primary)]
        if marked:
            high = "SELECT bool_and(low_water_mark >= %s - 12) FROM outbox.lanes"
            marks = list(zip(shops.urls(primary), before, strict=True))
            wait_until(lambda: all(ask(one, high, last) for one, last in marks), 60, "the marks to rise")
        written = ask(url, "SELECT pg_current_wal_insert_lsn()::text")
        paused = opened.enter_context(ExitStack())
        if pooled:
            paused.enter_context(pooler.paused())
        proxy.stop()
        primary.stop(immediate=True)
        with copy as restored:
            url = restored.url("outbox")
            # As far as the relay has read, and farther.
            while not ask(url, "SELECT pg_current_wal_insert_lsn() > %s::pg_lsn", written):
                execute(url, "SELECT pg_logical_emit_message(false, 'pad', repeat('x', 100000))")
            assert set().union(*map(row_ids, shops.urls(restored))) == set()
            new = shops.write(restored, 40)
            ids = [row_ids(one) for one in shops.urls(restored)]
            assert all(min(some) < last - 12 and max(some) > last for some, last in zip(ids, before, strict=True))
            proxy.lead_to(restored.port)
            proxy.start()
            paused.close()
            if delivery == "exactly-once":
                await_stops(relays[0], 2)
                assert shops.published() == dict.fromkeys(settled + lost, 1)
                shown = follow(url).look("outbox recover --since TIME --dry-run", TIME=point)
                assert f"Kafka has, and Postgres has lost: {len(lost)} events of 4 keys" in shown.text
                follow(url).own("outbox recover --since TIME --reason", TIME=point)
            shops.drained(restored)
            assert all(relay.running for relay in relays)
            assert shops.published() == dict.fromkeys(settled + lost + new, 1)
            assert shops.in_order(new)


@contextmanager
def full(server: PostgresServer, url: str, table: str) -> Iterator[None]:
    """Let the server find no space for the rows of a table, which is empty."""
    path = server.data_dir / "pgdata" / ask(url, "SELECT pg_relation_filepath(%s)", table)
    kept = path.with_name(f"{path.name}.kept")
    path.rename(kept)
    path.symlink_to("/dev/full")
    try:
        yield
    finally:
        kept.replace(path)
        # Sessions that have it open; on a real disk they need not begin anew.
        ask(
            url,
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE %s",
            "outbox%",
        )


@of("Postgres is full")
def test_the_archive_is_full(follow, private_postgres, shop, settings, address):
    settings |= {"delivery": "exactly-once", "relay__archive_days": 7, "relay__lease_seconds": 10}
    server = private_postgres(FAST)
    url = private_postgres.database(server).url
    shop.prepare(url)
    operator = follow(url)
    assert "would be created" in operator.look("outbox db prune --dry-run").text
    Retention(lambda: psycopg.connect(url, autocommit=True), "outbox", 7).prune(dry_run=False, force=False)
    today = ask(url, "SELECT 'outbox.published_' || to_char(now() AT TIME ZONE 'UTC', 'YYYY_MM_DD')")
    with full(server, url, today):
        relay = operator.start()
        ids = shop.write(url, 10)
        relay.wait_for_log("No space left on device")
        wait_until(lambda: "postgres_unavailable" in operator.look("curl -s", RELAY=address).text, what="the reason")
        assert "backlog 40 events" in operator.look("outbox status").text
        assert shop.published().keys() <= set(ids)
    ids += shop.write(url, 1)
    drained(url)
    assert shop.published() == dict.fromkeys(ids, 1)
    assert ask(url, "SELECT count(*) FROM outbox.published") == len(ids)


@of("A sink was restored to an earlier point")
def test_a_sink_is_restored(follow, private_postgres, outbox_kafka):
    """Under a member of an inbox that runs."""
    primary = private_postgres(FAST)
    url = private_postgres.database(primary).url
    db.upgrade_consumer(url)
    log = Log(SimpleNamespace(url=url), outbox_kafka, 2)
    keys = [f"k{number}" for number in range(20)]
    with TcpProxy("127.0.0.1", primary.port) as proxy:
        log.produce(keys * 10)
        with log.consuming(database=f"postgresql://postgres@127.0.0.1:{proxy.port}/outbox") as member:
            member.wait(lambda: log.count() == 200, "the first effects")
            backup = Backup(primary)
            log.produce(keys * 5)
            member.wait(lambda: log.count() == 300, "what the restored server has")
            backup.here()
            log.produce(keys * 10)
            member.wait(lambda: log.count() == 500, "what it has not")
            proxy.stop()
            primary.stop(immediate=True)
            with backup.restore() as restored:
                log.database.url = url = restored.url("outbox")
                assert log.count() == 300
                shown = follow(url).look("outbox offsets show", GROUP=log.group).text
                lags = re.findall(rf"{log.topic}-\d\W+\d+\W+(\d+)\W", shown)
                assert sum(map(int, lags)) == 200, shown
                proxy.lead_to(restored.port)
                proxy.start()
                log.produce(keys)
                member.wait(lambda: log.count() >= 520, "it to go on")
                log.check()
                assert log.run("SELECT sum(duplicates) FROM consumer.offsets") == [(0,)]


@of("A sink was restored to an earlier point")
def test_a_restored_sink_has_forgotten_calls(follow, private_postgres, provider):
    """Of each External one that was reserved before the point, and one that was not; all of them were made after it."""
    primary = private_postgres(FAST)
    url = private_postgres.database(primary).url
    db.upgrade_consumer(url)
    sink = Sink(url)
    asked, repeated, forgotten = externals = [
        payments(provider.url, name="asked", ask=True),
        payments(provider.url, name="repeated"),
        payments(provider.url, name="forgotten"),
    ]
    backup = Backup(primary)
    for external in externals:
        sink.reserve(external, [f"{external.name} 1"])
    point = backup.here()
    messages = {}
    for external in externals:
        sink.reserve(external, [f"{external.name} 2"])
        assert sink.drain(external) == {"attempts": 2, "confirmed": 2}
        messages[external.name] = sink.rows(
            "SELECT message_id, topic, part, message_offset, order_key, 'Ordered', false, order_key, 100 "
            "FROM consumer.reservations WHERE name = %s ORDER BY id",
            external.name,
        )
    primary.stop(immediate=True)
    with backup.restore() as restored:
        sink = Sink(restored.url("outbox"))
        assert sink.states() == {f"{external.name} 1": "reserved" for external in externals}
        operator = follow(sink.url)
        for external in externals:
            sink.write(external, messages[external.name])

        def since(external: External) -> list[tuple[str, str]]:
            """Drain, and return the paths and keys that the provider sees."""
            before = len(provider.requests())
            counts.append(sink.drain(external))
            return sorted((path, key) for _, path, key, _ in provider.requests()[before:])

        counts: list[dict[str, int]] = []
        operator.execute("UPDATE consumer.reservations", TIME=point)
        keys = {name: [str(row[0]) for row in rows] for name, rows in messages.items()}
        assert since(asked) == sorted((f"/charges/{key}", key) for key in keys["asked"])
        assert since(repeated) == sorted(("/charges", key) for key in keys["repeated"])
        # As of a sink that was restored two days later.
        older = NOW.replace("clock_timestamp()", "(clock_timestamp() - interval '2 days')")
        operator.execute("UPDATE consumer.reservations", TIME=ask(sink.url, older))
        assert since(forgotten) == []
        assert counts == [{"attempts": 2, "confirmed": 2}, {"attempts": 2, "confirmed": 2}, {"stuck": 2}]
        assert "may have happened" in ask(
            sink.url, "SELECT min(last_error) FROM consumer.reservations WHERE state = 'stuck'"
        )
        assert provider.standing() == Counter(row[4] for rows in messages.values() for row in rows)


def delete(kafka: Topics, topic: str) -> None:
    """Delete a topic, and wait until it is gone."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_topics([topic])[topic].result(30)
    wait_until(lambda: topic not in admin.list_topics(timeout=30).topics, what="the topic to be gone")


# A topic alone: the markers of exactly-once are left, which makes it the other case. With at-least-once there are none.
@pytest.mark.parametrize("what", ["cluster", "topic"])
@of("Kafka was lost, or a topic")
def test_kafka_is_lost(follow, outbox_kafka, unverified, outbox_postgres, settings, what):
    """With an archive. The new cluster, or topic, is empty, and a group had applied only a part."""
    settings |= {"delivery": "exactly-once", "relay__archive_days": 7, "relay__lease_seconds": 10}
    url = outbox_postgres.url
    first = second = outbox_kafka
    if what == "cluster":
        second = Topics(unverified.bootstrap_servers)
        second.token = first.token
    shop = Shop(first)
    shop.prepare(url)
    prepare_sink(url)
    point = ask(url, NOW)

    relay = follow(url).start()
    ids = shop.write(url, 10)
    running = shop.consumer(url)
    running.wait(lambda: len(applied(url)) == 40, "the first effects")
    running.end()
    ids += shop.write(url, 10)
    drained(url)
    ends(relay)
    waiting = shop.write(url, 5)
    settings["kafka__bootstrap_servers"] = second.bootstrap_servers
    if what == "topic":
        delete(first, shop.topic)
    shop = Shop(second)
    operator = follow(url)
    if what == "cluster":
        relay = operator.start()
        await_stops(relay, 2)
        ends(relay)
    shown = operator.look("outbox recover --since TIME --dry-run", TIME=point)
    assert f"Postgres has, and Kafka has lost: {len(ids)} events of 4 keys" in shown.text
    operator.own("outbox recover --since TIME --resend", TIME=point)
    if what == "topic":
        # The lanes go on from their markers, whose events were put back.
        db.change_lanes(url, 2)
    operator.start()
    drained(url)
    assert shop.published() == dict.fromkeys(ids + waiting, 1)
    assert shop.in_order(ids + waiting)
    assert isinstance(shop.consumer(url).error(), TopicReplaced)
    operator.own("outbox offsets reset", GROUP="g", TOPIC=shop.topic)
    running = shop.consumer(url)
    running.wait(lambda: len(applied(url)) >= len(ids + waiting), "the effects of all")
    running.end()
    assert Counter(applied(url)) == dict.fromkeys(ids + waiting, 1)
    assert look_up(url, "SELECT sum(duplicates) FROM consumer.offsets") == [(40,)]


def test_every_step_was_taken(request):
    """Runs last; of a section only if all of its tests were to run."""
    every_step_was_taken(request)
