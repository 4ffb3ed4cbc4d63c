"""The repair of a lost slot by the relay itself: when it heals, when it stays closed, and what it leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from cdc_shell import Shell, shell
from rows_and_roles import login_role
from structlog.testing import capture_logs
from support import wait_until

from outbox import Event, Outbox
from outbox.errors import SchemaError
from relay import database, failpoints
from relay.core.ports import Unavailable
from relay.database import Connector
from relay.operations.wal_setup import SlotHealing
from relay.wal.slot import SlotNames

__all__ = ["shell"]

STATE = """
SELECT (SELECT array_agg((slot_name, plugin, confirmed_flush_lsn)) FROM pg_replication_slots WHERE slot_name = %s),
       (SELECT array_agg(to_jsonb(s)) FROM outbox.streams AS s), (SELECT array_agg(to_jsonb(l)) FROM outbox.lanes AS l),
       (SELECT count(*) FROM outbox.audit)"""


@dataclass
class Healer:
    """The healing of one relay, and what it has logged."""

    shell: Shell
    url: str
    repairs: list[None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.healing = SlotHealing(
            Connector(self.url, "healing"),
            SlotNames("outbox", self.shell.slot, "outbox_relay"),
            "r1",
            lambda: self.repairs.append(None),
        )

    def look(self) -> list[tuple[str, str]]:
        """Look once; give the level and the text of each line of the log."""
        with capture_logs() as logs:
            self.healing.look()
        return [(entry["log_level"], entry["error"]) for entry in logs]

    def state(self) -> list[tuple[Any, ...]]:
        return self.shell.query(STATE, self.shell.slot)

    def refuses(self, text: str) -> None:
        """Look: nothing is changed, and the log says why."""
        before = self.state()
        ((level, said),) = self.look()
        assert (level, text in said) == ("error", True), said
        assert (self.state(), self.repairs) == (before, [])

    def drop_slot(self) -> None:
        self.shell.query("SELECT pg_drop_replication_slot(%s)", self.shell.slot)


@pytest.fixture
def healer(shell) -> Healer:
    shell.done("cdc setup")
    shell.done("relay switch", "wal")
    shell.query("UPDATE outbox.lanes SET streaming = true, owner = 'x', commit_lsn = 1 RETURNING 1")
    return Healer(shell, shell.url)


@pytest.fixture
def armed(monkeypatch):
    """Arms failpoints in this process, for one test."""
    monkeypatch.setattr(failpoints, "_armed", {})
    return failpoints.arm


def lose(healer: Healer, fault: str) -> None:
    """Do to the slot what somebody may do to it."""
    create = "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')"
    match fault:
        case "is gone":
            healer.drop_slot()
        case "created again":
            healer.drop_slot()
            healer.shell.query(create, healer.shell.slot)
        case "it was advanced":
            healer.shell.event()
            healer.shell.query("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", healer.shell.slot)


def test_a_slot_that_has_a_gap_is_replaced(healer):
    shell = healer.shell
    for number, fault in enumerate(("is gone", "created again", "it was advanced"), 1):
        shell.admin.execute("UPDATE outbox.lanes SET streaming = true, owner = 'x', commit_lsn = 1")
        before = shell.query("SELECT epoch FROM outbox.lanes ORDER BY lane")
        assert (healer.look(), len(healer.repairs)) == ([], number - 1)
        lose(healer, fault)
        ((level, said),) = healer.look()
        assert (level, fault in said, len(healer.repairs)) == ("warning", True, number)
        # Every lane reads the table before it streams again, and whoever held it has to take it anew.
        assert shell.query("SELECT epoch - 1 FROM outbox.lanes ORDER BY lane") == before
        assert shell.query("SELECT DISTINCT source, streaming, owner, commit_lsn FROM outbox.lanes") == [
            ("wal", False, None, None)
        ]
        assert shell.query(
            "SELECT s.confirmed_flush_lsn - '0/0' = b.flushed_lsn, b.opened_xid > 0 FROM outbox.streams AS b "
            "JOIN pg_replication_slots AS s ON s.slot_name = b.slot"
        ) == [(True, True)]
        what, why = shell.audit()[-1]
        assert (what, why.startswith("the relay r1 itself: "), fault in why) == ("cdc repair", True, True)
        shell.done("cdc status")
        assert (healer.look(), len(healer.repairs)) == ([], number)


def test_nothing_is_done_for_an_outbox_without_a_checkpoint(shell):
    healer = Healer(shell, shell.url)
    assert healer.look() == []
    shell.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", shell.slot)
    before = healer.state()
    assert (healer.look(), healer.state()) == ([], before)


REFUSED = {
    "after a failover or a restore": (
        "UPDATE outbox.streams SET timeline = timeline + 1",
        "UPDATE outbox.streams SET timeline = timeline - 1",
    ),
    "the checkpoint is of server 7": (
        "UPDATE outbox.streams SET system_identifier = '7'",
        "UPDATE outbox.streams SET system_identifier = (SELECT system_identifier FROM pg_control_system())",
    ),
    "the tables are ahead of this server's WAL": (
        "UPDATE outbox.lanes SET commit_lsn = 1::bigint << 60",
        "UPDATE outbox.lanes SET commit_lsn = 1",
    ),
    "the tables are ahead": (
        "UPDATE outbox.streams SET flushed_lsn = flushed_lsn + (1::bigint << 60)",
        "UPDATE outbox.streams SET flushed_lsn = flushed_lsn - (1::bigint << 60)",
    ),
    "no lane is read from the WAL": (
        "UPDATE outbox.lanes SET source = 'polling'",
        "UPDATE outbox.lanes SET source = 'wal'",
    ),
    "there is no table outbox.events": (
        "ALTER TABLE outbox.events RENAME TO elsewhere",
        "ALTER TABLE outbox.elsewhere RENAME TO events",
    ),
}


def test_what_else_may_be_at_fault_stays_with_the_operator(healer):
    healer.drop_slot()
    for why, (fault, undone) in REFUSED.items():
        one = Healer(healer.shell, healer.url)
        healer.shell.admin.execute(fault)
        one.refuses(why)
        # Not again and again.
        assert one.look() == []
        healer.shell.admin.execute(undone)
    assert healer.look()[0][0] == "warning"


def test_a_publication_that_was_changed_stays_with_the_operator(healer):
    for change in ("ALTER PUBLICATION outbox_relay SET (publish = 'insert, update')", "DROP PUBLICATION outbox_relay"):
        healer.drop_slot()
        healer.shell.admin.execute(change)
        healer.refuses("publication 'outbox_relay' was changed or dropped")
        healer.shell.done("cdc setup", "--repair", "--reason", "somebody changed it")
        assert (healer.look(), healer.repairs) == ([], [])


def test_a_slot_of_somebody_else_is_kept(healer):
    healer.drop_slot()
    healer.shell.query("SELECT pg_create_physical_replication_slot(%s)", healer.shell.slot)
    healer.refuses("is not this outbox's")
    healer.drop_slot()
    assert healer.look()[0][0] == "warning"


def test_a_slot_that_is_read_is_kept(healer):
    healer.drop_slot()
    healer.shell.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", healer.shell.slot)
    with healer.shell.reading():
        healer.refuses("is being read by server process")
    assert healer.look()[0][0] == "warning"


def test_a_repair_that_ends_midway_is_done_by_the_next_look(healer, armed):
    for number, place in enumerate(("heal.dropped", "heal.made", "heal.noted")):
        lose(healer, "is gone")
        before = healer.state()[0][1:]
        armed(f"{place}=error")
        with pytest.raises(Unavailable, match=place):
            healer.look()
        # Relays are still stopped, by a checkpoint that is as it was.
        assert healer.state()[0][1:] == before
        assert healer.shell("cdc status")[0] == 1
        assert len(healer.repairs) == number
        assert (healer.look()[0][0], len(healer.repairs)) == ("warning", number + 1)
        healer.shell.done("cdc status")


def test_of_two_relays_one_repairs(healer, monkeypatch):
    """The new slot waits for a transaction that is open, longer than for other locks; meanwhile the other one looks."""
    monkeypatch.setattr(database, "_LOCK_SECONDS", 0.2)
    lose(healer, "is gone")
    other = Healer(healer.shell, healer.url)
    found: list[Any] = []
    with psycopg.connect(healer.url) as writer:
        Outbox().add(writer, Event("Order", "1", "Open"))
        thread = threading.Thread(target=lambda: found.append(healer.healing.look()))
        thread.start()
        making = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'healing' AND wait_event_type = 'Lock' "
            "AND clock_timestamp() - query_start > '500ms'"
        )
        wait_until(lambda: healer.shell.query(making) == [(1,)], 10, "the first to wait")
        assert "is being made" in healer.shell("cdc status")[1]
        assert (other.look(), other.repairs) == ([], [])
        writer.commit()
        thread.join(30)
    assert (found, len(healer.repairs)) == ([None], 1)
    assert (other.look(), other.repairs) == ([], [])
    assert [what for what, _ in healer.shell.audit()].count("cdc repair") == 1
    healer.shell.done("cdc status")


@pytest.fixture
def role(shell) -> Iterator[str]:
    """A role with the rights of a relay that reads the WAL, and no others."""
    with login_role(shell.admin, "relay") as name:
        shell.done("db roles", f"relay={name}", "--wal", "--apply")
        yield name


def test_a_relays_role_heals_and_says_what_it_lacks(healer, role):
    shell = healer.shell
    as_relay = Healer(shell, shell.url.replace("postgres@", f"{role}@"))
    lose(healer, "created again")
    for right, lacking in (
        ("INSERT (what, why, details) ON outbox.audit", "lacks INSERT (what, why, details) on audit"),
        ("UPDATE ON outbox.streams", "lacks UPDATE on streams"),
    ):
        before = healer.state()
        shell.admin.execute(f"REVOKE {right} FROM {role}")
        with pytest.raises(SchemaError) as error:
            as_relay.look()
        assert lacking in str(error.value)
        assert healer.state() == before
        shell.admin.execute(f"GRANT {right} TO {role}")
    shell.admin.execute(f"ALTER ROLE {role} NOREPLICATION")
    before = healer.state()
    with pytest.raises(SchemaError):
        as_relay.look()
    assert healer.state() == before
    shell.admin.execute(f"ALTER ROLE {role} REPLICATION")
    assert as_relay.look()[0][0] == "warning"
    assert shell.query("SELECT who FROM outbox.audit ORDER BY id DESC LIMIT 1") == [(role,)]
    shell.done("cdc status")
