"""Work on a connection in a thread, while its owner does something else.

psycopg has no call that only sends a query: it waits for the answer. A thread waits instead, and whoever owns the
connection waits for the thread before using the connection again.
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
    """Runs one piece of work at a time on ``connection``. Its thread begins with the first one."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._executor: ThreadPoolExecutor | None = None
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin with ``work``. The one before must have been waited for."""
        assert self._work is None, "the connection is in use"
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._work = self._executor.submit(work)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the work is done, ``seconds`` at most; return whether it is. Raises what it has raised."""
        if self._work is not None:
            if wait([self._work], seconds).not_done:
                return False
            work, self._work = self._work, None
            work.result()
        return True

    def close(self) -> None:
        """End the thread. Work under way is broken off: the connection can only be closed after that."""
        work, self._work = self._work, None
        if work is not None and not work.done():
            # Ends the thread's wait at once, whether the server is there or not.
            with (
                contextlib.suppress(OSError, psycopg.Error),
                socket.socket(fileno=os.dup(self._connection.fileno())) as duplicate,
            ):
                duplicate.shutdown(socket.SHUT_RDWR)
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
