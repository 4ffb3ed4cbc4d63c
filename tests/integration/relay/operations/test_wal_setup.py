"""``outbox cdc`` and ``outbox relay switch`` in every order and state: what is refused says what to do."""

from __future__ import annotations

from typing import Any

import orjson
import psycopg
from cdc_shell import shell
from psycopg import sql

from outbox._app import migrate as db
from outbox.testing.fixtures import token

__all__ = ["shell"]


def test_from_the_beginning_to_the_end_and_each_command_twice(shell):
    assert shell.refused("relay switch", "wal") == (
        1,
        f"outbox: slot {shell.slot!r} is not set up for this outbox: run `outbox cdc setup`\n",
    )
    status, output = shell("cdc status")
    assert (status, "PROBLEM" in output, "run `outbox cdc setup`" in output) == (1, True, True)
    assert "outbox relay switch wal" in shell.done("cdc setup")
    assert "was already set up" in shell.done("cdc setup")
    assert shell.publications() == ["outbox_relay"]
    assert "has no gap" in shell.done("cdc status")
    assert "Every lane is read from wal now" in shell.done("relay switch", "wal", "--reason", "its order")
    assert "was read from wal already" in shell.done("relay switch", "wal")
    assert "was already set up" in shell.done("cdc setup")
    # An outbox whose lanes are read from the WAL is not taken apart.
    status, output = shell.refused("cdc drop", "--slot", shell.slot)
    assert (status, "`outbox relay switch polling` first" in output) == (1, True)
    status, output = shell.refused("db lanes", "2")
    assert (status, "`outbox relay switch polling` first" in output) == (1, True)
    output = shell.done("relay switch", "polling")
    assert "Every lane is read from polling now" in output
    assert "outbox cdc drop" in output
    assert "was read from polling already" in shell.done("relay switch", "polling")
    if shell.admin.info.server_version >= 180000:
        # Its publication has the lane.
        _, output = shell.refused("db lanes", "2")
        assert "`outbox cdc drop` first, and set it up again afterwards" in output
    # The name has to be typed.
    status, output = shell.refused("cdc drop", "--slot", "outbox_relay")
    assert (status, shell.slot in output, shell.slots()) == (2, True, 1)
    assert "was dropped" in shell.done("cdc drop", answer=f"{shell.slot}\n")
    assert (shell.slots(), shell.publications(), shell.query("SELECT * FROM outbox.streams")) == (0, [], [])
    shell.done("cdc drop", "--slot", shell.slot)
    shell.done("db lanes", "2")
    assert "retains WAL" not in shell.done("relay switch", "polling")
    assert "were created" in shell.done("cdc setup")
    shell.done("relay switch", "wal")
    assert shell.audit() == [
        ("cdc setup", None),
        ("switch to wal", "its order"),
        ("switch to polling", None),
        ("cdc drop", None),
        ("cdc drop", None),
        ("cdc setup", None),
        ("switch to wal", None),
    ]


def test_status_as_json_and_for_people(shell):
    shell.done("cdc setup")
    shell.done("relay switch", "wal")
    found = orjson.loads(shell.done("cdc status", "--json"))
    assert (found["slot"], found["publication"]) == (shell.slot, "outbox_relay")
    assert (found["problem"], found["over_limit"], found["wal_status"]) == (None, False, "reserved")
    assert found["confirmed_lsn"] == found["flushed_lsn"] != found["current_lsn"]
    assert found["retained_bytes"] >= found["lag_bytes"] > 0
    assert (found["read_by_pid"], found["settled_lsn"]) == (None, None)
    assert found["timeline"] == 1
    assert len(found["lanes"]) == 4
    assert found["lanes"][3] == {"lane": 3, "source": "wal", "streaming": False, "owner": None, "settled_lsn": None}
    with shell.reading():
        assert orjson.loads(shell.done("cdc status", "--json"))["read_by_pid"] > 0
        assert "server process" in shell.done("cdc status")
    shell.query("SELECT count(pg_logical_emit_message(true, 'pad', repeat('x', 600000))) FROM generate_series(1, 3)")
    limit = {"OUTBOX_WAL__RETAINED_LIMIT_BYTES": str(1 << 20)}
    status, output = shell("cdc status", **limit)
    assert (status, "ALERT" in output, "The stream has no gap" in output) == (1, True, True)
    assert "1.0 MiB" in output
    status, output = shell("cdc status", "--json", **limit)
    assert (status, orjson.loads(output)["over_limit"]) == (1, True)
    shell.done("cdc status")


def test_settings_that_cannot_be(shell):
    for command, name, value in (
        (("cdc setup",), "OUTBOX_WAL__SLOT", "Not-A-Name"),
        (("cdc status",), "OUTBOX_WAL__RETAINED_LIMIT_BYTES", "1"),
        (("cdc drop", "--slot", "x"), "OUTBOX_WAL__PUBLICATION", ""),
        (("relay switch", "wal"), "OUTBOX_DATABASE_URL", "mysql://x"),
    ):
        status, output = shell.refused(*command, **{name: value})
        assert (status, name in output) == (2, True), output


def test_a_server_or_tables_that_are_not_there(shell):
    for settings, status, named in (
        ({"OUTBOX_DATABASE_URL": "postgresql://127.0.0.1:1/x"}, 1, "127.0.0.1:1"),
        ({"OUTBOX_SCHEMA": "nowhere"}, 1, "outbox db upgrade"),
    ):
        for command in (("cdc setup",), ("cdc status",), ("cdc drop", "--slot", shell.slot), ("relay switch", "wal")):
            found, output = shell.refused(*command, **settings)
            assert (found, named in output) == (status, True), output
    assert shell.slots() == 0


def test_slots_of_others_are_left_alone(shell, outbox_postgres_server):
    create = "SELECT pg_create_logical_replication_slot(%s, %s)"
    elsewhere = f"elsewhere_{token()}"
    with psycopg.connect(outbox_postgres_server.create_database(elsewhere), autocommit=True) as other:
        try:
            for plugin, connection in (
                ("test_decoding", shell.admin),
                ("pgoutput", other),
                (None, other),
                # Another program's, in our database: a setup makes the publication before the slot.
                ("pgoutput", shell.admin),
            ):
                if plugin is None:
                    connection.execute("SELECT pg_create_physical_replication_slot(%s)", (shell.slot,))
                elif plugin == "test_decoding" and not _has(connection, plugin):
                    continue
                else:
                    connection.execute(create, (shell.slot, plugin))
                for command in (
                    ("cdc setup",),
                    ("cdc setup", "--repair", "--reason", "it is in the way"),
                    ("cdc drop", "--slot", shell.slot),
                ):
                    status, output = shell.refused(*command)
                    assert (status, "choose another name (OUTBOX_WAL__SLOT)" in output) == (1, True), output
                assert shell.slots() == 1
                connection.execute("SELECT pg_drop_replication_slot(%s)", (shell.slot,))
        finally:
            connection = None
    outbox_postgres_server.drop_database(elsewhere)
    assert shell.publications() == []
    shell.done("cdc setup")


def _has(connection: psycopg.Connection[Any], plugin: str) -> bool:
    try:
        connection.execute(sql.SQL("LOAD {}").format(plugin))
    except psycopg.Error:
        return False
    return True


def test_two_outboxes_in_one_database_do_not_take_each_others_things(shell):
    """The second one was not told other names; nothing of the first may be dropped or changed."""
    db.upgrade(shell.url, schema="second")
    second = {"OUTBOX_SCHEMA": "second"}
    shell.done("cdc setup")
    shell.done("relay switch", "wal")
    commands = (("cdc setup",), ("cdc setup", "--repair", "--reason", "?"), ("cdc drop", "--slot"))
    for command in commands:
        name = (shell.slot,) if command[-1] == "--slot" else ()
        _, output = shell.refused(*command, *name, **second)
        assert "outbox in schema 'outbox'): choose another name (OUTBOX_WAL__SLOT)" in output
    second["OUTBOX_WAL__SLOT"] = f"{shell.slot}_second"
    for command in commands:
        name = (second["OUTBOX_WAL__SLOT"],) if command[-1] == "--slot" else ()
        _, output = shell.refused(*command, *name, **second)
        assert "choose another name (OUTBOX_WAL__PUBLICATION)" in output
    shell.done("cdc status")
    second["OUTBOX_WAL__PUBLICATION"] = "Second one"
    shell.done("cdc setup", **second)
    shell.done("cdc status", **second)
    shell.done("cdc drop", "--slot", second["OUTBOX_WAL__SLOT"], **second)
    shell.done("cdc status")
    assert shell.publications() == ["outbox_relay"]


def test_one_outbox_has_one_slot(shell):
    """Another name in the settings makes no second slot, which would keep WAL for ever; and drops no publication."""
    shell.done("cdc setup")
    other = {"OUTBOX_WAL__SLOT": f"{shell.slot}_2"}
    for command in (
        ("cdc setup",),
        ("cdc setup", "--repair", "--reason", "?"),
        ("cdc drop", "--slot", other["OUTBOX_WAL__SLOT"]),
    ):
        _, output = shell.refused(*command, **other)
        assert f"this outbox has the slot {shell.slot!r}" in output
    shell.done("cdc status")


def test_publications_of_others_are_left_alone(shell):
    shell.admin.execute("CREATE TABLE mine (n int)")
    for made in ("FOR TABLE mine", "FOR ALL TABLES", "FOR TABLE outbox.events, mine", ""):
        shell.admin.execute(f"CREATE PUBLICATION outbox_relay {made}")
        for command in (("cdc setup",), ("cdc setup", "--repair", "--reason", "?"), ("cdc drop", "--slot", shell.slot)):
            _, output = shell.refused(*command)
            assert "choose another name (OUTBOX_WAL__PUBLICATION)" in output, made
        shell.admin.execute("DROP PUBLICATION outbox_relay")
    assert shell.slots() == 0
    # One that is as it has to be is taken as it is.
    shell.admin.execute("CREATE PUBLICATION outbox_relay FOR TABLE outbox.events WITH (publish = 'insert')")
    shell.done("cdc setup")
    # And one that was ours is made right again, whatever somebody has made of it.
    shell.admin.execute("ALTER PUBLICATION outbox_relay ADD TABLE mine")
    _, output = shell.refused("cdc setup")
    assert "was changed" in output
    shell.done("cdc setup", "--repair", "--reason", "somebody added a table")
    shell.done("cdc status")
    assert shell.query("SELECT tablename FROM pg_publication_tables WHERE pubname = 'outbox_relay'") == [("events",)]


def test_a_repair_wants_a_reason_and_a_slot_that_nobody_reads(shell):
    for reason in ((), ("--reason", " ")):
        status, output = shell.refused("cdc setup", "--repair", *reason)
        assert (status, "--reason" in output) == (2, True)
    shell.done("cdc setup")
    with shell.reading():
        status, output = shell.refused("cdc setup", "--repair", "--reason", "for fun")
        assert (status, "is being read" in output, "stop the relays first" in output) == (1, True, True)
        status, output = shell.refused("cdc drop", "--slot", shell.slot)
        assert (status, "active" in output) == (1, True)
        shell.done("cdc status")
    shell.admin.execute("SELECT pg_drop_replication_slot(%s)", (shell.slot,))
    _, output = shell.refused("cdc setup")
    assert "slot" in output
    assert "is gone" in output
    assert "outbox cdc setup --repair" in output
    _, output = shell.refused("relay switch", "wal")
    assert "outbox cdc setup --repair" in output
    shell.admin.execute(
        "UPDATE outbox.lanes SET source = 'wal', streaming = true, owner = 'x', lease_until = 'infinity'"
    )
    before = shell.query("SELECT epoch FROM outbox.lanes ORDER BY lane")
    assert "was replaced" in shell.done("cdc setup", "--repair", "--reason", "somebody dropped it")
    # Every lane reads the table before it streams again, and whoever held it has to take it anew.
    assert shell.query("SELECT epoch - 1 FROM outbox.lanes ORDER BY lane") == before
    assert shell.query("SELECT DISTINCT streaming, owner FROM outbox.lanes") == [(False, None)]
    assert shell.audit()[-1] == ("cdc repair", "somebody dropped it")
    shell.done("cdc status")
