"""How fast one relay drains a backlog: by polling and from the WAL, at-least-once and exactly-once, beside a bare loop.

    python benchmarks/drain.py [--rows 200000] [--rounds 3]

The bare loop has the messages in memory, ready made, with the same keys, values and headers, on one idempotent producer
with the same options: what confluent-kafka can do on this machine when nothing else is to be done. The ratios are the
figures; events a second depend on the machine. Postgres here runs with fsync on. The backlog is committed a hundred
events at a time, and all of it before the relay starts; a relay that reads the WAL reads all of it from the WAL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Producer
from rich.console import Console
from rich.table import Table

from outbox.testing.fixtures import RelayFactory, Topics, migrate
from outbox.testing.kafka import KafkaCluster
from outbox.testing.postgres import PostgresServer
from relay.cdc import Cdc
from relay.config import SourceKind, WalSettings, load, producer_options
from relay.database import Connector
from relay.polling import Queries
from relay.ports import Claim
from relay.sending import message_headers
from relay.slot import SlotNames

KEYS = 5_000
TOGETHER = 100
INSERT = """
INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload)
SELECT %s, 'order-' || g %% %s::int, 'OrderPlaced', jsonb_build_object('order_id', g, 'pad', repeat(md5(g::text), 22))
  FROM generate_series(%s::int + 1, %s::int + %s::int) AS g"""
WAYS = list(itertools.product(SourceKind, ("at-least-once", "exactly-once")))
Way = tuple[SourceKind, str]


def fill(url: str, kind: str, rows: int) -> None:
    """Write the backlog: JSON of about 740 bytes, 5,000 keys."""
    with psycopg.connect(url, autocommit=True) as connection:
        for first in range(0, rows, TOGETHER):
            connection.execute(INSERT, (kind, KEYS, first, first, TOGETHER))


def bare(url: str, kafka: str, topic: str, rows: int) -> float:
    """Produce the backlog's messages from memory; give the seconds from the first to the last acknowledgement."""
    messages: list[tuple[str, bytes | None, Any]] = []
    with Connector(url, "bench")() as connection:
        for lane in range(4):
            bound = {"lane": lane, "floor": 0, "after": 0, "pending": [], "limit": rows}
            claims = map(Claim._make, connection.execute(Queries("outbox").fetch, bound))
            messages.extend((c.aggregate_id, c.value, message_headers(c, "/outbox")) for c in claims)
    assert len(messages) == rows
    options = producer_options(load(kafka={"bootstrap.servers": kafka}))
    producer = Producer(options)
    started = time.perf_counter()
    for key, value, headers in messages:
        while True:
            try:
                producer.produce(topic, value, key, headers=headers)
                break
            except BufferError:
                producer.poll(0.01)
    while len(producer):
        producer.poll(0.05)
    return time.perf_counter() - started


def prepare(url: str, relays: RelayFactory, way: Way) -> None:
    """Have the lanes read from the source; from the WAL, until nothing but the stream is left to read."""
    source, delivery = way
    wal = WalSettings()
    with Connector(url, "bench")() as connection:
        cdc = Cdc(connection, SlotNames("outbox", wal.slot, wal.publication))
        if source is SourceKind.WAL:
            cdc.setup()
        cdc.switch(source, leave_messages=True)
        if source is SourceKind.WAL:
            relay = relays(create_topics=False, delivery=delivery, source=source)
            relay.wait_for_log("acquired")
            streaming = "SELECT bool_and(streaming) FROM outbox.lanes"
            while not connection.execute(streaming).fetchone()[0]:  # type: ignore[index]
                time.sleep(0.05)
            relay.terminate()
            assert relay.wait() == 0, relay.log()


def drain(url: str, relays: RelayFactory, way: Way) -> tuple[float, dict[str, Any]]:
    """Start a relay; give the seconds from its first lane to an empty outbox, and the last line of its log."""
    source, delivery = way
    relay = relays(create_topics=False, delivery=delivery, source=source)
    with psycopg.connect(url, autocommit=True) as connection:
        relay.wait_for_log("acquired")
        started = time.perf_counter()
        empty = "SELECT NOT EXISTS (SELECT 1 FROM outbox.events)"
        while not connection.execute(empty).fetchone()[0]:  # type: ignore[index]
            time.sleep(0.02)
        seconds = time.perf_counter() - started
    relay.terminate()
    assert relay.wait() == 0, relay.log()
    return seconds, json.loads(relay.log().splitlines()[-1])


def main() -> None:
    """Run, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    table = Table("round", "bare produce()", *(f"{source}, {delivery}" for source, delivery in WAYS), "commits")
    ratios: dict[str, list[float]] = defaultdict(list)
    with (
        PostgresServer() as server,
        KafkaCluster() as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        url = server.create_database("bench")
        migrate(url)
        topics = Topics(cluster.bootstrap_servers)
        with RelayFactory(lambda: url, lambda: cluster.bootstrap_servers, Path(folder)) as relays:
            for number in range(1, options.rounds + 1):
                other = topics.create_topic(f"bare-{number}", 4)
                first, seconds = 0.0, {}
                commits = []
                # In turns: the broker and the page cache get warmer from drain to drain.
                for way in WAYS if number % 2 else reversed(WAYS):
                    kind = f"Order{number}-{way[0]}-{way[1]}"
                    topic = topics.create_topic(f"{kind.lower()}-events", 4)
                    prepare(url, relays, way)
                    fill(url, kind, options.rows)
                    first = first or bare(url, cluster.bootstrap_servers, other, options.rows)
                    seconds[way], figures = drain(url, relays, way)
                    assert len(topics.consume(topic, timeout=120)) == options.rows
                    if way[1] == "exactly-once":
                        commits.append(f"p50 {figures['commit_ms_p50']} ms, p99 {figures['commit_ms_p99']} ms")
                table.add_row(
                    str(number),
                    f"{options.rows / first:,.0f}/s",
                    *(f"{options.rows / seconds[way]:,.0f}/s" for way in WAYS),
                    "\n".join(commits),
                )
                (polled, polled_once), (streamed, streamed_once) = (
                    (seconds[source, "at-least-once"], seconds[source, "exactly-once"]) for source in SourceKind
                )
                ratios["at-least-once of bare"].append(first / polled)
                ratios["exactly-once of at-least-once"].append(polled / polled_once)
                ratios["wal of polling, at-least-once"].append(polled / streamed)
                ratios["wal of polling, exactly-once"].append(polled_once / streamed_once)
    console = Console()
    console.print(table)
    for name, values in ratios.items():
        each = ", ".join(f"{value:.2f}" for value in values)
        console.print(f"{name}: median {statistics.median(values):.2f} ({each})")


if __name__ == "__main__":
    main()
