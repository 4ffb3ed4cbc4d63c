"""Shipping the tables: upgrade, downgrade, offline SQL, rights, and the commands."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import psycopg
import pytest
from migration_support import empty, rows, while_it_waits
from older_postgres import postgres_16
from psycopg import sql
from rows_and_roles import login_role, put

from outbox import ConfigurationError, Event, Outbox, SchemaError
from outbox._app import migrate as db
from outbox._app import schema_drift as schema_check
from outbox.consumer.retention import IdRetention

__all__ = ["empty"]


@pytest.fixture
def migrated(outbox_postgres) -> str:
    """The URL of a database with all tables, which is a copy: to upgrade an empty one takes longer."""
    return str(outbox_postgres.url)


def test_upgrade_makes_what_the_metadata_says_and_a_second_one_writes_nothing(empty):
    db.upgrade(empty)
    db.upgrade_consumer(empty)
    assert (schema_check.check(empty), schema_check.check_consumer(empty, "consumer")) == ([], [])
    assert rows(empty, "SELECT lane FROM outbox.lanes ORDER BY lane") == [(0,), (1,), (2,), (3,)]
    # Every change of the catalog, or of the lanes, has its transaction in xmin.
    catalogs = ("class", "attribute", "attrdef", "constraint", "index", "description", "proc", "trigger", "namespace")
    written = " UNION ALL ".join(
        f"SELECT '{name}', count(*), max(xmin::text::bigint) FROM {name}"
        for name in (*(f"pg_{catalog}" for catalog in catalogs), "outbox.lanes", "outbox.alembic_version")
    )
    first = rows(empty, written)
    db.upgrade(empty)
    db.upgrade_consumer(empty)
    assert rows(empty, written) == first


@pytest.mark.parametrize(("schema", "lanes"), [("outbox", 1), ("my Schema%s", 7)])
def test_schema_and_lanes_can_be_chosen(empty, schema, lanes):
    db.upgrade(empty, schema, lanes)
    assert schema_check.check(empty, schema) == []
    with psycopg.connect(empty) as connection:
        Outbox(schema=schema).add_many(connection, [Event("Order", str(n), "T") for n in range(200)], lock_key=True)
        Outbox(schema=schema).add(connection, Event("Order", "x", "T"))
        table = sql.Identifier(schema, "events")
        used = connection.execute(sql.SQL("SELECT DISTINCT lane FROM {} ORDER BY 1").format(table)).fetchall()
    assert [row[0] for row in used] == list(range(lanes))
    with pytest.raises(ConfigurationError, match="outbox db lanes 3"):
        db.upgrade(empty, schema, 3)


def test_pods_that_start_together_upgrade_once(empty):
    errors: list[Exception] = []

    def upgrade() -> None:
        try:
            db.upgrade(empty)
        except Exception as error:  # noqa: BLE001  shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=upgrade) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert rows(empty, "SELECT count(*) FROM outbox.lanes") == [(4,)]


def test_downgrade_leaves_nothing_but_refuses_to_lose_events(migrated):
    with psycopg.connect(migrated) as connection:
        Outbox().add(connection, Event("Order", "1", "T"))
    with pytest.raises(SchemaError, match=r"outbox\.events still has rows"):
        db.downgrade(migrated)
    assert rows(migrated, "SELECT count(*) FROM outbox.events") == [(1,)]
    db.downgrade(migrated, drop_rows=True)
    # There is nothing to do any more.
    db.downgrade(migrated)
    left = "SELECT relname FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r'"
    assert rows(migrated, left) == [("alembic_version",)]
    db.upgrade(migrated)
    assert schema_check.check(migrated) == []


@pytest.mark.parametrize(
    ("history", "tables"),
    [
        (db.OUTBOX, ("published", "audit", "idempotency_keys", "dead_letters")),
        (db.CONSUMER, ("offsets", "processed_messages", "dead_letters", "losses", "audit")),
    ],
    ids=["outbox", "consumer"],
)
def test_a_downgrade_refuses_to_lose_what_is_kept(migrated, history, tables):
    names = [f"{history.schema}.{name}" for name in tables]
    for table in names:
        put(migrated, table)
        with pytest.raises(SchemaError, match=f"{table} still has rows, which a downgrade would drop"):
            db.downgrade(migrated, history=history)
        assert rows(migrated, f"DELETE FROM {table} RETURNING 1") == [(1,)]
    for table in names:
        put(migrated, table)
    db.downgrade(migrated, history=history, drop_rows=True)
    left = "SELECT count(*) FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'r'"
    assert rows(migrated, left, history.schema) == [(1,)]


def test_downgrade_keeps_an_event_that_commits_while_it_waits(migrated):
    for isolation in ("read committed", "repeatable read"):
        with psycopg.connect(migrated, autocommit=True) as connection:
            connection.execute("DELETE FROM outbox.events")
            name = sql.Identifier(connection.info.dbname)
            connection.execute(
                sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = {}").format(name, sql.Literal(isolation))
            )
        with psycopg.connect(migrated) as writer:
            Outbox().add(writer, Event("Order", "1", "T"))
            with while_it_waits(migrated, lambda: db.downgrade(migrated)) as done:
                writer.commit()
                with pytest.raises(SchemaError, match=r"outbox\.events still has rows"):
                    done.result(30)
        assert rows(migrated, "SELECT count(*) FROM outbox.events") == [(1,)], isolation


def test_downgrade_gives_up_when_the_tables_stay_locked(migrated, monkeypatch):
    monkeypatch.setattr(db, "_LOCK_TIMEOUT", "100ms")
    with psycopg.connect(migrated) as writer:
        Outbox().add(writer, Event("Order", "1", "T"))
        for drop_rows in (False, True):
            with pytest.raises(SchemaError, match="long transactions use these tables; try again"):
                db.downgrade(migrated, drop_rows=drop_rows)
    assert rows(migrated, "SELECT count(*) FROM outbox.events") == [(1,)]


def test_a_client_that_is_stopped_keeps_no_writer_out(migrated, monkeypatch):
    """Its session ends, and with it the locks; later it says so."""
    monkeypatch.setattr(db, "_IDLE_TIMEOUT", "2s")

    def statements() -> Iterator[str]:
        yield "LOCK TABLE outbox.events IN ACCESS EXCLUSIVE MODE"
        put(f"{migrated}?options=-clock_timeout%3D10s", "outbox.events")
        yield "SELECT 1"

    with pytest.raises(SchemaError, match="idle-in-transaction timeout; the command was stopped for too long"):
        db.grant(migrated, statements())  # type: ignore[arg-type]
    assert rows(migrated, "SELECT count(*) FROM outbox.events") == [(1,)]


def test_a_limit_for_all_transactions_is_not_one_for_migrations(empty):
    """To change a large table takes long."""
    with db._transaction(f"{empty}?options=-ctransaction_timeout%3D5min") as connection:
        assert connection.exec_driver_sql("SHOW transaction_timeout").scalar() == "0"


def test_who_waits_for_another_change_waits_for_its_end_and_not_for_a_client_that_is_stopped(migrated, monkeypatch):
    monkeypatch.setattr(db, "_LOCK_TIMEOUT", "100ms")
    waiting = f"{migrated}?options=-cstatement_timeout%3D60s"

    def stop_in_it() -> None:
        with db._transaction(migrated) as holder, while_it_waits(migrated, lambda: db.change_lanes(waiting, 2)) as done:
            # Not before the other one waits, however long that takes to come about.
            assert holder.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar() == db._IDLE_TIMEOUT
            holder.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = '200ms'")
            done.result(60)

    with pytest.raises(SchemaError, match="idle-in-transaction timeout"):
        stop_in_it()
    assert rows(migrated, "SELECT count(*) FROM outbox.lanes") == [(2,)]


def all_tables(url: str, schema: str) -> list[str]:
    query = "SELECT relname FROM pg_class WHERE relnamespace = %s::text::regnamespace AND relkind IN ('r', 'p')"
    return [row[0] for row in rows(url, query, schema)]


def test_downgrade_sees_events_that_a_policy_hides_from_it(migrated):
    with psycopg.connect(migrated, autocommit=True) as admin, login_role(admin, "owner") as owner:
        put(admin, "outbox.events")
        for kind, name in (("SCHEMA", "outbox"), *(("TABLE", f"outbox.{t}") for t in all_tables(migrated, "outbox"))):
            admin.execute(f"ALTER {kind} {name} OWNER TO {owner}")
        admin.execute("ALTER TABLE outbox.events ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        with pytest.raises(SchemaError, match="row-level security"):
            db.downgrade(migrated.replace("postgres@", f"{owner}@"))
        assert rows(migrated, "SELECT count(*) FROM outbox.events") == [(1,)]


def test_offline_sql_is_deterministic_and_makes_the_schema_of_that_very_name(empty):
    for schema in ('Quo"te a.b', "one:two %sy%%z"):
        before = rows(empty, "SELECT nspname FROM pg_namespace")
        text = db.sql(schema, 3)
        assert text == db.sql(schema, 3)
        with psycopg.connect(empty, autocommit=True) as connection:
            connection.execute(text)
            connection.execute(db.sql(f"{schema} sink", history=db.CONSUMER))
            lanes = sql.SQL("SELECT lane FROM {} ORDER BY 1").format(sql.Identifier(schema, "lanes"))
            assert connection.execute(lanes).fetchall() == [(0,), (1,), (2,)]
        after = rows(empty, "SELECT nspname FROM pg_namespace")
        assert {row[0] for row in set(after) - set(before)} == {schema, f"{schema} sink"}
        assert str(db.upgrade(empty, schema)).startswith("nothing to do, the tables are at revision")
        assert schema_check.check(empty, schema) == []
        assert schema_check.check_consumer(empty, f"{schema} sink") == []
        db.change_lanes(empty, 2, schema)
        assert schema_check.check(empty, schema) == []
        db.downgrade(empty, schema)


def test_an_older_postgres(monkeypatch):
    """The wheel carries Postgres 16 as well."""
    from outbox.sandbox.postgres import PostgresServer

    if os.environ.get("OUTBOX_DATABASE_URL"):
        pytest.skip("OUTBOX_DATABASE_URL is set: that server is the one to test")
    monkeypatch.setenv("OUTBOX_PG_BIN", str(postgres_16()))
    with PostgresServer(settings={"fsync": "off"}) as server:
        url = server.create_database("older")
        db.upgrade(url)
        assert schema_check.check(url) == []
        db.change_lanes(url, 2)
        assert schema_check.check(url) == []
        with psycopg.connect(url) as connection:
            assert connection.info.server_version // 10000 == 16
            Outbox().add_many(connection, [Event("Order", "1", "T", {"a": 1})], lock_key=True)
            put(connection, "outbox.events", aggregate_type="a", aggregate_id="b", event_type="c")
            ids = connection.execute("SELECT event_id FROM outbox.events").fetchall()
    assert {row[0].version for row in ids} == {7}


def test_the_consumers_tables_have_a_history_of_their_own(empty):
    db.upgrade_consumer(empty, "sink")
    assert schema_check.check_consumer(empty, "sink") == []
    IdRetention(empty, "sink", 1).make()
    with psycopg.connect(empty) as connection:
        connection.execute("ALTER TABLE sink.offsets DROP CONSTRAINT offsets_not_negative")
        connection.execute("ALTER TABLE sink.processed_messages DETACH PARTITION sink.processed_messages_default")
    found = schema_check.check_consumer(empty, "sink")
    assert any("offsets: constraint offsets_not_negative is missing" in line for line in found)
    assert any("processed_messages_default: table is" in line for line in found)
    db.downgrade(empty, "sink", history=db.CONSUMER)
    left = "SELECT relname FROM pg_class WHERE relnamespace = 'sink'::regnamespace AND relkind IN ('r', 'p')"
    assert {row[0] for row in rows(empty, left)} <= {"alembic_version", "processed_messages_default"}
    text = db.sql("elsewhere", history=db.CONSUMER)
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(text)
    assert schema_check.check_consumer(empty, "elsewhere") == []


def test_the_commands(outbox_postgres, monkeypatch):
    from typer.testing import CliRunner

    from relay.cli.app import app

    monkeypatch.setenv("OUTBOX_DATABASE_URL", outbox_postgres.url)

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["db", *arguments])
        return done.exit_code, done.output

    assert run("check") == (0, "schema outbox is as this version expects\n")
    assert run("upgrade", "--consumer")[0] == 0
    assert run("check", "--consumer")[0] == 0
    assert run("lanes", "2") == (0, "schema outbox has 2 lanes\n")
    status, output = run("upgrade", "--lanes", "9")
    assert (status, "outbox db lanes 9" in output) == (2, True)
    with outbox_postgres.connect(autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox.events DROP CONSTRAINT events_size")
    status, output = run("check", "--json")
    assert (status, "events_size" in output) == (1, True)
    assert "CREATE TABLE outbox.events" in run("sql")[1]
    assert run("downgrade", "base")[0] == 0
    status, output = run("check", "--database-url", "postgresql://127.0.0.1:1/x")
    assert (status, output.startswith("outbox: postgresql://127.0.0.1:1/x")) == (1, True)
