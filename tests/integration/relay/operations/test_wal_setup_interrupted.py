"""``outbox cdc`` while it is interrupted, run by two people at once, without room for a slot, or on older tables."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from cdc_shell import shell
from wal_support import cdc

from outbox.errors import OperationRefused, SchemaError
from relay.config import SourceKind
from relay.operations.wal_setup import Cdc
from relay.wal.slot import SlotNames

__all__ = ["shell"]


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
            with pytest.raises(OperationRefused, match="interrupted setup left it behind, use --repair"):
                commands.setup()
            commands.repair("interrupted")
        assert commands.status().problem is None
        assert not commands.setup()
        commands.switch(SourceKind.WAL)


@pytest.mark.parametrize(
    ("killed_in", "found"),
    [("_drop_slot", None), ("_make_slot", "is gone"), ("_note", "it was advanced or created again")],
)
def test_a_repair_that_was_interrupted(shell, monkeypatch, killed_in, found):
    """Relays stop, or nothing has changed yet; run again it is done."""
    with cdc(shell.url, {"wal__slot": shell.slot}) as commands:
        commands.setup()
        commands.switch(SourceKind.WAL)
        with monkeypatch.context() as patch:
            killed_at(patch, killed_in)
            with pytest.raises(Killed):
                commands.repair("first try")
        problem = commands.status().problem
        assert (problem is None) if found is None else (problem is not None and found in problem)
        commands.repair("second try")
        assert commands.status().problem is None
    assert shell.audit()[-1] == ("cdc repair", "second try")


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
            with pytest.raises(OperationRefused, match="another session has just created the slot"):
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

        def cursor(self, **options: Any) -> Any:
            return shell.admin.cursor(**options)

    with pytest.raises(OperationRefused, match="raise max_replication_slots"):
        Cdc(Full(), SlotNames("outbox", shell.slot, "outbox_relay")).setup()


def test_a_setup_whose_slot_another_session_drops_meanwhile_says_so(shell, monkeypatch):
    make_slot = Cdc._make_slot

    def replaced(cdc: Cdc) -> None:
        make_slot(cdc)
        shell.query("SELECT pg_drop_replication_slot(%s)", shell.slot)

    monkeypatch.setattr(Cdc, "_make_slot", replaced)
    _, output = shell.refused("cdc setup")
    assert "another session has just dropped the slot" in output
    assert (shell.query("SELECT * FROM outbox.streams"), shell.audit()) == ([], [])


def test_a_downgrade_does_not_forget_the_slot(shell):
    shell.done("cdc setup")
    shell.done("relay switch", "wal")
    _, output = shell.refused("db downgrade", "base")
    assert "outbox.streams still has rows" in output
    assert "outbox cdc drop" in output
    shell.done("relay switch", "polling")
    shell.done("cdc drop", "--slot", shell.slot)
    _, output = shell.refused("db downgrade", "base")
    assert "outbox.audit still has rows" in output
    shell.done("db downgrade", "base", "--drop-rows")
    for command in (("cdc status",), ("cdc setup",), ("relay switch", "wal")):
        _, output = shell.refused(*command)
        assert "outbox db upgrade" in output
    shell.done("db upgrade")
    shell.done("db check")
