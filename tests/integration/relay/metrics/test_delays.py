"""How long events took to Kafka: what a relay shows is what the database's clock says of them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping

import psycopg
from prometheus_client.parser import text_string_to_metric_families
from support import drained, order, wait_until

from outbox import Event, Outbox
from outbox.sandbox._ports import free_ports

__all__ = ["order"]

NAME = "outbox_relay_publish_delay_seconds"
LATE = """
INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload, created_at)
SELECT %s, 'k' || n, 'T', '{}', clock_timestamp() - %s * interval '1 second' FROM generate_series(1, %s) AS n"""


def scraped(port: int) -> Mapping[tuple[str, str], float]:
    """Return the histogram: by topic and limit, "sum" or "count"."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.labels["topic"], sample.labels.get("le") or sample.name.rpartition("_")[2]): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(NAME) and sample.labels["outbox"] == "orders"
    }


def test_the_histogram_holds_what_the_database_says(outbox_postgres, outbox_kafka, outbox_relay, order):
    url, (kind, topic) = outbox_postgres.url, order
    other = outbox_kafka.create_topic(outbox_kafka.name("other"), 1)
    with psycopg.connect(url, autocommit=True) as connection:
        ((began,),) = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchall()
        for seconds, count in ((2_000, 5), (120, 10)):
            connection.execute(LATE, (kind, seconds, count))
        with connection.transaction():
            Outbox().add_many(connection, [Event(kind, f"k{n}", "T", {}) for n in range(3_000)])
        connection.execute(LATE, ("Other", 7_200, 2))
    (port,) = free_ports(1)
    outbox_relay(
        name="orders",
        delivery="exactly-once",
        relay__metrics_address=f"127.0.0.1:{port}",
        routes=json.dumps({kind: {"topic": topic}, "Other": {"topic": other}}),
    )
    drained(url)
    found = wait_until(lambda: len(found := scraped(port)) == 2 * 19 and found, what="the histogram")
    with psycopg.connect(url) as connection:
        ((ended,),) = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchall()
    assert [found[topic, limit] for limit in ("60.0", "300.0", "900.0", "3600.0", "+Inf", "count")] == [
        *(3_000, 3_010, 3_010, 3_015, 3_015, 3_015)
    ]
    assert [found[other, limit] for limit in ("3600.0", "+Inf", "count")] == [0, 2, 2]
    # Each event is published between the two looks at the database's clock.
    assert 11_200 <= found[topic, "sum"] <= 11_200 + 3_015 * (ended - began)
    assert 14_400 <= found[other, "sum"] <= 14_400 + 2 * (ended - began)
