"""Events that can't be published by a real relay, and what is left of them: what the tests of failures share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from support import look_up, wait_until, write
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from outbox import Event
from outbox._app import migrate as db
from outbox.testing.fixtures import Topics
from relay.cli.app import app

QUICK = {"failures__max_attempts": 3, "failures__min_backoff_seconds": 0.05, "failures__max_backoff_seconds": 0.1}
SMALL = {"max.message.bytes": "20000"}
DELIVERIES = ["at-least-once", "exactly-once"]


@pytest.fixture
def delivery(request, outbox_kafka):
    """Settings of a relay of an outbox that no other test has; at-least-once, unless a test names the delivery."""
    return QUICK | {"delivery": getattr(request, "param", "at-least-once"), "name": outbox_kafka.name("outbox")}


@pytest.fixture
def url(outbox_postgres):
    """An outbox with one lane, so that whatever holds it up holds everything up."""
    db.change_lanes(outbox_postgres.url, 1)
    return outbox_postgres.url


def event(kind: str, name: str, size: int = 0) -> Event:
    """An event called key-number, as in a1; ``size`` bytes of payload that do not compress."""
    return Event(kind, name[0], name, os.urandom(size) if size else {"n": name}, event_id=uuid7())


def add(url: str, *events: Event) -> None:
    """All in one transaction."""
    write(url, events)


def headers(message: Any) -> dict[str, str]:
    return {name: value.decode() for name, value in message.headers()}


def names(messages: Iterable[Any]) -> list[str]:
    return [headers(message)["event-type"] for message in messages]


def dead(url: str) -> list[str]:
    return [name for (name,) in look_up(url, "SELECT event_type FROM outbox.dead_letters ORDER BY id")]


def wait_for_dead(url: str, *names: str) -> None:
    wait_until(lambda: dead(url) == list(names), 60, what=f"dead letters {names}")


def outbox(url: str, *arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"], env={"OUTBOX_DATABASE_URL": url})
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def routes(**given: Any) -> dict[str, str]:
    return {"OUTBOX_ROUTES": json.dumps(given)}


def let_pass(topics: Topics, topic: str) -> None:
    """Remove the cause: the topic takes messages of any size."""
    resource = ConfigResource(
        ConfigResource.Type.TOPIC,
        topic,
        incremental_configs=[ConfigEntry("max.message.bytes", "2000000", incremental_operation=AlterConfigOpType.SET)],
    )
    admin = AdminClient({"bootstrap.servers": topics.bootstrap_servers})
    admin.incremental_alter_configs([resource])[resource].result()
