"""What the tests of migrations share: an empty database, and somebody who waits for a lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest

from outbox.testing.fixtures import wait_for


@pytest.fixture
def empty(outbox_postgres_server):
    """The URL of a database with nothing in it."""
    from outbox.testing.fixtures import token

    name = f"empty_{token()}"
    yield outbox_postgres_server.create_database(name)
    outbox_postgres_server.drop_database(name)


def rows(url: str, query: str, *values: object) -> list[tuple]:
    with psycopg.connect(url) as connection:
        return connection.execute(query, values or None).fetchall()


@contextmanager
def while_it_waits(url: str, change: Callable[[], None]) -> Iterator[Future[None]]:
    """Start a change in a thread, and go on when it waits for a lock of the caller's open transaction."""
    waiting = (
        "SELECT 1 FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
        " WHERE NOT l.granted AND a.datname = current_database()"
    )
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(change)
        assert wait_for(lambda: bool(rows(url, waiting)), 20), "it does not wait"
        yield done
