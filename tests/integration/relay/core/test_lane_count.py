"""Changing the number of lanes."""

from __future__ import annotations

import psycopg
import pytest
from migration_support import empty, rows, while_it_waits
from psycopg import sql

from outbox import Event, Outbox, SchemaError
from outbox._app import migrate as db
from outbox._app import schema_drift as schema_check

__all__ = ["empty"]


def test_lanes_change_after_a_drain(empty):
    db.upgrade(empty)
    with psycopg.connect(empty) as connection:
        connection.execute("UPDATE outbox.lanes SET epoch = 41 WHERE lane = 2")
        Outbox().add(connection, Event("Order", "1", "T"))
    with pytest.raises(SchemaError, match="1 events are not published"):
        db.change_lanes(empty, 6)
    with psycopg.connect(empty) as connection:
        connection.execute("DELETE FROM outbox.events")
        connection.execute("UPDATE outbox.lanes SET lease_until = now() + interval '1 hour' WHERE lane = 1")
    with pytest.raises(SchemaError, match="relays hold 1 lanes"):
        db.change_lanes(empty, 6)
    with psycopg.connect(empty) as connection:
        connection.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
    db.change_lanes(empty, 6)
    assert schema_check.check(empty) == []
    assert rows(empty, "SELECT lane, epoch FROM outbox.lanes ORDER BY lane") == [(n, 42) for n in range(6)]
    with psycopg.connect(empty) as connection:
        Outbox().add_many(connection, [Event("Order", str(n), "T") for n in range(200)])
        assert connection.execute("SELECT count(DISTINCT lane) FROM outbox.events").fetchone() == (6,)


def test_lanes_do_not_change_under_a_relay_that_is_taking_one(empty):
    """The relay's transaction is open when the change starts: its lease must be seen, and its row kept."""
    db.upgrade(empty)
    with psycopg.connect(empty) as relay:
        relay.execute(
            "UPDATE outbox.lanes SET owner = 'me', epoch = epoch + 1,"
            " lease_until = now() + interval '1 hour' WHERE lane = 2"
        )
        with while_it_waits(empty, lambda: db.change_lanes(empty, 6)) as done:
            relay.commit()
            with pytest.raises(SchemaError, match="relays hold 1 lanes"):
                done.result(30)
    assert rows(empty, "SELECT owner, epoch FROM outbox.lanes WHERE lane = 2") == [("me", 1)]


def test_new_lanes_get_epochs_that_no_relay_ever_had(empty):
    db.upgrade(empty)
    with psycopg.connect(empty) as relay:
        relay.execute("UPDATE outbox.lanes SET epoch = 41 WHERE lane = 2")
        with while_it_waits(empty, lambda: db.change_lanes(empty, 6)) as done:
            relay.commit()
            done.result(30)
    assert {row[0] for row in rows(empty, "SELECT epoch FROM outbox.lanes")} == {42}


def test_lanes_do_not_wait_for_ever(empty, monkeypatch):
    monkeypatch.setattr(db, "_LOCK_TIMEOUT", "100ms")
    db.upgrade(empty)
    with psycopg.connect(empty) as relay:
        relay.execute("UPDATE outbox.lanes SET epoch = 1")
        with pytest.raises(SchemaError, match="long transactions use these tables; try again"):
            db.change_lanes(empty, 6)


@pytest.mark.parametrize("name", ["failures", "dead_letters"])
def test_lanes_do_not_change_while_failed_events_are_kept(empty, name):
    db.upgrade(empty)
    table = sql.Identifier("outbox", name)
    with psycopg.connect(empty) as connection:
        # As the migration that brings them is not this test's matter: any table of that name with a row in it.
        connection.execute(sql.SQL("DROP TABLE IF EXISTS {} CASCADE").format(table))
        connection.execute(sql.SQL("CREATE TABLE {} AS SELECT 1 AS event_id").format(table))
    with pytest.raises(SchemaError, match=rf"outbox\.{name} has 1 rows.*retry or discard"):
        db.change_lanes(empty, 6)
    with psycopg.connect(empty) as connection:
        connection.execute(sql.SQL("DELETE FROM {}").format(table))
    db.change_lanes(empty, 6)
