"""A relay, a group, and what ``outbox audit`` says of them."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Producer, TopicPartition
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka.admin import AdminClient
from inbox_member import FAST
from inbox_support import Running
from rows_and_roles import execute, login_role
from spans import relay
from support import carry_out, drained, look_up, order, wait_until, write
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from outbox import Event, Outbox
from outbox.inbox import Consumer
from relay.audit.findings import Scope
from relay.audit.follow import Follower
from relay.audit.ledger import turn_on
from relay.cli.app import app
from relay.config import load

__all__ = ["order"]

EVENTS = 60


def an_id(ago: int = 600) -> UUID:
    """Return an id of so many seconds ago."""
    return UUID(int=(int(time.time() - ago) * 1000 << 80) | (uuid7().int & ((1 << 80) - 1)))


class Pipeline:
    """A relay that archives, and a group of the inbox; each test adds events, and then does something wrong."""

    def __init__(self, database: Any, kafka: Any, kind: str, topic: str) -> None:
        self.database, self.kafka, self.kind, self.topic = database, kafka, kind, topic
        self.group = kafka.name("sums")

    @property
    def environment(self) -> dict[str, str]:
        return {
            "OUTBOX_DATABASE_URL": self.database.url,
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": self.kafka.bootstrap_servers,
            "OUTBOX_RELAY__ARCHIVE_DAYS": "1",
        }

    def kept_before(self) -> None:
        kept_before(self.database.url)

    def keep_ledger(self) -> None:
        """Turn the ledger on, as an hour ago."""
        with psycopg.connect(self.database.url, autocommit=True) as connection:
            turn_on(connection, "outbox", "to know")
        self.run("UPDATE outbox.ledger_state SET since = since - interval '1 hour'")

    @contextmanager
    def operator(self) -> Iterator[dict[str, str]]:
        """Give the environment of an operator who may see the groups."""
        with psycopg.connect(self.database.url, autocommit=True) as admin, login_role(admin, "operator") as role:
            self.command("db", "roles", f"operator={role}", f"consumer-monitor={role}", "--apply")
            yield self.environment | {"OUTBOX_DATABASE_URL": self.database.url.replace("postgres@", f"{role}@")}

    def add(self, count: int = EVENTS, keys: int = 7, *, ago: int = 0) -> list[str]:
        """Write events whose ids are of so many seconds ago, and return the ids."""
        events = [
            Event(
                self.kind,
                f"key-{number % keys}",
                "Placed",
                {"n": number, "text": "Grüße"},
                headers={"tenant": "ä", "trace": "x"} if number % 3 else {},
                event_id=an_id(ago),
            )
            for number in range(count)
        ]
        return [str(one) for one in write(self.database.url, events)]

    def schedule(self, *, ago: int) -> str:
        """Schedule an event for tomorrow whose id is of so many seconds ago, and return the id."""
        event = Event(self.kind, "key-0", "Placed", {}, event_id=an_id(ago))
        with psycopg.connect(self.database.url) as connection:
            return str(Outbox().add(connection, event, delay=dt.timedelta(days=1)))

    def due(self) -> None:
        """Let what is scheduled be due, and wait until it is published."""
        self.run("UPDATE outbox.scheduled SET not_before = now()")
        wait_until(lambda: self.rows("SELECT FROM outbox.scheduled") == [], what="the events to be moved")
        self.published()

    def published(self) -> None:
        drained(self.database.url)

    def sent(self, count: int = EVENTS) -> list[str]:
        """Write events of ten minutes ago, a minute that is over, and wait until they are published."""
        ids = self.add(count, ago=600)
        self.published()
        return ids

    def follower(self, hours: float = 1) -> Follower:
        """Return what follows this pipeline in this process, as from so many hours ago on."""
        now = dt.datetime.now(dt.UTC)
        settings = load(
            database_url=self.database.url,
            kafka={"bootstrap_servers": self.kafka.bootstrap_servers},
            relay={"archive_days": 1},
        )
        return Follower(settings, Scope(now - dt.timedelta(hours=hours), now))

    def applied(
        self, count: int, handler: Callable[..., None] = lambda *_: None, topics: Sequence[str] = (), **options: Any
    ) -> None:
        """Let the group apply messages, until it has passed so many."""
        kafka = {"bootstrap.servers": self.kafka.bootstrap_servers, **FAST}
        given = {"group": self.group, "wait": (0.01, 0.1), **options}
        running = Running(Consumer(self.database.url, [self.topic, *topics], kafka=kafka, **given), handler)
        try:
            running.wait(lambda: self.rows("SELECT sum(next_offset) FROM consumer.offsets") == [(count,)], "positions")
        finally:
            running.end()

    def command(self, *words: str, status: int = 0) -> str:
        """Run a command of ``outbox``; return what it printed."""
        done = CliRunner().invoke(app, words, env=self.environment)
        assert done.exit_code == status, (done.output, done.exception)
        return done.output

    def rows(self, query: str) -> list[Any]:
        return look_up(self.database.url, query)

    def run(self, statement: str) -> None:
        carry_out(self.database.url, statement)

    def produce(self, topic: str | None = None, **values: Any) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap_servers})
        producer.produce(topic or self.topic, **values)
        assert producer.flush(30) == 0

    def ends(self) -> dict[int, int]:
        reader = KafkaConsumer({"bootstrap.servers": self.kafka.bootstrap_servers, "group.id": "reader"})
        try:
            return {
                part: reader.get_watermark_offsets(TopicPartition(self.topic, part), 30)[1]
                for part in reader.list_topics(self.topic, 30).topics[self.topic].partitions
            }
        finally:
            reader.close()

    def cut(self, partition: int) -> None:
        """Delete a partition's records, as retention does."""
        client = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        for future in client.delete_records([TopicPartition(self.topic, partition, OFFSET_END)]).values():
            future.result(30)

    def repeat(self, event_id: str) -> None:
        """Produce an event's record again."""
        record = self.record(event_id)
        self.produce(key=record.key(), value=record.value(), headers=record.headers(), partition=record.partition())

    def record(self, event_id: str) -> Any:
        """Return an event's record."""
        reader = KafkaConsumer({"bootstrap.servers": self.kafka.bootstrap_servers, "group.id": "reader"})
        count = len(reader.list_topics(self.topic, 30).topics[self.topic].partitions)
        reader.assign([TopicPartition(self.topic, part, OFFSET_BEGINNING) for part in range(count)])
        try:
            while (message := reader.poll(30)) is not None:
                # Those of others may come first.
                if dict(message.headers() or ()).get("ce_id") == event_id.encode():
                    return message
        finally:
            reader.close()
        raise AssertionError(event_id)

    def audit(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        done = CliRunner().invoke(app, ["audit", "--json", *arguments], env=self.environment)
        assert done.stdout, (done.output, done.exception)
        return done.exit_code, json.loads(done.stdout.splitlines()[-1])

    def differences(self, *arguments: str) -> list[tuple[str, str]]:
        status, found = self.audit(*arguments)
        assert status == (1 if found["differences"] else 0)
        return sorted((one["kind"], one["event_id"]) for one in found["differences"])


def kept_before(url: str) -> None:
    """Give the archive an event from before the hour that is audited: it has been on since then."""
    execute(
        url,
        "INSERT INTO outbox.published (lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at, "
        "published_at) SELECT 0, 0, gen_random_uuid(), 'Before', 'k', 'E', at, at "
        "FROM (SELECT now() - interval '2 hours' AS at) AS before",
    )


@pytest.fixture
def pipeline(outbox_postgres: Any, outbox_kafka: Any, order: tuple[str, str]) -> Iterator[Pipeline]:
    """A pipeline whose relay runs, and whose archive has been on for long."""
    with relay(outbox_postgres, outbox_kafka, relay__archive_days=1):
        found = Pipeline(outbox_postgres, outbox_kafka, *order)
        found.kept_before()
        yield found
