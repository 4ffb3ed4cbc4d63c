"""The demo's servers: those in the environment, or the sandbox's. Each run has its own database and topic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outbox.urls import libpq_url, with_database


@dataclass(frozen=True, slots=True)
class Servers:
    """The addresses of Postgres and Kafka. ``sandbox``: whether the sandbox runs one of them."""

    url: str
    bootstrap: str
    sandbox: bool


def find_servers() -> Servers:
    """Return the servers that the environment names, otherwise the sandbox's, which are started."""
    from outbox._app.settings import check_environment

    check_environment()
    url = os.environ.get("OUTBOX_DATABASE_URL")
    bootstrap = os.environ.get("OUTBOX_KAFKA__BOOTSTRAP_SERVERS")
    if url and bootstrap:
        return Servers(libpq_url(url), bootstrap, sandbox=False)
    from outbox.sandbox.sandbox import Sandbox

    state = Sandbox().up()
    return Servers(libpq_url(url) if url else state.database_url, bootstrap or state.bootstrap_servers, sandbox=True)


@contextmanager
def own_database(url: str, name: str) -> Iterator[str]:
    """Create a database for this run, with the outbox's and the consumers' tables. It is dropped at the end."""
    from outbox._app import migrate
    from outbox.sandbox.postgres import create_database, drop_database

    create_database(url, name)
    try:
        own = with_database(url, name)
        migrate.upgrade(own)
        migrate.upgrade_consumer(own)
        yield own
    finally:
        drop_database(url, name)
