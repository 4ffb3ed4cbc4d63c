"""Debezium's JDBC sink connector on a Kafka Connect worker of its own.

It wants records with a schema. Connect's JsonConverter takes one for all messages from its settings
(``schema.content``, KIP-1054), so it reads the very messages that the others read, without a schema in each of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql

from benchmarks.consuming.stage import ORDERS, Stage
from outbox.sandbox import jars
from release.jars import Roots

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from peers.connect import Worker

LOCK: Final = Path(__file__).parents[1] / "jars.lock"
SINK: Final = "debezium-jdbc"
POOL: Final = "hibernate"

_DEBEZIUM: Final = "3.6.0.Final"
_HIBERNATE: Final = "7.2.19.Final"

ROOTS: Final[Roots] = {
    # One by one, as in tests/peers/connect.py: what Connect has itself does not belong into a plugin.
    SINK: (
        False,
        (
            f"io.debezium:debezium-api:{_DEBEZIUM}",
            f"io.debezium:debezium-config:{_DEBEZIUM}",
            f"io.debezium:debezium-connect-plugins:{_DEBEZIUM}",
            f"io.debezium:debezium-connector-common:{_DEBEZIUM}",
            f"io.debezium:debezium-connector-jdbc:{_DEBEZIUM}",
            f"io.debezium:debezium-openlineage-api:{_DEBEZIUM}",
            f"io.debezium:debezium-sink:{_DEBEZIUM}",
            f"io.debezium:debezium-util:{_DEBEZIUM}",
            # But not what it is a module of: Hibernate looks for modules in the worker's jars too.
            "com.fasterxml.jackson.datatype:jackson-datatype-jsr310:2.21.2",
            "org.postgresql:postgresql:42.7.13",
        ),
    ),
    # Debezium names 7.2.6.Final, of which not every repository has the pool.
    POOL: (
        True,
        (
            f"org.hibernate.orm:hibernate-core:{_HIBERNATE}",
            f"org.hibernate.orm:hibernate-agroal:{_HIBERNATE}",
        ),
    ),
}

_FIELDS: Final = {
    "order_id": "string",
    "seq": "int32",
    "customer": "string",
    "amount_cents": "int64",
    "status": "string",
    "note": "string",
}
_SCHEMA: Final = {
    "type": "struct",
    "fields": [{"field": name, "type": kind, "optional": True} for name, kind in _FIELDS.items()],
}
DEFAULT: Final[Mapping[str, str]] = {"insert.mode": "insert", "primary.key.mode": "none"}
_LARGE: Final = {
    "tasks.max": "4",
    "batch.size": "5000",
    "dialect.postgres.unnest.insert.enabled": "true",
    "consumer.override.max.poll.records": "5000",
    "consumer.override.fetch.min.bytes": str(1024 * 1024),
    "consumer.override.fetch.max.wait.ms": "50",
}
TUNED: Final = {**DEFAULT, **_LARGE}
UPSERT: Final = {
    **_LARGE,
    "insert.mode": "upsert",
    "primary.key.mode": "record_value",
    "primary.key.fields": "order_id",
    "use.reduction.buffer": "true",
}
_SECONDS: Final = 900.0
_EVERY: Final = 0.1


def sink(settings: Mapping[str, str]) -> Callable[[Stage, str, str, int], float]:
    """Return a run of the connector with these settings over those that it needs."""

    def run(stage: Stage, topic: str, table: str, events: int) -> float:
        worker = _worker(stage)
        host = psycopg.conninfo.conninfo_to_dict(stage.url)
        tuned = "batch.size" in settings
        url = f"jdbc:postgresql://{host['host']}:{host['port']}/{host['dbname']}"
        config = {
            "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
            "topics": topic,
            "connection.url": url + ("?reWriteBatchedInserts=true" if tuned else ""),
            "connection.username": str(host["user"]),
            # Asked for, and not needed here.
            "connection.password": "none",
            "collection.name.format": table,
            "schema.evolution": "none",
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.json.JsonConverter",
            "value.converter.schemas.enable": "true",
            "value.converter.schema.content": json.dumps(_SCHEMA),
            "consumer.override.isolation.level": "read_committed",
            "consumer.override.auto.offset.reset": "earliest",
            **settings,
        }
        with psycopg.connect(stage.url, autocommit=True) as connection:
            started = time.perf_counter()
            worker.create(table, config)
            try:
                return _until_there(connection, worker, table, events, upsert=settings is UPSERT) - started
            finally:
                worker.delete(table)

    return run


def _until_there(
    connection: psycopg.Connection[Any], worker: Worker, table: str, events: int, *, upsert: bool
) -> float:
    """Wait until all events are in the table; return when it last grew. Raises ServiceError when a task fails.

    Without counting the rows again and again, which would cost it what others spend on the work: they are counted
    when the table has stopped to grow.
    """
    count = sql.SQL("SELECT sum(seq) FROM {}" if upsert else "SELECT count(*) FROM {}").format(sql.Identifier(table))
    size = count if upsert else sql.SQL("SELECT pg_relation_size({})").format(sql.Literal(table))
    wanted = ORDERS.expected(events)[1] if upsert else events
    deadline = time.monotonic() + _SECONDS
    before, grown = None, time.perf_counter()
    looked_at, asked = None, time.monotonic()
    while time.monotonic() < deadline:
        now = connection.execute(size).fetchone()
        if now != before:
            before, grown = now, time.perf_counter()
        elif now != looked_at and time.perf_counter() - grown > 2 * _EVERY:
            looked_at = now
            if connection.execute(count).fetchone() == (wanted,):
                return grown
        if time.monotonic() - asked > 20 * _EVERY:
            asked = time.monotonic()
            worker.state(table)
        time.sleep(_EVERY)
    raise TimeoutError(f"{table}: not all events after {_SECONDS:g} s: {before}; {worker.state(table)}")


def _worker(stage: Stage) -> Worker:
    """Return the worker, started when it is first needed: its compiler is warm from then on."""
    worker = stage.kept.get("connect")
    if not isinstance(worker, Worker):
        folder = stage.folder / "connect"
        folder.mkdir()
        plugin = [*jars.fetch(SINK, lock=LOCK), *jars.fetch(POOL, lock=LOCK)]
        worker = Worker(folder, stage.kafka, heap="1g", plugin=plugin).start()
        stage.kept["connect"] = worker
    return worker
