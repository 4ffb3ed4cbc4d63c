"""Changing the number of lanes."""

from __future__ import annotations

import psycopg
import pytest
from migration_support import empty, rows, while_it_waits
from rows_and_roles import login_role, put

from outbox import Event, Outbox, SchemaError
from outbox._app import migrate as db
from outbox._app import schema_drift as schema_check

__all__ = ["empty"]


def test_lanes_change_with_what_waits(empty):
    db.upgrade(empty)
    with psycopg.connect(empty) as connection:
        connection.execute("UPDATE outbox.lanes SET epoch = 41, lease_until = now() + interval '1 hour' WHERE lane = 2")
        Outbox().add_many(connection, [Event("Order", str(n), "T", {"n": n}) for n in range(200)])
        for n in range(200):
            put(connection, "outbox.failures", lane=0, id=n, aggregate_type="Order", aggregate_id=str(n))
            put(connection, "outbox.dead_letters", lane=0, id=n, aggregate_type="Order", aggregate_id=str(n))
    with pytest.raises(SchemaError, match="relays hold 1 lane;"):
        db.change_lanes(empty, 6)
    with psycopg.connect(empty) as connection:
        connection.execute("UPDATE outbox.lanes SET lease_until = '-infinity', transactional_id = 'one' WHERE lane = 2")
    with pytest.raises(SchemaError, match="a relay was killed, and of 1 lane it is not known"):
        db.change_lanes(empty, 6)
    with psycopg.connect(empty) as connection:
        connection.execute("UPDATE outbox.lanes SET transactional_id = NULL")
        before = connection.execute(
            "SELECT id, event_id, aggregate_id, payload FROM outbox.events ORDER BY id"
        ).fetchall()
    db.change_lanes(empty, 6)
    assert schema_check.check(empty) == []
    assert rows(empty, "SELECT lane, epoch FROM outbox.lanes ORDER BY lane") == [(n, 42) for n in range(6)]
    assert rows(empty, "SELECT id, event_id, aggregate_id, payload FROM outbox.events ORDER BY id") == before
    lanes = dict(rows(empty, "SELECT aggregate_id, lane FROM outbox.events"))
    assert set(lanes.values()) == set(range(6))
    for name in ("failures", "dead_letters"):
        assert dict(rows(empty, f"SELECT aggregate_id, lane FROM outbox.{name}")) == lanes
    with psycopg.connect(empty) as connection:
        Outbox().add_many(connection, [Event("Order", str(n), "T") for n in range(200)])
        assert (
            connection.execute("SELECT count(DISTINCT lane) FROM outbox.events GROUP BY aggregate_id").fetchall()
            == [(1,)] * 200
        )


def test_rights_on_the_column_stay(empty):
    db.upgrade(empty)
    with psycopg.connect(empty, autocommit=True) as connection, login_role(connection, "monitor") as role:
        connection.execute(f'GRANT SELECT (lane, id) ON outbox.events TO "{role}"')
        db.change_lanes(empty, 6)
        allowed = "SELECT has_column_privilege(%s, 'outbox.events', 'lane', 'SELECT')"
        assert connection.execute(allowed, (role,)).fetchone() == (True,)
        connection.execute(f'REVOKE ALL ON outbox.events FROM "{role}"')


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
            with pytest.raises(SchemaError, match="relays hold 1 lane;"):
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
