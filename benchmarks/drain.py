"""How fast one relay drains a backlog, at-least-once and exactly-once, beside a bare produce() loop in the same run.

    python benchmarks/drain.py [--rows 200000] [--rounds 3]

The bare loop has the messages in memory, ready made, with the same keys, values and headers, on one idempotent producer
with the same options: what confluent-kafka can do on this machine when nothing else is to be done. The ratio is the
figure; events a second depend on the machine. Postgres here runs with fsync on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Producer
from rich.console import Console
from rich.table import Table

from outbox.testing.fixtures import RelayFactory, Topics, migrate
from outbox.testing.kafka import KafkaCluster
from outbox.testing.postgres import PostgresServer
from relay.config import load, producer_options
from relay.database import Connector
from relay.polling import Queries
from relay.ports import Claim
from relay.sending import message_headers

KEYS = 5_000
INSERT = """
INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload)
SELECT %s, 'order-' || g %% %s, 'OrderPlaced', jsonb_build_object('order_id', g, 'pad', repeat(md5(g::text), 22))
  FROM generate_series(1, %s) AS g"""


def fill(url: str, kind: str, rows: int) -> None:
    """Write the backlog: JSON of about 740 bytes, 5,000 keys."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(INSERT, (kind, KEYS, rows))


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


def drain(url: str, relays: RelayFactory, delivery: str) -> tuple[float, dict[str, Any]]:
    """Start a relay; give the seconds from its first lane to an empty outbox, and the last line of its log."""
    relay = relays(create_topics=False, delivery=delivery)
    with psycopg.connect(url, autocommit=True) as connection:
        relay.wait_for_log("lane acquired")
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
    table = Table("round", "bare produce()", "at-least-once", "of bare", "exactly-once", "of at-least-once", "commit")
    ratios: list[float] = []
    exact: list[float] = []
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
                kinds = {delivery: f"Order{number}-{delivery}" for delivery in ("at-least-once", "exactly-once")}
                other = topics.create_topic(f"bare-{number}", 4)
                first, seconds = 0.0, {}
                figures: dict[str, Any] = {}
                # In turns: the broker and the page cache get warmer from drain to drain.
                for delivery in sorted(kinds, reverse=bool(number % 2)):
                    topic = topics.create_topic(f"{kinds[delivery].lower()}-events", 4)
                    fill(url, kinds[delivery], options.rows)
                    first = first or bare(url, cluster.bootstrap_servers, other, options.rows)
                    seconds[delivery], figures = drain(url, relays, delivery)
                    assert len(topics.consume(topic, timeout=120)) == options.rows
                    if delivery == "exactly-once":
                        commit = f"p50 {figures['commit_ms_p50']} ms, p99 {figures['commit_ms_p99']} ms, AddPartitions "
                        commit += f"{figures['add_partitions_requests_per_transaction']} each"
                ratios.append(first / seconds["at-least-once"])
                exact.append(seconds["at-least-once"] / seconds["exactly-once"])
                table.add_row(
                    str(number),
                    f"{options.rows / first:,.0f}/s",
                    f"{options.rows / seconds['at-least-once']:,.0f}/s",
                    f"{ratios[-1]:.2f}",
                    f"{options.rows / seconds['exactly-once']:,.0f}/s",
                    f"{exact[-1]:.2f}",
                    commit,
                )
    table.add_section()
    table.add_row("median", "", "", f"{statistics.median(ratios):.2f}", "", f"{statistics.median(exact):.2f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
