"""What the tests of `outbox doctor` share: settings for a database and a Kafka, and what is found about each thing."""

from __future__ import annotations

import psycopg

from outbox._clients.checks import Finding, Level
from relay.config import load
from relay.database import Connector
from relay.operations.doctor import examine, postgres
from relay.operations.doctor.run import run


def settings(database, kafka, **more):
    return load(database_url=database.url, kafka={"bootstrap.servers": kafka.bootstrap_servers}, **more)


def found(given) -> dict[str, tuple[Level, str]]:
    return {finding.about: (finding.level, finding.found) for finding in examine(given)}


def in_postgres(given) -> dict[str, Finding]:
    """Return what is found in the outbox's database, without looking at Kafka and at the consumers."""
    with Connector(given.require_database(), "test")() as connection:
        return {finding.about: finding for finding in run(postgres.checks(connection, given))}


def groups(database, **strategies: str | None) -> None:
    with psycopg.connect(database.url) as connection:
        for group, strategy in strategies.items():
            connection.execute(
                "INSERT INTO consumer.groups (grp, owner, strategy) VALUES (%s, 'me', %s)", (group, strategy)
            )
