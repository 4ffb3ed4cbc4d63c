"""The relay's sessions in the outbox's database, and how they leave a former primary that goes on.

A failover by DNS or a proxy breaks no connection while the former primary runs, and takes writes: a split brain. So
from time to time a new session shows where the URL's name leads; sessions on another server than that are ended, and
their owners go on as after any lost connection.

| where a new session arrives        | what follows                                                                    |
|------------------------------------|---------------------------------------------------------------------------------|
| at the server of the others        | nothing                                                                         |
| at another one, or it was started  | those of the others are ended                                                   |
| again, as behind a pooler          |                                                                                 |
| at a standby, or nowhere           | nothing: it may be promoted; the task is tried again, and reported as failing   |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

import structlog

from outbox._clients.search_path import PinnedConnection
from outbox.consumer.connections import MAX_AGE_SECONDS
from relay.background import interrupt
from relay.database import Connector, unavailable_on_error
from relay.polling.kept_marks import Server
from relay.polling.queries import SERVER

log = structlog.get_logger("relay")

_clock: Callable[[], float] = time.monotonic


class RelayConnector(Connector):
    """A Connector that knows the servers of its open connections. Thread-safe."""

    def __init__(self, url: str, application_name: str) -> None:
        super().__init__(url, application_name)
        self._lock = threading.Lock()
        self._servers: Final = WeakKeyDictionary[PinnedConnection, Server]()
        self._due = _clock() + MAX_AGE_SECONDS

    def __call__(self) -> PinnedConnection:
        connection = super().__call__()
        try:
            with unavailable_on_error("asking which server it is"):
                (server,) = connection.execute(SERVER).fetchall()
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._servers[connection] = Server(*server)
        return connection

    def look(self) -> None:
        """Every MAX_AGE_SECONDS, end the sessions that are not on the server to which a new one leads.

        Raises Unavailable or SchemaError.
        """
        if _clock() < self._due:
            return
        with self._lock:
            # Not those that are opened meanwhile: the WAL may be longer by then.
            known = list(self._servers.items())
        with self() as newest, self._lock:
            now = self._servers[newest]
        former = [each for each, server in known if not (each.closed or server.has_become(now))]
        self._due = _clock() + MAX_AGE_SECONDS
        if former:
            log.warning("the database's name leads to another server; sessions are opened again", sessions=len(former))
        for each in former:
            interrupt(each)
