"""A transaction of many events, which the server replays in one of its own for as long as they are taken."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import stream_bench
from proxy import Connection, TcpProxy
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from stream_bench import outboxed
from support import backlog, wait_until

from relay.wal.channel import StreamEvent
from relay.wal.from_stream import StreamReader
from relay.wal.replication import Replication

__all__ = ["outboxed"]

COUNT = 20_000
MORE = 120_000
"""More than the sockets' buffers hold, of the ids that the stream has."""
LIMIT_SECONDS = 1

WRITE = """
INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload)
SELECT 'Order', 'k', g::text, '{}' FROM generate_series(1, %s) AS g"""

SENDER = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walsender' AND datname = current_database()"
WAITS = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s"


class SlowProxy(TcpProxy):
    """Takes nothing from the server while ``takes`` is not set, and little ahead."""

    takes = threading.Event()

    def _connect(self, connection: Connection) -> bool:
        connected = super()._connect(connection)
        if connection.target is not None:
            connection.target.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        return connected

    def _from_target(self, connection: Connection, data: bytes) -> None:
        self.takes.wait()
        super()._from_target(connection, data)


def test_a_limit_of_the_role_for_transactions_does_not_end_the_stream(outboxed, monkeypatch):
    box = outboxed()
    box.admin.execute(f"ALTER DATABASE {box.admin.info.dbname} SET transaction_timeout = '{LIMIT_SECONDS}s'")
    with SlowProxy("127.0.0.1", int(conninfo_to_dict(box.url)["port"])) as proxy:
        host, _, port = proxy.address.rpartition(":")
        url = make_conninfo(box.url, host=host, port=port)
        monkeypatch.setattr(stream_bench, "Replication", lambda _url, name: Replication(url, name))
        proxy.takes.set()
        box.relay(batch=2000)
        box.streams()
        first = box.session()
        ((sender,),) = box.rows(SENDER)
        proxy.takes.clear()
        try:
            box.admin.execute(WRITE, (MORE,))
            wait_until(
                lambda: box.rows(WAITS, sender) == [("WalSenderWriteData",)],
                what="the server to wait in the middle of the transaction",
            )
            over = time.monotonic() + 2 * LIMIT_SECONDS
            wait_until(lambda: time.monotonic() > over, what="the limit to be over")
        finally:
            proxy.takes.set()
        box.until(lambda: len(box.kafka.published) >= MORE, "all events")
        assert box.session() is first
        assert box.kafka.names() == [str(number) for number in range(1, MORE + 1)]


def test_what_a_stream_repeats_is_passed_over_in_large_steps(outboxed, monkeypatch):
    """Otherwise one that always ends in the middle of a transaction never gets beyond it."""
    box = outboxed()
    box.relay(batch=2000)
    box.streams()
    box.admin.execute(WRITE, (COUNT,))
    box.read(COUNT)
    while len(box.kafka.published) < COUNT:
        box.turn()
    # The last batch is not settled, so the server sends all of the transaction again.
    announced, taken = StreamReader._announced, list[int]()

    def noted(reader: StreamReader, *arguments: Any) -> Mapping[int, Sequence[StreamEvent]]:
        found = announced(reader, *arguments)
        taken.extend(map(len, found.values()))
        return found

    monkeypatch.setattr(StreamReader, "_announced", noted)
    box.relay(batch=2000)
    box.streams()
    box.until(lambda: backlog(box.url) == 0, "the repeats to be passed over")
    assert box.given() == COUNT
    assert len(taken) <= 30, taken
