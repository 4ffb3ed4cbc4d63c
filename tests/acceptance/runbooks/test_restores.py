"""The runbooks of restores and losses, with real ones: of Postgres by its WAL to a point, of a sink, of a Kafka.

Commands come out of docs/operations/runbooks.md itself; see runbooks.py. Each test shows what is lost and what is
repeated, and how it is seen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
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
from shop import FAST, Shop, applied, prepare_sink
from standby import ask
from support import MUTANT, await_stops, drained, ends, look_up, owners, wait_until
from wal_support import streaming, to_wal

from outbox._app import migrate as db
from outbox.external import External
from outbox.inbox.errors import TopicReplaced
from outbox.sandbox._ports import free_ports
from outbox.sandbox.postgres import PostgresServer
from outbox.testing.fixtures import Database, RelayProcess, Topics
from outbox.urls import with_database
from relay.tasks.archive import Retention

__all__ = ["provider", "unverified"]

LAST_ID = "SELECT last_value FROM outbox.events_id_seq"


def row_ids(url: str) -> set[int]:
    with psycopg.connect(url) as connection:
        return {id_ for (id_,) in connection.execute("SELECT id FROM outbox.events")}


class OfServer:
    """An outbox of a server that is lost, in a database of its own: its shop, and what was written when.

    settings   of its relays and of the commands, where they are not those of the test.
    """

    def __init__(self, database: Database, shop: Shop, **settings: Any) -> None:
        self.name, self.shop = database.name, shop
        name = shop.kafka.name(database.name)
        # By their source, the events of the others are told from its own.
        own = {"name": name, "ce_source": name, "wal__slot": name.replace("-", "_")}
        self.settings = settings | own
        self.settled: list[str] = []
        self.lost: list[str] = []
        self.last = 0
        shop.prepare(database.url)
        if settings["source"] == "wal":
            to_wal(database.url, self.settings)

    def writes_what_will_be_lost(self, server: PostgresServer, *rounds: int) -> None:
        url = server.url(self.name)
        for number in rounds:
            self.lost += self.shop.write(url, number)
            drained(url, 120)
        self.last = ask(url, LAST_ID)


class BroughtBack(OfServer):
    """One that a backup brings back to a point. The relay is ended before, and is there again behind it."""

    def __init__(self, follow: Callable[..., Operator], database: Database, shop: Shop, **settings: Any) -> None:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        super().__init__(database, shop, **settings, relay__metrics_address=address)
        self._follow = follow
        self._relay: RelayProcess | None = None
        self._waiting: list[str] = []

    def settles(self, server: PostgresServer) -> None:
        """Write what is settled before the point; the relay runs behind it."""
        url = server.url(self.name)
        if self._relay is None:
            self._relay = self._operator(url).start()
        self.settled += self.shop.write(url, 5)
        drained(url)

    def waits(self, server: PostgresServer) -> None:
        """Write what waits at the point."""
        assert self._relay is not None
        ends(self._relay)
        self._waiting = self.shop.write(server.url(self.name), 5)

    def loses(self, server: PostgresServer) -> None:
        """Publish what waits, and what the restored server will not have."""
        relay = self._operator(server.url(self.name)).start()
        self.writes_what_will_be_lost(server, 20)
        ends(relay)

    def recovers(self, server: PostgresServer, point: str) -> None:
        """Follow the runbook, and write more under ids that were given out before."""
        url, shop, known = server.url(self.name), self.shop, self.settled + self._waiting + self.lost
        operator = self._operator(url)
        assert ask(url, "SELECT count(*) FROM outbox.events") == len(self._waiting)
        if self.settings["delivery"] == "exactly-once":
            relay = operator.start()
            await_stops(relay, 2)
            ends(relay)
            assert shop.published() == dict.fromkeys(known, 1)
        shown = operator.look("outbox recover --since TIME --dry-run", TIME=point)
        assert shown.status == 1, shown.text
        assert f"Kafka has, and Postgres has lost: {len(self.lost)} events of 4 keys" in shown.text
        perhaps = f"perhaps, from within a minute of the point: {len(self.settled)} events"
        assert (perhaps in shown.text) == (not self.settings["relay__archive_days"])
        assert f"{len(self._waiting)} published already; settled, not published again" in shown.text
        assert "Postgres has, and Kafka has lost: nothing" in shown.text
        assert ask(url, "SELECT count(*) FROM outbox.events") == len(self._waiting)
        operator.own("outbox recover --since TIME --reason", TIME=point)
        assert ask(url, "SELECT count(*) FROM outbox.events") == 0
        wal = self.settings["source"] == "wal"
        if wal:
            operator.own("outbox cdc setup --repair")
        new = shop.write(url, 20)
        assert min(row_ids(url)) <= self.last
        operator.start()
        drained(url)
        if wal:
            wait_until(lambda: streaming(url), what="the lanes to stream")
        new += shop.write(url, 1)
        drained(url)
        assert shop.published() == dict.fromkeys(known + new, 1)
        recovered = "SELECT details ->> 'lost' FROM outbox.audit WHERE what = 'recover'"
        assert ask(url, recovered) == str(len(self.lost))

    def _operator(self, url: str) -> Operator:
        return self._follow(url, **self.settings)


@of("Postgres was restored to an earlier point")
def test_postgres_is_restored(follow, private_postgres, shop, settings):
    """By a base backup and the WAL up to a point; ids, revisions and batches are given out again. Two outboxes.

    The other pairs of delivery and source: the next test, and that of a second region.
    """
    settings |= {"relay__lease_seconds": 10}
    primary = private_postgres(FAST)
    polled, read = private_postgres.database(primary), private_postgres.database(primary, "read")
    exactly_once = {"delivery": "exactly-once", "source": "polling", "relay__archive_days": 7}
    at_least_once = {"delivery": "at-least-once", "source": "wal", "relay__archive_days": 0}
    outboxes = [
        BroughtBack(follow, polled, shop, **exactly_once),
        BroughtBack(follow, read, Shop(shop.kafka, "Bill"), **at_least_once),
    ]
    for one in outboxes:
        one.settles(primary)
    backup = Backup(primary)
    for one in outboxes:
        one.settles(primary)
        one.waits(primary)
    point = backup.here()
    for one in outboxes:
        one.loses(primary)
    primary.stop()
    with backup.restore() as restored:
        for one in outboxes:
            one.recovers(restored, point)


class Copied(OfServer):
    """One whose files come back as they were, and whose relays run all the while."""

    def start(self, follow: Callable[..., Operator], via: str, relays: int) -> None:
        """Start so many relays; those that poll know soon that no id up to a mark can be committed any more."""
        self.marked = self.settings["source"] == "polling"
        own: dict[str, Any] = {"program": (MUTANT, "quick_marks")} if self.marked else {}
        url = with_database(via, self.name)
        self.relays = [follow(url).start(**self.settings, **own, relay__metrics_address=None) for _ in range(relays)]

    def settles(self, server: PostgresServer) -> None:
        """Write what is settled when the files are copied. Each relay has a lane by then."""
        url = server.url(self.name)
        wait_until(lambda: len(owners(url)) == len(self.relays), 60, "each relay to have a lane")
        self.settled = self.shop.write(url, 5)
        drained(url, 120)

    def marks_have_risen(self, server: PostgresServer) -> bool:
        high = "SELECT bool_and(low_water_mark >= %s - 12) FROM outbox.lanes"
        return not self.marked or ask(server.url(self.name), high, self.last)

    def writes_again(self, server: PostgresServer) -> None:
        """Write more, under ids that were given out before, and under others."""
        url = server.url(self.name)
        assert row_ids(url) == set()
        self.new = self.shop.write(url, 40)
        ids = row_ids(url)
        assert min(ids) < self.last - 12
        assert max(ids) > self.last

    def is_whole(self, server: PostgresServer) -> None:
        """Wait until all is published, and look at all of it."""
        drained(server.url(self.name), 120)
        assert all(relay.running for relay in self.relays)
        assert self.shop.published() == dict.fromkeys(self.settled + self.lost + self.new, 1)
        assert self.shop.in_order(self.new)


# By their databases: how many relays publish the outboxes of a server, and how.
COPIED: dict[str, tuple[int, dict[str, Any]]] = {
    "outbox": (1, {"delivery": "exactly-once", "source": "wal", "relay__lease_seconds": 60}),
    "read": (1, {"delivery": "at-least-once", "source": "wal", "relay__lease_seconds": 60}),
    "polled": (1, {"delivery": "at-least-once", "source": "polling", "relay__lease_seconds": 60}),
    "pooled": (2, {"delivery": "at-least-once", "source": "polling", "relay__lease_seconds": 300}),
    "neighbour": (1, {"delivery": "at-least-once", "source": "polling", "relay__lease_seconds": 300}),
}
POOLED = {"pooled", "neighbour"}


@of("Postgres was restored to an earlier point")
def test_a_copy_of_the_files_comes_back_under_relays_that_run(follow, private_postgres, outbox_kafka, settings):
    """As a snapshot of a disk does: the same timeline, whose positions are given out again; the slots are there.

    Sessions may be a pooler's, which do not end with the server: of two outboxes they are. In one of these, each of two
    relays has a lane.
    """
    primary = private_postgres(FAST)
    outboxes = {
        name: Copied(private_postgres.database(primary, name), Shop(outbox_kafka, name), **own)
        for name, (_, own) in COPIED.items()
    }
    main = outboxes["outbox"]
    settings |= main.settings
    with TcpProxy("127.0.0.1", primary.port) as proxy, ExitStack() as opened:
        direct = f"postgresql://postgres@127.0.0.1:{proxy.port}/outbox"
        pooler = opened.enter_context(PgBouncer(direct, size=4))
        for name, (relays, _) in COPIED.items():
            outboxes[name].start(follow, pooler.url if name in POOLED else direct, relays)
        for one in outboxes.values():
            one.settles(primary)
        proxy.stop()
        copy = snapshot(primary)
        point = ask(primary.url("outbox"), NOW)
        proxy.start()
        for one in outboxes.values():
            one.writes_what_will_be_lost(primary, 10, 10, 10)
        for one in outboxes.values():
            wait_until(lambda one=one: one.marks_have_risen(primary), 60, "the marks to rise")
        written = ask(primary.url("outbox"), "SELECT pg_current_wal_insert_lsn()::text")
        with pooler.paused():
            proxy.stop()
            primary.stop(immediate=True)
            restored = opened.enter_context(copy)
            url = restored.url("outbox")
            # As far as the relays have read, and farther.
            while not ask(url, "SELECT pg_current_wal_insert_lsn() > %s::pg_lsn", written):
                execute(url, "SELECT pg_logical_emit_message(false, 'pad', repeat('x', 100000))")
            for one in outboxes.values():
                one.writes_again(restored)
            proxy.lead_to(restored.port)
            proxy.start()
        await_stops(main.relays[0], 2)
        assert main.shop.published() == dict.fromkeys(main.settled + main.lost, 1)
        shown = follow(url).look("outbox recover --since TIME --dry-run", TIME=point)
        assert f"Kafka has, and Postgres has lost: {len(main.lost)} events of 4 keys" in shown.text
        follow(url).own("outbox recover --since TIME --reason", TIME=point)
        for one in outboxes.values():
            one.is_whole(restored)


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
