"""What somebody plants in an open ``public`` is never called: not by superusers, owners, writers, relays or consumers.

See ``planted``: with anything of the product left to the search path of its role, these tests fail.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any

import asyncpg
import planted
import psycopg
import pytest
import sqlalchemy as sa
from consumer_group import COLUMNS
from direct_sink import Sink as Straight
from external_support import Sink as Provided
from external_support import payments
from inbox_support import Log, apply
from page_support import PageRun
from support import wait_until
from task_sink import WAYS, Sink, event_id
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from outbox import AsyncOutbox, Event, Outbox, outbox_tables
from outbox._app import migrate as db
from outbox._clients.search_path import PIN
from outbox.consumer.tables import consumer_tables
from outbox.external import Done
from outbox.inbox import once, once_async
from outbox.testing.fixtures import Database, token
from relay.cli.app import app
from relay.operations.roles import Kind, grants
from spark_jobs.dedup.strategies import (
    ColumnType,
    Dedup,
    DedupStore,
    Fingerprint,
    Natural,
    OffsetsOnly,
    Version,
    column_types,
)
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.effects.produce import Produce
from spark_jobs.job import META
from spark_jobs.postgres.batch_table import BatchTable
from spark_jobs.postgres.group_store import PostgresGroupStore


@pytest.fixture(scope="module")
def template(outbox_postgres_server) -> Iterator[str]:
    """A database in which everything is planted, and then the tables are made."""
    name = f"planted_{token()}"
    url = outbox_postgres_server.create_database(name)
    with psycopg.connect(url, autocommit=True) as admin:
        planted.plant(admin)
        db.upgrade(url)
        db.upgrade_consumer(url)
        assert planted.calls(admin) == 0
    yield name
    outbox_postgres_server.drop_database(name)


@pytest.fixture
def hostile(outbox_postgres_server, template, monkeypatch) -> Iterator[Database]:
    """A copy of it. Nothing of what is planted there may have been called in the end."""
    name = f"planted_{token()}"
    with Database(outbox_postgres_server.create_database(name, template=template), name) as database:
        monkeypatch.setenv("OUTBOX_DATABASE_URL", database.url)
        monkeypatch.setenv("OUTBOX_WAL__SLOT", f"slot_{name}")
        yield database
        with psycopg.connect(database.url, autocommit=True) as own:
            own.execute(PIN)
            own.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
                "WHERE database = current_database()"
            )
            assert planted.calls(own) == 0
    outbox_postgres_server.drop_database(name)


@pytest.fixture
def admin(hostile) -> psycopg.Connection[Any]:
    """A test's own connection, which looks nowhere else."""
    connection = hostile.connect(autocommit=True)
    connection.execute(PIN)
    return connection


def outbox(*words: str, ok: tuple[int, ...] = (0,)) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code in ok, (words, done.output, done.exception)
    return done.output


def foreign(connection: psycopg.Connection[Any]) -> list[Any]:
    """Return what in the schemas of ours depends on anything in public."""
    return connection.execute(
        "SELECT refobjid::regproc FROM pg_depend JOIN pg_proc ON pg_proc.oid = refobjid AND refclassid = 1255 "
        "WHERE pronamespace = 2200 AND classid <> 2617 AND classid <> 1255 AND NOT EXISTS (SELECT FROM pg_operator "
        "WHERE pg_operator.oid = objid AND classid = 2617)"
    ).fetchall()


def test_what_is_planted_would_be_called(hostile):
    """By this the others mean something."""
    connection = hostile.connect(autocommit=True)
    for query in ("SELECT hashtextextended('a', 0)", "SELECT '1'::varchar = '1'::varchar", "SELECT num_nonnulls(1, 2)"):
        with pytest.raises(psycopg.errors.RaiseException, match="planted"):
            connection.execute(query)
    assert planted.calls(connection) == 3
    connection.execute("SELECT pg_catalog.setval('planted.calls', 1, false)")


# What creates the tables.


def test_no_table_depends_on_it(admin):
    assert foreign(admin) == []


@pytest.mark.parametrize("history", [db.OUTBOX, db.CONSUMER], ids=["outbox", "consumer"])
def test_revisions_that_a_host_runs_with_its_own_path(hostile, admin, history):
    """Alembic's own statements are not ours: the version's are left out, and so is the pin of `outbox db sql`."""
    script = db.sql(history=history)
    assert script.split(";")[1].strip() == "SET LOCAL search_path = pg_catalog"
    ours = re.sub(r"(SET LOCAL search_path|UPDATE \w+\.alembic_version)[^;]*;", "", script)
    admin.execute(f"DROP SCHEMA {history.schema} CASCADE")
    hostile.connect(autocommit=True).execute(ours)
    assert foreign(admin) == []


@pytest.mark.parametrize("build", [outbox_tables, consumer_tables])
def test_tables_that_a_host_creates_with_its_own_path(hostile, admin, build):
    metadata = sa.MetaData()
    build(metadata, "host")
    statements: list[str] = []
    engine = sa.create_mock_engine(
        "postgresql+psycopg://", lambda statement, *_: statements.append(str(statement.compile(dialect=engine.dialect)))
    )
    metadata.create_all(engine, checkfirst=False)
    connection = hostile.connect(autocommit=True)
    connection.execute("CREATE SCHEMA host")
    for statement in statements:
        connection.execute(statement.replace("%%", "%"))
    assert foreign(admin) == []


def test_grants_printed_and_applied(hostile):
    made = f"role_{hostile.name}"
    with hostile.connect(autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {made} LOGIN")
        try:
            roles = [f"{kind}={made}" for kind in Kind]
            printed = outbox("db", "roles", *roles, "--wal")
            assert printed.startswith("SET search_path = pg_catalog;")
            # Blocks of code are safe by themselves too.
            for statement in grants([(kind, made) for kind in Kind], "outbox", "consumer", wal=True):
                connection.execute(statement)
            connection.execute(printed)
            outbox("db", "roles", *roles, "--wal", "--apply")
        finally:
            connection.execute(f"REASSIGN OWNED BY {made} TO CURRENT_USER; DROP OWNED BY {made}; DROP ROLE {made}")


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
    assert outbox.cancel(target, later)
    assert once(target, message, consumer="billing")
    assert not once(target, message, consumer="billing")


def test_writers_and_once(hostile, admin):
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


def test_any_program_that_inserts(hostile, admin):
    hostile.connect(autocommit=True).execute(
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('Order', 'o', 'T')"
    )
    assert admin.execute("SELECT lane IS NOT NULL FROM outbox.events").fetchone() == (True,)


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


@pytest.fixture
def filled(hostile, admin, outbox_kafka, monkeypatch) -> dict[str, str]:
    """Rows in the tables of both sides. Returns what stands for ids in commands."""
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", outbox_kafka.bootstrap_servers)
    event, published, message = (str(uuid7()) for _ in range(3))
    kind = ("Order", "o-1", "OrderPlaced")
    columns = "lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at"
    admin.execute(
        f"INSERT INTO outbox.dead_letters ({columns}, attempts, last_error, first_failed_at) "
        "VALUES (0, 1000, %s, %s, %s, %s, now(), 1, 'e', now())",
        (event, *kind),
    )
    admin.execute(
        f"INSERT INTO outbox.published ({columns}) VALUES (0, 1001, %s, %s, %s, %s, now())", (published, *kind)
    )
    admin.execute("INSERT INTO consumer.groups (grp, owner) VALUES ('g', 'test')")
    admin.execute(
        "INSERT INTO consumer.offsets (grp, topic, part, topic_id, next_offset, generation) "
        "VALUES ('g', 't', 0, 'T', 1, 1)"
    )
    [(number,)] = admin.execute(
        "INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_id, message_headers, "
        "message_time, reason, error) VALUES ('g', 't', 'T', 0, 0, %s, '[]', now(), 'failed', 'e') RETURNING id",
        (message,),
    ).fetchall()
    with admin.transaction():
        later = Outbox().add(admin, events()[0], not_before=planted.LATER)
    given = {"event": event, "published": published, "message": message, "number": number, "later": later}
    return {name: str(value) for name, value in given.items()}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(filled, command):
    done = CliRunner().invoke(app, command.format(**filled).split())
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    # 2 is for words that it does not know.
    assert done.exit_code in {0, 1}, done.output
    assert "planted:" not in done.output


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


def test_the_page(filled, hostile):
    page = PageRun(hostile.url)
    try:
        page.sign_in()
        for path in (*PAGES, "/audit", "/system", f"/events/{filled['event']}", "/consumers/groups/g"):
            answer = page.ask(path)
            assert answer.status in {200, 404}, path
            assert "planted:" not in answer.text, path
    finally:
        page.close()


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once", "exactly-once"])
@pytest.mark.parametrize("source", ["polling", "wal"])
def test_relays(hostile, admin, outbox_kafka, outbox_relay, source, delivery):
    if (source, delivery) == ("wal", "at-most-once"):
        pytest.skip("there is no such relay")
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


# What consumes.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "strategy",
    [None, Natural(["n"]), Version("numbers", {"n": "n"}, "message_offset", "place"), OffsetsOnly(), Fingerprint()],
)
def test_tasks(hostile, admin, way, strategy):
    sink = Sink(hostile.url, way=way)
    sink.begin([0, 1])
    admin.execute("CREATE TABLE public.numbers (n int CHECK (n < 100), place bigint)")
    admin.execute("INSERT INTO public.numbers VALUES (7, -1)")
    given = {} if strategy is None else {"strategy": strategy}
    # One is repeated, one has no place in the table.
    messages = [(event_id(n), 10 + n) for n in range(5)] + [(event_id(3), 13), (event_id(9), 500)]
    report = sink.apply(messages, **given)
    assert report["outcome"] == "rejected", report
    admin.execute("ALTER TABLE public.numbers DROP CONSTRAINT numbers_n_check")
    report = sink.apply(messages, **given)
    assert report["outcome"] == "applied", report
    assert admin.execute("SELECT count(*) FROM public.numbers WHERE n > 7").fetchone() in {(7,), (6,)}


def test_effects_without_sql(hostile, admin):
    sink = Sink(hostile.url)
    sink.begin([0])
    admin.execute(
        "CREATE TABLE public.states (n varchar(20) PRIMARY KEY, place bigint NOT NULL, kind varchar(9), made date)"
    )
    pairs = {"n": "n", "place": "message_offset", "kind": "message_type"}
    types = {"n": ColumnType("character varying"), "place": ColumnType("bigint")}
    types |= {"kind": ColumnType("character varying"), "made": ColumnType("date")}
    produce = Produce(
        "produced", "Order", "message_key", "Numbered", "pg_catalog.jsonb_build_object('n'::text, n)", part="n::text"
    )
    for effect in (
        Upsert("states", ["n"], pairs, version="place", deletes=True),
        Upsert("states", ["n"], pairs),
    ):
        text = ";".join(one.as_string(None) for one in effect.statements(list(COLUMNS), types))
        report = sink.apply(
            [(event_id(n), n % 3) for n in range(5)], sink.position(), effect=f"{text};{produce.insert()}"
        )
        assert report["outcome"] == "applied", report
        admin.execute("DELETE FROM consumer.processed_messages")
    assert Insert("states").table == "states"


# An extension's type, in a schema that is in no search path. Its order is its own.
EXTENSION = """
CREATE SCHEMA extensions;
CREATE EXTENSION vector SCHEMA extensions;
CREATE TYPE extensions.folded;
CREATE FUNCTION extensions.folded_in(cstring) RETURNS extensions.folded LANGUAGE internal IMMUTABLE STRICT AS 'textin';
CREATE FUNCTION extensions.folded_out(extensions.folded) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT
AS 'textout';
CREATE TYPE extensions.folded (INPUT = extensions.folded_in, OUTPUT = extensions.folded_out, LIKE = text);
CREATE CAST (extensions.folded AS text) WITHOUT FUNCTION AS IMPLICIT;
CREATE FUNCTION extensions.folded_cmp(a extensions.folded, b extensions.folded) RETURNS integer LANGUAGE sql IMMUTABLE
RETURN pg_catalog.bttextcmp(pg_catalog.lower(a::text), pg_catalog.lower(b::text))"""
FOLDED = """
CREATE FUNCTION extensions.folded_{name}(a extensions.folded, b extensions.folded) RETURNS boolean LANGUAGE sql
IMMUTABLE RETURN extensions.folded_cmp(a, b) OPERATOR(pg_catalog.{operator}) 0;
CREATE OPERATOR extensions.{operator} (FUNCTION = extensions.folded_{name}, LEFTARG = extensions.folded,
                                       RIGHTARG = extensions.folded)"""
FOLDED_CLASS = """
CREATE OPERATOR CLASS extensions.folded_ops DEFAULT FOR TYPE extensions.folded USING btree AS
OPERATOR 1 extensions.<, OPERATOR 2 extensions.<=, OPERATOR 3 extensions.=, OPERATOR 4 extensions.>=,
OPERATOR 5 extensions.>, FUNCTION 1 extensions.folded_cmp(extensions.folded, extensions.folded)"""
# Of each type two values, one below the other; and the first one in another spelling.
KINDS = {
    "varchar(9)": ("a", "b", "a"),
    "text": ("a", "b", "a"),
    "bpchar": ("a", "b", "a "),
    "numeric(9,2)": ("9", "10", "9.00"),
    "uuid": (f"{0:032}", f"{1:032}", f"{0:032}"),
    "timestamptz": ("2026-01-01 12:00+02", "2026-01-01 11:00+00", "2026-01-01 10:00Z"),
    "public.mood": ("low", "high", "low"),
    "public.lower_case": ("a", "b", "a"),
    "varchar(9)[]": ("{a}", "{b}", "{a}"),
    "public.mood[]": ("{low}", "{high}", "{low}"),
    "int4range": ("[1,2)", "[2,3)", "[1,1]"),
    "public.pair": ("(a,1)", "(a,2)", "(a,1)"),
    "extensions.folded": ("a", "B", "A"),
    "public.folded_domain": ("a", "B", "A"),
    "extensions.folded[]": ("{a}", "{B}", "{A}"),
    "extensions.vector(2)": ("[1,2]", "[1,3]", "[1,2.0]"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_versions_of_any_type(hostile, admin, kind):
    """Compared by pg_catalog's operators, or those of the type's extension, wherever that is."""
    admin.execute(EXTENSION)
    for name, operator in {"lt": "<", "le": "<=", "eq": "=", "ge": ">=", "gt": ">"}.items():
        admin.execute(FOLDED.format(name=name, operator=operator))
    admin.execute(FOLDED_CLASS)
    admin.execute("GRANT USAGE ON SCHEMA extensions TO PUBLIC")
    admin.execute(
        "CREATE TYPE public.mood AS ENUM ('low', 'high'); CREATE TYPE public.pair AS (name varchar(9), n bigint); "
        "CREATE DOMAIN public.lower_case AS varchar(9); CREATE DOMAIN public.folded_domain AS extensions.folded"
    )
    planted.plant_for(admin, kind.partition("(")[0] + "[]" * kind.endswith("[]"))
    admin.execute(f"CREATE TABLE public.states (k {kind} PRIMARY KEY, v {kind})")
    sink = Straight(hostile.url)
    sink.begin([0])
    effect = Upsert("states", ["k"], ["k", "v"], version="v", deletes=True)
    columns = {"k": "text", "v": "text"} | META
    low, high, same = KINDS[kind]
    steps: list[tuple[list[tuple[str, str | None]], list[tuple[str, str]]]] = [
        ([(low, low), (high, high)], [(low, low), (high, high)]),
        # A newer one, and one that is not.
        ([(same, high), (high, low)], [(low, high), (high, high)]),
        # A tombstone before a message, and one behind.
        ([(low, same), (high, None), (high, low), (low, high), (same, None)], [(high, low)]),
    ]
    for strategy in (Dedup(), Version("states", {"k": "k"}, "v")):
        admin.execute("DELETE FROM public.states")
        for rows, left in steps:
            given = {
                "k": [None if version is None else key for key, version in rows],
                "v": [version for _, version in rows],
                "message_key": [key for key, _ in rows],
                "message_tombstone": [version is None for _, version in rows],
            }
            report = sink.apply(effect, given, None, columns=columns, strategy=strategy)
            assert report[0] == "applied"
            found = admin.execute("SELECT k::text, v::text FROM public.states").fetchall()
            stored = f"SELECT (%s)::{kind}::text, (%s)::{kind}::text"
            assert sorted(found) == sorted(row for pair in left for row in admin.execute(stored, pair)), strategy
    # A shuffle that leaves out tombstones: of a key that has no row any more, and of one that has.
    with hostile.connect() as connection:
        cursor = connection.cursor()
        BatchTable(cursor, DedupStore("consumer", "g"), columns, Dedup(), "SELECT 1", bisect=True, max_dead=1)
        cursor.executemany(
            "INSERT INTO batch (message_topic, message_part, message_offset, message_key, message_tombstone) "
            "VALUES ('t', 0, %s, %s, true)",
            list(enumerate((same, high))),
        )
        effect.note(cursor)
        cursor.execute("DELETE FROM batch")
        types = column_types(cursor, "states")
        assert effect.missed(cursor, ["k", "v"], types) == ("t", 0, 1)


def test_the_drivers_statements(hostile, admin):
    store = PostgresGroupStore(hostile.url, "consumer", "driver", "test")
    admin.execute("CREATE TABLE public.target (n integer, message_id uuid)")
    try:
        store.require_utf8()
        store.setup("CREATE TABLE IF NOT EXISTS made (n int)")
        assert admin.execute("SELECT to_regclass('public.made') IS NOT NULL").fetchone() == (True,)
        generation = store.take_over("Dedup", "partition")
        store.add([("t", 0)], {"t": "T"}, generation)
        assert store.is_new() is False
        assert store.state(["t"], generation, keep_order=True).stored
        assert store.dead_keys(["t"]) == {}
        assert store.retried(["t"], 10, keep_order=True) == []
        assert store.column_types("target") == {"n": ColumnType("integer"), "message_id": ColumnType("uuid")}
        assert store.direct(Insert("target", {"n": "n"}), OffsetsOnly(), {"n": "integer"}, ["n"]) is not None
        store.maintain_days(3, lambda *_: None)
        store.end(generation)
    finally:
        store.close()


def test_effects_outside(hostile, admin):
    sink = Provided(hostile.url)
    external = payments(
        "http://127.0.0.1:1",
        call=lambda call: Done(call.request),
        request="pg_catalog.jsonb_build_object('order'::text, order_id)",
        on_confirmed="INSERT INTO orders (id, state) VALUES ('o-1', 'paid')",
    )
    sink.reserve(external, ["o-1"])
    assert sink.drain(external) == {"attempts": 1, "confirmed": 1}
    assert admin.execute("SELECT state FROM public.orders").fetchall() == [("paid",)]


def test_the_inbox(hostile, outbox_kafka, monkeypatch):
    log = Log(hostile, outbox_kafka, 2)
    log.produce([f"k{n % 5}" for n in range(300)])
    refused = threading.Event()

    def handle(connection: Any, message: Any) -> None:
        if message.key() == b"k3" and not refused.is_set():
            raise ValueError("not yet")
        apply(connection, message)

    with log.consuming(handle, on_failure="dead-letter", attempts=1) as running:
        running.wait(lambda: len(log.letters()) == 60, "the dead letters")
        refused.set()
        with psycopg.connect(hostile.url, autocommit=True) as connection:
            connection.execute("UPDATE consumer.dead_letters SET state = 'retry' WHERE reason = 'failed'")
        running.wait(lambda: log.count() == 300, "what was retried")
    log.check()
