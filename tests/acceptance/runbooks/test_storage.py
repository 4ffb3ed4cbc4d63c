"""The runbooks of partitions and of the disk: what causes their alerts, and what ends them. See test_relays.py."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from alerting import Samples, collected, firing
from prometheus_client import CollectorRegistry
from rows_and_roles import old_partition
from runbook_support import every_step_was_taken, of

from relay.database import Connector
from relay.metrics.storage import Place, StorageWatch


@pytest.fixture
def shown(outbox_postgres) -> Callable[[], Samples]:
    """A function that reads what a relay shows of the tables."""
    registry, connect = CollectorRegistry(), Connector(outbox_postgres.url, "watch")
    places = [Place(connect, "outbox", {"published": 7}), Place(connect, "consumer", {"processed_messages": 14})]
    watch = StorageWatch(places, lambda: True, registry)

    def look() -> Samples:
        watch._looked -= 61
        watch.look()
        return collected(registry)

    return look


@of("Partitions are missing or kept")
def test_the_archive_and_the_ids_were_not_pruned(operator, orders, shown):
    with psycopg.connect(orders.url, autocommit=True) as connection:
        old_partition(connection, "consumer", "processed_messages", 40)
        old_partition(connection, "outbox", "published", 9)
    assert "OutboxPruneOverdue" in firing(shown())
    operator.settings |= {"relay__archive_days": 7}
    operator.own("outbox db prune")
    assert "OutboxPruneOverdue" in firing(shown())
    operator.own("outbox db prune --consumer")
    assert "OutboxPruneOverdue" not in firing(shown())


@of("The disk fills up")
def test_what_takes_the_disk(operator, orders, shown):
    now, size = shown(), 'outbox_database_bytes{instance="a"}'
    assert now[size] > 0
    assert "OutboxDiskFills" in firing(now | {size: 40e9}, now | {size: 20e9})
    assert "OutboxDiskFills" not in firing(now | {size: 40e9})
    orders.add(5_000)
    assert "events" in [row["relname"] for row in operator.query("pg_total_relation_size")]


def test_every_step_was_taken(request):
    every_step_was_taken(request)
