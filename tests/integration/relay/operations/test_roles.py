"""`outbox db roles`: each kind of role gets what it needs, and a writer can't pose as the relay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from rows_and_roles import login_role
from typer.testing import CliRunner

from outbox import Event, Outbox
from outbox.event import ATTEMPTS, DEAD_LETTER, REPLAY
from relay.cli.app import app


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
