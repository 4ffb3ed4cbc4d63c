"""The demo's servers: those in the environment, or the sandbox's. Each run has its own database and topic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from outbox.urls import libpq_url, with_database

PARTITIONS: Final = 4


@dataclass(frozen=True, slots=True)
class Servers:
    """The addresses of Postgres and Kafka."""

    url: str
    bootstrap: str


def find_servers() -> Servers:
    """Return the servers that the environment names, otherwise the sandbox's, which are started."""
    from outbox._app.settings import check_environment

    check_environment()
    url = os.environ.get("OUTBOX_DATABASE_URL")
    bootstrap = os.environ.get("OUTBOX_KAFKA__BOOTSTRAP_SERVERS")
    if url and bootstrap:
        return Servers(libpq_url(url), bootstrap)
    from outbox.sandbox.sandbox import Sandbox

    state = Sandbox().up()
    return Servers(libpq_url(url) if url else state.database_url, bootstrap or state.bootstrap_servers)


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
def own_topic(bootstrap: str, topic: str) -> Iterator[None]:
    """Create a topic for this run, deleted at its end."""
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, num_partitions=PARTITIONS)])[topic].result(30)
    try:
        yield
    finally:
        admin.delete_topics([topic])[topic].result(30)
