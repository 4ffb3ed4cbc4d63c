"""`outbox db roles`: each kind of role gets what it needs, and a writer can't pose as the relay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import psycopg
import pytest
from psycopg import sql
from rows_and_roles import login_role, put
from typer.testing import CliRunner

from outbox import Event, Outbox
from outbox.event import ATTEMPTS, DEAD_LETTER, REPLAY
from relay.audit.ledger import turn_on
from relay.cli.app import app
from relay.operations.roles import RoleKind, grants

RIGHTS = """
SELECT c.oid::regclass::text || coalesce('.' || a.attname, ''), p.privilege
  FROM pg_class AS c
 CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'TRIGGER']) AS p(privilege)
  LEFT JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                             AND p.privilege IN ('SELECT', 'INSERT', 'UPDATE')
 WHERE c.relnamespace IN ('outbox'::regnamespace, 'consumer'::regnamespace) AND c.relkind IN ('r', 'p')
   AND CASE WHEN a.attname IS NULL THEN has_table_privilege('of_both', c.oid, p.privilege)
            ELSE has_column_privilege('of_both', c.oid, a.attnum, p.privilege) END"""
"""The rights on tables, and on columns where there are any, of the role ``of_both``."""


@pytest.fixture
def writer(outbox_postgres) -> Iterator[str]:
    """The name of a role that may log in."""
    with outbox_postgres.connect(autocommit=True) as admin, login_role(admin, "writer") as name:
        yield name


def run(database: Any, *arguments: str, status: int = 0, **environment: str) -> str:
    environment = {"OUTBOX_DATABASE_URL": database.url} | environment
    done = CliRunner().invoke(app, ["db", "roles", *arguments], env=environment)
    assert done.exit_code == status, (done.output, done.exception)
    return done.stdout if status == 0 else done.stderr


def test_the_command_prints_and_changes_nothing_unless_it_is_told_to(outbox_postgres, writer):
    text = run(outbox_postgres)
    for kind in ("writer", "relay", "operator", "page"):
        assert f'GRANT USAGE ON SCHEMA "outbox" TO "outbox_{kind}";' in text
    assert "outbox_consumer" not in text
    assert "REPLICATION" not in text
    assert "ALTER ROLE" in run(outbox_postgres, OUTBOX_SOURCE="wal")
    run(outbox_postgres, f"writer={writer}")
    with psycopg.connect(outbox_postgres.url, user=writer) as connection:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            Outbox().add(connection, Event("Order", "1", "T"))
    assert run(outbox_postgres, f"writer={writer}", "--apply").endswith("-- granted\n")
    with psycopg.connect(outbox_postgres.url, user=writer) as connection:
        Outbox().add(connection, Event("Order", "1", "T"))


def test_a_writer_can_not_pose_as_the_relay(outbox_postgres, writer):
    with outbox_postgres.connect(autocommit=True) as admin:
        # On the whole table, as somebody may have granted it by hand.
        admin.execute(f"GRANT USAGE ON SCHEMA outbox TO {writer}; GRANT INSERT ON outbox.events TO {writer}")
    run(outbox_postgres, f"writer={writer}", "--apply")
    insert = (
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, headers{}) VALUES ('A', '1', 'T', {}{})"
    )
    with psycopg.connect(outbox_postgres.url, user=writer, autocommit=True) as connection:
        for header in (DEAD_LETTER, ATTEMPTS, REPLAY, "outbox-later"):
            headers = f"jsonb_build_object('tenant', 'acme', '{header}', 'x')"
            with pytest.raises(psycopg.errors.CheckViolation, match="events_relay_headers"):
                connection.execute(insert.format("", headers, ""))
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(insert.format(", from_relay", headers, ", true"))
        connection.execute(insert.format("", """'{"tenant": "outbox-", "x-outbox-": "1"}'""", ""))


def test_names_that_want_care(outbox_postgres):
    with outbox_postgres.connect(autocommit=True) as admin, login_role(admin, "we\"ird %s %% $x$ ; --'") as name:
        run(outbox_postgres, f"writer={name}", f"relay={name}", "--apply")
        found = admin.execute("SELECT has_table_privilege(%s, 'outbox.events', 'DELETE')", (name,)).fetchone()
        assert found == (True,)


def test_a_role_that_is_not_there(outbox_postgres):
    line = run(outbox_postgres, "writer=nobody_at_all", "--apply", status=1)
    assert re.fullmatch(r'outbox: [^\n]*role "nobody_at_all" does not exist; create the role first[^\n]*\n', line)


def test_a_role_of_two_kinds_has_the_rights_of_both_in_any_order(outbox_postgres):
    with outbox_postgres.connect() as admin:
        turn_on(admin, "outbox", None)

        def rights(*kinds: RoleKind) -> set[tuple[str, str]]:
            with admin.transaction(force_rollback=True):
                admin.execute("CREATE ROLE of_both")
                for statement in grants([(kind, "of_both") for kind in kinds], "outbox", "consumer", wal=True):
                    admin.execute(sql.SQL(statement))  # type: ignore[arg-type]
                return set(admin.execute(RIGHTS).fetchall())

        of = {kind: rights(kind) for kind in RoleKind}
        assert all(of.values())
        wrong = {pair: (of[pair[0]] | of[pair[1]]) ^ rights(*pair) for pair in permutations(RoleKind, 2)}
        assert {pair: found for pair, found in wrong.items() if found} == {}
        admin.rollback()


def test_what_is_printed_takes_nothing_from_a_service_that_runs(outbox_postgres, writer):
    """A REVOKE comes before its GRANT, in one transaction. What locks a table is a transaction of its own."""
    printed = run(outbox_postgres, f"writer={writer}", "--aggregate-type", f"{writer}=Order")
    before, begun, rest = printed.partition("BEGIN;\n")
    within, committed, after = rest.partition("COMMIT;\n")
    assert (begun, committed, after) == ("BEGIN;\n", "COMMIT;\n", "RESET search_path;\n")
    assert ("CREATE POLICY" in before, "CREATE POLICY" in within) == (True, False)
    assert ("REVOKE" in before, within.rfind("REVOKE") < within.find("GRANT")) == (False, True)
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute(sql.SQL(printed))  # type: ignore[arg-type]
    with psycopg.connect(outbox_postgres.url, user=writer) as connection:
        Outbox().add(connection, Event("Order", "1", "T"))


@pytest.mark.parametrize("superuser", [False, True])
def test_a_migrator_takes_over_the_ledgers_function_too(outbox_postgres, superuser):
    with (
        outbox_postgres.connect(autocommit=True) as admin,
        login_role(admin, "former") as former,
        login_role(admin, "heir") as heir,
    ):
        if not superuser:
            run(outbox_postgres, f"migrator={former}", "--apply")
        turn_on(admin, "outbox", None)
        run(outbox_postgres, f"migrator={heir}", "--apply")
        # What the owner of the ledger lets it call has the owner's rights.
        with psycopg.connect(outbox_postgres.url, user=heir) as connection:
            connection.execute(
                "CREATE TABLE outbox.seen (role text); CREATE FUNCTION outbox.noted() RETURNS trigger LANGUAGE plpgsql "
                "AS 'BEGIN INSERT INTO outbox.seen VALUES (current_user); RETURN NEW; END'; "
                "CREATE TRIGGER noted BEFORE INSERT ON outbox.ledger FOR EACH ROW EXECUTE FUNCTION outbox.noted()"
            )
        put(admin, "outbox.events")
        assert admin.execute("SELECT sum(events) FROM outbox.ledger").fetchall() == [(1,)]
        assert admin.execute("SELECT role FROM outbox.seen").fetchall() == [(heir,)]


def test_who_becomes_an_operator_after_the_ledger_was_turned_on_reads_it(outbox_postgres, writer):
    with outbox_postgres.connect(autocommit=True) as admin:
        turn_on(admin, "outbox", None)
    read = "SELECT count(*) FROM outbox.ledger, outbox.ledger_state"
    for kind, status in (("monitor", 1), ("operator", 0)):
        run(outbox_postgres, f"{kind}={writer}", "--apply")
        with psycopg.connect(outbox_postgres.url, user=writer) as connection:
            if status:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(read)
            else:
                connection.execute(read)
