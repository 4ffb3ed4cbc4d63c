"""A database in whose ``public`` somebody has planted functions and operators. Fixtures in here are for import."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import planted
import psycopg
import pytest
from typer.testing import CliRunner

from outbox._app import migrate as db
from outbox._clients.search_path import PIN
from outbox.testing.fixtures import Database, token
from relay.cli.app import app


@pytest.fixture(scope="session")
def template(outbox_postgres_server) -> Iterator[str]:
    """A database in which everything is planted, and then the tables are made."""
    name = f"planted_{token()}"
    url = outbox_postgres_server.create_database(name)
    with psycopg.connect(url, autocommit=True) as admin:
        planted.plant(admin)
        db.upgrade(url)
        db.upgrade_consumer(url)
        assert planted.calls(admin) == 0
    yield name
    outbox_postgres_server.drop_database(name)


@pytest.fixture
def hostile(outbox_postgres_server, template, monkeypatch) -> Iterator[Database]:
    """A copy of it. Nothing of what is planted there may have been called in the end."""
    name = f"planted_{token()}"
    with Database(outbox_postgres_server.create_database(name, template=template), name) as database:
        monkeypatch.setenv("OUTBOX_DATABASE_URL", database.url)
        monkeypatch.setenv("OUTBOX_WAL__SLOT", f"slot_{name}")
        yield database
        with psycopg.connect(database.url, autocommit=True) as own:
            own.execute(PIN)
            own.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
                "WHERE database = current_database()"
            )
            assert planted.calls(own) == 0
    outbox_postgres_server.drop_database(name)


@pytest.fixture
def admin(hostile) -> psycopg.Connection[Any]:
    """A test's own connection, which looks nowhere else."""
    connection = hostile.connect(autocommit=True)
    connection.execute(PIN)
    return connection


def outbox(*words: str, ok: tuple[int, ...] = (0,)) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code in ok, (words, done.output, done.exception)
    return done.output


def foreign(connection: psycopg.Connection[Any]) -> list[Any]:
    """Return what in the schemas of ours depends on anything in public."""
    return connection.execute(
        "SELECT refobjid::regproc FROM pg_depend JOIN pg_proc ON pg_proc.oid = refobjid AND refclassid = 1255 "
        "WHERE pronamespace = 2200 AND classid <> 2617 AND classid <> 1255 AND NOT EXISTS (SELECT FROM pg_operator "
        "WHERE pg_operator.oid = objid AND classid = 2617)"
    ).fetchall()
