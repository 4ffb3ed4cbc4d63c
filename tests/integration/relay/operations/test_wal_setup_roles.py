"""``outbox cdc`` and a relay that reads the WAL, under the roles of the docs."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from cdc_shell import shell
from psycopg import sql
from support import order, wait_until
from wal_support import cdc, streaming, wal

from outbox.testing.fixtures import token
from relay.config import SourceKind

__all__ = ["order", "shell", "wal"]


@pytest.fixture
def roles(shell):
    """Makes roles; they go with the test."""
    made: list[str] = []

    def make(name: str, options: str = "") -> str:
        role = f"{name}_{token()}"
        shell.admin.execute(sql.SQL("CREATE ROLE {} LOGIN " + options).format(sql.Identifier(role)))
        made.append(role)
        return role

    yield make
    for role in made:
        shell.admin.execute(sql.SQL("REASSIGN OWNED BY {} TO CURRENT_USER").format(sql.Identifier(role)))
        shell.admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


def of(url: str, role: str) -> str:
    return url.replace("postgres@", f"{role}@")


def test_setup_needs_the_owner_with_replication(shell, roles):
    owner, reader = roles("owner"), roles("reader", "REPLICATION")
    as_owner = {"OUTBOX_DATABASE_URL": of(shell.url, owner)}
    shell.admin.execute(
        sql.SQL("GRANT USAGE ON SCHEMA outbox TO {0}, {1}; GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO {1}").format(
            sql.Identifier(owner), sql.Identifier(reader)
        )
    )
    _, output = shell.refused("cdc setup", OUTBOX_DATABASE_URL=of(shell.url, reader))
    assert "creating the publication needs the rights of the tables' owner, and CREATE on the database" in output
    for (table,) in shell.query("SELECT tablename FROM pg_tables WHERE schemaname = 'outbox'"):
        shell.admin.execute(
            sql.SQL("ALTER TABLE outbox.{} OWNER TO {}").format(sql.Identifier(table), sql.Identifier(owner))
        )
    _, output = shell.refused("cdc setup", **as_owner)
    assert "CREATE on the database" in output
    shell.admin.execute(
        sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(
            sql.Identifier(shell.admin.info.dbname), sql.Identifier(owner)
        )
    )
    _, output = shell.refused("cdc setup", **as_owner)
    assert "needs REPLICATION: ALTER ROLE" in output
    shell.admin.execute(sql.SQL("ALTER ROLE {} REPLICATION").format(sql.Identifier(owner)))
    shell.done("cdc setup", **as_owner)
    shell.done("relay switch", "wal", **as_owner)
    shell.done("cdc status", **as_owner)
    shell.done("relay switch", "polling", **as_owner)
    shell.admin.execute(sql.SQL("ALTER ROLE {} NOREPLICATION").format(sql.Identifier(owner)))
    _, output = shell.refused("cdc drop", "--slot", shell.slot, **as_owner)
    assert "needs REPLICATION: ALTER ROLE" in output
    shell.admin.execute(sql.SQL("ALTER ROLE {} REPLICATION").format(sql.Identifier(owner)))
    shell.done("cdc drop", "--slot", shell.slot, **as_owner)


def test_a_relay_needs_no_more_than_the_docs_grant(shell, roles, outbox_kafka, outbox_relay, wal, order):
    """The grants are read from docs/operations/migrations.md."""
    kind, topic = order
    url, shell.slot = shell.url, wal["wal__slot"]
    # Nobody is killed before the first look at the topic: a slow first request must not be given up and sent again.
    wal |= {"relay__lease_seconds": 5.0}
    text = (Path(__file__).parents[4] / "docs" / "operations" / "migrations.md").read_text()
    blocks = [text.split(f"```sql\n-- {title}\n")[1].split("```")[0] for title in GRANTS]
    relay_role, writer_role, other = roles("relay"), roles("writer"), roles("other")
    for block in blocks:
        for role, name in (("outbox_relay", relay_role), ("outbox_writer", writer_role)):
            block = block.replace(role, name)
        shell.admin.execute(block)
    with cdc(url, {"wal__slot": shell.slot}) as commands:
        commands.setup()
        commands.switch(SourceKind.WAL)
    shell.admin.execute(sql.SQL("ALTER ROLE {} NOREPLICATION").format(sql.Identifier(relay_role)))
    relay = outbox_relay(database_url=of(url, relay_role), **wal)
    relay.wait_for_log("the relay's role needs REPLICATION: ALTER ROLE")
    shell.admin.execute(sql.SQL("ALTER ROLE {} REPLICATION").format(sql.Identifier(relay_role)))
    insert = "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES (%s, %s, 'T')"
    with psycopg.connect(of(url, writer_role), autocommit=True) as writer:
        writer.execute(insert, (kind, "before"))
        wait_until(lambda: streaming(url), 30, "the lanes to stream")
        writer.execute(insert, (kind, "while"))
    assert {message.key() for message in outbox_kafka.consume(topic, 2)} == {b"before", b"while"}
    # Taking over ends the other's walsender, which is of the same role.
    relay.pause()
    heir = outbox_relay(database_url=of(url, relay_role), **wal)
    heir.wait_for_log("lanes acquired")
    shell.admin.execute(insert, (kind, "heir"))
    assert len(outbox_kafka.consume(topic, 3)) == 3
    wait_until(
        lambda: b"heir" in {message.key() for message in outbox_kafka.consume(topic)}, what="the heir to publish"
    )
    assert "permission" not in heir.log()
    relay.resume()
    relay.wait_for_log("lane lost")
    # And no more than that: a role without grants says which one is missing.
    outsider = outbox_relay(database_url=of(url, other), **wal)
    outsider.wait_for_log("permission denied for schema outbox")


GRANTS = ("grants", "grants of a relay with source=wal")
