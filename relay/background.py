"""Runs work on a connection in a thread, while the connection's owner does something else.

psycopg has no call that only sends a query: it waits for the result. A thread waits instead, and the connection's owner
waits for the thread before using the connection again.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

import psycopg
from psycopg import errors, pq

# How long the server may take to end a statement that was cancelled.
_CANCEL_SECONDS: Final = 5.0


class Background:
    """Runs one piece of work at a time on ``connection``. The thread starts with the first one."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._executor: ThreadPoolExecutor | None = None
        self._work: Future[object] | None = None

    def start(self, work: Callable[[], object]) -> None:
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
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)


def run_within(connection: psycopg.Connection[Any], statement: str, seconds: float) -> bool:
    """Run a statement that returns nothing, and cancel it after ``seconds``. Returns whether it ended by itself.

    By this process's clock: Postgres sleeps, and limits statements, by the wall clock of its machine. When that goes
    back by an hour, both last an hour longer. Raises psycopg.Error.
    """
    pgconn = connection.pgconn
    pgconn.send_query(statement.encode())
    waiter, deadline, late = select.poll(), time.monotonic() + seconds, False
    while True:
        waiter.register(pgconn.socket, select.POLLIN | (select.POLLOUT if pgconn.flush() else 0))
        if waiter.poll(max(deadline - time.monotonic(), 0.0) * 1000):
            pgconn.consume_input()
            if not pgconn.is_busy():
                break
        elif late:
            raise psycopg.OperationalError(f"the server has not cancelled a statement within {_CANCEL_SECONDS:g} s")
        else:
            connection.cancel_safe(timeout=_CANCEL_SECONDS)
            late, deadline = True, time.monotonic() + _CANCEL_SECONDS
    # All of them first: the connection is free only then.
    for result in list(iter(pgconn.get_result, None)):
        error = errors.error_from_result(result) if result.status == pq.ExecStatus.FATAL_ERROR else None
        if error is not None and not (late and isinstance(error, errors.QueryCanceled)):
            raise error
    return not late
