"""The consumer's sessions over restarts, failovers and poolers, and how long they are kept."""

from __future__ import annotations

from functools import partial
from urllib.parse import urlsplit

import psycopg
import pytest
from consumer_group import ConsumerGroup
from pgbouncer import PgBouncer
from proxy import TcpProxy
from sessions_support import NAME, ask, later, read, run, sessions, terminate, url, use
from standby import Standby, set_parameter
from support import wait_until

from outbox._app import migrate as db
from outbox.consumer import connections
from outbox.consumer import postgres_errors as postgres
from outbox.consumer.model import StoredOffset
from outbox.inbox._session import Session
from spark_jobs.postgres.group_store import PostgresGroupStore

__all__ = ["later", "url"]


def test_a_session_that_the_server_ended_is_replaced_unseen(url):
    for again in (ask, read, lambda url: ask(url, reset=False)):
        pid = again(url)
        terminate(url, pid)
        assert again(url) != pid


def test_a_round_survives_a_server_that_restarts_and_lets_go_of_one_that_becomes_read_only(private_postgres):
    server = private_postgres()
    url = private_postgres.database(server).url
    db.upgrade_consumer(url)
    group = ConsumerGroup(url)
    group.begin([0])
    store = PostgresGroupStore(url, "consumer", "g", "test")
    ask(url)
    before = store.state(["t"], 1, keep_order=False)
    server.kill()
    server.start()
    assert store.state(["t"], 1, keep_order=False) == before
    assert ask(url)
    server.kill()
    # While it is away both fail as before, and work again after that.
    for again in (lambda: store.stored(["t"]), store.take_over, lambda: ask(url)):
        with pytest.raises(postgres.AWAY):
            again()
    server.start()
    assert (store.take_over(), bool(ask(url))) == (2, True)
    (driver,) = [store.stored(["t"]) and sessions(url, "outbox driver g")]
    worker = ask(url)
    set_parameter(server.url(), "default_transaction_read_only", "on")
    # One that writes has its error, and the other is told with its answer.
    with pytest.raises(postgres.AWAY):
        use(url, lambda connection: connection.execute("UPDATE consumer.groups SET owner = 'x'"))
    store.stored(["t"])
    wait_until(lambda: sessions(url, NAME) == sessions(url, "outbox driver g") == [], what="both to be closed")
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
        connection.execute("SELECT pg_reload_conf()")
    wait_until(lambda: ask(url, "SELECT current_setting('transaction_read_only')") == "off", what="writes to be taken")
    assert store.take_over() == 3
    assert (ask(url) != worker, sessions(url, "outbox driver g") != driver) == (True, True)


def asked_by(member: Session) -> int:
    """Return the group's position, as a member of the inbox reads it."""
    with member.transaction() as connection:
        [(offset,)] = connection.execute("SELECT next_offset FROM consumer.offsets")
    return int(offset)


def test_a_primary_that_goes_on_after_a_failover_is_not_asked_for_ever(private_postgres, later):
    """The name leads to the new primary, and the old one does not know that it is none: a split brain.

    Before that, a session of the standby is not kept: it may be promoted; or another server is the primary now.
    """
    primary = private_postgres({"wal_level": "replica"})
    database = private_postgres.database(primary)
    db.upgrade_consumer(database.url)
    ConsumerGroup(database.url).begin([0])
    address = urlsplit(database.url)
    with Standby(primary) as standby, TcpProxy("127.0.0.1", primary.port) as name:
        url = database.url.replace(f"{address.hostname}:{address.port}", name.address)
        store = PostgresGroupStore(url, "consumer", "g", "test")
        member = Session(partial(psycopg.connect, url))
        assert (store.take_over(), ask(url, "SELECT inet_server_port()")) == (2, primary.port)
        assert asked_by(member) == 0
        wait_until(standby.caught_up, what="the standby")
        assert read(standby.url(database.name)) != read(standby.url(database.name))
        standby.promote()
        name.lead_to(standby.port)
        run(standby.url(database.name), "UPDATE consumer.offsets SET next_offset = 7")
        # Nothing tells these sessions: the server is there, and takes writes.
        at = ("t", 0)
        assert (store.stored(["t"])[at].next_offset, ask(url, "SELECT inet_server_port()")) == (0, primary.port)
        assert asked_by(member) == 0
        later(connections.MAX_AGE_SECONDS)
        assert (store.stored(["t"])[at].next_offset, ask(url, "SELECT inet_server_port()")) == (7, standby.port)
        assert asked_by(member) == 7
        member.close()
        connections.close_all()


@pytest.mark.parametrize("again", [ask, read], ids=["effect", "read"])
def test_a_session_is_kept_for_some_minutes(url, later, again):
    pid = again(url)
    later(connections.MAX_AGE_SECONDS - 60)
    # Use makes it no younger.
    assert again(url) == pid
    later(61)
    assert again(url) != pid
    wait_until(lambda: pid not in sessions(url), what="the session's end")


# Behind a pooler.


def test_behind_a_pooler_nothing_of_others_is_reset(url):
    """Each transaction has another session of the server there: DISCARD ALL would be somebody else's."""
    with PgBouncer(url, size=1) as pooler, psycopg.connect(pooler.url, autocommit=True) as other:
        other.execute("SET lock_timeout = '77s'")
        for _ in range(3):
            assert ask(pooler.url, "SELECT current_setting('lock_timeout')") == "77s"
            assert other.execute("SHOW lock_timeout").fetchone() == ("77s",)
        # Not kept: which session the effect had can't be told.
        assert connections._here().take((pooler.url, NAME)) is None


def test_behind_a_pooler_the_driver_keeps_its_connection(url):
    ConsumerGroup(url).begin([0])
    with PgBouncer(url, size=2) as pooler:
        store = PostgresGroupStore(pooler.url, "consumer", "g", "test")
        store.stored(["t"])
        kept = connections._here()._sessions[pooler.url, "outbox driver g"]
        for generation in (2, 3):
            assert store.take_over() == generation
            assert store.state(["t"], generation, keep_order=True)[0] == {("t", 0): StoredOffset("topic-id", 0)}
            with connections.transaction(pooler.url, "outbox driver g", reset=False) as connection:
                query = "SELECT current_setting('application_name'), current_setting('client_encoding')"
                assert connection.execute(query).fetchone() == ("outbox driver g", "UTF8")
        assert connections._here()._sessions[pooler.url, "outbox driver g"] is kept
        connections.close_all()
