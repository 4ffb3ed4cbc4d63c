"""What the tests of the consumer's sessions share: to open, use, list and end them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql
from support import look_up, wait_until

from outbox.consumer import connections

NAME = "test of sessions"
PID = "SELECT pg_backend_pid()"


@pytest.fixture
def url(outbox_postgres) -> str:
    return str(outbox_postgres.url)


def ask(url: str, query: str = PID, *, reset: bool = True) -> Any:
    with connections.transaction(url, NAME, reset=reset) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row if len(row) > 1 else row[0]


def use(url: str, do: Callable[[psycopg.Connection[Any]], object]) -> None:
    with connections.transaction(url, NAME, reset=True) as connection:
        do(connection)


def read(url: str, query: str = PID) -> Any:
    [(found,)] = connections.read(url, NAME, sql.SQL(query).format(), {})
    return found


def run(url: str, query: str, *values: object) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(query.encode(), values)


def sessions(url: str, name: str = NAME) -> list[int]:
    query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s ORDER BY pid"
    return [pid for (pid,) in look_up(url, query, name)]


def terminate(url: str, pid: int) -> None:
    look_up(url, "SELECT pg_terminate_backend(%s)", pid)
    wait_until(lambda: not look_up(url, "SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid), what="the session's end")


def with_default(url: str, setting: str, value: str) -> None:
    """Give the role a default in this database, for sessions to come."""
    with psycopg.connect(url, autocommit=True) as connection:
        user, name = map(sql.Identifier, (connection.info.user, connection.info.dbname))
        connection.execute(
            sql.SQL("ALTER ROLE {} IN DATABASE {} SET {} = {}").format(user, name, sql.Identifier(setting), value)
        )


@pytest.fixture
def later(monkeypatch) -> Callable[[float], None]:
    """Let time pass for the ages of sessions."""
    passed = 0.0
    monkeypatch.setattr(connections, "_clock", lambda: time.monotonic() + passed)

    def let(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    return let
