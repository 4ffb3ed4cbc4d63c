"""A relay whose statements meet a lock that is not let go of gives them up: directly, and behind a pooler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg
import pytest
from one_lane import OneLane
from pause_rig import Rig
from pgbouncer import PgBouncer
from polling_support import polling
from support import backlog, look_up, wait_until

from outbox import Event, Outbox
from outbox.sandbox._process import patience
from relay import database
from relay.core.lease import Lease
from relay.core.ports import DatabaseUnavailable, Receipt, UnsettledBatch
from relay.database import Connector, begin_session, unavailable_on_error
from relay.lanes import LaneTable


@pytest.fixture(params=["direct", "pooled"])
def url(request, outbox_postgres) -> Iterator[str]:
    """A database's address, by way of a PgBouncer or not."""
    address = outbox_postgres.url
    if request.param == "direct":
        yield address
        return
    with PgBouncer(address, size=4) as pooler:
        yield pooler.url


@pytest.fixture
def lease(url):
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
        [lease] = LaneTable(connection, "outbox", "me", "0", 600.0).acquire(1)
    return lease


def opened(url: str, lease: Lease) -> OneLane:
    """A source. After an error it is of no further use."""
    return OneLane(polling(url), lease)


@contextmanager
def locked(url: str, table: str) -> Iterator[None]:
    """Lock a table, but not for ever: a relay without limits is to fail its test, and not to hang in it."""
    with psycopg.connect(url, prepare_threshold=None) as other:
        other.execute("SELECT set_config('idle_in_transaction_session_timeout', %s, true)", (f"{20 * patience()}s",))
        other.execute(f"LOCK TABLE outbox.{table} IN ACCESS EXCLUSIVE MODE")
        yield
        other.rollback()


def limit(monkeypatch, *, lock: float, statement: int) -> None:
    monkeypatch.setattr(database, "_LOCK_SECONDS", lock)
    monkeypatch.setattr(database, "_STATEMENT_SECONDS", statement)


def add(url: str, lane: int) -> None:
    with psycopg.connect(url, prepare_threshold=None) as connection:
        Outbox().add_many(connection, [Event("Order", f"k{n}", "T", {"n": n}) for n in range(40)])
        connection.execute("DELETE FROM outbox.events WHERE lane <> %s", (lane,))


@pytest.mark.parametrize(
    ("url", "lock", "statement", "why"),
    [("direct", 600, 1, "statement timeout"), ("pooled", 0.2, 600, "lock timeout")],
    indirect=["url"],
    ids=["statement", "lock"],
)
def test_a_read_and_a_settling_that_meet_a_lock_are_given_up(url, lease, monkeypatch, lock, statement, why):
    limit(monkeypatch, lock=lock, statement=statement)
    add(url, lease.lane)
    with opened(url, lease) as source, locked(url, "events"), pytest.raises(DatabaseUnavailable, match=why):
        source.fetch(100)
    with opened(url, lease) as source:
        claims = source.fetch(100)
        assert claims
        source.settle(Receipt(UnsettledBatch(claims)))
        with locked(url, "lanes"), pytest.raises(DatabaseUnavailable, match=why):
            source.flush()
    with opened(url, lease) as source:
        # Nothing of it was settled, and all of it is now.
        assert [claim.event_id for claim in source.fetch(100)] == [claim.event_id for claim in claims]
        source.settle(Receipt(UnsettledBatch(claims)))
        source.flush()
    assert backlog(url) == 0


def test_a_statement_outside_of_any_transaction_is_given_up_too(url, lease, monkeypatch):
    limit(monkeypatch, lock=0.2, statement=600)
    with opened(url, lease) as source, locked(url, "lanes"), pytest.raises(DatabaseUnavailable, match="lock timeout"):
        source.source.store.lane_count()
    with opened(url, lease) as source:
        assert source.source.store.lane_count() == 4


def test_the_control_loops_statements_are_given_up(url, monkeypatch):
    limit(monkeypatch, lock=0.2, statement=600)
    connection = Connector(url, "test")()
    begin_session(connection)
    table = LaneTable(connection, "outbox", "me", "0", 600.0)
    try:
        leases = table.acquire(4)
        for doing in (table.beat, table.distribution, lambda: table.renew(leases), lambda: table.acquire(1)):
            with locked(url, "lanes"), locked(url, "relays"), pytest.raises(DatabaseUnavailable, match="lock timeout"):
                doing()
        table.beat()
        assert (table.distribution().total, len(leases)) == (4, 4)
    finally:
        table.close()


@pytest.mark.parametrize(("lease_seconds", "lock"), [(15.0, "1500ms"), (600.0, "10s")])
def test_the_control_loop_waits_for_a_lock_no_longer_than_a_tenth_of_a_lease(url, lease_seconds, lock):
    """Its leases would run out meanwhile."""
    table = Rig(url, lease_seconds=lease_seconds).supervisor._connect()
    with closing(table):
        assert table._connection.execute("SELECT current_setting('lock_timeout')").fetchone() == (lock,)


def test_behind_a_pooler_no_server_keeps_the_limits(outbox_postgres):
    """They would be those of strangers, who get the same server process next."""
    address = outbox_postgres.url
    shown = "SELECT current_setting('lock_timeout') || current_setting('statement_timeout')"
    with PgBouncer(address, size=1) as pooler:
        with psycopg.connect(pooler.url, autocommit=True, prepare_threshold=None) as stranger:
            before = stranger.execute(shown).fetchone()
            connection = Connector(pooler.url, "test")()
            assert not begin_session(connection)
            assert connection.execute(shown).fetchone() == ("10s2min",)
            with connection.transaction(), connection.transaction():
                assert connection.execute(shown).fetchone() == ("10s2min",)
            connection.close()
            assert stranger.execute(shown).fetchone() == before == ("00",)


@pytest.fixture
def limited(outbox_postgres) -> None:
    """The sessions of the database have a limit for transactions. To come before ``url``: a pooler has some open."""
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {outbox_postgres.name} SET transaction_timeout = '5min'")


def test_a_limit_for_all_transactions_is_not_one_for_the_relays(limited, url):
    """It ends the session: in the middle of a statement that waits for events, or of what has to take long."""
    shown = "SELECT current_setting('transaction_timeout')"
    with closing(Connector(url, "test")()) as connection:
        assert connection.execute(shown).fetchone() == ("5min",)
        begin_session(connection)
        assert connection.execute(shown).fetchone() == ("0",)
        with connection.transaction():
            assert connection.execute(shown).fetchone() == ("0",)


def test_a_relay_that_sleeps_in_a_transaction_behind_a_pooler_lets_go_of_its_locks(outbox_postgres, monkeypatch):
    monkeypatch.setattr(database, "_IDLE_SECONDS", 1)
    address = outbox_postgres.url
    with PgBouncer(address, size=2) as pooler:
        connection = Connector(pooler.url, "test")()
        assert not begin_session(connection)
        held = "SELECT count(*) FROM pg_locks WHERE relation = 'outbox.lanes'::regclass AND mode = 'RowExclusiveLock'"

        def sleep() -> None:
            with unavailable_on_error("sleeping"), connection.transaction():
                connection.execute("UPDATE outbox.lanes SET epoch = epoch")
                assert look_up(address, held) == [(1,)]
                wait_until(lambda: look_up(address, held) == [(0,)], what="Postgres to end the session")
                connection.execute("SELECT 1")

        with pytest.raises(DatabaseUnavailable, match="idle-in-transaction"):
            sleep()
        connection.close()
