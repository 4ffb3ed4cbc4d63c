"""Connections for the page's requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, Final

import psycopg

from relay.core.ports import DatabaseUnavailable

_MOST: Final = 12
"""Connections at the same time; a further request waits for a moment. They must not take all threads of the page."""
_WAIT_SECONDS: Final = 1.0


def limited(
    connect: Callable[[], psycopg.Connection[Any]],
) -> Callable[[], AbstractContextManager[psycopg.Connection[Any]]]:
    """Return a function whose context is a new connection, of at most a certain number at the same time.

    It raises DatabaseUnavailable while too many requests wait for the server.
    """
    free = threading.BoundedSemaphore(_MOST)

    @contextmanager
    def connection() -> Iterator[psycopg.Connection[Any]]:
        if not free.acquire(timeout=_WAIT_SECONDS):
            raise DatabaseUnavailable(f"Postgres: {_MOST} requests of this page wait for it already; try again")
        try:
            with closing(connect()) as opened:
                yield opened
        finally:
            free.release()

    return connection
