"""An outbox that is written to and read from past the relay, and one with a transaction that hangs.

Fixtures in here are for import.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import impatient
import nursery
import pytest
from confluent_kafka import Producer
from raw_kafka import UNVERIFIED, HangingTransaction
from support import IMPATIENT, carry_out
from typer.testing import CliRunner

from outbox._app import migrate as db
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics
from relay.cli.app import app
from relay.core.marker import Marker
from relay.kafka.offsets import Offsets
from relay.kafka.state_topic import StateTopic
from relay.operations.hidden_events import abort_hanging


def other_program(kafka: Any, topic: str, *partitions: int, **record: Any) -> Producer:
    """Return a producer that is no relay's, with a transaction open in these partitions."""
    other = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": f"other of {topic}"})
    other.init_transactions(60)
    other.begin_transaction()
    for partition in partitions:
        other.produce(topic, b"{}", partition=partition, **record)
    assert other.flush(30) == 0
    return other


class Outbox:
    """A database, a Kafka and a name; written to and read from past the relay."""

    program: Sequence[str] = ("-m", "relay.cli")
    decide_seconds = 1.0
    """How long commands with less patience, see impatient.py, wait for the end of a transaction."""

    def __init__(self, database, kafka: Topics, lanes: int) -> None:
        self.url = database.url
        self.kafka = kafka
        self.name = kafka.name("outbox")
        self.kinds = [kafka.name("Order"), kafka.name("Invoice")]
        self.topics = [kafka.create_topic(f"{kind.lower()}-events", 3) for kind in self.kinds]
        db.change_lanes(self.url, lanes)
        self.state = StateTopic({"bootstrap.servers": kafka.bootstrap_servers}, f"{self.name}.relay.state")
        self.state.require(lanes)

    def run(self, query: str, *values: object) -> list[tuple]:
        return carry_out(self.url, query, values)

    def add(self, kind: int, key: str, events: int) -> None:
        """Add events of one key: they have one lane."""
        self.run(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload)"
            " SELECT %s, %s, 'T', jsonb_build_object('n', n) FROM generate_series(1, %s) AS n",
            self.kinds[kind],
            key,
            events,
        )

    def keys(self, kind: int) -> dict[int, str]:
        """A key of each lane."""
        lane = self.run("SELECT generation_expression FROM information_schema.columns WHERE table_schema = 'outbox'"
                        " AND table_name = 'events' AND column_name = 'lane'")[0][0]  # fmt: skip
        rows = self.run(
            f"SELECT DISTINCT ON (lane) lane, aggregate_id FROM (SELECT {lane} AS lane, aggregate_id FROM"
            " (SELECT %s::text AS aggregate_type, 'k' || n AS aggregate_id FROM generate_series(1, 2000) AS n) AS k)"
            " AS l ORDER BY lane, aggregate_id",
            self.kinds[kind],
        )
        return dict(rows)

    def rows(self, lane: int) -> list[tuple[int, str, str, str]]:
        """Id, event id, topic and key of a lane's events."""
        found = self.run(
            "SELECT id, event_id::text, aggregate_type, aggregate_id FROM outbox.events WHERE lane = %s ORDER BY id",
            lane,
        )
        return [(id_, event_id, f"{kind.lower()}-events", key) for id_, event_id, kind, key in found]

    def left(self, where: str = "") -> int:
        return self.run("SELECT count(*) FROM outbox.events" + where)[0][0]

    def publish(self, rows) -> None:
        """Send what a relay would have sent, without settling it."""
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap_servers, "linger.ms": 5})
        contents = dict(self.run("SELECT event_id::text, payload::text FROM outbox.events"))
        for _, event_id, topic, key in rows:
            while True:
                try:
                    producer.produce(topic, contents[event_id].encode(), key, headers=[("ce_id", event_id)])
                    break
                except BufferError:
                    producer.poll(0.1)
        assert producer.flush(60) == 0

    def published(self) -> Counter[str]:
        """How often each event stands in the topics, for readers in read_committed."""
        found = Counter()
        for message in self.kafka.consume(self.topics):
            found[dict(message.headers())["ce_id"].decode()] += 1
        return found

    def lane(self, lane: int) -> dict[str, Any]:
        names = ("owner", "epoch", "last_batch", "lease_until", "transactional_id")
        query = "SELECT owner, epoch, last_batch, lease_until::text, transactional_id FROM outbox.lanes WHERE lane = %s"
        return dict(zip(names, self.run(query, lane)[0], strict=True))

    def identity(self) -> str:
        return self.run("SELECT system_identifier::text FROM pg_control_system()")[0][0]

    def marker(self, batch: int, rows=()) -> Marker:
        return Marker(batch, 1, self.identity(), 1, tuple(row[0] for row in rows), tuple(row[1] for row in rows))

    def reconcile(self, *arguments: str, failpoints: str = "") -> subprocess.CompletedProcess[str]:
        return self.command("relay", "reconcile", "--json", *arguments, failpoints=failpoints)

    def command(
        self, *arguments: str, failpoints: str = "", settings: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command: in this process, but for one that fails on purpose."""
        environment = {
            "OUTBOX_DATABASE_URL": self.url,
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": self.kafka.bootstrap_servers,
            "OUTBOX_NAME": self.name,
            **{f"OUTBOX_{name}": value for name, value in (settings or {}).items()},
        }
        others = {name: value for name, value in os.environ.items() if name.startswith("OUTBOX_")}
        if failpoints:
            inherited = {name: value for name, value in os.environ.items() if name not in others}
            environment["OUTBOX_FAILPOINTS"] = failpoints
            done = nursery.run([*self.program, *arguments], inherited | environment)
            assert "Traceback" not in done.stderr, done.stderr
            return done
        with pytest.MonkeyPatch.context() as patch:
            if self.program == IMPATIENT:
                for changed, name, value in impatient.changes(reconcile=True, decide=self.decide_seconds):
                    (patch.setitem if isinstance(changed, dict) else patch.setattr)(changed, name, value)
            here = CliRunner().invoke(app, arguments, env={**dict.fromkeys(others), **environment})
        if not isinstance(here.exception, SystemExit | None):
            raise here.exception
        return subprocess.CompletedProcess(arguments, here.exit_code, here.stdout, here.stderr)


@pytest.fixture
def outbox(outbox_postgres, outbox_kafka):
    return Outbox(outbox_postgres, outbox_kafka, 8)


class Hanging(Outbox):
    """An outbox with a batch whose transaction's markers the broker has lost.

    Batch 1 of lane 0 is settled. Batch 2 is in one partition of each topic, and in the lane's partition of the state
    topic.
    """

    program = IMPATIENT

    def __init__(self, database, kafka: Topics) -> None:
        super().__init__(database, kafka, 2)
        self.former = f"{self.name}.relay.former"
        self.id = f"{self.former}.0"
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": self.id})
        producer.init_transactions(60)
        producer.begin_transaction()
        for lane in (0, 1):
            producer.produce(self.state.name, self.marker(1).encode(), b"marker", partition=lane)
        producer.commit_transaction(60)
        kafka.await_transactions(self.state.name)
        keys = [self.keys(kind) for kind in (0, 1)]
        for kind in (0, 1):
            for lane in (0, 1):
                self.add(kind, keys[kind][lane], 5)
        self.batch = self.rows(0)
        self.other = self.rows(1)
        self.run("UPDATE outbox.lanes SET last_batch = 1, transactional_id = %s", self.former)
        self.run("UPDATE outbox.lanes SET owner = 'killed'")

    def other_program(self, topic: str, partition: int) -> Producer:
        """Return a producer that is no relay's, with a transaction open in this partition."""
        return other_program(self.kafka, topic, partition, key=b"key")

    def hang(self, state: bool = True) -> None:
        transaction = HangingTransaction(self.kafka.bootstrap_servers, self.id)
        # What others write within two seconds may belong to it: by the time of a real one, a lease has run out since.
        before = int(time.time() * 1000) - 10_000
        for topic in self.topics:
            records = [(key.encode(), b"{}", {"ce_id": event_id}) for _, event_id, of, key in self.batch if of == topic]
            transaction.write(topic, 1, records, before)
        if state:
            transaction.write(self.state.name, 0, [(b"marker", self.marker(2, self.batch).encode(), {})], before)

    def undecided(self) -> set[tuple[str, int]]:
        offsets = Offsets({"bootstrap.servers": self.kafka.bootstrap_servers})
        high = offsets.high(offsets.partitions({*self.topics, self.state.name}))
        return {tuple(found.partition) for found in offsets.await_decided(high, 0.0)}


def _unverified() -> KafkaCluster:
    return KafkaCluster(settings=UNVERIFIED)


@pytest.fixture
def unverified(of_group) -> KafkaCluster:
    """A broker that lets a producer write in a transaction which its coordinator knows nothing of."""
    return of_group.once(_unverified)


@pytest.fixture
def hanging(outbox_postgres, unverified):
    hanging = Hanging(outbox_postgres, Topics(unverified.bootstrap_servers))
    yield hanging
    # What hangs in a topic that an outbox could write is named in the next test too.
    options = {"bootstrap.servers": unverified.bootstrap_servers}
    offsets = Offsets(options)
    high = offsets.high(offsets.partitions({*hanging.topics, hanging.state.name}))
    assert abort_hanging(options, options, [hanging.id], offsets.await_decided(high, 0.0)) == []


def relay_settings(outbox: Outbox) -> dict[str, object]:
    return {
        "program": outbox.program,
        "bootstrap_servers": outbox.kafka.bootstrap_servers,
        "name": outbox.name,
        "delivery": "exactly-once",
        "relay__lease_seconds": 5,
        "relay__max_backoff_seconds": 0.5,
    }
