"""The WAL as the source, and a failover: real servers, real standbys, a primary that is killed.

What no standby has is not published: tests/integration/relay/wal/test_visibility.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from older_postgres import postgres_16
from proxy import TcpProxy
from standby import Standby, ask, either, needs_failover_slots, require_standby
from support import IMPATIENT, Load, backlog, check, logged, wait_until
from wal_support import cdc, done, run_outbox, to_wal

from outbox import Event, Outbox
from outbox._app import migrate as db
from outbox._clients.clock import uptime
from outbox.errors import OperationRefused
from outbox.sandbox.postgres import PostgresServer
from outbox.testing.fixtures import Database, RelayFactory, RelayProcess, Topics
from relay.config import SourceKind
from relay.core.ports import StreamLost, Unavailable
from relay.database import unavailable_on_error
from relay.failpoints import VARIABLE
from relay.lanes import Lease
from relay.settle.statements import TIMELINE
from relay.wal.lane_hash import lane_of
from relay.wal.session import Stream, StreamSession
from relay.wal.slot import Slot, SlotNames

FAST = {"fsync": "off", "autovacuum": "off"}
# They wait for a person, or for a promotion: not for long.
QUICK = {"delivery": "exactly-once", "relay__max_backoff_seconds": 0.5, "relay__lease_seconds": 3}


@pytest.fixture
def kafka_too(outbox_kafka):
    """A setting for commands that look into Kafka."""
    return {"kafka__bootstrap_servers": outbox_kafka.bootstrap_servers}


def published(topics, topic: str, ids: set[str]) -> None:
    wait_until(lambda: ids <= on_kafka(topics, topic).keys(), 60, "every event to be on Kafka")


def refused(url: str, settings: dict[str, Any], *arguments: str) -> str:
    result = run_outbox(url, settings, *arguments)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


def streaming(url: str) -> bool:
    """Return whether a relay is alive and every lane is read from the stream."""
    return ask(url, "SELECT bool_and(streaming AND lease_until > clock_timestamp()) FROM outbox.lanes")


def read_by_relay(url: str) -> bool:
    return streaming(url) and ask(
        url,
        "SELECT count(*) FROM pg_replication_slots "
        "WHERE slot_type = 'logical' AND active AND database = current_database()",
    )


class Journal:
    """Events of which the same transaction writes down that they were written: what a server's history has."""

    def __init__(self, url: str, kind: str) -> None:
        self._kind = kind
        self._number = 0
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE journal (event_id uuid PRIMARY KEY, key text, number int)")

    def key(self, lane: int, lanes: int) -> str:
        """A key of that lane."""
        return next(key for key in map(str, range(1000)) if lane_of(self._kind, key, lanes) == lane)

    def write(self, url: str, keys: Sequence[str]) -> set[str]:
        """Write events in one transaction; give their ids."""
        ids = set()
        with psycopg.connect(url) as connection:
            for key in keys:
                self._number += 1
                event = Event(self._kind, key, "Counted", {"n": self._number})
                event_id = Outbox().add(connection, event)
                row = (event_id, key, self._number)
                connection.execute("INSERT INTO journal VALUES (%s, %s, %s)", row)
                ids.add(str(event_id))
        return ids

    @staticmethod
    def read(url: str) -> set[str]:
        """The ids that this server knows of."""
        with psycopg.connect(url, autocommit=True) as connection:
            return {str(row[0]) for row in connection.execute("SELECT event_id FROM journal")}


def on_kafka(topics, topic: str, among: set[str] | None = None) -> Counter[str]:
    """How often each event can be read now; those of ``among`` must be in order."""
    counts: Counter[str] = Counter()
    numbers: dict[bytes, list[int]] = defaultdict(list)
    for message in topics.consume(topic, wait_for_open=False):
        event_id = dict(message.headers())["ce_id"].decode()
        counts[event_id] += 1
        if counts[event_id] == 1 and (among is None or event_id in among):
            numbers[message.key()].append(json.loads(message.value())["n"])
    assert all(each == sorted(each) for each in numbers.values()), numbers
    return counts


@needs_failover_slots
def test_a_synchronous_standby_that_has_the_slot_goes_on(
    private_postgres, outbox_kafka, outbox_relay, wal, kafka_too, order
):
    """Nothing to do for anybody: every event once, in order, from the new primary."""
    kind, topic = order
    primary = private_postgres(FAST)
    url = private_postgres.database(primary).url
    settings = wal | QUICK
    to_wal(url, settings)
    with Standby(primary, synced_slots=True) as standby:
        require_standby(primary)
        a_standby_is_called_one(standby.url("outbox"))
        both = either(primary, standby, "outbox")
        with Load(both, kind, threads=2) as load:
            relay = outbox_relay(database_url=both, **settings)
            wait_until(lambda: streaming(both), what="the lanes to stream")
            standby.await_slot(wal["wal__slot"])
            load.more(100)
            primary.kill()
            standby.promote()
            load.more(100)
            wait_until(lambda: read_by_relay(both), what="the lanes to stream again")
            load.more(100)
            load.drain()
        assert relay.running
        assert "lane stopped" not in relay.log()
        assert ask(both, "SELECT timeline FROM outbox.streams") == 2
        assert check(both, outbox_kafka.consume(topic)) == 0
        assert '"problem":null' in done(both, settings, "cdc", "status", "--json")


def a_standby_is_called_one(url: str) -> None:
    """Also by what a lane asks for when it joins the stream, and by the heartbeat: they ask for the WAL's end."""
    with psycopg.connect(url, autocommit=True) as connection:
        for ask_it in (
            lambda: connection.execute(f"SELECT {TIMELINE}"),
            lambda: Slot(connection, SlotNames("outbox", "a", "b")).heartbeat(),
        ):
            with pytest.raises(Unavailable, match="is a standby that is not promoted"), unavailable_on_error("asking"):
                ask_it()


class Outrun:
    """An outbox of two lanes. Kafka gets events of it that the standby never sees, and not yet all that this has."""

    def __init__(self, database: Database, topics: Topics, start: RelayFactory, settings: dict[str, Any]) -> None:
        self._name, self._topics, self._start = database.name, topics, start
        kind, name = topics.name(f"Order-{database.name}"), topics.name(database.name)
        self._topic = topics.create_topic(f"{kind.lower()}-events", 3)
        self._settings = settings | {"name": name, "wal__slot": name.replace("-", "_"), "relay__batch_size": 10}
        db.change_lanes(database.url, 2)
        to_wal(database.url, self._settings)
        self._journal = Journal(database.url, kind)
        self._short, self._long = self._journal.key(0, 2), self._journal.key(1, 2)

    def begins(self, primary: PostgresServer, standby: Standby) -> None:
        """Write what both servers have, and what Kafka has not yet."""
        self._both = either(primary, standby, self._name)
        relay = self._relay()
        wait_until(lambda: streaming(self._both), what="the lanes to stream")
        self._journal.write(self._both, [self._short, self._long] * 10)
        standby.await_slot(self._settings["wal__slot"])
        wait_until(lambda: len(self._on_kafka()) == 20, what="the first events")
        relay.kill()
        self._journal.write(self._both, [self._short] * 6 + [self._long] * 300)

    def outruns(self) -> None:
        """The short lane is through with what will be lost, the long one is not with what both servers have."""
        self._lost = self._journal.write(self._both, [self._short] * 24)
        relay = self._relay(env={VARIABLE: "batch.fetched=delay:0.3@1+"})
        wait_until(lambda: self._lost & self._on_kafka().keys(), what="the first of what will be lost")
        relay.kill()

    def goes_on(self) -> None:
        """Publish what the standby has, each event once with the markers of exactly-once, and look at all of it."""
        both, exactly_once = self._both, self._settings["delivery"] == "exactly-once"
        there = self._journal.read(both)
        assert not self._lost & there
        assert there - self._on_kafka().keys()
        relay = self._relay(program=IMPATIENT)
        if exactly_once:
            self._is_reconciled(relay, there)
        there |= self._journal.write(both, [self._short, self._long] * 10)
        published(self._topics, self._topic, there)
        wait_until(lambda: read_by_relay(both) and backlog(both) == 0, what="the stream to be read")
        there |= self._journal.write(both, [self._short, self._long])
        published(self._topics, self._topic, there)
        counts = self._on_kafka(there)
        assert counts.keys() <= there | self._lost
        if exactly_once:
            assert set(counts.values()) == {1}
            assert '"problem":null' in done(both, self._settings, "cdc", "status", "--json")
            done(both, self._settings, "relay", "reconcile")
        assert ask(both, "SELECT timeline FROM outbox.streams") == 2

    def _is_reconciled(self, relay: RelayProcess, there: set[str]) -> None:
        """A person looks, and lets the lanes go on."""
        relay.wait_for_log("outbox relay reconcile")
        # The lane that has lost rows stops, and perhaps the other one; if not, the stream waits for the first.
        wait_until(lambda: _stopped_or_waiting(relay), 60, "every lane to stop or to wait")
        # What the killed relay had committed can have stood behind a transaction that its other lane left open.
        self._topics.await_transactions(self._topic)
        before = self._on_kafka()
        assert there - before.keys()
        assert "has lost" in refused(self._both, self._settings, "relay", "reconcile")
        assert self._on_kafka() == before
        done(self._both, self._settings, "relay", "reconcile", "--apply", "--reason", "a failover")

    def _relay(self, **more: Any) -> RelayProcess:
        return self._start(database_url=self._both, **self._settings, **more)

    def _on_kafka(self, among: set[str] | None = None) -> Counter[str]:
        return on_kafka(self._topics, self._topic, among)


def _stopped_or_waiting(relay: RelayProcess) -> bool:
    """Return whether both lanes have stopped, or one has and the stream is not read without it."""
    stopped = {line["lanes"] for line in logged(relay, '"lane stopped"')}
    return len(stopped) == 2 or bool(logged(relay, "after a failover the stream is read when all lanes"))


@needs_failover_slots
def test_a_standby_that_was_behind(private_postgres, outbox_kafka, outbox_relay, kafka_too):
    """Kafka has events that the new primary never saw, and not yet all that it has: with both deliveries."""
    primary = private_postgres(FAST)
    settings = QUICK | kafka_too | {"source": "wal"}
    outboxes = [
        Outrun(private_postgres.database(primary, name), outbox_kafka, outbox_relay, settings | {"delivery": delivery})
        for name, delivery in (("twice", "at-least-once"), ("once", "exactly-once"))
    ]
    with (
        TcpProxy("127.0.0.1", primary.port) as proxy,
        Standby(primary, synced_slots=True, via_port=proxy.port) as standby,
    ):
        for one in outboxes:
            one.begins(primary, standby)
        wait_until(standby.caught_up, what="the standby to catch up")
        proxy.stop()
        for one in outboxes:
            one.outruns()
        primary.kill()
        standby.promote()
        for one in outboxes:
            one.goes_on()


def test_a_slot_that_the_failover_left_behind(
    private_postgres, outbox_kafka, outbox_relay, wal, kafka_too, order, monkeypatch
):
    """Postgres 16 knows no other way. A relay waits at the standby, then for a person; the table has all."""
    monkeypatch.setenv("OUTBOX_PG_BIN", str(postgres_16()))
    kind, topic = order
    primary = private_postgres(FAST)
    assert ask(primary.url(), "SHOW server_version_num")[:2] == "16"
    url = private_postgres.database(primary).url
    settings = wal | QUICK | kafka_too
    to_wal(url, settings)
    with Standby(primary) as standby:
        require_standby(primary)
        both, aside = either(primary, standby, "outbox"), standby.url("outbox")
        with Load(both, kind, threads=2) as load:
            first = outbox_relay(database_url=url, **settings)
            wait_until(lambda: read_by_relay(url), what="the lanes to stream")
            load.more(100)
            waiting = outbox_relay(database_url=aside, **settings)
            waiting.wait_for_log("is a standby that is not promoted")
            a_standby_is_called_one(aside)
            with cdc(aside, settings) as commands:
                for command in (
                    commands.setup,
                    lambda: commands.repair("x"),
                    lambda: commands.switch(SourceKind.WAL),
                    commands.drop,
                ):
                    with pytest.raises(OperationRefused, match="this server is a standby"):
                        command()
            assert "this server is a standby" in refused(aside, settings, "cdc", "setup")
            assert "this server is a standby" in refused(aside, settings, "relay", "reconcile")
            assert ask(aside, "SELECT count(*) FROM pg_replication_slots") == 0
            first.kill()
            load.more(50)
            primary.kill()
            standby.promote()
            waiting.wait_for_log("is gone: it was dropped, or a failover left it behind")
            load.more(50)
            done(both, settings, "cdc", "setup", "--repair", "--reason", "the slot was left behind")
            wait_until(lambda: read_by_relay(both), what="the lanes to stream")
            load.more(50)
            load.drain()
        assert waiting.running
        assert check(both, outbox_kafka.consume(topic)) == 0
        assert ask(both, "SELECT timeline FROM outbox.streams") == 2


class Parted:
    """A replication connection to a server on timeline 2, which left timeline 1 at byte 1000."""

    def identify(self) -> tuple[str, int]:
        return "4711", 2

    def switches(self, timeline: int) -> dict[int, int]:
        return {1: 1000}


def test_where_timelines_part(outbox_postgres):
    slot = Slot(outbox_postgres.connect(autocommit=True), SlotNames("outbox", "a", "b"))
    parted = slot.look()._replace(timeline=1, timeline_now=2, system_identifier="4711")

    def lost(published: int = -1, **places: int) -> bool:
        try:
            slot.check_timeline(parted._replace(**places), Parted(), published)
        except StreamLost as error:
            raised.append(str(error))
            return True
        return False

    raised: list[str] = []

    # Where the record of a commit begins; what begins where the timelines part is the other one's.
    assert [lost(settled_lsn=at) for at in (999, 1000)] == [False, True]
    assert [lost(published=at) for at in (999, 1000)] == [False, True]
    # Where a record ends.
    assert [lost(flushed_lsn=at) for at in (1000, 1001)] == [False, True]
    way_out = re.compile(r"left timeline 1 at 0/3E8; .*outbox recover --since TIME")
    assert (len(raised), all(map(way_out.search, raised))) == (3, True)


def test_a_lane_that_asks_another_server_ends_the_session():
    """The stream's connection hangs on a server that is gone, while a lane has found the new one."""

    def unreachable():
        raise AssertionError("not all lanes have joined")

    leases = [Lease(lane, 1, 10.0, uptime()) for lane in range(3)]
    stream = Stream(lambda leases: StreamSession(SlotNames("outbox", "a", "b"), unreachable, unreachable, leases))
    stream.begin(leases)
    old = stream.join(0, 0, 1)
    with pytest.raises(Unavailable, match="timeline 1, Postgres is on 2 now"):
        stream.join(1, 0, 2)
    with pytest.raises(Unavailable):
        old.take(1)
    new = stream.join(1, 0, 2)
    assert new.take(1) == []
    assert stream.join(0, 0, 2) is not old
    stream.end()
    assert stream.session is None
    with pytest.raises(Unavailable, match="the stream is closed"):
        stream.join(0, 0, 2)
    # A relay that gets all lanes again goes on with the same stream: of a session that it had joined before, or not.
    for number in (2, 3):
        stream.begin(others := [Lease(lane, number, 10.0, uptime()) for lane in range(2)])
        assert new.session._stopping.is_set()
        again = stream.join(0, 0, 2)
        assert again.session._leases == others
        assert again.session is not new.session
        new = again
