"""Connections for the page's requests, kept between them."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg

from relay.ports import DatabaseUnavailable

_KEPT: Final = 4
_MOST: Final = 12
"""Requests that have a connection at the same time; a further one waits for a moment."""
_WAIT_SECONDS: Final = 1.0


class Sessions:
    """Hands out connections, each to one request at a time. ``connect`` opens one, in autocommit."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]]) -> None:
        self._connect = connect
        self._idle: list[psycopg.Connection[Any]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._free = threading.BoundedSemaphore(_MOST)

    @contextmanager
    def __call__(self) -> Iterator[psycopg.Connection[Any]]:
        """Yield a connection. After an error it is closed: the next request may find the server back.

        Raises DatabaseUnavailable while too many requests wait for the server.
        """
        if not self._free.acquire(timeout=_WAIT_SECONDS):
            raise DatabaseUnavailable(f"Postgres: {_MOST} requests of this page wait for it already; try again")
        try:
            connection = self._taken()
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            self._keep(connection)
        finally:
            self._free.release()

    def _taken(self) -> psycopg.Connection[Any]:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect()
            if not connection.closed and not _is_readable(connection):
                return connection
            # The server has ended it since.
            connection.close()

    def _keep(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            keep = len(self._idle) < _KEPT and not connection.closed and not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def close(self) -> None:
        """Close the idle connections, and from now on each one after its request."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _is_readable(connection: psycopg.Connection[Any]) -> bool:
    """Return whether an idle connection has something to read: most likely that it has ended."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
