"""examples/recipes/django_shop as its users have it: their migrations, their server, their commands and tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from recipes_support import RECIPES, ROOT, post
from support import look_up, wait_until

from outbox.testing.fixtures import token


class Shop:
    """A copy of the project with its own database, which has no tables yet."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        server = psycopg.conninfo.conninfo_to_dict(url)
        names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD", "dbname": "PGDATABASE"}
        self.environment = os.environ | {names[key]: str(value) for key, value in server.items()}
        self.environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OUTBOX_DATABASE_URL": url}

    def python(self, *words: str) -> str:
        """Return what a command prints."""
        done = subprocess.run(
            [sys.executable, "-W", "error", *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def orders(self) -> list[tuple[Any, ...]]:
        return look_up(self.url, "SELECT id::text, customer_id, total_cents FROM shop_order ORDER BY id")


@pytest.fixture(scope="module")
def shop(outbox_postgres_server, tmp_path_factory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop") / "django_shop"
    shutil.copytree(RECIPES / "django_shop", folder)
    name = f"shop_{token()}"
    shop = Shop(outbox_postgres_server.create_database(name), folder)
    yield shop
    outbox_postgres_server.drop_database(name)


@pytest.fixture
def address(shop) -> Iterator[str]:
    """Where the project's server listens; its tables are there."""
    shop.python("manage.py", "migrate")
    log = shop.folder / "server.log"
    command = [sys.executable, "-W", "error", "manage.py", "runserver", "--noreload", "127.0.0.1:0"]
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=shop.folder, env=shop.environment, stdout=output, stderr=output) as server,
    ):
        try:
            address = wait_until(lambda: re.search(r"http://[\d.:]+", log.read_text()), what="the server")[0]
            yield f"{address}/orders"
        finally:
            server.kill()
            print(log.read_text())


def test_orders_and_their_events_are_committed_together(shop, address, outbox_kafka, outbox_relay):
    topic = f"order-events-{outbox_kafka.token}"
    outbox_relay(database_url=shop.url, topic_template=f"{{aggregate_type}}-events-{outbox_kafka.token}")
    assert shop.python("manage.py", "place_order", "Ann", "1700").split() == ["1"]
    assert post(address, {"customer": 1, "total_cents": 4200}) == (201, {"order": 2})
    # The foreign key is looked at when the transaction commits: the event has been written by then.
    assert post(address, {"customer": 7, "total_cents": 5000}) == (409, {"error": "no such customer"})
    assert post(address, {"customer": 1, "total_cents": 800}) == (201, {"order": 4})
    assert shop.orders() == [("1", 1, 1700), ("2", 1, 4200), ("4", 1, 800)]
    messages = outbox_kafka.consume(topic, count=3)
    found = [(message.key().decode(), *json.loads(message.value()).values()) for message in messages]
    assert sorted(found) == shop.orders()
    wait_until(lambda: look_up(shop.url, "SELECT FROM outbox.events") == [], what="an empty outbox")
    assert len(outbox_kafka.consume(topic)) == 3


def test_the_projects_own_tests_pass(shop):
    """They make a database of their own, with the outbox's tables."""
    assert "Ran 1 test" in shop.python("manage.py", "test")
    assert "No changes detected" in shop.python("manage.py", "makemigrations", "--check", "--dry-run")
