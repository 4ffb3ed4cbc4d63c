"""The polling source on real Postgres: order, late commits, fencing, errors."""

from __future__ import annotations

import psycopg
import pytest
from polling_support import add, fetched, lanes, settle, source, table, taken
from support import backlog

from outbox import Event, Outbox, SchemaError
from relay.core.lease import Lease
from relay.core.ports import LaneLost, Unavailable

__all__ = ["lanes"]


def test_nothing_is_given_that_postgres_could_still_lose(outbox_postgres, lanes):
    """A writer without synchronous commit, a role without it too: the fetch flushes what it read."""
    source_ = source(outbox_postgres, taken(lanes))
    source_.source.connection.execute("SET synchronous_commit = off")
    with outbox_postgres.connect(autocommit=True) as writer:
        writer.execute("SET synchronous_commit = off")
        for name in ("first", "second", "third"):
            with writer.transaction():
                Outbox().add(writer, Event("Order", name, "T"))
            written = writer.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
            claims = source_.fetch(10)
            assert fetched(claims) == [name]
            assert writer.execute("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", written).fetchone() == (True,)
            settle(source_, claims)
    source_.close()


def test_a_late_commit_with_a_lower_id_is_found_and_comes_first(outbox_postgres, lanes):
    source_ = source(outbox_postgres, taken(lanes))
    with psycopg.connect(outbox_postgres.url) as late:
        Outbox().add(late, Event("Order", "late", "T"))
        add(outbox_postgres, "early")
        claims = source_.fetch(10)
        assert fetched(claims) == ["early"]
        settle(source_, claims)
        add(outbox_postgres, "next")
    assert fetched(source_.fetch(10)) == ["late", "next"]
    source_.close()


def test_settling_under_an_old_epoch_deletes_nothing(outbox_postgres, lanes):
    lease = taken(lanes)
    source_ = source(outbox_postgres, lease)
    add(outbox_postgres, "a")
    claims = source_.fetch(10)
    lanes.release([lease])
    assert taken(table(outbox_postgres, "other")).epoch == lease.epoch + 1
    settle(source_, claims)
    with pytest.raises(LaneLost, match="epoch"):
        source_.flush()
    with pytest.raises(LaneLost, match="epoch"):
        source_.fetch(10)
    source_.close()
    assert backlog(outbox_postgres.url) == 1
    newcomer = source(outbox_postgres, lease)
    with pytest.raises(LaneLost, match="epoch"):
        newcomer.fetch(10)
    newcomer.close()


def test_what_the_claim_holds(outbox_postgres, lanes):
    event = Event("Order", "4711", "OrderPlaced", {"ü": 1.50}, headers={"tenant": "acme"})
    with psycopg.connect(outbox_postgres.url) as connection:
        others = [Event("Order", "b", "B", b"\x00\xff"), Event("Order", "t", "T")]
        event_id, *_ = Outbox().add_many(connection, [event, *others])
    source_ = source(outbox_postgres, taken(lanes))
    first, second, third = source_.fetch(10)
    assert (first.event_id, first.aggregate_type, first.aggregate_id) == (str(event_id), "Order", "4711")
    assert (first.event_type, first.value, first.headers) == ("OrderPlaced", '{"ü": 1.5}'.encode(), {"tenant": "acme"})
    assert first.time.endswith("Z")
    assert "T" in first.time
    assert second.value == b"\x00\xff"
    assert third.value is None
    source_.close()


def test_an_idle_source_leaves_no_transaction_open(outbox_postgres, lanes):
    source_ = source(outbox_postgres, taken(lanes))
    add(outbox_postgres, "a")
    settle(source_, source_.fetch(10))
    source_.flush()
    with psycopg.connect(outbox_postgres.url) as connection:
        states = connection.execute("SELECT state FROM pg_stat_activity WHERE application_name = 'test'").fetchall()
    assert states == [("idle",)]
    source_.close()


def test_errors_of_the_server_are_told_apart_from_missing_tables(outbox_postgres, lanes):
    source_ = source(outbox_postgres, taken(lanes))
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'test'")
    with pytest.raises(Unavailable, match="reading lane 0"):
        source_.fetch(1)
    source_.close()
    source_ = source(outbox_postgres, Lease(0, 1, 30.0, 0.0), "nowhere")
    with pytest.raises(SchemaError, match="outbox db"):
        source_.fetch(1)
    source_.close()
