"""What the tests of the runbooks share: events to be published, sessions that forget themselves, alerts that fire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from alerting import Samples, firing, scraped
from prometheus import require
from runbooks import SECTIONS, TYPED, Section
from support import drained, wait_until


def of(title: str) -> Callable[..., Any]:
    """Return the parameters that name the section which a test follows."""
    assert title in SECTIONS, title
    return pytest.mark.parametrize("section", [SECTIONS[title]], ids=lambda section: section.anchor)


class Orders:
    """An aggregate type, its topic, and events of it."""

    def __init__(self, database: Any, kafka: Any, *, exists: bool = True) -> None:
        self.url = database.url
        self.kafka = kafka
        self.kind = kafka.name("Order")
        self.topic = f"{self.kind.lower()}-events"
        self.options = {"bootstrap.servers": kafka.bootstrap_servers}
        if exists:
            kafka.create_topic(self.topic, 1)

    def add(self, count: int, *, seconds_ago: int = 0) -> None:
        """Write events, of a key each."""
        with psycopg.connect(self.url) as connection:
            connection.execute(
                "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload, created_at)"
                " SELECT %s, 'k' || n, 'T', '{}', now() - %s * interval '1 second' FROM generate_series(1, %s) AS n",
                (self.kind, seconds_ago, count),
            )

    def published(self, count: int) -> None:
        """Wait until so many events are published, and none is left."""
        assert len(self.kafka.consume(self.topic, count)) == count
        drained(self.url)


@contextmanager
def forgotten(url: str, statement: str) -> Iterator[int]:
    """Hold what a statement locks, in a session that forgets its transaction; yield its process id."""
    connection = psycopg.connect(url, application_name="forgetful")
    connection.execute(statement.encode())
    try:
        yield connection.info.backend_pid
    finally:
        connection.close()


def shows(address: str, name: str, value: float) -> bool:
    """Return whether a process shows a figure. ``name`` ends with a brace, or with labels and a comma."""
    return value in [found for series, found in scraped(address).items() if series.startswith(f"outbox_{name}")]


def alarmed(address: str, *alerts: str, before: Samples | None = None, later: float = 0.0) -> None:
    """Wait until exactly these alerts fire for what a relay shows."""
    wanted, last = set(alerts), set[str]()

    def fires() -> bool:
        nonlocal last
        last = firing(scraped(address), before, later=later)
        return last == wanted

    try:
        wait_until(fires, what="alerts", longest=0.3)
    except AssertionError as error:
        raise AssertionError(f"{sorted(last)} fire, and not {sorted(wanted)}") from error


def every_step_was_taken(request: pytest.FixtureRequest) -> None:
    """Assert that the tests of a file have typed every step of their sections, if all of these were to run."""
    module = request.module
    ran = {item.name for item in request.session.items if getattr(item, "module", None) is module}
    tests: dict[str, set[str]] = {}
    for name, test in vars(module).items():
        for mark in getattr(test, "pytestmark", ()):
            if isinstance(section := mark.args[1][0], Section):
                tests.setdefault(section.title, set()).add(f"{name}[{section.anchor}]")
    checked = 0
    for title, names in tests.items():
        if names <= ran:
            missing = SECTIONS[title].steps - TYPED.get(title, set())
            if missing:
                # Without it, tests of the section were skipped.
                require("promtool")
            assert missing == set(), title
            checked += 1
    assert checked > 0
