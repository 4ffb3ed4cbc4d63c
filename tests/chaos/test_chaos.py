"""`make chaos`: everything is killed, stopped and woken at random for minutes; then the topic is held against the rows.

CHAOS_SECONDS (180) is how long each of the runs lasts, CHAOS_SEED chooses another course of events. Writers commit
asynchronously, so Postgres loses some of their transactions with each crash: Kafka must not have those.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest
from support import Load, check, drained, wait_until
from wal_support import to_wal

from relay.failpoints import NAMES, VARIABLE

SECONDS = float(os.environ.get("CHAOS_SECONDS", "180"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))


class Chaos:
    """Three relays, a Kafka and a Postgres, and a hand that breaks one of them at a time."""

    def __init__(self, server, database, cluster, outbox_relay, settings) -> None:
        self.chance = random.Random(SEED)
        self.server = server
        self.cluster = cluster
        self.settings = settings | {"database_url": database.url, "bootstrap_servers": cluster.bootstrap_servers}
        self.new_relay = outbox_relay
        self.done: Counter[str] = Counter()
        self.relays = [self.start() for _ in range(3)]

    def start(self):
        env = {}
        if self.chance.random() < 0.5:
            action = self.chance.choice(["kill", "error", "delay:1", "pause"])
            env = {VARIABLE: f"{self.chance.choice(sorted(NAMES))}={action}@{self.chance.randint(1, 30)}"}
            self.done[f"failpoint armed: {action}"] += 1
        return self.new_relay(env=env, **self.settings)

    def strike(self) -> None:
        names = ["kill_relay", "stop_relay", "put_relay_to_sleep", "kill_broker", "kill_postgres"]
        name = self.chance.choices(names, [8, 2, 4, 2, 1])[0]
        getattr(self, name)()
        self.done[name] += 1

    def kill_relay(self) -> None:
        victim = self.chance.randrange(3)
        self.relays[victim].kill()
        self.relays[victim] = self.start()

    def stop_relay(self) -> None:
        victim = self.chance.randrange(3)
        self.relays[victim].terminate()
        self.relays[victim] = self.start()

    def put_relay_to_sleep(self) -> None:
        relay = self.chance.choice(self.relays)
        if relay.running:
            relay.pause()
            time.sleep(self.chance.uniform(0, 6))
            relay.resume()

    def kill_broker(self) -> None:
        broker = self.chance.randrange(self.cluster.brokers)
        self.cluster.kill_broker(broker)
        time.sleep(self.chance.uniform(0, 3))
        self.cluster.start_broker(broker)

    def kill_postgres(self) -> None:
        self.server.kill()
        self.server.start()

    def end(self) -> None:
        """Kill all relays; a healthy one takes over."""
        for relay in self.relays:
            relay.kill()
        self.new_relay(**self.settings)


@pytest.mark.timeout(SECONDS * 2 + 600)
@pytest.mark.parametrize("brokers", [1, 3])
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
@pytest.mark.parametrize("source", ["polling", "wal"])
def test_chaos(private_postgres, private_kafka, outbox_relay, source, delivery, brokers):
    server = private_postgres({"synchronous_commit": "off", "wal_writer_delay": "2s"})
    database = private_postgres.database(server)
    cluster = private_kafka(brokers=brokers)
    topics = private_kafka.topics(cluster)
    topics.create_topic("order-events", 3)
    settings = {"delivery": delivery, "relay__lease_seconds": 3, "relay__batch_size": 200}
    settings |= {"kafka__reconnect_backoff_max_ms": 500, "source": source, "wal__slot": "outbox_relay"}
    if source == "wal":
        to_wal(database.url, settings)
    with Load(database.url, "Order", threads=2, keys=200, pause=0) as load:
        chaos = Chaos(server, database, cluster, outbox_relay, settings)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            goal = load.committed() + chaos.chance.randint(20, 800)
            wait_until(lambda goal=goal: load.committed() >= goal, 120, "some load")
            chaos.strike()
        load.stop()
        chaos.end()
        drained(database.url, 180)
    messages = topics.consume("order-events", timeout=180)
    repeats = check(database.url, messages)
    print(f"{source}, {delivery}, {brokers} brokers: {len(messages)} messages, {repeats} repeats, {dict(chaos.done)}")
    if delivery == "exactly-once":
        assert repeats == 0
