"""Runs work on a connection in a thread, while the connection's owner does something else.

psycopg has no call that only sends a query: it waits for the result. A thread waits instead, and the connection's owner
waits for the thread before using the connection again.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import psycopg


class Background:
    """Runs one piece of work at a time on ``connection``. The thread starts with the first one."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._executor: ThreadPoolExecutor | None = None
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start ``work``. The caller must have waited for the previous work."""
        assert self._work is None, "the connection is in use"
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._work = self._executor.submit(work)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the work, at most ``seconds``. Returns whether it is done. Raises what the work has raised."""
        if self._work is not None:
            if wait([self._work], seconds).not_done:
                return False
            work, self._work = self._work, None
            work.result()
        return True

    def close(self) -> None:
        """End the thread. Interrupts work in progress: the connection can only be closed afterwards."""
        work, self._work = self._work, None
        if work is not None and not work.done():
            interrupt(self._connection)
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


def interrupt(connection: psycopg.Connection[Any]) -> None:
    """End another thread's wait on the connection at once, even if the server does not answer."""
    with (
        contextlib.suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(connection.fileno())) as duplicate,
    ):
        duplicate.shutdown(socket.SHUT_RDWR)
