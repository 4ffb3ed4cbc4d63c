"""A relay that sleeps between two messages to Postgres (SIGSTOP, a paused virtual machine) keeps no lane from others.

While a pipeline has no Sync, Postgres waits for its next message without any limit of time but Postgres 17's
``transaction_timeout``: what it has locked by then stays locked. So no lane's row may be locked there.
"""

from __future__ import annotations

import fcntl
import struct
import termios
from contextlib import closing
from typing import Any

import psycopg
import pytest
from counting import Counting
from one_lane import OneLane
from pgbouncer import PgBouncer
from polling_support import add, fetched, lanes, polling, settle, taken
from proxy import Connection
from stream_bench import outboxed
from support import wait_until

from outbox import Event, Outbox
from outbox._clients.search_path import PinnedConnection
from relay.database import Connector
from relay.polling.kept_marks import KeptMarks
from relay.tasks.scheduled import NextDue, ScheduledEvents

__all__ = ["lanes", "outboxed"]

# The sessions of a name that have executed something, and wait for the next message of the same pipeline.
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND datname = current_database() "
    "AND backend_type = 'client backend' AND state = 'active' AND wait_event = 'ClientRead'"
)


ADVISORY = (
    "SELECT l.objid FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid) WHERE l.locktype = 'advisory' "
    "AND a.application_name = %s AND a.datname = current_database()"
)


class Halting(Counting):
    """Looks for locked lanes and advisory locks, wherever a client has sent statements without their Sync."""

    def __init__(self, url: str, name: str, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(url)
        self.looks = 0
        self.locked: list[Any] = []
        self._name = name
        self._admin = psycopg.connect(database, autocommit=True)
        wait = PinnedConnection.wait

        def waiting(*arguments: Any) -> Any:
            try:
                return wait(*arguments)
            finally:
                # What is sent next comes here alone.
                wait_until(lambda: not any(map(_unread, list(self._connections))), what="all to be forwarded")

        monkeypatch.setattr(PinnedConnection, "wait", waiting)

    def _from_client(self, connection: Connection, data: bytes) -> None:
        session, before = connection in self._begun, self._rest.get(connection, b"")
        super()._from_client(connection, data)
        if session and _unended(before + data):
            wait_until(lambda: self._ask(WAITING, self._name) == [(1,)], what="the statements to be executed")
            self.looks += 1
            free = self._ask("SELECT lane FROM outbox.lanes FOR UPDATE SKIP LOCKED")
            self.locked += set(self._ask("SELECT lane FROM outbox.lanes")) - set(free)
            self.locked += self._ask(ADVISORY, self._name)

    def _ask(self, query: str, *values: object) -> list[Any]:
        return self._admin.execute(query, values).fetchall()

    def close(self) -> None:
        super().close()
        self._admin.close()


def _unread(connection: Connection) -> int:
    """Return how many bytes of a client are not read yet."""
    try:
        return struct.unpack("i", fcntl.ioctl(connection.client, termios.FIONREAD, bytes(4)))[0]
    except (OSError, ValueError):
        return 0  # it is closed


def _unended(data: bytes) -> bool:
    """Return whether these messages execute a statement that no Sync follows."""
    unended = False
    while len(data) >= 5 and len(data) > (size := int.from_bytes(data[1:5], "big")):
        kind, data = data[:1], data[size + 1 :]
        unended = kind == b"E" or (unended and kind != b"S")
    return unended


@pytest.mark.parametrize("once", [False, True], ids=["at-least-once", "exactly-once"])
def test_a_relay_that_reads_the_wal(outboxed, once, monkeypatch):
    box = outboxed(2)
    with Halting(box.url, "relay", box.url, monkeypatch) as halting:
        box.url, url = halting.url, box.url
        box.relay(once=once)
        box.streams()
        names = [f"{key}{n}" for n in range(3) for key in "abcd"]
        for name in names:
            box.add(name)
            box.until(lambda name=name: name in box.kafka.names(), name)
        box.until(lambda: box.rows("SELECT count(*) FROM outbox.events") == [(0,)], "all to be settled")
        box.kill()
        box.url = url
    assert halting.looks > 3
    assert halting.locked == []


def test_a_relay_behind_a_pooler(outbox_postgres, lanes, monkeypatch):
    database = outbox_postgres.url
    with PgBouncer(database, size=4) as pooler, Halting(pooler.url, "test", database, monkeypatch) as halting:
        source = polling(halting.url, kept=KeptMarks())
        assert source.session.pooled
        lease = taken(lanes)
        with OneLane(source, lease) as one:
            assert source.store.identity([lease])[1] == {}
            assert source.store.adopt_settled([lease], {lease.lane: None}, "mine").keys() == {lease.lane}
            for name in "abc":
                add(outbox_postgres, name)
                claims = one.fetch(10)
                assert fetched(claims) == [name]
                settle(one, claims)
            assert one.fetch(10) == []
            reader = source.reader
            reader._row_marks.keep("this", list(reader._lanes.values()), {one.lane: 3})
        with outbox_postgres.connect() as writer:
            ((now,),) = writer.execute("SELECT now()").fetchall()
            Outbox().add(writer, Event("Order", "d", "d1"), not_before=now)
        due = NextDue()
        due.set(0.0)
        with closing(ScheduledEvents(Connector(halting.url, "test"), "outbox", due)) as scheduled:
            scheduled.look()
    with outbox_postgres.connect() as admin:
        assert admin.execute("SELECT aggregate_id FROM outbox.events").fetchall() == [("d",)]
        assert admin.execute("SELECT low_water_mark FROM outbox.lanes").fetchall() == [(3,)]
    assert halting.looks > 3
    assert halting.locked == []
