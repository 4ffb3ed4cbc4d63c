"""The lag of consumer groups in a relay's metrics: also of one whose consumer is gone, until it is forgotten."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from alerting import firing, firing_by_outbox, scraped
from confluent_kafka import Producer
from counting import Counting
from inbox_support import Log
from prometheus_client import CollectorRegistry
from support import IMPATIENT, wait_until
from typer.testing import CliRunner

from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.errors import SchemaError
from outbox.sandbox._ports import free_ports
from relay.cli.app import app
from relay.core.ports import BrokerUnavailable, DatabaseUnavailable
from relay.metrics import groups
from relay.metrics.groups import GroupLags, GroupWatch

HOUR = 3_600.0


def shown(address: str, name: str) -> dict[tuple[str, ...], float]:
    """Return a metric of the groups by the values of its labels: group, partition, topic."""
    series = {found: value for found, value in scraped(address).items() if found.startswith(f"outbox_group_{name}{{")}
    return {tuple(re.findall(r'(?:group|topic|partition)="([^"]*)"', found)): value for found, value in series.items()}


def test_a_group_whose_consumer_is_killed_for_good(outbox_postgres, outbox_kafka, outbox_relay, tmp_path):
    """Its lag is shown by whatever relay holds the first lane, and the alert lasts until the group is forgotten."""
    log = Log(outbox_postgres, outbox_kafka, partitions=2)
    member = log.process(tmp_path, "member")
    log.produce([f"k{n}" for n in range(20)])
    wait_until(lambda: log.count() == 20, 60, "the messages to be applied")
    member.signal(signal.SIGKILL)
    assert member.wait() == -signal.SIGKILL
    for part in (0, 1):
        log.produce(["k"] * 7, partition=part)
    with psycopg.connect(outbox_postgres.url) as connection:
        connection.execute("UPDATE consumer.offsets SET updated_at = now() - interval '2 days'")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]

    def start(address: str) -> Any:
        return outbox_relay(
            program=IMPATIENT,
            name="orders",
            kafka__bootstrap_servers=log.servers,
            relay__metrics_address=address,
            relay__lease_seconds=2,
        )

    def lag(address: str) -> bool:
        return shown(address, "lag_messages") == {(log.group, log.topic): 14}

    first = start(addresses[0])
    wait_until(lambda: lag(addresses[0]), 60, "the lag")
    assert set(shown(addresses[0], "wait_seconds")) == {(log.group, part, log.topic) for part in "01"}

    # They came just now, whenever the group moved.
    def waits() -> bool:
        return all(0 < seconds < 60 for seconds in shown(addresses[0], "wait_seconds").values())

    wait_until(waits, 60, "the messages to wait")
    assert "ConsumerGone" not in firing(scraped(addresses[0]))
    assert "ConsumerGone" in firing(scraped(addresses[0]), later=660.0)
    start(addresses[1])
    first.kill()
    wait_until(lambda: lag(addresses[1]), 60, "the lag at the other relay")
    wait_until(lambda: min(shown(addresses[1], "wait_seconds").values()) > 0, 60, "the messages to wait there")
    assert ("ConsumerGone", "orders") in firing_by_outbox(scraped(addresses[1]), later=660.0)
    settings = {"OUTBOX_DATABASE_URL": outbox_postgres.url, "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": log.servers}
    forget = ["offsets", "forget", log.group, "--topic", log.topic, "--reason", "gone for good"]
    done = CliRunner().invoke(app, forget, env=settings)
    assert done.exit_code == 0, done.output
    wait_until(lambda: shown(addresses[1], "lag_messages") == {}, 60, "the group to be forgotten")
    assert shown(addresses[1], "wait_seconds") == {}
    assert "ConsumerGone" not in firing(scraped(addresses[1]), later=660.0)


class Watched:
    """A watch of a group whose rows the test writes."""

    def __init__(self, database: Any, kafka: Any) -> None:
        self.url, self.options = database.url, {"bootstrap.servers": kafka.bootstrap_servers}
        self.topic = kafka.create_topic(kafka.name("orders"), 1)
        # One: an idempotent producer waits half a second for its first answer.
        self.producer = Producer({**self.options, "enable.idempotence": True})
        self.admin = psycopg.connect(database.url, autocommit=True)
        self.admin.execute("INSERT INTO consumer.groups (grp, owner) VALUES ('g', 'me')")
        self.admin.execute(
            "INSERT INTO consumer.offsets (grp, topic, part, topic_id, next_offset, generation) "
            "VALUES ('g', %s, 0, %s, 0, 1)",
            (self.topic, KafkaAdmin(self.options).snapshot([self.topic]).ids[self.topic]),
        )
        self.start()

    def start(self, url: str | None = None, servers: str | None = None, **options: Any) -> None:
        self.shows = True
        self.registry = CollectorRegistry()
        kafka = self.options if servers is None else {"bootstrap.servers": servers}
        shows, schema = (lambda: self.shows), options.pop("schema", "consumer")
        self.watch = GroupWatch(url or self.url, schema, kafka, shows, self.registry, **options)

    def send(self, count: int, *, seconds_ago: float = 0.0) -> None:
        for _ in range(count):
            self.producer.produce(self.topic, b"x", partition=0, timestamp=int((time.time() - seconds_ago) * 1_000))
        assert self.producer.flush(30) == 0

    def move(self, offset: int, *, seconds_ago: float) -> None:
        self.admin.execute(
            "UPDATE consumer.offsets SET next_offset = %s, updated_at = now() - %s * interval '1 second'",
            (offset, seconds_ago),
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"outbox_group_{name}", {"group": "g", **labels})

    def wait(self) -> float:
        """Look, and return how long messages wait; 0 if none does."""
        self.look()
        return self.value("wait_seconds", topic=self.topic, partition="0") or 0.0

    def look(self) -> None:
        """Look, without a rest."""
        self.watch._rest_until = 0.0
        self.watch.look()

    def lag(self) -> float | None:
        self.look()
        return self.value("lag_messages", topic=self.topic)


@pytest.fixture
def watched(outbox_postgres, outbox_kafka) -> Iterator[Watched]:
    found = Watched(outbox_postgres, outbox_kafka)
    with contextlib.closing(found.admin):
        yield found


def test_how_long_messages_wait(watched):
    """Since the offset stopped, or the first of them came, whichever is later; a relay that starts knows it at once."""
    watched.move(0, seconds_ago=2 * HOUR)
    assert (watched.wait(), watched.lag()) == (0.0, 0)
    # A relay that was just started has not seen it come: at least so long, and not longer than the offset stands.
    watched.send(1, seconds_ago=10 * HOUR)
    for still, least in ((50 * HOUR, 6 * HOUR), (2 * HOUR, HOUR), (11 * 60, 5 * 60), (5, 5)):
        watched.move(0, seconds_ago=still)
        watched.start()
        assert least <= watched.wait() < least + 60
    # It moved, and the next ones come just now.
    watched.move(1, seconds_ago=2 * HOUR)
    assert (watched.wait(), watched.lag()) == (0.0, 0)
    watched.send(3)
    assert watched.wait() < 60
    assert watched.lag() == 3
    # The same position an hour later. What comes meanwhile does not matter.
    watched.watch._since = {key: at - dt.timedelta(hours=1) for key, at in watched.watch._since.items()}
    watched.send(3)
    assert HOUR <= watched.wait() < HOUR + 60
    watched.move(4, seconds_ago=2 * HOUR)
    assert watched.wait() < 60
    moved = watched.value("last_progress_timestamp_seconds")
    assert moved == pytest.approx(time.time() - 2 * HOUR, abs=60)


def test_kafka_is_asked_about_a_position_once(watched, monkeypatch):
    watched.send(1, seconds_ago=30 * 60)
    watched.move(0, seconds_ago=2 * HOUR)
    asked: list[dt.datetime] = []
    at_time = KafkaAdmin.at_time
    monkeypatch.setattr(KafkaAdmin, "at_time", lambda one, parts, when: asked.append(when) or at_time(one, parts, when))
    assert 900 <= watched.wait() < 960
    # What is late, each time; and 1, 5, 15 minutes, while an hour is too long.
    assert len(asked) == 1 + 4
    assert 900 <= watched.wait() < 960
    assert len(asked) == 1 + 4 + 1


def test_a_look_costs_few_statements(watched):
    """However many groups there are."""
    watched.send(1)
    for count in (1, 50):
        watched.admin.execute(
            "INSERT INTO consumer.groups (grp, owner) SELECT 'g' || n, 'me' FROM generate_series(2, %s) AS n", (count,)
        )
        watched.admin.execute(
            "INSERT INTO consumer.offsets (grp, topic, part, topic_id, next_offset, generation) "
            "SELECT g.grp, o.topic, 0, o.topic_id, 0, 1 FROM consumer.groups AS g, consumer.offsets AS o "
            "WHERE o.grp = 'g' ON CONFLICT DO NOTHING"
        )
        with Counting(watched.url) as counting:
            watched.start(url=counting.url)
            watched.watch.look()
            selects = [one for one in counting.statements if b"SELECT" in one and b"set_config" not in one]
        # The session's process, whether there are tables, the groups, their offsets, the clock.
        assert len(selects) == 5, selects
    assert len(watched.watch._found.lags) == 50


def test_messages_that_are_late(watched):
    """Published more than ten seconds ago, whether the group moves or not."""
    watched.send(4, seconds_ago=60)
    watched.send(3, seconds_ago=-60)
    watched.move(1, seconds_ago=0)
    assert (watched.lag(), watched.value("late_messages", topic=watched.topic)) == (6, 3)
    watched.move(4, seconds_ago=0)
    assert (watched.lag(), watched.value("late_messages", topic=watched.topic)) == (3, 0)
    watched.move(7, seconds_ago=0)
    assert (watched.lag(), watched.value("late_messages", topic=watched.topic)) == (0, 0)


def test_a_look_that_takes_long_is_followed_by_a_rest(monkeypatch):
    """As one of ten thousand partitions. Its figures are shown until a minute after the next look is due."""
    now, looks, registry = [1_000.0], [], CollectorRegistry()
    watch = GroupWatch("postgresql://x", "consumer", {}, lambda: True, registry)

    def read() -> GroupLags:
        now[0] += 3.0
        looks.append(now[0])
        return GroupLags({("g", "t"): 1}, {}, {}, {})

    monkeypatch.setattr(watch, "_read", read)
    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for at in range(1_000, 1_060, 10):
        now[0] = max(now[0], float(at))
        watch.look()
    assert looks == [1_003.0, 1_043.0]
    for at, shown in ((1_132.0, 1.0), (1_134.0, None)):
        now[0] = at
        assert registry.get_sample_value("outbox_group_lag_messages", {"group": "g", "topic": "t"}) == shown


def test_who_shows_nothing(watched):
    """Another relay holds the first lane; no tables of consumers; a reading that is stale."""
    watched.send(1)
    assert watched.lag() == 1
    watched.watch._looked = watched.watch._rest_until = time.monotonic() - 61
    assert watched.value("lag_messages", topic=watched.topic) is None
    assert watched.lag() == 1
    watched.shows = False
    assert watched.value("lag_messages", topic=watched.topic) is None
    assert watched.lag() is None
    watched.start(schema="outbox_without")
    assert watched.lag() is None
    watched.start(schema="outbox_without", required=True)
    with pytest.raises(SchemaError, match="outbox_without"):
        watched.watch.look()


def test_servers_that_are_away(watched, monkeypatch):
    monkeypatch.setattr(groups, "_KAFKA_SECONDS", 1.0)
    watched.start(url="postgresql://127.0.0.1:1/x")
    with pytest.raises(DatabaseUnavailable):
        watched.watch.look()
    # Where the consumers are not named as this relay's to show, a Kafka that is away is for others to tell.
    watched.start(servers="127.0.0.1:1")
    assert watched.lag() is None
    watched.start(servers="127.0.0.1:1", required=True)
    with pytest.raises(BrokerUnavailable):
        watched.watch.look()
