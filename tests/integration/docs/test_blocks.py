"""What the documentation shows runs: SQL on a real server, and the fixtures' example of docs/guides/testing.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import psycopg
import pytest
from docs_support import Block, blocks
from psycopg import sql
from rows_and_roles import drop_role

ROLES = ("outbox_writer", "outbox_relay", "outbox_operator", "outbox_consumer")
"""Those that pages give rights to; whoever follows a page has them."""

ELSEWHERE = {
    "docs/guides/recipes.md",  # tests/*/test_recipes*.py
    "docs/operations/runbooks.md",  # tests/acceptance/runbooks
}
"""Pages whose SQL other tests run."""

WRITE_FIRST = (
    "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) VALUES ('A', '1', 'T', '{}')"
)

PRELUDE = """
import psycopg
from sqlalchemy import text

from outbox import Event, Outbox


def run_my_migrations(url):
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE orders (number text PRIMARY KEY)")


def place_order(session, number, aggregate_type="Order"):
    session.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})
    Outbox().add(session, Event(aggregate_type, number, "OrderPlaced", {}))


"""


def pages() -> dict[str, list[Block]]:
    """Return the pages with SQL that no other test runs."""
    found: dict[str, list[Block]] = {}
    for block in blocks("sql"):
        if block.page not in ELSEWHERE:
            found.setdefault(block.page, []).append(block)
    return found


@pytest.mark.parametrize("page", pages())
def test_sql_runs(page, outbox_postgres):
    """Each page's statements, in their order, in a database with all tables. Roles and slots get names of their own."""
    connector = f"debezium_{outbox_postgres.name}"
    ours = {role: f"{role}_{outbox_postgres.name}" for role in ROLES}
    with outbox_postgres.connect(autocommit=True) as admin:
        for role in ours.values():
            admin.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(role)))
        admin.execute(WRITE_FIRST)
        try:
            for block in pages()[page]:
                text = re.sub(
                    r"\b(outbox_(?:writer|relay|operator|consumer))\b", lambda role: ours[role[1]], block.text
                )
                text = re.sub(r"\bdebezium_outbox\b", connector, text)
                if "confirmed_flush_lsn" in text:  # the page's connector has made its slot by then
                    admin.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (connector,))
                for statement in re.split(r";$", text, flags=re.MULTILINE):
                    if statement.strip():
                        run(admin, statement, block.where)
        finally:
            admin.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
                (connector,),
            )
            for role in [*ours.values(), connector]:
                if admin.execute("SELECT FROM pg_roles WHERE rolname = %s", (role,)).fetchone():
                    drop_role(admin, role)


def run(connection: psycopg.Connection[tuple[object, ...]], statement: str, where: str) -> None:
    try:
        connection.execute(statement.encode())
    except psycopg.Error as error:
        raise AssertionError(f"{where}: {statement.strip()}") from error


def test_the_fixtures_example_passes(tmp_path, outbox_postgres_server, outbox_kafka_cluster):
    (example,) = [block.text for block in blocks("python") if block.page == "docs/guides/testing.md"]
    (tmp_path / "test_example.py").write_text(PRELUDE + example)
    environment = os.environ | {
        "OUTBOX_TEST_DATABASE_URL": outbox_postgres_server.url(),
        "OUTBOX_TEST_KAFKA": outbox_kafka_cluster.bootstrap_servers,
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
