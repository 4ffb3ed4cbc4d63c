"""``outbox cdc`` while it is interrupted, or run by two people at once."""

from __future__ import annotations

from typing import Any

import pytest
from cdc_shell import shell
from wal_support import cdc

from outbox import Event, Outbox
from outbox.errors import SchemaError
from relay.config import SourceKind
from relay.operations.wal_setup import Cdc, CdcRefused

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
    assert "has to be made anew" in output
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
