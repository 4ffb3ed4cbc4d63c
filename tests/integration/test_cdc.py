"""``outbox cdc`` and ``outbox relay switch`` in every order and state: what is refused says what to do."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest
from psycopg import sql
from support import order, wait_until
from typer.testing import CliRunner
from wal_support import cdc, streaming, wal

from outbox import Event, Outbox
from outbox._app import migrate as db
from outbox.errors import SchemaError
from outbox.testing.fixtures import token
from relay.cli.app import app
from relay.config import SourceKind
from relay.operations.wal_setup import Cdc, CdcRefused
from relay.wal.slot import SlotNames

__all__ = ["order", "wal"]


class Shell:
    """Types commands for one outbox, and looks into its database."""

    def __init__(self, database: Any, slot: str, **environment: str) -> None:
        self.url = database.url
        self.slot = slot
        self.admin = database.connect(autocommit=True)
        self._environment = {"OUTBOX_DATABASE_URL": database.url, "OUTBOX_WAL__SLOT": slot} | environment

    def __call__(self, command: str, *arguments: str, answer: str | None = None, **environment: str) -> tuple[int, str]:
        """Run a command; give its exit status and what it printed. Never a traceback."""
        done = CliRunner().invoke(
            app, [*command.split(), *arguments], env=self._environment | environment, input=answer
        )
        assert done.exception is None or isinstance(done.exception, SystemExit), (done.exception, done.output)
        return done.exit_code, done.output

    def done(self, command: str, *arguments: str, **options: Any) -> str:
        status, output = self(command, *arguments, **options)
        assert status == 0, output
        return output

    def refused(self, command: str, *arguments: str, **options: Any) -> tuple[int, str]:
        status, output = self(command, *arguments, **options)
        assert status != 0, output
        assert output.startswith("outbox: "), output
        assert output.count("\n") == 1, output
        return status, output

    def query(self, text: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.admin.execute(text, values or None).fetchall()

    def slots(self) -> int:
        return self.query("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", self.slot)[0][0]

    def publications(self) -> list[str]:
        return [name for (name,) in self.query("SELECT pubname FROM pg_publication ORDER BY 1")]

    def audit(self) -> list[tuple[str, str | None]]:
        return self.query("SELECT what, why FROM outbox.audit ORDER BY id")

    def event(self) -> None:
        self.admin.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('A', '1', 'T')"
        )


@pytest.fixture
def shell(outbox_postgres):
    # A slot goes with its database.
    return Shell(outbox_postgres, f"slot_{token()}")


@contextlib.contextmanager
def reading(shell: Shell):
    """A connection that reads the slot, as a relay does."""
    with contextlib.closing(psycopg.connect(shell.url, autocommit=True, replication="database")) as connection:
        pgconn = connection.pgconn
        pgconn.send_query(
            f"START_REPLICATION SLOT {shell.slot} LOGICAL 0/0 "
            "(proto_version '1', publication_names 'outbox_relay')".encode()
        )
        look = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
        wait_until(lambda: shell.query(look, shell.slot)[0][0], 10, "the slot to be read")
        yield
    wait_until(lambda: not shell.query(look, shell.slot)[0][0], 10, "the slot to be free")


def test_from_the_beginning_to_the_end_and_each_command_twice(shell):
    assert shell.refused("relay switch", "wal") == (
        1,
        f"outbox: slot {shell.slot!r} is not set up for this outbox: run `outbox cdc setup`\n",
    )
    status, output = shell("cdc status")
    assert (status, "PROBLEM" in output, "run `outbox cdc setup`" in output) == (1, True, True)
    assert "outbox relay switch wal" in shell.done("cdc setup")
    assert "was set up already" in shell.done("cdc setup")
    assert shell.publications() == ["outbox_relay"]
    assert "whole" in shell.done("cdc status")
    assert "Every lane is read from wal now" in shell.done("relay switch", "wal", "--reason", "its order")
    assert "was read from wal already" in shell.done("relay switch", "wal")
    assert "was set up already" in shell.done("cdc setup")
    # An outbox whose lanes are read from the WAL is not taken apart.
    status, output = shell.refused("cdc drop", "--slot", shell.slot)
    assert (status, "`outbox relay switch polling` first" in output) == (1, True)
    status, output = shell.refused("db lanes", "2")
    assert (status, "`outbox relay switch polling` first" in output) == (1, True)
    # Nobody reads the slot: what is in it nobody knows.
    _, output = shell.refused("relay switch", "polling", "--wait-seconds", "0")
    assert "or use --leave-messages" in output
    output = shell.done("relay switch", "polling", "--leave-messages")
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
    assert "is gone" in shell.done("cdc drop", answer=f"{shell.slot}\n")
    assert (shell.slots(), shell.publications(), shell.query("SELECT * FROM outbox.streams")) == (0, [], [])
    shell.done("cdc drop", "--slot", shell.slot)
    shell.done("db lanes", "2")
    assert "keeps WAL" not in shell.done("relay switch", "polling")
    assert "are there" in shell.done("cdc setup")
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
    assert (found["read_by_pid"], found["settled_lsn"], found["messages_seen_at"]) == (None, None, None)
    assert found["timeline"] == 1
    assert len(found["lanes"]) == 4
    assert found["lanes"][3] == {"lane": 3, "source": "wal", "streaming": False, "owner": None, "settled_lsn": None}
    with reading(shell):
        assert orjson.loads(shell.done("cdc status", "--json"))["read_by_pid"] > 0
        assert "server process" in shell.done("cdc status")
    shell.query("SELECT count(pg_logical_emit_message(true, 'pad', repeat('x', 600000))) FROM generate_series(1, 3)")
    limit = {"OUTBOX_WAL__RETAINED_LIMIT_BYTES": str(1 << 20)}
    status, output = shell("cdc status", **limit)
    assert (status, "ALERT" in output, "The stream is whole" in output) == (1, True, True)
    assert "1.0 MiB" in output
    status, output = shell("cdc status", "--json", **limit)
    assert (status, orjson.loads(output)["over_limit"]) == (1, True)
    shell.done("cdc status")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"OUTBOX_WAL__SLOT": "Not-A-Name"}, "OUTBOX_WAL__SLOT"),
        ({"OUTBOX_WAL__PUBLICATION": ""}, "OUTBOX_WAL__PUBLICATION"),
        ({"OUTBOX_WAL__RETAINED_LIMIT_BYTES": "1"}, "OUTBOX_WAL__RETAINED_LIMIT_BYTES"),
        ({"OUTBOX_DATABASE_URL": "mysql://x"}, "OUTBOX_DATABASE_URL: "),
    ],
)
def test_settings_that_cannot_be(shell, settings, named):
    for command in (("cdc setup",), ("cdc status",), ("cdc drop", "--slot", "x"), ("relay switch", "wal")):
        status, output = shell.refused(*command, **settings)
        assert (status, named in output) == (2, True), output


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
            for plugin, connection in (("test_decoding", shell.admin), ("pgoutput", other), (None, other)):
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
    commands = (
        ("cdc setup",),
        ("cdc setup", "--repair", "--reason", "?"),
        ("cdc drop", "--slot"),
    )
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
    with reading(shell):
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
    assert "is new" in shell.done("cdc setup", "--repair", "--reason", "somebody dropped it")
    # Every lane reads the table before it streams again, and whoever held it has to take it anew.
    assert shell.query("SELECT epoch - 1 FROM outbox.lanes ORDER BY lane") == before
    assert shell.query("SELECT DISTINCT streaming, owner FROM outbox.lanes") == [(False, None)]
    assert shell.audit()[-1] == ("cdc repair", "somebody dropped it")
    shell.done("cdc status")


class Killed(Exception):
    """As if the process had ended there."""


def killed_at(monkeypatch, method: str, nth: int = 1) -> None:
    """Have the nth call of a method end the command."""
    calls = []
    original = getattr(Cdc, method)

    def dying(self: Cdc, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise Killed
        return original(self, *arguments, **options)

    monkeypatch.setattr(Cdc, method, dying)


@pytest.mark.parametrize(
    ("killed_in", "way_on"),
    [("_make_slot", "setup"), ("_note", "repair")],
    ids=["no slot yet", "slot and no checkpoint"],
)
def test_a_setup_that_was_interrupted(shell, monkeypatch, killed_in, way_on):
    with cdc(shell.url, {"wal__slot": shell.slot}) as commands:
        with monkeypatch.context() as patch:
            killed_at(patch, killed_in)
            with pytest.raises(Killed):
                commands.setup()
        assert commands.status().problem is not None
        with pytest.raises(SchemaError, match="outbox cdc setup"):
            commands.switch(SourceKind.WAL)
        if way_on == "setup":
            assert commands.setup()
        else:
            with pytest.raises(CdcRefused, match="interrupted left it behind, use --repair"):
                commands.setup()
            commands.repair("interrupted")
        assert commands.status().problem is None
        assert not commands.setup()
        commands.switch(SourceKind.WAL)


@pytest.mark.parametrize(
    ("killed_in", "kept", "found"),
    [
        ("_drop_slot", False, None),
        ("_make_slot", False, "is gone"),
        ("_note", False, "advanced it or made it anew"),
        ("_note", True, "was changed"),
    ],
)
def test_a_repair_that_was_interrupted(shell, monkeypatch, killed_in, kept, found):
    """Relays stop, or nothing has changed yet; run again it is done."""
    with cdc(shell.url, {"wal__slot": shell.slot}) as commands:
        commands.setup()
        commands.switch(SourceKind.WAL)
        if kept:
            shell.admin.execute("ALTER PUBLICATION outbox_relay SET (publish = 'update')")
        with monkeypatch.context() as patch:
            killed_at(patch, killed_in)
            with pytest.raises(Killed):
                commands.repair("first try", lose_messages=not kept)
        problem = commands.status().problem
        assert (problem is None) if found is None else (problem is not None and found in problem)
        commands.repair("second try")
        assert commands.status().problem is None
    assert shell.audit()[-1] == ("cdc repair", "second try")


def test_a_new_slot_is_not_made_over_events_without_a_row(shell):
    """A slot that is not whole may have some all the same; who repairs it says whether they may be lost."""
    shell.done("cdc setup")
    shell.done("relay switch", "wal")
    shell.admin.execute("SELECT pg_drop_replication_slot(%s)", (shell.slot,))
    _, output = shell.refused("relay switch", "polling")
    assert "that the slot had not given are lost with it; use --leave-messages" in output
    shell.admin.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (shell.slot,))
    with shell.admin.transaction():
        Outbox(transport="message", slot=shell.slot).add(shell.admin, Event("Order", "1", "Said"))
    repair = ("cdc setup", "--repair", "--reason", "somebody made it anew")
    _, output = shell.refused(*repair)
    assert "has to be replaced" in output
    assert "it has 1, not all published" in output
    assert (shell.slots(), shell.audit()[-1][0]) == (1, "switch to wal")
    assert shell.refused("cdc setup", "--lose-messages")[0] == 2
    assert "is new" in shell.done(*repair, "--lose-messages")
    details = "SELECT details - 'slot' - 'publication' FROM outbox.audit ORDER BY id DESC LIMIT 1"
    assert shell.query(details) == [({"slot_kept": False, "messages_lost_at_most": 1},)]
    # Now it is whole: nothing is lost by another one.
    with shell.admin.transaction():
        Outbox(transport="message", slot=shell.slot).add(shell.admin, Event("Order", "1", "Said"))
    assert "is kept, with all that is in it" in shell.done(*repair)
    assert shell.query(details) == [({"slot_kept": True},)]


def test_a_drop_that_was_interrupted(shell, monkeypatch):
    with cdc(shell.url, {"wal__slot": shell.slot}) as commands:
        commands.setup()
        with monkeypatch.context() as patch:
            killed_at(patch, "_note")
            with pytest.raises(Killed):
                commands.drop()
        assert "is gone" in (commands.status().problem or "")
        # Both ways are open.
        commands.drop()
        assert (shell.slots(), shell.publications()) == (0, [])
        assert commands.setup()


def test_two_people_at_once(shell, monkeypatch):
    """Both have seen that there is nothing; one of them makes the slot, the other is told."""
    with cdc(shell.url, {"wal__slot": shell.slot}) as one, cdc(shell.url, {"wal__slot": shell.slot}) as two:
        original = Cdc._make_slot

        def late(self: Cdc) -> None:
            if self is one:
                assert two.setup()
            original(self)

        with monkeypatch.context() as patch:
            patch.setattr(Cdc, "_make_slot", late)
            with pytest.raises(CdcRefused, match="somebody else has just made the slot"):
                one.setup()
        assert one.status().problem is None
        dropped = Cdc._drop_slot

        def dropping(self: Cdc) -> None:
            if self is one:
                two.drop()
            dropped(self)

        monkeypatch.setattr(Cdc, "_drop_slot", dropping)
        one.drop()
    assert (shell.slots(), shell.publications()) == (0, [])


def test_no_slot_left_on_the_server(shell, monkeypatch):
    """The server's own error comes out as advice. (Using its slots up would disturb other tests.)"""

    class Full:
        info = shell.admin.info

        def execute(self, query: Any, *values: Any) -> Any:
            if "pg_create_logical_replication_slot" in str(query):
                raise psycopg.errors.ConfigurationLimitExceeded("all replication slots are in use")
            return shell.admin.execute(query, *values)

        def transaction(self) -> Any:
            return shell.admin.transaction()

    with pytest.raises(CdcRefused, match="raise max_replication_slots"):
        Cdc(Full(), SlotNames("outbox", shell.slot, "outbox_relay")).setup()


def test_back_to_polling_waits_for_events_without_a_row(shell, outbox_kafka, outbox_relay, wal, order):
    kind, topic = order
    url, outbox = shell.url, Outbox(transport="message", slot=wal["wal__slot"])
    shell.slot = wal["wal__slot"]
    settings = {"wal__slot": shell.slot}

    def say(number: int) -> None:
        with psycopg.connect(url) as writer:
            outbox.add(writer, Event(kind, "key", "Said", {"n": number}))

    with cdc(url, settings) as commands:
        commands.setup()
        commands.switch(SourceKind.WAL)
        relay = outbox_relay(**wal)
        wait_until(lambda: streaming(url), 30, "the lanes to stream")
        relay.pause()
        say(1)
        # The first one: no checkpoint knows yet that there are such events, but the slot is being read.
        with pytest.raises(CdcRefused, match="with source=wal get there first"):
            commands.switch(SourceKind.POLLING, wait_seconds=0.3)
        relay.resume()
        say(2)
        assert commands.switch(SourceKind.POLLING)
        assert [orjson.loads(message.value())["n"] for message in outbox_kafka.consume(topic, 2)] == [1, 2]
        assert commands.status().slot.message_at is not None
        relay.wait_for_log("read from another source; this relay waits")
        say(3)
        # Nobody reads the WAL now: it can't get there, from either side.
        commands.switch(SourceKind.WAL)
        relay.kill()
        with pytest.raises(CdcRefused, match="with source=wal get there first"):
            commands.switch(SourceKind.POLLING, wait_seconds=0.3)
        outbox_relay(**wal)
        assert commands.switch(SourceKind.POLLING)
        assert len(outbox_kafka.consume(topic, 3)) == 3
        # A slot that is gone will never get there: that is what it says, and not to wait.
        commands.switch(SourceKind.WAL)
    for process in outbox_relay._started:
        if process.running:
            process.kill()
    look = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    wait_until(lambda: not shell.query(look, shell.slot)[0][0], 10, "the slot to be free")
    shell.query("SELECT pg_drop_replication_slot(%s)", shell.slot)
    with cdc(url, settings) as commands, pytest.raises(CdcRefused, match="is gone"):
        commands.switch(SourceKind.POLLING)


def test_the_tables_go_back_and_forth_with_rows(shell):
    """0003: the slot must not be forgotten; events, lanes and archive stay."""
    shell.done("cdc setup")
    shell.done("relay switch", "wal")
    shell.event()
    before = shell.query("SELECT lane, epoch FROM outbox.lanes ORDER BY lane")
    _, output = shell.refused("db downgrade", "outbox_0002")
    assert "outbox.streams still has rows" in output
    assert "outbox cdc drop" in output
    shell.done("relay switch", "polling", "--leave-messages")
    shell.done("cdc drop", "--slot", shell.slot)
    shell.done("db downgrade", "outbox_0002")
    # What this version says of older tables.
    for command in (("cdc status",), ("cdc setup",), ("relay switch", "wal")):
        _, output = shell.refused(*command)
        assert "outbox db upgrade" in output
    shell.done("db upgrade")
    shell.done("db check")
    assert shell.query("SELECT lane, epoch FROM outbox.lanes ORDER BY lane") == before
    assert shell.query("SELECT DISTINCT source, streaming FROM outbox.lanes") == [("polling", False)]
    assert shell.query("SELECT count(*) FROM outbox.events") == [(1,)]
    shell.done("cdc setup")
    shell.done("relay switch", "wal")


# Rights


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
    assert "making the publication needs the rights of the tables' owner, and CREATE on the database" in output
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
    assert "needs the REPLICATION right: ALTER ROLE" in output
    shell.admin.execute(sql.SQL("ALTER ROLE {} REPLICATION").format(sql.Identifier(owner)))
    shell.done("cdc setup", **as_owner)
    shell.done("relay switch", "wal", **as_owner)
    shell.done("cdc status", **as_owner)
    shell.done("relay switch", "polling", "--leave-messages", **as_owner)
    shell.admin.execute(sql.SQL("ALTER ROLE {} NOREPLICATION").format(sql.Identifier(owner)))
    _, output = shell.refused("cdc drop", "--slot", shell.slot, **as_owner)
    assert "needs the REPLICATION right: ALTER ROLE" in output
    shell.admin.execute(sql.SQL("ALTER ROLE {} REPLICATION").format(sql.Identifier(owner)))
    shell.done("cdc drop", "--slot", shell.slot, **as_owner)


def test_a_relay_needs_no_more_than_the_docs_grant(shell, roles, outbox_kafka, outbox_relay, wal, order):
    """The grants are read from docs/operations/migrations.md."""
    kind, topic = order
    url, shell.slot = shell.url, wal["wal__slot"]
    # Nobody is killed before the first look at the topic: a slow first request must not be given up and sent again.
    wal |= {"relay__lease_seconds": 5.0}
    text = (Path(__file__).parents[2] / "docs" / "operations" / "migrations.md").read_text()
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
        with writer.transaction():
            Outbox(transport="message", slot=shell.slot).add(writer, Event(kind, "message", "T"))
    assert {message.key() for message in outbox_kafka.consume(topic, 3)} == {b"before", b"while", b"message"}
    # Taking over ends the other's walsender, which is of the same role.
    relay.pause()
    heir = outbox_relay(database_url=of(url, relay_role), **wal)
    heir.wait_for_log("lanes acquired")
    shell.admin.execute(insert, (kind, "heir"))
    assert len(outbox_kafka.consume(topic, 4)) == 4
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
