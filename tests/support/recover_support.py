"""An outbox whose database is from before what Kafka has, for ``outbox recover``. Fixtures in here are for import."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import Producer
from reconcile_support import Outbox

ARCHIVE = {"RELAY__ARCHIVE_DAYS": "7"}


class Restored(Outbox):
    """An outbox whose database is from before, and what Kafka got since."""

    def __init__(self, made: Outbox) -> None:
        self.__dict__.update(made.__dict__)
        [(self.since,)] = self.run("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US')")
        self.key = self.keys(0)[1]

    def send(
        self,
        *event_ids: str,
        topic: str | None = None,
        value: bytes = b'{"n": 1}',
        headers: Sequence[tuple[str, str]] = (),
        seconds_ago: float = 0.0,
    ) -> None:
        """Publish events past the tables, with the times of so many seconds ago."""
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap_servers})
        at = int((time.time() - seconds_ago) * 1000)
        for event_id in event_ids:
            names = [("ce_id", event_id), *headers]
            producer.produce(topic or self.topics[0], value, self.key, headers=names, timestamp=at)
        assert producer.flush(60) == 0

    def recover(self, *arguments: str, status: int = 0, failpoints: str = "", archive: bool = True) -> dict[str, Any]:
        command = ("recover", "--since", self.since, "--json", *arguments)
        settings = ARCHIVE if archive else {}
        done = self.command(*command, failpoints=failpoints, settings=settings)
        assert done.returncode == status, done.stdout + done.stderr
        return json.loads(done.stdout) if status >= 0 else {}

    def letter(
        self, event_id: str, number: int = 4711, *, blocks: bool | None = None, ago: str = "0", headers: str = "{}"
    ) -> None:
        """Insert a dead letter with this number, and unless ``blocks`` is None its failure."""
        columns = ", lane, id, created_at, dead_at, attempts, last_error, first_failed_at, headers"
        at = f"now() - interval '{ago}'"
        self.put("dead_letters", event_id, columns, f", 1, {number}, {at}, {at}, 3, 'large', now(), '{headers}'")
        if blocks is not None:
            self.failed("dead_letters", event_id, blocks, "infinity")

    def failed(self, table: str, event_id: str, blocks: bool, at: str) -> None:
        """Insert the failure of an event in a table, whose next attempt is then."""
        self.run(
            "INSERT INTO outbox.failures SELECT lane, id, event_id, aggregate_type, aggregate_id, %s, 3, 'large', "
            f"now(), now(), '{at}' FROM outbox.{table} WHERE event_id = %s",
            *(blocks, event_id),
        )

    def put(self, table: str, event_id: str, columns: str = "", values: str = "") -> None:
        """Insert an event into a table, with the payload that ``send`` sends."""
        self.run(
            f"INSERT INTO outbox.{table} (event_id, aggregate_type, aggregate_id, event_type, payload{columns})"
            f" VALUES (%s, %s, %s, 'T', '{{\"n\": 1}}'{values})",
            event_id,
            self.kinds[0],
            self.key,
        )


@pytest.fixture
def restored(outbox: Outbox) -> Restored:
    return Restored(outbox)


def new_id() -> str:
    return str(uuid.uuid4())


def ids(found: Sequence[dict[str, Any]]) -> set[str]:
    return {event["event_id"] for event in found}


def resent(restored: Restored) -> list[tuple]:
    restored.recover("--resend", "--reason", "Kafka was lost")
    return restored.run("SELECT event_id::text, headers FROM outbox.events ORDER BY id")
