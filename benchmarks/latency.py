"""From COMMIT to a consumer's hands at a steady load: by polling and from the WAL, in both deliveries, in the same run.

    python benchmarks/latency.py [--rate 600] [--seconds 15] [--rounds 2]

One writer, one event in each transaction, 5,000 keys, 740 bytes of JSON. The time runs from the return of COMMIT in the
writer to poll() in a read_committed consumer, both in this process. Postgres runs with fsync on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import threading
import time
from pathlib import Path

import psycopg
from confluent_kafka import Consumer, TopicPartition
from rich.console import Console
from rich.table import Table

from outbox import Event, Outbox
from outbox.testing.fixtures import RelayFactory, Topics, migrate
from outbox.testing.kafka import KafkaCluster
from outbox.testing.postgres import PostgresServer
from relay.cdc import Cdc
from relay.config import SourceKind, WalSettings
from relay.slot import SlotNames


def write(url: str, kind: str, rate: int, count: int, committed: dict[int, float]) -> None:
    """Commit ``count`` events, ``rate`` a second; note when each commit came back."""
    outbox = Outbox()
    pad = "x" * 690
    with psycopg.connect(url) as connection:
        started = time.perf_counter()
        for number in range(count):
            delay = started + number / rate - time.perf_counter()
            if delay > 0:
                time.sleep(delay)
            outbox.add(connection, Event(kind, f"order-{number % 5000}", "Placed", {"n": number, "pad": pad}))
            connection.commit()
            committed[number] = time.perf_counter()


def measure(
    url: str, kafka: str, topics: Topics, relays: RelayFactory, way: tuple[str, str], rate: int, seconds: int
) -> list[float]:
    """Give the latencies of one run, in milliseconds, sorted; the first second is left out."""
    source, delivery = way
    kind = topics.name(f"Order-{delivery}-{time.monotonic_ns()}")
    topic = topics.create_topic(f"{kind.lower()}-events", 4)
    consumer = Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": "latency",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 5,
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(4)])
    wal = WalSettings()
    with psycopg.connect(url, autocommit=True) as connection:
        cdc = Cdc(connection, SlotNames("outbox", wal.slot, wal.publication))
        if source == "wal":
            cdc.setup()
        cdc.switch(SourceKind(source), leave_messages=True)
        relay = relays(create_topics=False, delivery=delivery, source=source, name=topics.name("outbox"))
        relay.wait_for_log("acquired")
        streaming = "SELECT bool_and(streaming) FROM outbox.lanes"
        while source == "wal" and not connection.execute(streaming).fetchone()[0]:  # type: ignore[index]
            time.sleep(0.05)
    committed: dict[int, float] = {}
    received: dict[int, float] = {}
    count = rate * seconds
    writer = threading.Thread(target=write, args=(url, kind, rate, count, committed))
    writer.start()
    while len(received) < count:
        message = consumer.poll(1.0)
        if message is not None and message.error() is None:
            received[json.loads(message.value())["n"]] = time.perf_counter()
    writer.join()
    consumer.close()
    relay.terminate()
    assert relay.wait() == 0, relay.log()
    return sorted((received[n] - committed[n]) * 1000 for n in range(rate, count))


def main() -> None:
    """Run, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=600)
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    table = Table("round", "source", "delivery", "p50", "p95", "p99", "max")
    with PostgresServer() as server, KafkaCluster() as cluster, tempfile.TemporaryDirectory() as folder:
        url = server.create_database("bench")
        migrate(url)
        topics = Topics(cluster.bootstrap_servers)
        with RelayFactory(lambda: url, lambda: cluster.bootstrap_servers, Path(folder)) as relays:
            for number in range(1, options.rounds + 1):
                for way in itertools.product(("polling", "wal"), ("at-least-once", "exactly-once")):
                    times = measure(url, cluster.bootstrap_servers, topics, relays, way, options.rate, options.seconds)
                    shown = [times[len(times) * part // 100] for part in (50, 95, 99)]
                    table.add_row(str(number), *way, *(f"{ms:.1f} ms" for ms in (*shown, times[-1])))
    Console().print(table)


if __name__ == "__main__":
    main()
