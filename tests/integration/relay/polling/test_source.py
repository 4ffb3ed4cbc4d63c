"""The polling source on real Postgres: durability, fencing, errors."""

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
