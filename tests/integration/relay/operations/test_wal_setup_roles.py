"""``outbox cdc`` and a relay that reads the WAL, under the roles of the docs."""

from __future__ import annotations

from contextlib import ExitStack

import psycopg
import pytest
from cdc_shell import shell
from rows_and_roles import login_role
from support import order, wait_until
from wal_support import cdc, streaming, wal

from relay.config import SourceKind
from relay.operations.roles import RoleKind, grants

__all__ = ["order", "shell", "wal"]


@pytest.fixture
def roles(shell):
    """Makes roles; they go with the test."""
    with ExitStack() as stack:
        yield lambda *given: stack.enter_context(login_role(shell.admin, *given))


def of(url: str, role: str) -> str:
    return url.replace("postgres@", f"{role}@")


def test_setup_needs_the_owner_with_replication(shell, roles):
    owner, reader = roles("owner"), roles("reader", "REPLICATION")
    as_owner = {"OUTBOX_DATABASE_URL": of(shell.url, owner)}
    shell.admin.execute(f"GRANT USAGE ON SCHEMA outbox TO {owner}, {reader}")
    shell.admin.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO {reader}")
    _, output = shell.refused("cdc setup", OUTBOX_DATABASE_URL=of(shell.url, reader))
    assert "creating the publication needs the rights of the tables' owner, and CREATE on the database" in output
    for (table,) in shell.query("SELECT tablename FROM pg_tables WHERE schemaname = 'outbox'"):
        shell.admin.execute(f"ALTER TABLE outbox.{table} OWNER TO {owner}")
    _, output = shell.refused("cdc setup", **as_owner)
    assert "CREATE on the database" in output
    shell.admin.execute(f"GRANT CREATE ON DATABASE {shell.admin.info.dbname} TO {owner}")
    _, output = shell.refused("cdc setup", **as_owner)
    assert "needs REPLICATION: ALTER ROLE" in output
    shell.admin.execute(f"ALTER ROLE {owner} REPLICATION")
    shell.done("cdc setup", **as_owner)
    shell.done("relay switch", "wal", **as_owner)
    shell.done("cdc status", **as_owner)
    shell.done("relay switch", "polling", **as_owner)
    shell.admin.execute(f"ALTER ROLE {owner} NOREPLICATION")
    _, output = shell.refused("cdc drop", "--slot", shell.slot, **as_owner)
    assert "needs REPLICATION: ALTER ROLE" in output
    shell.admin.execute(f"ALTER ROLE {owner} REPLICATION")
    shell.done("cdc drop", "--slot", shell.slot, **as_owner)


def test_a_relay_needs_no_more_than_is_granted(shell, roles, outbox_kafka, outbox_relay, wal, order):
    """The grants are those of `outbox db roles`."""
    kind, topic = order
    url, shell.slot = shell.url, wal["wal__slot"]
    # Nobody is killed before the first look at the topic: a slow first request must not be given up and sent again.
    wal |= {"relay__lease_seconds": 5.0, "relay__max_backoff_seconds": 0.2}
    relay_role, writer_role, other = roles("relay"), roles("writer"), roles("other")
    granted = [(RoleKind.WRITER, writer_role), (RoleKind.RELAY, relay_role)]
    for statement in grants(granted, "outbox", "consumer", wal=True):
        shell.admin.execute(statement.encode())
    with cdc(url, {"wal__slot": shell.slot}) as commands:
        commands.setup()
        commands.switch(SourceKind.WAL)
    shell.admin.execute(f"ALTER ROLE {relay_role} NOREPLICATION")
    relay = outbox_relay(database_url=of(url, relay_role), **wal)
    relay.wait_for_log("the relay's role needs REPLICATION: ALTER ROLE")
    shell.admin.execute(f"ALTER ROLE {relay_role} REPLICATION")
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
