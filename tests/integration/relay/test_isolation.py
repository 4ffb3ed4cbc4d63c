"""The relay's statements are read committed, whatever a role or a database has as its default."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest
from one_lane import OneLane
from pgbouncer import PgBouncer
from polling_support import add, fetched, lanes, polling, taken
from psycopg.conninfo import conninfo_to_dict
from rows_and_roles import Roles, outbox, roles
from support import wait_until

from relay.database import Connector, one_snapshot
from relay.operations.roles import RoleKind
from relay.polling import source as polling_source

__all__ = ["lanes", "roles"]

LEVEL = "SELECT current_setting('transaction_isolation'), current_setting('transaction_read_only')"
COMMITTED, SNAPSHOT = [("read committed", "off")], [("repeatable read", "on")]


@pytest.fixture
def url(roles: Roles) -> str:
    """A relay's role that has another default."""
    made = roles.of(RoleKind.RELAY)
    role = conninfo_to_dict(made)["user"]
    roles.admin.execute(f"ALTER ROLE {role} SET default_transaction_isolation = 'serializable'")
    with psycopg.connect(made) as connection:
        assert connection.execute(LEVEL).fetchall() == [("serializable", "off")]
    return made


@pytest.fixture(params=["direct", "pooled"])
def connection(url, request) -> Iterator[psycopg.Connection]:
    with ExitStack() as stack:
        if request.param == "pooled":
            url = stack.enter_context(PgBouncer(url, size=4)).url
        yield stack.enter_context(Connector(url, "test")())


def test_statements_and_transactions_are_read_committed_and_reports_one_snapshot(connection):
    assert connection.execute(LEVEL).fetchall() == COMMITTED
    with connection.transaction():
        assert connection.execute(LEVEL).fetchall() == COMMITTED
    with one_snapshot(connection, 30.0):
        assert connection.execute(LEVEL).fetchall() == SNAPSHOT
    with pytest.raises(psycopg.errors.QueryCanceled), one_snapshot(connection, 0.01):
        connection.execute("SELECT pg_sleep(60)")
    with connection.transaction():
        assert connection.execute(LEVEL).fetchall() == COMMITTED


def test_an_event_that_comes_during_a_wait_ends_it(outbox_postgres, url, lanes, roles, monkeypatch):
    monkeypatch.setattr(polling_source, "_MAX_WAIT_SECONDS", 60.0)
    watching = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'DO %'"
    with OneLane(polling(url), taken(lanes)) as source:
        assert source.fetch(10) == []

        def write() -> None:
            wait_until(lambda: roles.admin.execute(f"{watching} AND state = 'active'").fetchone() == (1,))
            add(outbox_postgres, "a")

        writer = threading.Thread(target=write)
        writer.start()
        began = time.monotonic()
        assert source.wait(60.0)
        assert time.monotonic() - began < 50.0
        writer.join()
        assert fetched(source.fetch(10)) == ["a"]


def test_the_status_is_shown_behind_a_pooler(outbox_postgres, outbox_kafka):
    with PgBouncer(outbox_postgres.url, size=4) as pooler:
        shown = outbox(pooler.url, "status", status=1, kafka__bootstrap_servers=outbox_kafka.bootstrap_servers)
    assert "no relay is running" in shown
