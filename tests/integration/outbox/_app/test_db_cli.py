"""``outbox db …`` with arguments and databases that can't be right: one line, an exit status, never a traceback."""

from __future__ import annotations

import psycopg
import pytest
from migration_support import empty
from psycopg import sql
from typer.testing import CliRunner

from outbox import ConfigurationError
from outbox._app import migrate as db
from outbox._app import schema_drift as schema_check
from outbox._clients.checks import Level
from relay.cli.app import app
from relay.config import load
from relay.operations.doctor.postgres import _tables

__all__ = ["empty"]

NOWHERE = "postgresql://127.0.0.1:1/x"
LONG = "é" * 32  # 32 characters, 64 bytes
WITH_DATABASE = (("upgrade",), ("downgrade", "base"), ("check",), ("lanes", "2"))


def refused(*arguments: str, url: str = NOWHERE, schema: str | None = None) -> tuple[int, str]:
    """Run a command that must fail; give its exit status and its one line."""
    environment = {"OUTBOX_DATABASE_URL": url} | ({} if schema is None else {"OUTBOX_SCHEMA": schema})
    done = CliRunner().invoke(app, ["db", *arguments], env=environment)
    assert isinstance(done.exception, SystemExit), (done.exception, done.output)
    assert done.stdout == ""
    assert done.stderr.startswith("outbox: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("downgrade", "nope"), "no revision 'nope' here; choose from base, outbox_1"),
        (("downgrade", "head"), "no revision 'head'"),
        (("downgrade", "outbox_1", "--consumer"), "no revision 'outbox_1'"),
        (("sql", "--from", "nope"), "no revision 'nope'"),
        (("sql", "--to", ""), "no revision ''"),
        (("sql", "--to", "base"), "no revision 'base'"),
        (("sql", "--to", "outbox_1:head"), "no revision 'outbox_1:head'"),
        (("sql", "--consumer", "--to", "outbox_1"), "no revision 'outbox_1'"),
        (("upgrade", "--lanes", "0"), "lanes must be"),
        (("upgrade", "--lanes", "257"), "lanes must be"),
        (("sql", "--lanes", "-1"), "lanes must be"),
        (("sql", "--lanes", ""), "lanes must be"),
        (("lanes", "abc"), "lanes must be"),
        (("lanes", "9" * 5000), "lanes must be"),
        (("upgrade", "--consumer", "--lanes", "2"), "--lanes is for the outbox"),
        (("sql", "--consumer", "--lanes", "x"), "--lanes is for the outbox"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_the_database_is_asked(arguments, shown):
    status, line = refused(*arguments)
    assert (status, shown in line) == (2, True), line


def test_a_step_backwards_is_no_upgrade(monkeypatch):
    monkeypatch.setattr(db, "revisions", lambda history=db.OUTBOX: ["outbox_1", "outbox_2"])
    status, line = refused("sql", "--from", "outbox_2", "--to", "outbox_1")
    assert (status, "outbox_2, comes after outbox_1" in line) == (2, True), line


@pytest.mark.parametrize(
    ("command", "schema"),
    [
        (("upgrade",), ""),
        (("downgrade", "base"), LONG),
        (("check",), "pg_mine"),
        (("lanes", "2"), "information_schema"),
        (("sql",), "\udcff"),
    ],
)
def test_schemas_that_cannot_be(command, schema):
    status, line = refused(*command, "--schema", schema)
    assert (status, "schema" in line) == (2, True), line
    if command[0] != "lanes":
        assert refused(*command, "--consumer", "--schema", schema)[0] == 2


def test_schemas_that_cannot_be_from_the_environment():
    assert refused("sql", schema=LONG)[0] == 2
    assert refused("upgrade", schema="")[0] == 2


@pytest.mark.parametrize("call", [db.upgrade, db.upgrade_consumer, db.downgrade, schema_check.check])
def test_no_command_line_can_hold_a_nul_but_a_file_can(call):
    with pytest.raises(ConfigurationError, match="invalid schema name"):
        call(NOWHERE, "a\0b")
    with pytest.raises(ConfigurationError, match="invalid schema name"):
        db.sql("a\0b")


@pytest.mark.parametrize(
    ("command", "url"),
    [
        (("upgrade",), "mysql://h/x"),
        (("downgrade", "base"), ""),
        (("check",), "postgresql://user:secret@[::1]x/x"),
        (("lanes", "2"), "postgresql://h/\udcff"),
    ],
)
def test_urls_that_cannot_be_read(command, url):
    status, line = refused(*command, "--database-url", url)
    assert (status, "URL" in line, "secret" in line) == (2, True, False), line


@pytest.mark.parametrize(
    ("command", "url"),
    [
        (("upgrade",), "postgresql://127.0.0.1:1,127.0.0.1:2/x"),
        (("downgrade", "base"), "postgresql:///x?host=/nonexistent"),
        (("check",), f"postgresql://{'a' * 70}.example/x"),
        (("lanes", "2"), "postgresql://127.0.0.1:1/x?service=none"),
    ],
)
def test_databases_out_of_reach(command, url):
    status, line = refused(*command, "--database-url", url)
    assert (status, "see that the server runs" in line) == (1, True), line


def test_a_database_or_role_that_is_not_there(empty):
    for command in WITH_DATABASE:
        status, line = refused(*command, url=f"{empty}_not")
        assert (status, "does not exist" in line, "OUTBOX_DATABASE_URL" in line) == (1, True, True), line
    status, line = refused("upgrade", url=empty.replace("postgres@", "nobody_here@"))
    assert (status, "nobody_here" in line, "OUTBOX_DATABASE_URL" in line) == (1, True, True), line


def test_a_schema_that_was_never_made(empty):
    status, line = refused("downgrade", "base", "--schema", "typo", url=empty)
    assert (status, "no table typo.alembic_version" in line) == (1, True), line
    status, line = refused("lanes", "2", "--schema", "typo", url=empty)
    assert (status, "outbox db upgrade" in line) == (1, True), line
    with psycopg.connect(empty) as connection:
        assert connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'typo'").fetchall() == []


def test_a_downgrade_goes_back_only(outbox_postgres, monkeypatch):
    monkeypatch.setattr(db, "revisions", lambda history=db.OUTBOX: ["outbox_1", "outbox_2", "outbox_3"])
    with outbox_postgres.connect() as connection:
        connection.execute("UPDATE outbox.alembic_version SET version_num = 'outbox_1'")
    status, line = refused("downgrade", "outbox_3", url=outbox_postgres.url)
    assert (status, "is at outbox_1 already" in line) == (1, True), line


def test_tables_of_a_later_or_an_unreleased_version(outbox_postgres):
    for command, schema, revision in (
        ("upgrade", "outbox", "outbox_0001"),
        ("downgrade base", "outbox", "outbox_9999"),
        ("upgrade --consumer", "consumer", "consumer_0001"),
        ("downgrade base --consumer", "consumer", "consumer_0001"),
    ):
        with outbox_postgres.connect() as connection:
            connection.execute(f"UPDATE {schema}.alembic_version SET version_num = %s", (revision,))
        status, line = refused(*command.split(), url=outbox_postgres.url)
        assert (status, f"'{revision}', which this version does not have" in line) == (1, True), line
        again = "outbox db upgrade --consumer" if schema == "consumer" else "outbox db upgrade"
        assert f"drop the schema and create it again with `{again}`" in line


def test_the_version_before_keeps_the_tables_of_a_later_one(outbox_postgres):
    """A release that is taken back runs its own migration step again."""
    environment = {"OUTBOX_DATABASE_URL": outbox_postgres.url}
    for schema, words in (("outbox", []), ("consumer", ["--consumer"])):
        names = {"schema": sql.Identifier(schema), "later": sql.Literal(f"{schema}_9999")}
        with outbox_postgres.connect() as connection:
            connection.execute(sql.SQL("UPDATE {schema}.alembic_version SET version_num = {later}").format(**names))
            connection.execute(sql.SQL("ALTER TABLE {schema}.audit ADD COLUMN added text").format(**names))
        done = CliRunner().invoke(app, ["db", "upgrade", *words], env=environment)
        assert (done.exit_code, "nothing to do, the tables are of a later version" in done.output) == (0, True), done
        with outbox_postgres.connect() as connection:
            (kept,) = connection.execute(
                sql.SQL(
                    "SELECT version_num FROM {schema}.alembic_version WHERE (SELECT added FROM {schema}.audit) IS NULL"
                ).format(**names)
            ).fetchall()
        assert kept == (f"{schema}_9999",)
    assert "is at outbox_9999, of a later version than this one" in schema_check.check(outbox_postgres.url)[-1]
    with outbox_postgres.connect() as connection:
        assert {each.level for each in _tables(connection, load(database_url=outbox_postgres.url))} == {Level.WARNING}


def test_what_the_tables_say_of_themselves_makes_them_of_no_later_version(outbox_postgres):
    with outbox_postgres.connect(autocommit=True) as connection:
        connection.execute("COMMENT ON TABLE outbox.events IS 'of a later version than this one'")
        (found,) = _tables(connection, load(database_url=outbox_postgres.url))
    assert (found.level, "of a later version than this one" in found.found) == (Level.FAILURE, True)


def test_tables_that_another_history_made(outbox_postgres):
    with outbox_postgres.connect() as connection:
        connection.execute("DROP TABLE outbox.alembic_version")
    status, line = refused("upgrade", url=outbox_postgres.url)
    assert (status, "continue with the migrations that did" in line) == (1, True), line


def test_a_role_without_rights(outbox_postgres):
    role = f"nothing_{outbox_postgres.name}"
    url = outbox_postgres.url.replace("postgres@", f"{role}@")
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        try:
            for command in (*WITH_DATABASE, ("upgrade", "--schema", "other")):
                status, line = refused(*command, url=url)
                assert (status, "permission denied" in line, "use the role that owns" in line) == (1, True, True), line
        finally:
            admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def test_a_connection_that_may_only_read(outbox_postgres):
    url = f"{outbox_postgres.url}?options=-cdefault_transaction_read_only%3Don"
    for command in (("downgrade", "base"), ("check",), ("lanes", "2"), ("upgrade", "--schema", "other")):
        status, line = refused(*command, url=url)
        assert (status, "use the primary server" in line) == (1, True), line


def test_a_server_that_does_not_run():
    status, line = refused("upgrade")
    assert status == 1
    # Without libpq's question below it.
    assert line.endswith(
        "port 1 failed: Connection refused; see that the server runs, and that OUTBOX_DATABASE_URL has the right host, "
        "database and user\n"
    )


@pytest.mark.parametrize("tables", [(), ("--consumer",)])
def test_an_upgrade_says_what_it_has_done(empty, tables):
    def said(*arguments: str) -> str:
        return CliRunner().invoke(app, ["db", *arguments, *tables], env={"OUTBOX_DATABASE_URL": empty}).stdout

    schema = "consumer" if tables else "outbox"
    last = db.revisions(db.CONSUMER if tables else db.OUTBOX)[-1]
    assert said("upgrade") == f"schema {schema}: tables created, revision {last}\n"
    assert said("upgrade") == f"schema {schema}: nothing to do, the tables are at revision {last} already\n"
    assert said("downgrade", "base") == f"schema {schema} is at base\n"
    # The version table is still there, and empty.
    assert said("upgrade") == f"schema {schema}: tables created, revision {last}\n"
