"""The tables get a next version under load: relays and services of this version go on with them, also after a kill."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from rows_and_roles import put
from support import Load, check, drained, end_leases, ends, look_up, wait_until
from typer.testing import CliRunner
from wal_support import to_wal

from outbox import SchemaError
from outbox._app import migrate as db
from relay.cli.app import app

# Next revisions as ours are to be: the first one only adds, and what is added has a default; a constraint is validated
# in the second one, in which a test can stop.
ADDED = """
import sqlalchemy as sa
from alembic import context, op

revision = "outbox_2"
down_revision = "outbox_1"
branch_labels = None
depends_on = None


def upgrade():
    schema = context.config.attributes["schema"]
    for table in ("events", "lanes", "failures", "dead_letters", "published", "scheduled", "relays", "audit"):
        op.add_column(table, sa.Column("added", sa.Text, nullable=False, server_default="new"), schema=schema)
    op.create_check_constraint("events_added", "events", "added <> ''", schema=schema, postgresql_not_valid=True)
"""
# The upgrade, and no writer.
WAITING = (
    "SELECT 1 FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
STOP = 4711
VALIDATED = f"""
from alembic import context, op

revision = "outbox_3"
down_revision = "outbox_2"
branch_labels = None
depends_on = None


def upgrade():
    op.execute('ALTER TABLE "%s".events VALIDATE CONSTRAINT events_added' % context.config.attributes["schema"])
    op.execute("SELECT pg_advisory_xact_lock({STOP})")
"""


@pytest.fixture
def next_version(tmp_path, monkeypatch) -> Iterator[None]:
    """Commands of this process have two revisions more than the relays."""
    place = tmp_path / "migrations"
    shutil.copytree(db.folder(), place)
    (place / "versions" / "0002_added.py").write_text(ADDED)
    (place / "versions" / "0003_validated.py").write_text(VALIDATED)
    with monkeypatch.context() as patched:
        patched.setattr(db, "folder", lambda: place)
        yield


def upgrade(url: str) -> str:
    done = CliRunner().invoke(app, ["db", "upgrade"], env={"OUTBOX_DATABASE_URL": url})
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_relays_of_this_version_go_on_with_the_next_tables(
    outbox_postgres, outbox_kafka, outbox_relay, wal, order, next_version, monkeypatch
):
    """From the WAL, whose stream says that the columns are others; a relay that is killed goes on in the table."""
    monkeypatch.setattr(db, "_LOCK_TIMEOUT", "300ms")
    monkeypatch.setattr(db, "_FIRST_PAUSE_SECONDS", 0.1)
    # As many tries as it takes to see one of them.
    monkeypatch.setattr(db, "_LONGEST_PAUSE_SECONDS", 0.4)
    monkeypatch.setattr(db, "_TRIES", 60)
    url, (kind, topic) = outbox_postgres.url, order
    settings = wal | {"delivery": "at-least-once", "relay__archive_days": 1}
    to_wal(url, settings)
    relay = outbox_relay(**settings)
    with Load(url, kind) as load, ThreadPoolExecutor(1) as threads:
        load.more(100)
        with psycopg.connect(url) as report:
            report.execute("SELECT count(*) FROM outbox.events").fetchall()
            upgrading = threads.submit(upgrade, url)
            wait_until(lambda: look_up(url, WAITING) != [], what="a wait for a lock")
            # Writers wait behind it no longer than one of its tries.
            load.more(20)
        assert "(try 1 of 60)" in (said := upgrading.result(60))
        assert "to outbox_3" in said
        load.more(100)
        relay.kill()
        end_leases(url)
        relay = outbox_relay(**settings)
        load.more(100)
        load.drain()
    check(url, outbox_kafka.consume(topic, timeout=60))
    wait_until(lambda: look_up(url, "SELECT DISTINCT added FROM outbox.published") == [("new",)], what="the archive")
    drained(url)
    ends(relay)


def test_tables_that_stay_locked_are_an_error_after_the_last_try(outbox_postgres, next_version, monkeypatch):
    monkeypatch.setattr(db, "_LOCK_TIMEOUT", "10ms")
    monkeypatch.setattr(db, "_FIRST_PAUSE_SECONDS", 0.01)
    url = outbox_postgres.url
    with psycopg.connect(url) as report:
        report.execute("SELECT count(*) FROM outbox.events").fetchall()
        done = CliRunner().invoke(app, ["db", "upgrade"], env={"OUTBOX_DATABASE_URL": url})
    assert done.exit_code == 1, done.output
    *tries, last = done.stderr.splitlines()
    assert [line.endswith(f"(try {number} of 6)") for number, line in enumerate(tries, 1)] == [True] * 5
    assert "try again when they have ended" in last
    assert look_up(url, "SELECT version_num FROM outbox.alembic_version") == [("outbox_1",)]


def revision(url: str) -> str:
    return look_up(url, "SELECT version_num FROM outbox.alembic_version")[0][0]


def test_each_revision_has_a_transaction_of_its_own(outbox_postgres, next_version, monkeypatch):
    """Writers go on while the second one validates; killed in it, or begun by two at once, the upgrade continues."""
    monkeypatch.setattr(db, "_LOCK_TIMEOUT", "60s")
    url = outbox_postgres.url
    stopped = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted"

    def in_the_second() -> int:
        ((pid,),) = wait_until(lambda: look_up(url, stopped, STOP), what="the second revision")
        put(f"{url}?options=-clock_timeout%3D20s", "outbox.events")
        assert revision(url) == "outbox_2"
        return pid

    with ThreadPoolExecutor(2) as threads:
        with psycopg.connect(url) as holder:
            holder.execute("SELECT pg_advisory_xact_lock(%s)", (STOP,))
            killed = threads.submit(db.upgrade, url)
            look_up(url, "SELECT pg_terminate_backend(%s)", in_the_second())
            with pytest.raises(SchemaError, match="terminating connection"):
                killed.result(60)
            both = [threads.submit(db.upgrade, url) for _ in range(2)]
            in_the_second()
        done = {str(one.result(60)) for one in both}
    assert done == {
        "tables upgraded from revision outbox_2 to outbox_3",
        "nothing to do, the tables are at revision outbox_3 already",
    }
    assert revision(url) == "outbox_3"
