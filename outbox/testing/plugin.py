"""pytest fixtures: real Postgres, real Kafka and a real relay, for services that write events and for our own tests.

An entry point (``outbox``) loads it in every pytest run where the package is installed: so only pytest is imported at
the top, and no server starts before a test needs it.

With OUTBOX_TEST_DATABASE_URL or OUTBOX_TEST_KAFKA set, the tests use those servers, each test with its own
database and topics (the user needs CREATEDB). Tests that kill their servers are then skipped. The addresses that the
applications use (OUTBOX_DATABASE_URL …) are not taken: databases would be created and dropped wherever a shell points.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from outbox.testing.fixtures import (
        Database,
        DatabaseServer,
        KafkaServer,
        PrivateKafka,
        PrivatePostgres,
        RelayFactory,
        Topics,
    )

_DATABASE_URL = "OUTBOX_TEST_DATABASE_URL"
_BOOTSTRAP_SERVERS = "OUTBOX_TEST_KAFKA"


@pytest.fixture(scope="session")
def _outbox_extra() -> None:
    """Raise MissingExtra if the packages that the other fixtures need are not installed."""
    from outbox.errors import MissingExtra

    try:
        import outbox.testing.fixtures  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra("sandbox", error.name or "psutil") from error


@pytest.fixture(scope="session")
def outbox_postgres_server(_outbox_extra: None) -> Iterator[DatabaseServer]:
    """A Postgres server for the whole session: the given one, or a new one."""
    if url := os.environ.get(_DATABASE_URL):
        from outbox.testing.fixtures import ExternalPostgres

        yield ExternalPostgres(url)
        return
    from outbox.sandbox.postgres import PostgresServer

    # Without fsync, data survives a kill of the server, but not a crash of the machine: enough for tests.
    with PostgresServer(settings={"fsync": "off"}) as server:
        yield server


@pytest.fixture(scope="session")
def outbox_kafka_cluster(_outbox_extra: None) -> Iterator[KafkaServer]:
    """A Kafka for the whole session: the given one, or a new one with one broker."""
    if servers := os.environ.get(_BOOTSTRAP_SERVERS):
        from outbox.testing.fixtures import ExternalKafka

        yield ExternalKafka(servers)
        return
    from outbox.sandbox.kafka import KafkaCluster

    with KafkaCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def outbox_migrations() -> Callable[[str], None]:
    """A function that makes the application's own tables at an address, and leaves no connection open: override it."""
    return lambda _url: None


@pytest.fixture(scope="session")
def _outbox_template(outbox_postgres_server: DatabaseServer, outbox_migrations: Callable[[str], None]) -> Iterator[str]:
    """A database with the outbox's tables and the application's, migrated once and copied for every test."""
    from outbox.testing.fixtures import migrate, token

    name = f"outbox_template_{token()}"
    url = outbox_postgres_server.create_database(name)
    migrate(url)
    outbox_migrations(url)
    yield name
    outbox_postgres_server.drop_database(name)


@pytest.fixture
def outbox_postgres(outbox_postgres_server: DatabaseServer, _outbox_template: str) -> Iterator[Database]:
    """This test's own database, with the outbox's tables in the schema ``outbox``."""
    from outbox.testing.fixtures import Database, token

    name = f"outbox_test_{token()}"
    with Database(outbox_postgres_server.create_database(name, template=_outbox_template), name) as database:
        yield database
    outbox_postgres_server.drop_database(name)


@pytest.fixture
def outbox_kafka(outbox_kafka_cluster: KafkaServer) -> Iterator[Topics]:
    """Kafka, with topic names of this test's own; the topics are deleted after it."""
    from outbox.testing.fixtures import Topics

    with Topics(outbox_kafka_cluster.bootstrap_servers) as topics:
        yield topics


@pytest.fixture
def outbox_relay(_outbox_extra: None, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RelayFactory]:
    """A function that starts ``outbox relay run`` in a process of its own; all are killed after the test.

    By default it serves this test's ``outbox_postgres`` and ``outbox_kafka``.
    """
    from outbox.testing.fixtures import RelayFactory

    def database_url() -> str:
        database: Database = request.getfixturevalue("outbox_postgres")
        return database.url

    def bootstrap_servers() -> str:
        topics: Topics = request.getfixturevalue("outbox_kafka")
        return topics.bootstrap_servers

    # Set up now, if the test uses them at all, so that they are torn down after the relays.
    for name in ("outbox_postgres", "outbox_kafka"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    with RelayFactory(database_url, bootstrap_servers, tmp_path) as factory:
        yield factory


@pytest.fixture
def private_postgres(_outbox_extra: None) -> Iterator[PrivatePostgres]:
    """A function that starts a Postgres that this test may kill and restart; see PrivatePostgres."""
    if os.environ.get(_DATABASE_URL):
        pytest.skip(f"{_DATABASE_URL} is set, and this test kills its Postgres: unset it to run this test")
    from outbox.testing.fixtures import PrivatePostgres

    with PrivatePostgres() as factory:
        yield factory


@pytest.fixture
def private_kafka(_outbox_extra: None) -> Iterator[PrivateKafka]:
    """A function that starts a Kafka that this test may kill and restart; see PrivateKafka."""
    if os.environ.get(_BOOTSTRAP_SERVERS):
        pytest.skip(f"{_BOOTSTRAP_SERVERS} is set, and this test kills its Kafka: unset it to run this test")
    from outbox.testing.fixtures import PrivateKafka

    with PrivateKafka() as factory:
        yield factory
