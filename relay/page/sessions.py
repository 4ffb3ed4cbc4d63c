"""Connections for the page's requests, kept between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg

_KEPT: Final = 4


class Sessions:
    """Hands out connections, each to one request at a time. ``connect`` opens one, in autocommit."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]]) -> None:
        self._connect = connect
        self._idle: list[psycopg.Connection[Any]] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def __call__(self) -> Iterator[psycopg.Connection[Any]]:
        """Yield a connection. After an error it is closed: the next request may find the server back."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        # The server may have restarted since; only a statement would show it, so one that was closed is replaced.
        if connection is None or connection.closed:
            connection = self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
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
