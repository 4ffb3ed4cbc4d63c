"""The lag of consumer groups in a relay's metrics: also of one whose consumer is gone, until it is forgotten."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, LiteralString
from unittest.mock import Mock

import psycopg
import pytest
from alerting import collected, firing, firing_by_outbox, scraped
from confluent_kafka import Producer
from counting import Counting
from inbox_support import Log
from plans import blocks
from prometheus_client import CollectorRegistry
from psycopg import sql
from rows_and_roles import login_role
from support import IMPATIENT, wait_until

from outbox.consumer.admin import status
from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.progress import LETTERS
from outbox.consumer.statements import statement
from outbox.errors import SchemaError
from outbox.sandbox._ports import free_ports
from relay.core.ports import BrokerUnavailable, DatabaseUnavailable
from relay.metrics import groups
from relay.metrics.groups import GroupLags, GroupWatch

HOUR = 3_600.0


def shown(address: str, name: str) -> dict[tuple[str, ...], float]:
    """Return a metric of the groups by the values of its labels: group, partition, topic."""
    series = {found: value for found, value in scraped(address).items() if found.startswith(f"outbox_group_{name}{{")}
    return {tuple(re.findall(r'(?:group|topic|partition)="([^"]*)"', found)): value for found, value in series.items()}


def test_a_group_whose_consumer_is_killed_for_good(outbox_postgres, outbox_kafka, outbox_relay, tmp_path):
    """Its lag and its dead letter are shown by whatever relay holds the first lane, as no consumer runs that could show
    them; the alerts last until the letter is discarded, and until the group is forgotten.
    """
    log = Log(outbox_postgres, outbox_kafka, partitions=2)
    member = log.process(tmp_path, "member", rejects="k57")
    log.produce([f"k{n}" for n in range(200)])
    wait_until(lambda: log.count() == 199 and log.letters(), 60, "the messages to be applied")
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

    def operate(*words: str) -> None:
        done = log.command(*words)
        assert done.exit_code == 0, done.output

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
    wait_until(lambda: shown(addresses[1], "dead_letters") == {(log.group,): 1}, 60, "the dead letter")
    assert ("ConsumerDeadLetters", "orders") in firing_by_outbox(scraped(addresses[1]))
    assert shown(addresses[1], "calls_stuck") == shown(addresses[1], "losses") == {(log.group,): 0}
    (letter,) = log.letters()
    operate("dead-letters", "discard", "--side", "consumer", str(letter["id"]), "--reason", "a test")
    wait_until(lambda: shown(addresses[1], "dead_letters") == {(log.group,): 0}, 60, "it to be discarded")
    assert "ConsumerDeadLetters" not in firing(scraped(addresses[1]))
    operate("offsets", "forget", log.group, "--topic", log.topic, "--reason", "gone for good")
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

    def waiting(self) -> tuple[float | None, ...]:
        """Return the group's dead letters, losses and stuck calls, as they are shown."""
        return self.value("dead_letters"), self.value("losses"), self.value("calls_stuck")

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
        # The process, whether there are tables, the groups, their offsets, the clock; whether dead letters can be read,
        # losses, stuck calls, calls that are due, the partitions with their dead letters.
        assert len(selects) == 10, selects
    assert len(watched.watch._found.lags) == len(watched.watch._counts.dead_letters) == 50


class Waiting:
    """What waits for an operator in a sink of the group ``g`` and of others."""

    def __init__(self, admin: psycopg.Connection[Any]) -> None:
        self.admin = admin

    def dead(self, count: int, group: str = "g", state: str = "dead", part: int = 0) -> None:
        """Add dead letters of the group's topic, each with a message of 1 kB."""
        self.admin.execute(
            "INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_value,"
            " message_headers, message_time, reason, error, state) "
            "SELECT %s, o.topic, o.topic_id, o.part, coalesce((SELECT max(id) FROM consumer.dead_letters), 0) + n,"
            " convert_to(repeat(md5(n::text), 32), 'UTF8'), '{}', now(), 'rejected', 'why', %s "
            "FROM consumer.offsets AS o, generate_series(1, %s) AS n WHERE o.grp = 'g' AND o.part = %s",
            (group, state, count, part),
        )

    def lost(self, count: int, group: str = "g") -> None:
        self.admin.execute(
            "INSERT INTO consumer.losses (grp, topic, topic_id, part, first_offset, end_offset, kind, detail) "
            "SELECT %s, 't', 'id', 0, n, n + 1, 'given-up', 'why' FROM generate_series(1, %s) AS n",
            (group, count),
        )

    def called(
        self, count: int, state: str = "stuck", group: str = "g", *, due: float = 0, parked: bool = False
    ) -> None:
        """Add calls that have been due for so many seconds, or are from now on."""
        self.admin.execute(
            "INSERT INTO consumer.reservations (grp, name, message_id, topic, part, message_offset, request, state,"
            " taking_back, settled_at, next_attempt_at, parked) "
            "SELECT %(grp)s, 'pay', gen_random_uuid(), 't', 0, n, '{}', %(state)s, %(state)s = 'cancelling',"
            " CASE %(state)s WHEN 'confirmed' THEN now() END, now() - %(due)s * interval '1 second', %(parked)s"
            " FROM generate_series(1, %(count)s) AS n",
            {"grp": group, "state": state, "due": due, "parked": parked, "count": count},
        )


def read_blocks(admin: psycopg.Connection[Any], query: LiteralString) -> int:
    """Return how many blocks a query of the consumers' tables reads."""
    explain = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ") + statement("consumer", query)
    ((plan,),) = admin.execute(explain).fetchone()
    return blocks(plan["Plan"])


def pages(admin: psycopg.Connection[Any], table: str) -> int:
    return admin.execute("SELECT pg_relation_size(%s::regclass) / 8192", (table,)).fetchone()[0]


def test_what_waits_for_an_operator(watched, monkeypatch):
    """Dead letters that are not retried, losses that are not accepted, stuck calls; also while Kafka is away."""
    waiting = Waiting(watched.admin)
    watched.look()
    assert watched.waiting() == (0, 0, 0)
    waiting.dead(3)
    waiting.dead(2, state="retry")
    waiting.lost(4)
    waiting.called(5)
    waiting.called(6, "reserved")
    watched.look()
    assert watched.waiting() == (3, 4, 5)
    alerts = {"ConsumerDeadLetters", "ConsumerEffectStuck", "ConsumerLosses"}
    assert firing(collected(watched.registry)) >= alerts
    watched.admin.execute("UPDATE consumer.losses SET accepted_at = now() WHERE first_offset > 1")
    watched.admin.execute("DELETE FROM consumer.dead_letters WHERE state = 'dead'")
    watched.admin.execute("UPDATE consumer.reservations SET state = 'reserved'")
    watched.look()
    assert watched.waiting() == (0, 1, 0)
    assert firing(collected(watched.registry)) & alerts == {"ConsumerLosses"}
    waiting.dead(1)
    monkeypatch.setattr(groups, "_KAFKA_SECONDS", 0.3)
    watched.start(servers="127.0.0.1:1")
    watched.look()
    assert (watched.waiting(), watched.value("lag_messages", topic=watched.topic)) == ((1, 1, 0), None)
    # A reading that is stale, and another relay that shows them.
    watched.watch._counted = watched.watch._rest_until = time.monotonic() - 61
    assert watched.waiting() == (None, None, None)
    watched.look()
    assert watched.waiting() == (1, 1, 0)
    watched.shows = False
    assert watched.waiting() == (None, None, None)


def test_calls_that_nobody_makes(watched):
    """However many there are; not those that are parked, or wait for their next attempt."""
    waiting = Waiting(watched.admin)
    waiting.called(1, "calling", due=-60)
    waiting.called(1, due=HOUR)
    waiting.called(1, "reserved", due=HOUR, parked=True)
    watched.look()
    assert watched.value("calls_overdue_seconds") == 0
    waiting.called(1, "reserved", due=200)
    waiting.called(1, "cancelling", due=100)
    watched.look()
    assert 200 <= watched.value("calls_overdue_seconds") < 260
    assert "ConsumerEffectOverdue" not in firing(collected(watched.registry))
    waiting.called(1, "calling", due=700)
    watched.look()
    assert "ConsumerEffectOverdue" in firing(collected(watched.registry))
    (group,), _, _ = status.look(watched.admin, "consumer", KafkaAdmin(watched.options))
    assert "group g: a call has been due for 11 minutes: is `outbox external run` running?" in group.problems()
    waiting.called(100_000, "confirmed", due=700)
    waiting.called(1_000, "reserved", due=500)
    watched.admin.execute("VACUUM ANALYZE consumer.reservations")
    assert read_blocks(watched.admin, status._OVERDUE) < pages(watched.admin, "consumer.reservations") / 20


def test_a_missing_right_hides_one_figure(watched):
    waiting = Waiting(watched.admin)
    waiting.dead(3)
    waiting.lost(4)
    waiting.called(5)
    with login_role(watched.admin, "relay") as role:
        watched.admin.execute(f"GRANT USAGE ON SCHEMA consumer TO {role}")
        watched.admin.execute(f"GRANT SELECT ON consumer.groups, consumer.offsets TO {role}")
        seen = []
        for table in ("dead_letters", "losses", "reservations"):
            watched.start(url=watched.url.replace("postgres@", f"{role}@"))
            watched.look()
            assert watched.value("lag_messages", topic=watched.topic) == 0
            seen.append(watched.waiting())
            watched.admin.execute(f"GRANT SELECT ON consumer.{table} TO {role}")
        assert seen == [(None, None, None), (3, None, None), (3, 4, None)]


def test_the_groups_with_the_most_are_shown(watched, monkeypatch):
    monkeypatch.setattr(groups, "MOST", 2)
    waiting = Waiting(watched.admin)
    for n in range(4):
        watched.admin.execute("INSERT INTO consumer.groups (grp, owner) VALUES (%s, 'me')", (f"g{n}",))
        waiting.lost(n, f"g{n}")
    watched.look()
    found = {
        sample.labels["group"]: sample.value
        for family in watched.registry.collect()
        for sample in family.samples
        if sample.name == "outbox_group_losses"
    }
    assert found == {"g3": 3, "g2": 2}


def test_a_hundred_thousand_dead_letters_are_counted_without_their_messages(watched):
    """In two indexes."""
    waiting = Waiting(watched.admin)
    waiting.dead(100_000)
    waiting.dead(100, state="retry")
    watched.admin.execute("VACUUM ANALYZE consumer.dead_letters")
    assert read_blocks(watched.admin, LETTERS) < pages(watched.admin, "consumer.dead_letters") / 5
    watched.look()
    assert watched.waiting() == (100_000, 0, 0)


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
    monkeypatch.setattr(groups, "_KAFKA_SECONDS", 0.3)
    watched.start(url="postgresql://127.0.0.1:1/x")
    with pytest.raises(DatabaseUnavailable):
        watched.watch.look()
    # Where the consumers are not named as this relay's to show, a Kafka that is away is for others to tell.
    watched.start(servers="127.0.0.1:1")
    assert watched.lag() is None
    watched.start(servers="127.0.0.1:1", required=True)
    with pytest.raises(BrokerUnavailable):
        watched.watch.look()
    # Kafka that names the ends of partitions, and no offsets of a time.
    with monkeypatch.context() as patched:
        patched.setattr(KafkaAdmin, "at_time", Mock(side_effect=ConsumerUnavailable("Kafka does not answer")))
        watched.start()
        assert watched.lag() is None
        watched.start(required=True)
        with pytest.raises(BrokerUnavailable, match="Kafka does not answer"):
            watched.watch.look()
    watched.options |= {"security.protocol": "ssl", "ssl.ca.location": "/being/replaced"}
    watched.start(required=True)
    with pytest.raises(BrokerUnavailable, match="is a file being replaced"):
        watched.watch.look()
