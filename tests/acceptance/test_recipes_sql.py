"""examples/recipes/trigger.sql: changes of a table, by a role without rights on the outbox, reach Kafka in order."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import sql
from recipes_support import RECIPES
from rows_and_roles import login_role
from support import look_up, numbers_by_key, wait_until
from typer.testing import CliRunner

from relay.cli.app import app

TRIGGER = (RECIPES / "trigger.sql").read_bytes()
SKUS = ["coffee", "milk", "tea"]


class Shop:
    """The table with its trigger, its owner, and a role that may change the table's rows and do nothing else."""

    def __init__(self, admin: psycopg.Connection[Any], url: str, owner: str, support: str) -> None:
        self.url, self.owner, self.support = url, owner, support
        admin.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(sql.Identifier(self.owner)))
        granted = CliRunner().invoke(
            app, ["db", "roles", f"writer={self.owner}", "--apply"], env={"OUTBOX_DATABASE_URL": self.url}
        )
        assert granted.exit_code == 0, granted.output
        with psycopg.connect(self.url, user=self.owner) as connection:
            connection.execute(TRIGGER)
            rights = "GRANT SELECT, INSERT, UPDATE, DELETE ON products TO {}"
            connection.execute(sql.SQL(rights).format(sql.Identifier(self.support)))

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Connect as whoever changes rows by hand."""
        return psycopg.connect(self.url, user=self.support)


@pytest.fixture
def shop(outbox_postgres) -> Iterator[Shop]:
    with (
        outbox_postgres.connect(autocommit=True) as admin,
        login_role(admin, "shop") as owner,
        login_role(admin, "support") as support,
    ):
        yield Shop(admin, outbox_postgres.url, owner, support)


@pytest.fixture
def topic(shop, outbox_kafka, outbox_relay) -> str:
    outbox_relay(topic_template=f"{{aggregate_type}}-events-{outbox_kafka.token}")
    return outbox_kafka.create_topic(f"product-events-{outbox_kafka.token}", 3)


def test_each_change_that_is_committed_is_an_event(shop, topic, outbox_kafka):
    with shop.connect() as connection:
        connection.execute("INSERT INTO products VALUES ('tea', 'Tea', 300), ('coffee', 'Coffee', 500)")
        connection.commit()
        connection.execute("UPDATE products SET cents = 1")
        connection.execute("DELETE FROM products")
        connection.rollback()
        connection.execute("UPDATE products SET cents = 310 WHERE sku = 'tea'")
        connection.execute("UPDATE products SET name = 'Green tea' WHERE sku = 'tea'")
        connection.commit()
        connection.execute("UPDATE products SET cents = cents")  # changes nothing
        connection.execute("UPDATE products SET sku = 'mocha' WHERE sku = 'coffee'")
        connection.commit()
        connection.execute("DELETE FROM products WHERE sku = 'tea'")
        connection.execute("INSERT INTO products VALUES ('tea', 'Tea', 320)")
        connection.commit()
    messages = outbox_kafka.consume(topic, count=8)
    wait_until(lambda: look_up(shop.url, "SELECT FROM outbox.events") == [], what="an empty outbox")
    assert len(outbox_kafka.consume(topic)) == 8
    found = defaultdict(list)
    for message in messages:
        headers = dict(message.headers())
        assert headers["changed-by"] == shop.support.encode()
        kind = headers["ce_type"].decode().removeprefix("Product")
        found[message.key().decode()].append((kind, message.value() and json.loads(message.value())))
    assert found == {
        "tea": [
            ("Changed", {"name": "Tea", "cents": 300}),
            ("Changed", {"name": "Tea", "cents": 310}),
            ("Changed", {"name": "Green tea", "cents": 310}),
            ("Removed", None),
            ("Changed", {"name": "Tea", "cents": 320}),
        ],
        "coffee": [("Changed", {"name": "Coffee", "cents": 500}), ("Removed", None)],
        "mocha": [("Changed", {"name": "Coffee", "cents": 500})],
    }


def test_the_events_of_a_product_are_in_the_order_of_the_commits(shop, topic, outbox_kafka, chance):
    with shop.connect() as connection:
        connection.execute("INSERT INTO products SELECT sku, sku, 1 FROM unnest(%s::text[]) AS sku", (SKUS,))
    seeds = [chance.random() for _ in range(4)]

    def change(seed: float) -> None:
        choices = random.Random(seed)
        with shop.connect() as connection:
            for _ in range(50):
                # In one order, so that no two transactions wait for each other.
                for sku in sorted(choices.sample(SKUS, choices.randint(1, 2))):
                    connection.execute("UPDATE products SET cents = cents + 1 WHERE sku = %s", (sku,))
                if choices.random() < 0.3:
                    connection.rollback()
                connection.commit()

    with ThreadPoolExecutor(len(seeds)) as writers:
        list(writers.map(change, seeds))
    prices = dict(look_up(shop.url, "SELECT sku, cents FROM products"))
    assert min(prices.values()) > 20
    wait_until(lambda: look_up(shop.url, "SELECT FROM outbox.events") == [], what="an empty outbox")
    seen, repeats = numbers_by_key(outbox_kafka.consume(topic), "cents")
    assert (seen, repeats) == ({sku: list(range(1, cents + 1)) for sku, cents in prices.items()}, 0)


def test_who_changes_rows_can_write_no_other_events(shop):
    with shop.connect() as connection:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="schema outbox"):
            connection.execute(
                "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('A', '1', 'T')"
            )
        connection.rollback()
        connection.execute("CREATE TEMP TABLE mine (LIKE products)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="function announce_product"):
            connection.execute(
                "CREATE TRIGGER forge AFTER INSERT ON mine FOR EACH ROW EXECUTE FUNCTION announce_product()"
            )
        connection.rollback()
