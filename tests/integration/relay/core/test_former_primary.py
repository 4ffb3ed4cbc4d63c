"""A failover by DNS or a proxy, while the former primary goes on and takes writes: a split brain."""

from __future__ import annotations

import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import psycopg
import pytest
from proxy import TcpProxy
from spans import relay
from standby import Standby, needs_failover_slots
from support import backlog, wait_until, write
from wal_support import to_wal, wal

from outbox import Event
from outbox.sandbox._ports import free_ports
from relay import sessions, wiring
from relay.core.ports import DatabaseUnavailable
from relay.sessions import RelayConnector

__all__ = ["wal"]


@pytest.fixture
def later(monkeypatch):
    """A function after which five minutes have passed for the ages of sessions."""
    passed = 0.0
    monkeypatch.setattr(sessions, "_clock", lambda: time.monotonic() + passed)

    def let() -> None:
        nonlocal passed
        passed += sessions.MAX_AGE_SECONDS

    return let


@pytest.fixture
def looks(monkeypatch) -> list[float]:
    """When relays have looked where the name leads; they do it often here."""
    found: list[float] = []
    look = RelayConnector.look

    def noting(self: RelayConnector) -> None:
        look(self)
        found.append(time.monotonic())

    monkeypatch.setattr(RelayConnector, "look", noting)
    monkeypatch.setattr(wiring, "_WATCH_SECONDS", 0.2)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "polling",
        pytest.param("wal", marks=needs_failover_slots),
    ],
)
def test_a_relay_goes_over_to_the_server_to_which_the_name_leads(
    private_postgres, outbox_kafka, later, looks, wal, source
):
    primary = private_postgres({"wal_level": "logical"})
    database = private_postgres.database(primary)
    former, address = database.url, urlsplit(database.url)
    if source == "wal":
        to_wal(former, wal)
    kind = outbox_kafka.name("Order")
    with Standby(primary, synced_slots=source == "wal") as standby, TcpProxy("127.0.0.1", primary.port) as name:
        url = former.replace(f"{address.hostname}:{address.port}", name.address)
        new = standby.url(database.name)
        settings = wal | {"source": source, "delivery": "at-least-once"}

        def publish(server: str, key: str) -> None:
            write(server, [Event(kind, key, "T", {})])
            wait_until(lambda: backlog(server) == 0, 60, f"{key} to be published")

        with relay(SimpleNamespace(url=url), outbox_kafka, **settings):
            publish(former, "before")
            later()
            before = len(looks)
            # The first one may have begun before.
            wait_until(lambda: len(looks) > before + 1, what="a look")
            publish(former, "still here")
            if source == "wal":
                standby.await_slot(wal["wal__slot"])
            wait_until(standby.caught_up, what="the standby")
            standby.promote()
            name.lead_to(standby.port)
            written = {"before", "still here", "after", "and on"}
            if source == "polling":
                # Nothing tells the relay. Others stop at events that the new primary lacks: from the WAL, exactly-once.
                publish(former, "split brain")
                written.add("split brain")
            later()
            publish(new, "after")
            publish(new, "and on")
        read = [message.key().decode() for message in outbox_kafka.consume(f"{kind.lower()}-events")]
    assert set(read) == written


def test_a_session_stays_on_its_server_while_a_new_one_finds_that_a_standby_or_none(private_postgres, later):
    primary = private_postgres({"wal_level": "replica"})
    database = private_postgres.database(primary)
    address = urlsplit(database.url)
    (unused,) = free_ports(1)
    with Standby(primary) as standby, TcpProxy("127.0.0.1", primary.port) as name:
        connect = RelayConnector(database.url.replace(f"{address.hostname}:{address.port}", name.address), "test")
        with connect() as kept:
            later()
            connect.look()
            for port in (standby.port, unused):
                name.lead_to(port)
                later()
                with pytest.raises(DatabaseUnavailable):
                    connect.look()
            assert kept.execute("SELECT inet_server_port()").fetchone() == (primary.port,)
            name.lead_to(standby.port)
            standby.promote()
            # Tried again by the next look, and not five minutes later.
            connect.look()
            with pytest.raises(psycopg.OperationalError):
                kept.execute("SELECT 1")
        with connect() as opened:
            assert opened.execute("SELECT inet_server_port()").fetchone() == (standby.port,)
