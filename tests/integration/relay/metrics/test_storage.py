"""Sizes, dead rows and partitions in a relay's metrics, as the server has them."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest
from alerting import collected, firing
from prometheus_client import CollectorRegistry
from rows_and_roles import login_role, old_partition
from support import wait_until

from outbox import Event, Outbox
from outbox.consumer.retention import IdRetention
from relay.audit.ledger import turn_on
from relay.core.ports import Unavailable
from relay.database import Connector
from relay.metrics.storage import Place, StorageWatch
from relay.tasks.archive import Retention

DAY = 86_400.0


class Watched:
    """A watch of both schemas of a database."""

    def __init__(self, url: str) -> None:
        self.registry = CollectorRegistry()
        connect = Connector(url, "watch")
        places = [Place(connect, "outbox", {"published": 7}), Place(connect, "consumer", {"processed_messages": 14})]
        self.shows = True
        self.watch = StorageWatch(places, lambda: self.shows, self.registry)

    def look(self) -> None:
        self.watch._looked -= 61
        self.watch.look()

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"outbox_{name}", labels)

    def of(self, name: str, table: str, schema: str = "outbox") -> float | None:
        self.look()
        return self.value(f"table_{name}", schema=schema, table=table)


def test_rows_dead_rows_and_bytes(outbox_postgres):
    watched = Watched(outbox_postgres.url)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox.events SET (autovacuum_enabled = off)")
        with connection.transaction():
            Outbox().add_many(connection, [Event("Order", f"k{n}", "T", {"n": n}) for n in range(1_000)])
        connection.execute("DELETE FROM outbox.events WHERE lane <> 0")
        ((left, size),) = connection.execute(
            "SELECT count(*), pg_total_relation_size('outbox.events') FROM outbox.events"
        ).fetchall()
        connection.execute("SELECT pg_stat_force_next_flush()")
        wait_until(lambda: watched.of("dead_rows", "events") == 1_000 - left, what="the server's statistics")
        assert (watched.of("rows", "events"), watched.of("bytes", "events")) == (left, size)
        ((database,),) = connection.execute("SELECT pg_database_size(current_database())").fetchall()
    assert watched.value("database_bytes") == pytest.approx(database, rel=0.1)
    assert (watched.value("wal_directory_bytes") or 0) > 1 << 20
    assert watched.value("wal_kept_bytes") is not None


def test_partitions_that_are_missing_or_should_be_gone(outbox_postgres):
    url = outbox_postgres.url
    watched = Watched(url)
    Retention(Connector(url, "archive"), "outbox", 7).keep()
    IdRetention(url, "consumer", 14).make()
    assert firing(_samples(watched)) <= {"OutboxNotPublishing"}
    with psycopg.connect(url, autocommit=True) as connection:
        old_partition(connection, "outbox", "published", 9)
        old_partition(connection, "consumer", "processed_messages", 40)
        connection.execute("ALTER TABLE outbox.published_default SET (autovacuum_enabled = off)")
        connection.execute(
            "INSERT INTO outbox.published_default (lane, id, event_id, aggregate_type, aggregate_id, event_type, "
            "created_at, published_at) SELECT 0, 1, gen_random_uuid(), 'Order', 'k', 'T', now(), now() + '1 year'"
        )
        connection.execute("SELECT pg_stat_force_next_flush()")
    # Its day ended a day later; so many are kept.
    assert watched.of("prune_overdue_seconds", "published") == pytest.approx(DAY * 1.5, abs=DAY * 0.6)
    assert watched.of("prune_overdue_seconds", "processed_messages", "consumer") == pytest.approx(25.5 * DAY, abs=DAY)
    wait_until(lambda: watched.of("rows", "published_default") == 1, what="the server's statistics")
    assert firing(_samples(watched)) >= {"OutboxPruneOverdue", "OutboxPartitionsMissing"}
    # What `outbox db prune` does for these.
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP TABLE outbox.old_partition, consumer.old_partition")
        connection.execute("TRUNCATE outbox.published_default")
        connection.execute("SELECT pg_stat_force_next_flush()")
    wait_until(lambda: firing(_samples(watched)) <= {"OutboxNotPublishing"}, what="the alerts to be over")


def test_of_a_sink_that_is_idle_no_ids_are_overdue(outbox_postgres):
    """Their days count back from the newest, so nothing can be pruned."""
    url = outbox_postgres.url
    retention = IdRetention(url, "consumer", 14)
    with psycopg.connect(url, autocommit=True) as connection:
        old_partition(connection, "consumer", "processed_messages", 40)
        connection.execute("ALTER TABLE consumer.old_partition RENAME TO processed_40")
        old_partition(connection, "consumer", "processed_messages", 30)
        day = "(current_date - 30)::timestamptz + interval '1 hour'"
        connection.execute(
            "INSERT INTO consumer.groups (grp, owner) VALUES ('g', 'test') ON CONFLICT DO NOTHING;"
            f"INSERT INTO consumer.processed_messages (grp, day, message_id, seen_at) SELECT 'g', current_date - 30,"
            f" gen_random_uuid(), {day}"
        )
    watched = Watched(url)
    assert watched.of("prune_overdue_seconds", "processed_messages", "consumer") == 0
    assert retention.due().dropped == []


def test_a_role_without_pg_monitor_sees_all_but_the_wal_directory(outbox_postgres):
    with outbox_postgres.connect(autocommit=True) as admin, login_role(admin, "relay") as role:
        watched = Watched(outbox_postgres.url.replace("postgres@", f"{role}@"))
        assert (watched.of("bytes", "events") or 0) > 0
        assert (watched.of("bytes", "processed_messages_default", "consumer") or 0) > 0
        assert watched.value("wal_directory_bytes") is None
        assert (watched.value("database_bytes") or 0) > 0


def test_it_is_read_once_a_minute_and_shown_by_one_relay(outbox_postgres, monkeypatch):
    watched = Watched(outbox_postgres.url)
    watched.watch.look()
    looked = watched.watch._looked
    watched.watch.look()
    assert watched.watch._looked == looked
    watched.watch._looked = time.monotonic() - 241
    assert watched.value("database_bytes") is None
    watched.look()
    assert watched.value("database_bytes") is not None
    watched.shows = False
    watched.look()
    assert watched.value("database_bytes") is None


def _samples(watched: Watched) -> Any:
    watched.look()
    return collected(watched.registry)


def test_a_place_that_is_away_hides_no_other(outbox_postgres):
    watched = Watched(outbox_postgres.url)
    places = watched.watch._places
    away = Place(Connector("postgresql://postgres@127.0.0.1:1/nowhere", "watch"), "consumer", {})
    watched.watch._places = [places[0], away]
    with pytest.raises(Unavailable):
        watched.look()
    assert (watched.value("table_bytes", schema="outbox", table="events") or 0) > 0
    assert (watched.value("database_bytes") or 0) > 0
    watched.watch._places = [Place(away.connect, "outbox", {}), places[1]]
    with pytest.raises(Unavailable):
        watched.look()
    assert watched.value("table_bytes", schema="outbox", table="events") is None
    assert (watched.value("table_bytes", schema="consumer", table="offsets") or 0) > 0
    assert watched.value("database_bytes") is None


def test_all_tables_of_ours_are_shown_and_none_of_a_user(outbox_postgres):
    watched = Watched(outbox_postgres.url)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        turn_on(connection, "outbox", None)
        ours = connection.execute(
            "SELECT nspname, relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace"
            " WHERE nspname IN ('outbox', 'consumer') AND relkind = 'r'"
        ).fetchall()
        # Neither end is a time.
        for kind, low, high in (("bigint", "20260101", "20270101"), ("text", "2026-01-41", "2026-02-31")):
            connection.execute(f"CREATE TABLE outbox.mine_{kind} (a {kind}) PARTITION BY RANGE (a)")
            connection.execute(
                f"CREATE TABLE outbox.part_{kind} PARTITION OF outbox.mine_{kind}"
                f" FOR VALUES FROM ('{low}') TO ('{high}')"
            )
    watched.look()
    shown = [sample.labels for family in watched.registry.collect() for sample in family.samples]
    assert {(labels["schema"], labels["table"]) for labels in shown if "table" in labels} == set(ours)
