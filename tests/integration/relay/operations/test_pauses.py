"""Pauses in the database: who may set them, what a relay reads of them and when, and when an outbox is drained."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest
from pause_rig import LANE, ORDERS, OTHER_LANE, audit, outbox, url
from pause_support import pause, read, resume
from polling_support import add, table
from rows_and_roles import login_role
from typer.testing import CliRunner

from outbox import Event, Outbox
from outbox.errors import ConfigurationError
from relay.cli.app import app
from relay.core.pauses import ALL, Scope, ScopeKind
from relay.insights import look_at_tables
from relay.kafka.routing import Router
from relay.operations import pauses
from relay.operations.drain import Drain

__all__ = ["url"]


# What operators do
def test_each_change_is_audited_and_the_second_time_nothing_changes(url):
    first = pause(url, ALL, LANE, ORDERS, reason="ledger")
    assert [change.changed for change in first] == [True] * 3
    again = pause(url, LANE, reason="another")
    assert [(change.changed, change.paused) for change in again] == [(False, first[1].paused)]
    assert read(url)[LANE].reason == "ledger"
    assert [change.changed for change in resume(url, LANE, OTHER_LANE)] == [True, False]
    assert set(read(url)) == {ALL, ORDERS}
    assert audit(url) == [
        ("pause", "ledger", "all", ""),
        ("pause", "ledger", "lane", "1"),
        ("pause", "ledger", "topic", "order-events"),
        ("resume", None, "lane", "1"),
    ]


def test_who_waits_for_what_is_paused_is_sent_to_where_it_is_shown(url):
    with psycopg.connect(url) as connection:
        Outbox().add(connection, Event("Order", "1", "Placed", {}))
    pause(url, ALL)
    done = CliRunner().invoke(app, ["relay", "wait", "--seconds", "0", "--database-url", url])
    assert done.exit_code == 1
    assert (
        "outbox: not everything is published after 0 s: 1 event left; no relay is running; all lanes are paused"
        in done.output
    )


@pytest.mark.parametrize(
    ("scope", "said"),
    [
        (Scope(ScopeKind.LANE, "4"), "no lane 4, only 0 to 3; nothing was changed"),
        (Scope(ScopeKind.TOPIC, "nowhere"), "no route leads to topic 'nowhere'; nothing was changed"),
        (Scope(ScopeKind.TOPIC, "x.relay.state"), "no route leads to topic"),
    ],
)
def test_what_there_is_not_changes_nothing(url, scope, said):
    with pytest.raises(ConfigurationError, match=said):
        pause(url, LANE, scope)
    code, text = outbox(url, "drain", f"--{scope.kind}", scope.name, "--lane", "1")
    assert (code, re.search(said, text) is not None) == (2, True)
    assert (read(url), audit(url)) == ({}, [])


def test_who_holds_lanes_has_to_confirm_also_without_a_row_of_its_own(url, outbox_postgres):
    """One that leaves its lanes may have a turn in flight; one whose row is locked can't say that it lives."""
    relay = table(outbox_postgres, "me")
    leases = relay.acquire(1)
    pause(url, ALL, wait=False)
    assert read(url)[ALL].unconfirmed == ("me",)
    relay.beat([read(url)[ALL].number])
    assert read(url)[ALL].unconfirmed == ()
    relay.leave()
    assert read(url)[ALL].unconfirmed == ("me",)
    relay.release(leases)
    assert read(url)[ALL].unconfirmed == ()


def test_an_operator_can_not_choose_who_and_when(url, outbox_postgres):
    from relay.operations.roles import RoleKind, grants

    with psycopg.connect(url, autocommit=True) as admin, login_role(admin, "operator") as name:
        for statement in grants([(RoleKind.OPERATOR, name)], "outbox", "consumer", wal=False):
            admin.execute(statement)
        with psycopg.connect(url, user=name, autocommit=True) as mine:
            may_write = Router().may_write
            pauses.pause(mine, "outbox", [ALL], "mine", may_write=may_write)
            pauses.pause(mine, "outbox", [LANE], "mine", may_write=may_write, what="drain")
            (left,) = Drain(mine, "outbox", Router()).look([LANE]).values()
            assert left.drained
            for denied in (
                "INSERT INTO outbox.pauses (requested_by) VALUES ('somebody')",
                "INSERT INTO outbox.pauses (requested_at) VALUES ('2020-01-01')",
                "UPDATE outbox.pauses SET requested_by = 'somebody'",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    mine.execute(denied)
            assert {one.requested_by for one in read(url).values()} == {name}
            pauses.resume(mine, "outbox", [ALL, LANE], None)


def test_two_commands_at_once(url):
    """The second waits for the first, and finds nothing left to do."""
    barrier = threading.Barrier(4)

    def reach(_: int) -> list[bool]:
        with closing(psycopg.connect(url, autocommit=True)) as connection:
            barrier.wait(30)
            changes = pauses.pause(connection, "outbox", [ALL, LANE], None, may_write=Router().may_write)
            return [change.changed for change in changes]

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(reach, range(4))) == [[False, False]] * 3 + [[True, True]]


def test_the_commands(outbox_postgres, url):
    add(outbox_postgres, "k1")
    code, text = outbox(url, "pause", "--lane", "1", "--topic", "order-events", "--reason", "ledger \x1b[31m")
    assert (code, text.count("is paused, by postgres since")) == (0, 2)
    assert "\x1b" not in text
    assert "In effect" in text
    code, text = outbox(url, "resume")
    assert code == 0
    assert "All lanes: not paused, so nothing was changed." in text
    assert text.count("Still in force") == 2
    code, text = outbox(url, "drain", "--timeout", "0")
    assert code == 1
    assert (
        "all lanes not drained after 0 s, and not paused: 1 event left; no relay is running; lane 1 is paused; "
        "topic order-events" in text
    )
    code, text = outbox(url, "drain", "--timeout", "0", "--json")
    assert code == 1
    shown = json.loads(text.splitlines()[0])
    assert (shown["pauses"], shown["left"][0]["events"]) == ([], 1)
    code, text = outbox(url, "pause", "--lane", "9")
    assert (code, "no lane 9" in text) == (2, True)
    code, text = outbox(url, "resume", "--lane", "1", "--json")
    assert [one["name"] for one in json.loads(text)["left"]] == ["order-events"]


def test_the_status_says_paused_and_not_that_nobody_publishes(url, outbox_postgres):
    add(outbox_postgres, *(f"k{number}" for number in range(20)))
    relays = table(outbox_postgres, "me")
    relays.beat()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox.events DISABLE TRIGGER ALL")
        connection.execute("UPDATE outbox.events SET created_at = now() - interval '1 hour'")
        before = look_at_tables(connection, "outbox").problems()
        assert before == ["events wait in lanes 0, 1, 2, 3, which no relay holds"]
        pause(url, ALL, reason="ledger", wait=False)
        state = look_at_tables(connection, "outbox")
        (problem,) = state.problems()
        assert problem.startswith("all lanes are paused, by postgres since ")
        assert problem.endswith(" ends it. Unconfirmed by: me")
        assert ": ledger; `outbox relay resume`" in problem
        assert (state.oldest_seconds, [lane.paused for lane in state.lanes]) == (None, [True] * 4)
        relays.beat([one.number for one in read(url).values()])
        resume(url, ALL)
        relays.acquire(4)
        assert "the oldest event has waited" in look_at_tables(connection, "outbox").problems()[0]
        pause(url, LANE, wait=False)
        assert any("(lanes 0, 2, 3)" in line for line in look_at_tables(connection, "outbox").problems())
        pause(url, ORDERS, wait=False)
        # Of these lanes the events of a paused topic may be the old ones.
        assert not any("has waited" in line for line in look_at_tables(connection, "outbox").problems())


def test_lanes_do_not_change_while_one_is_paused(url):
    """Its number would stand for other keys."""
    from outbox._app import migrate as db
    from outbox.errors import SchemaError

    pause(url, LANE, ALL)
    with pytest.raises(SchemaError, match="lanes are paused by their numbers"):
        db.change_lanes(url, 8)
    resume(url, LANE)
    db.change_lanes(url, 8)
