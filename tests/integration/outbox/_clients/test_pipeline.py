"""A pipeline raises what failed first, and logs nothing about what Postgres skips after that."""

from __future__ import annotations

import logging
import select

import psycopg
import pytest

from outbox._clients.postgres import pipeline
from outbox.testing.fixtures import Database


def test_an_answer_that_comes_while_the_block_sends(
    outbox_postgres: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection, caplog.at_level(logging.DEBUG):
        gone_on: list[int] = []

        def send() -> None:
            connection.execute("SELECT 1 / 0")
            # Postgres sends an error at once.
            select.select([connection], [], [], 30)
            connection.execute("SELECT 1")
            gone_on.append(1)

        with pytest.raises(psycopg.errors.DivisionByZero), pipeline(connection):
            send()
        assert gone_on == []
        assert caplog.messages == []
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_an_answer_that_comes_after_the_block(outbox_postgres: Database) -> None:
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero), pipeline(connection):
            connection.execute("SELECT 1 / 0")
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_what_the_block_itself_raises_is_not_hidden(outbox_postgres: Database) -> None:
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        with pytest.raises(KeyError), pipeline(connection):
            raise KeyError
        with pytest.raises(psycopg.OperationalError, match="connection"), pipeline(connection):
            connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
