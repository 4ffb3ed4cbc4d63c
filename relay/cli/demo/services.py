"""The demo's servers: those in the environment, or the sandbox's. Each run has a database and a topic of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from outbox.urls import libpq_url, with_database

if TYPE_CHECKING:
    from outbox.sandbox.sandbox import Sandbox

PARTITIONS: Final = 4


class Broker(Protocol):
    """A Kafka that the demo may stop. ``start`` returns when it answers; its data and its address stay."""

    def stop(self) -> None: ...
    def start(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Services:
    """Where the servers are. ``broker`` is None if Kafka is not ours to stop."""

    url: str
    bootstrap: str
    broker: Broker | None


@dataclass(frozen=True, slots=True)
class _SandboxBroker:
    sandbox: Sandbox

    def stop(self) -> None:
        self.sandbox.stop_kafka()

    def start(self) -> object:
        return self.sandbox.up()


def find_services() -> Services:
    """Return the servers that the environment names, otherwise the sandbox's, which are started."""
    from relay.config import check_environment

    check_environment()
    url = os.environ.get("OUTBOX_DATABASE_URL")
    bootstrap = os.environ.get("OUTBOX_KAFKA__BOOTSTRAP_SERVERS")
    if url and bootstrap:
        return Services(libpq_url(url), bootstrap, None)
    from outbox.sandbox.sandbox import Sandbox

    sandbox = Sandbox()
    state = sandbox.up()
    return Services(
        libpq_url(url) if url else state.database_url,
        bootstrap or state.bootstrap_servers,
        None if bootstrap else _SandboxBroker(sandbox),
    )


@contextmanager
def own_database(url: str, name: str) -> Iterator[str]:
    """Create a database for this run, with the outbox's and the consumers' tables. It is dropped at the end."""
    import psycopg
    from psycopg import sql

    from outbox._app import migrate

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    try:
        own = with_database(url, name)
        migrate.upgrade(own)
        migrate.upgrade_consumer(own)
        yield own
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def own_topic(kafka: Mapping[str, str], topic: str) -> Iterator[None]:
    """Create a topic for this run, deleted at its end."""
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    # Without a word about a broker that the demo stops.
    admin = AdminClient({**kafka, "log_level": 0})
    admin.create_topics([NewTopic(topic, num_partitions=PARTITIONS)])[topic].result(30)
    try:
        yield
    finally:
        admin.delete_topics([topic])[topic].result(30)
