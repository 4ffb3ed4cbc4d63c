"""The services of examples/recipes as their users run them: processes of their own, with a database and a topic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from support import wait_until

from outbox.sandbox._process import Supervised, patience
from outbox.testing.fixtures import RelayFactory

ROOT: Final = Path(__file__).parents[2]
RECIPES: Final = ROOT / "examples" / "recipes"


class Service:
    """A service that runs until ``stop``; warnings are errors there too."""

    def __init__(self, argv: tuple[str, ...], log: Path, env: dict[str, str]) -> None:
        self._log = log
        self._process = Supervised([sys.executable, *argv], log=log, env=env, cwd=RECIPES)

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def logged(self, pattern: str) -> re.Match[str]:
        """Wait until its log matches."""

        def there() -> re.Match[str] | None:
            found = re.search(pattern, self.text())
            assert found or self._process.running, self.text()
            return found

        found: re.Match[str] = wait_until(there, 30, f"{pattern!r} in the log")
        return found

    def stop(self, number: int) -> int:
        """End it by a signal, and return its exit status."""
        self._process.signal(number)
        assert self._process.wait(30 * patience()), self.text()
        assert self._process.exit_code is not None
        return self._process.exit_code


class Shop:
    """A database with the outbox's tables, a topic for its orders' events, and the services that use them."""

    def __init__(self, database: Any, kafka: Any, start_relay: RelayFactory, folder: Path) -> None:
        self.url: str = database.url
        self.servers: str = kafka.bootstrap_servers
        self.topic: str = kafka.create_topic(kafka.name("order-events"))
        self._template = kafka.name("{aggregate_type}-events")
        self._kafka, self._start_relay, self._folder = kafka, start_relay, folder
        self._opened = ExitStack()

    def close(self) -> None:
        self._opened.close()

    def topic_of(self, kind: str) -> str:
        """Return the name of the topic of an aggregate type."""
        return self._template.replace("{aggregate_type}", kind.lower())

    def environment(self, **more: str) -> dict[str, str]:
        """Return what the examples find in their environment: without the options of this run of pytest."""
        ours = {"DATABASE_URL": self.url, "KAFKA_SERVERS": self.servers, "ORDER_TOPIC": self.topic}
        given = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        return {**given, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **ours, **more}

    def run(self, *argv: str, status: int = 0, **more: str) -> tuple[str, str]:
        """Run a command of Python to its end, and return what it printed and what it complained of."""
        command = [sys.executable, *argv]
        environment = self.environment(**more)
        done = subprocess.run(
            command, cwd=RECIPES, env=environment, capture_output=True, text=True, timeout=60 * patience(), check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout, done.stderr

    def start(self, *argv: str, **more: str) -> Service:
        """Start a service, to be killed at the end of the test if it still runs."""
        log = self._folder / f"{argv[-1].replace(os.sep, '-')}.log"
        service = Service(argv, log, self.environment(**more))
        self._opened.callback(lambda: service._process.running and service.stop(9))
        return service

    def execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement of SQL, and return its rows, if it has any."""
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def orders(self) -> list[tuple[str, str, int]]:
        return self.execute("SELECT id::text, article, quantity FROM orders ORDER BY id")

    def written(self) -> list[tuple[str, str, Any]]:
        """Return the events that no relay has published yet."""
        return self.execute("SELECT aggregate_id, event_type, payload FROM outbox.events ORDER BY id")

    def relay(self) -> None:
        """Start the relay: before that, all events stay where they were written."""
        self._start_relay(topic_template=self._template)

    def published(self, count: int) -> list[tuple[str, str, Any]]:
        """Wait for so many messages on Kafka, and return them all."""
        self._kafka.consume(self.topic, count=count)
        messages = self._kafka.consume(self.topic)
        return [
            (message.key().decode(), dict(message.headers())["ce_type"].decode(), json.loads(message.value()))
            for message in messages
        ]


@pytest.fixture
def shop(outbox_postgres, outbox_kafka, outbox_relay, tmp_path) -> Iterator[Shop]:
    made = Shop(outbox_postgres, outbox_kafka, outbox_relay, tmp_path)
    yield made
    made.close()


def post(address: str, body: Any) -> tuple[int, Any]:
    """Send JSON, and return the status and the JSON of the answer, or None if that is something else."""
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30 * patience()) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            is_json = error.headers.get_content_type() == "application/json"
            return error.code, json.load(error) if is_json else None
