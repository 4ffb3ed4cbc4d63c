"""What somebody plants in an open ``public`` is never called: not by superusers, owners, writers, relays or consumers.

See ``planted``: with anything of the product left to the search path of its role, these tests fail.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import asyncpg
import planted
import psycopg
import pytest
import sqlalchemy as sa
from page_support import PageRun
from planted_support import foreign, outbox
from rows_and_roles import login_role, put
from sqlalchemy.orm import Session
from support import wait_until
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from outbox import AsyncOutbox, Event, Outbox, outbox_tables
from outbox._app import migrate as db
from outbox._clients.search_path import PIN
from outbox.consumer import kafka_admin
from outbox.consumer.tables import consumer_tables
from outbox.inbox import once, once_async
from relay.cli.app import app
from relay.operations.roles import RoleKind, grants


def test_what_is_planted_would_be_called(hostile):
    """By this the others mean something."""
    connection = hostile.connect(autocommit=True)
    for query in ("SELECT hashtextextended('a', 0)", "SELECT '1'::varchar = '1'::varchar", "SELECT num_nonnulls(1, 2)"):
        with pytest.raises(psycopg.errors.RaiseException, match="planted"):
            connection.execute(query)
    assert planted.calls(connection) == 3
    connection.execute("SELECT pg_catalog.setval('planted.calls', 1, false)")


# What creates the tables.
def test_no_table_depends_on_it(hostile, admin):
    """Those of our commands, of revisions that a host runs with its own path, and those that it creates with it.

    Alembic's own statements are not ours: the version's are left out, and so is the pin of `outbox db sql`.
    """
    assert foreign(admin) == []
    connection = hostile.connect(autocommit=True)
    for history in (db.OUTBOX, db.CONSUMER):
        script = db.sql(history=history)
        assert script.split(";")[1].strip() == "SET LOCAL search_path = pg_catalog"
        ours = re.sub(r"(SET LOCAL search_path|UPDATE \w+\.alembic_version)[^;]*;", "", script)
        admin.execute(f"DROP SCHEMA {history.schema} CASCADE")
        connection.execute(ours)
        assert foreign(admin) == []
    for build, schema in ((outbox_tables, "host"), (consumer_tables, "sink")):
        connection.execute(f"CREATE SCHEMA {schema}")
        for statement in created(build, schema):
            connection.execute(statement.replace("%%", "%"))
        assert foreign(admin) == []


def created(build: Callable[[sa.MetaData, str], object], schema: str) -> list[str]:
    """Return the statements with which SQLAlchemy creates the tables."""
    metadata = sa.MetaData()
    build(metadata, schema)
    statements: list[str] = []
    engine = sa.create_mock_engine(
        "postgresql+psycopg://", lambda statement, *_: statements.append(str(statement.compile(dialect=engine.dialect)))
    )
    metadata.create_all(engine, checkfirst=False)
    return statements


def test_grants_printed_and_applied(hostile):
    with hostile.connect(autocommit=True) as connection, login_role(connection, "role") as made:
        roles = [f"{kind}={made}" for kind in RoleKind]
        printed = outbox("db", "roles", *roles, "--wal")
        assert printed.startswith("SET search_path = pg_catalog;")
        # Blocks of code are safe by themselves too.
        for statement in grants([(kind, made) for kind in RoleKind], "outbox", "consumer", wal=True):
            connection.execute(statement)
        connection.execute(printed)
        outbox("db", "roles", *roles, "--wal", "--apply")


# What writes.
def events(count: int = 3) -> list[Event]:
    return [Event("Order", f"o-{number}", "OrderPlaced", {"n": number}) for number in range(count)]


def write(target: Any) -> None:
    outbox = Outbox()
    message = {"ce_id": str(uuid7())}
    outbox.add(target, events()[0])
    outbox.add(target, events()[0], lock_key=True)
    outbox.add_many(target, events(), lock_key=True)
    later = outbox.add(target, events()[0], not_before=planted.LATER)
    outbox.check(target)
    assert outbox.reschedule(target, later, delay=dt.timedelta(hours=1))
    assert outbox.cancel(target, later)
    unique, keyed = Outbox(unique_keys=True), [replace(event, idempotency_key=str(later)) for event in events(1)]
    unique.add_many(target, keyed, lock_key=True)
    unique.add_many(target, keyed)
    connection = target.connection() if isinstance(target, Session) else target
    removed = "DELETE FROM outbox.events WHERE headers OPERATOR(pg_catalog.->>) 'idempotency-key' IS NOT NULL"
    assert connection.execute(sa.text(removed) if isinstance(connection, sa.Connection) else removed).rowcount == 1
    assert once(target, message, consumer="billing")
    assert not once(target, message, consumer="billing")


def test_writers_and_once(hostile, admin):
    """And any program that inserts."""
    hostile.connect(autocommit=True).execute(
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('Order', 'o', 'T')"
    )
    assert admin.execute("DELETE FROM outbox.events RETURNING lane IS NOT NULL").fetchall() == [(True,)]
    with hostile.connect() as connection:
        write(connection)
    # SQLAlchemy's look for hstore is its own.
    engine = hostile.engine(use_native_hstore=False)
    with engine.begin() as connection:
        write(connection)

    async def with_asyncpg() -> None:
        connection = await asyncpg.connect(hostile.url)
        try:
            # asyncpg's own look at types, which it remembers.
            await connection.execute(PIN)
            block = connection.transaction()
            await block.start()
            await AsyncOutbox().add_many(connection, events(), lock_key=True)
            await block.rollback()
            await connection.execute("RESET search_path")
            async with connection.transaction():
                await AsyncOutbox().add_many(connection, events(), lock_key=True)
                assert await once_async(connection, {"ce_id": str(uuid7())}, consumer="billing")
        finally:
            await connection.close()

    asyncio.run(with_asyncpg())
    assert admin.execute("SELECT count(*) FROM outbox.events").fetchone() == (13,)


# What reads, publishes and operates.
COMMANDS = (
    "status",
    "trace {event}",
    "trace {message}",
    "dead-letters list",
    "dead-letters show {event}",
    "dead-letters retry {event}",
    "dead-letters discard {event} --reason test",
    "dead-letters list --side consumer",
    "dead-letters show {number} --side consumer",
    "dead-letters retry {number} --side consumer",
    "dead-letters discard {number} --side consumer --reason test",
    "replay --event-id {published} --dry-run",
    "replay --event-id {published} --yes --reason test",
    "replay --aggregate Order/o-1 --yes --reason test",
    "consumers groups",
    "offsets show",
    "offsets forget g --topic t --reason test",
    "external list",
    "external retry --all",
    "external forget --days 1",
    "relay pause --topic order-events --reason test",
    "relay drain --lane 0 --reason test --timeout 1",
    "relay resume --topic order-events",
    "relay reconcile",
    "relay release 0 --reason test",
    "scheduled list",
    "scheduled cancel {later} --reason test",
    "cdc setup",
    "cdc status",
    "cdc drop",
    "doctor",
    "db check",
    "db check --consumer",
    "db upgrade",
    "db upgrade --consumer",
    "db prune --days 1",
    "db prune --consumer --days 2",
    "db lanes 8",
    "db downgrade base --drop-rows",
    "db downgrade base --consumer --drop-rows",
)


PAGES = (
    "/",
    "/dead-letters",
    "/dead-letters/relay",
    "/dead-letters/consumer",
    "/consumers",
    "/relays",
    "/wal",
    "/topics",
)


@pytest.fixture
def filled(hostile, admin, outbox_kafka, monkeypatch) -> dict[str, str]:
    """Rows in the tables of both sides. Returns what stands for ids in commands."""
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", outbox_kafka.bootstrap_servers)
    # The group's topic is not there.
    monkeypatch.setattr(kafka_admin, "_UNHEARD_SECONDS", 0.3)
    event, published, message = (str(uuid7()) for _ in range(3))
    kind = ("Order", "o-1", "OrderPlaced")
    columns = "lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at"
    put(admin, "outbox.dead_letters", id=1000, event_id=event, aggregate_id="o-1")
    admin.execute(
        f"INSERT INTO outbox.published ({columns}) VALUES (0, 1001, %s, %s, %s, %s, now())", (published, *kind)
    )
    put(admin, "consumer.groups")
    put(admin, "consumer.offsets", next_offset=1)
    number = put(admin, "consumer.dead_letters", message_id=message)["id"]
    with admin.transaction():
        later = Outbox().add(admin, events()[0], not_before=planted.LATER)
    given = {"event": event, "published": published, "message": message, "number": number, "later": later}
    return {name: str(value) for name, value in given.items()}


def test_the_page_and_the_commands(filled, hostile):
    """The commands are the last: they end with those that drop the tables."""
    page = PageRun(hostile.url)
    try:
        page.sign_in()
        for path in (*PAGES, "/audit", "/system", f"/events/{filled['event']}", "/consumers/groups/g"):
            answer = page.ask(path)
            assert answer.status in {200, 404}, path
            assert "planted:" not in answer.text, path
    finally:
        page.close()
    for command in COMMANDS:
        done = CliRunner().invoke(app, command.format(**filled).split())
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exception)
        # 2 is for words that it does not know.
        assert done.exit_code in {0, 1}, (command, done.output)
        assert "planted:" not in done.output, command


@pytest.mark.parametrize(
    ("source", "delivery"), [("polling", "at-most-once"), ("polling", "exactly-once"), ("wal", "at-least-once")]
)
def test_relays(hostile, admin, outbox_kafka, outbox_relay, source, delivery):
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events")
    slot = f"slot_{hostile.name}"
    settings: dict[str, Any] = {
        "source": source,
        "delivery": delivery,
        "wal__slot": slot,
        "relay__archive_days": 0 if delivery == "at-most-once" else 3,
    }
    settings |= {"name": hostile.name, "relay__batch_size": 50}
    if source == "wal":
        outbox("cdc", "setup")
        outbox("relay", "switch", "wal")
    with admin.transaction():
        writer = Outbox()
        writer.add_many(admin, [Event(kind, f"k-{n % 7}", "T", {"n": n}) for n in range(300)])
        writer.add(admin, Event(kind, "k-1", "T", {"n": 300}), not_before=planted.PAST)
    relay = outbox_relay(database_url=hostile.url, **settings)
    assert len(outbox_kafka.consume(topic, 301)) == 301
    wait_until(lambda: admin.execute("SELECT count(*) FROM outbox.events").fetchone() == (0,), 30, "the settlement")
    if source == "wal":
        # From the stream by now, and not from the table.
        with admin.transaction():
            writer.add_many(admin, [Event(kind, f"k-{n % 7}", "T", {"n": n}) for n in range(100)])
        assert len(outbox_kafka.consume(topic, 401)) == 401
    relay.terminate()
    assert relay.wait() == 0, relay.log()
    assert "planted:" not in relay.log()
