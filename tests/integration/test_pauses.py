"""Pauses in the database: who may set them, what a relay reads of them and when, and when an outbox is drained."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import closing
from typing import Any, Self

import psycopg
import pytest
from counting import Counting
from loop_fakes import Broker, Watcher, all_of
from pause_support import Draining, pause, read, resume
from polling_support import add, source, table, taken
from psycopg import sql
from support import look_up, wait_until
from typer.testing import CliRunner

from outbox import Event, Outbox
from outbox._clients.checks import Level
from outbox.errors import ConfigurationError
from relay.cli.app import app
from relay.config import load
from relay.core.lease import HeldLanes
from relay.core.loop import LoopSettings, WorkerLoop
from relay.core.pauses import ALL, CurrentPauses, Pauses, Scope, ScopeKind, scopes_of
from relay.database import Connector
from relay.insights import look_at_tables
from relay.kafka.routing import Route, Router
from relay.lanes import LaneTable
from relay.operations import pauses
from relay.operations.doctor import examine
from relay.operations.drain import Drain, Left
from relay.polling import low_water_mark, reader
from relay.polling.source import PollingSource
from relay.settle.retries import FailurePolicy, Failures
from relay.supervisor import Components, Supervisor
from relay.wal.lane_hash import lane_of

LANE, OTHER_LANE = scopes_of([1, 2], [])
ORDERS = Scope(ScopeKind.TOPIC, "order-events")


@pytest.fixture
def url(outbox_postgres):
    return outbox_postgres.url


def audit(url: str) -> list[tuple[Any, ...]]:
    return look_up(url, "SELECT what, why, details ->> 'scope', details ->> 'name' FROM outbox.audit ORDER BY id")


# What operators do


def test_each_change_is_audited_and_the_second_time_nothing_changes(url):
    first = pause(url, ALL, LANE, ORDERS, reason="ledger")
    assert [change.changed for change in first] == [True] * 3
    again = pause(url, LANE, reason="another")
    assert [(change.changed, change.before == change.after) for change in again] == [(False, True)]
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
    assert "1 event is not published after 0 s. See `outbox status` for relays and pauses" in done.output


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


def test_an_operator_can_not_choose_who_and_when(url, outbox_postgres):
    role = sql.Identifier(f"operator_{outbox_postgres.name}")
    from relay.operations.roles import Kind, grants

    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
        try:
            name = f"operator_{outbox_postgres.name}"
            for statement in grants([(Kind.OPERATOR, name)], "outbox", "consumer", wal=False):
                admin.execute(statement)
            with psycopg.connect(url, user=name, autocommit=True) as mine:
                may_write = Router().may_write
                pauses.pause(mine, "outbox", [ALL], "mine", may_write=may_write)
                pauses.pause(mine, "outbox", [LANE], "mine", may_write=may_write, what="drain")
                (left,) = Drain(mine, "outbox", Router()).look([LANE]).values()
                assert left.drained
                for values in ("(requested_by) VALUES ('somebody')", "(requested_at) VALUES ('2020-01-01')"):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        mine.execute(f"INSERT INTO outbox.pauses {values}")
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    mine.execute("UPDATE outbox.pauses SET requested_by = 'somebody'")
                assert {one.requested_by for one in read(url).values()} == {name}
                pauses.resume(mine, "outbox", [ALL, LANE], None)
        finally:
            admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(role))


def test_two_commands_at_once(url):
    """The second waits for the first, and finds nothing left to do."""
    barrier, changed = threading.Barrier(4), []

    def reach() -> None:
        with closing(psycopg.connect(url, autocommit=True)) as connection:
            barrier.wait()
            changes = pauses.pause(connection, "outbox", [ALL, LANE], None, may_write=Router().may_write)
            changed.append([change.changed for change in changes])

    threads = [threading.Thread(target=reach) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(changed) == [[False, False]] * 3 + [[True, True]]


def outbox(url: str, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["relay", *arguments], env={"OUTBOX_DATABASE_URL": url})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


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
        "all lanes not drained after 0 s, and not paused: 1 events left; no relay is running; lane 1 is paused; "
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
        assert before == ["events wait in lanes that no relay holds: 0, 1, 2, 3"]
        pause(url, ALL, reason="ledger", wait=False)
        state = look_at_tables(connection, "outbox")
        (problem,) = state.problems()
        assert problem.startswith("all lanes are paused, by postgres since ")
        assert problem.endswith(" ends it. Running relays that do not obey it yet: me")
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


def test_the_doctor_mentions_them(url, outbox_kafka):
    pause(url, LANE, reason="ledger")
    settings = load(database_url=url, kafka={"bootstrap.servers": outbox_kafka.bootstrap_servers})
    found = {finding.about: finding for finding in examine(settings)}
    assert found["pauses"].level is Level.WARNING
    assert found["pauses"].found.startswith("lane 1 is paused, by postgres since ")


# What relays read


def test_a_relay_reads_them_with_its_census_and_with_the_lanes_it_takes(outbox_postgres, url):
    relay = table(outbox_postgres, "me")
    relay.beat()
    assert relay.pauses is None
    relay.distribution()
    assert relay.pauses == Pauses()
    pause(url, LANE, ORDERS, wait=False)
    taken_now = relay.acquire(1)
    numbers = {scope: one.number for scope, one in read(url).items()}
    known = relay.pauses
    assert known is not None
    assert len(taken_now) == 1
    assert (known.lanes, known.topics, known.every_lane) == ({1}, {"order-events"}, False)
    assert known.numbers == {numbers[LANE], numbers[ORDERS]}
    resume(url, LANE, ORDERS)
    pause(url, ALL, wait=False)
    relay.distribution()
    assert relay.pauses.holds(3)
    assert relay.pauses.lanes == set()


class Rig:
    """A relay's control loop and worker's loop over real Postgres; what it publishes is a list in memory."""

    def __init__(self, url: str, *, lease_seconds: float = 30.0) -> None:
        self.broker = Broker(always=all_of)
        self.pauses = CurrentPauses()
        failures = Failures("outbox", FailurePolicy(), Router())
        self.supervisor = Supervisor(
            Components(
                instance="me",
                version="0",
                schema="outbox",
                lease_seconds=lease_seconds,
                shutdown_seconds=5.0,
                loop=LoopSettings(),
                connect=Connector(url, "control loop"),
                source=lambda _: PollingSource(Connector(url, "worker"), "outbox", failures),
                publisher=self.broker.publisher,  # type: ignore[arg-type]
                pauses=self.pauses,
            )
        )
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self.supervisor.run, args=(self.stop, threading.Event()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def lanes(self) -> set[int]:
        return {lane for turn in self.broker.turns for lane in turn}


@pytest.fixture(autouse=True)
def without_the_rules_of_loop_fakes(monkeypatch):
    """There a source is a fake as well."""
    monkeypatch.setattr(Broker, "publisher", lambda self, _source: _publisher(self))


def _publisher(broker: Broker) -> Any:
    from loop_fakes import OnePublisher

    broker.opened += 1
    return OnePublisher(broker)


def test_a_pause_between_the_census_and_the_taking_holds_from_the_first_turn_on(outbox_postgres, url, monkeypatch):
    add(outbox_postgres, *(f"k{number}" for number in range(40)))
    census = LaneTable.distribution

    def then_pause(self: LaneTable, next_due: Any) -> Any:
        found = census(self, next_due)
        if not read(url):
            pause(url, LANE, wait=False)
        return found

    monkeypatch.setattr(LaneTable, "distribution", then_pause)
    with Rig(url) as rig:
        wait_until(lambda: rig.lanes() == {0, 2, 3}, what="the other lanes")
        wait_until(lambda: not read(url)[LANE].unconfirmed, what="it to confirm")
    assert rig.lanes() == {0, 2, 3}


def test_a_relay_confirms_when_its_turn_in_flight_has_ended(outbox_postgres, url):
    add(outbox_postgres, *(f"k{number}" for number in range(40)))
    go_on = threading.Event()
    with Rig(url) as rig:

        def slowly(batches: Any) -> Any:
            assert go_on.wait(30)
            return all_of(batches)

        rig.broker.always = slowly
        wait_until(lambda: rig.broker.turns, what="a turn")
        pause(url, ALL, wait=False)
        wait_until(lambda: rig.pauses.now.every_lane, what="the control loop to know")
        time.sleep(1.2)
        assert read(url)[ALL].unconfirmed == ("me",)
        go_on.set()
        wait_until(lambda: not read(url)[ALL].unconfirmed, what="it to confirm")
        # What was in flight is settled, and not left for later.
        settled = {lane for turn in rig.broker.turns for lane in turn}
        rows = {row[0] for row in look_up(url, "SELECT DISTINCT lane FROM outbox.events")}
        assert not settled & rows


def test_an_idle_relay_sends_no_statement_more(url):
    """One of the control loop a tick; and of the worker's loop none while all is paused."""
    with Counting(url) as counting, Rig(counting.url) as rig:
        wait_until(lambda: rig.supervisor.health().ready, what="the relay to be ready")
        settled = counting.executed
        seconds = 4.0
        time.sleep(seconds)
        idle = counting.executed - settled
        pause(url, ALL, wait=False)
        wait_until(lambda: not read(url)[ALL].unconfirmed, what="it to confirm")
        before = counting.executed
        time.sleep(seconds)
        # A census a second, perhaps a renewal and a beat in between.
        assert counting.executed - before <= seconds + 3
        assert idle > seconds + 3
        assert rig.supervisor.health().ready
        assert rig.supervisor.health().paused_lanes == [0, 1, 2, 3]


def test_a_tick_is_one_statement(url):
    """Of the control loop. The worker's loop does not run here: its statements would be counted too."""
    with Counting(url) as counting:
        supervisor = Supervisor(Rig(counting.url, lease_seconds=600.0).supervisor._components)
        for _ in range(8):
            supervisor._tick()
        before = counting.executed
        supervisor._tick()
        assert counting.executed - before == 1
        supervisor._disconnect()


def test_what_is_left_out_is_not_visited_by_each_read(outbox_postgres, url, monkeypatch):
    """A topic may be paused for hours: the low-water mark passes its events by, and goes back when it is resumed."""
    from outbox._app import migrate as db

    db.change_lanes(url, 1)
    monkeypatch.setattr(low_water_mark, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(low_water_mark, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(reader, "_LOOK_SECONDS", 0.0)
    add(outbox_postgres, *(f"k{number}" for number in range(40)))
    with source(outbox_postgres, taken(table(outbox_postgres, "me"))) as one:
        polling = one.source
        polling.leave_out(frozenset({("Order", False)}))
        last = look_up(url, "SELECT max(id) FROM outbox.events")[0][0]

        def passed() -> bool:
            assert polling.fetch({0: 100}).batches == {}
            return bool(polling.reader.above([0])[0] == last)

        wait_until(passed, what="the mark to rise")
        polling.leave_out(frozenset())
        assert len(polling.fetch({0: 100}).batches[0]) == 40


# Drains


def _publish(url: str, condition: str, *values: Any) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(f"DELETE FROM outbox.events WHERE {condition}", values)


def test_the_command_pauses_when_all_is_published(outbox_postgres, url):
    add(outbox_postgres, *(f"k{number}" for number in range(40)))
    with Rig(url) as rig:
        code, text = outbox(url, "drain", "--reason", "ledger")
        assert (code, "Drained: nothing is published any more." in text) == (0, True)
        assert len(rig.broker.log) == 40
        assert read(url)[ALL].unconfirmed == ()
        add(outbox_postgres, "later")
        # Where it is paused, nothing more can be drained.
        code, text = outbox(url, "drain", "--timeout", "0")
        assert (code, "1 events left; all lanes are paused" in text) == (1, True)
        assert len(rig.broker.log) == 40
    assert audit(url) == [("drain", "ledger", "all", "")]


def test_only_the_scope_must_be_empty_up_to_the_beginning(outbox_postgres, url):
    keys = {lane: next(f"k{n}" for n in range(100) if lane_of("Order", f"k{n}", 4) == lane) for lane in range(4)}
    add(outbox_postgres, keys[1], keys[2])
    with Draining(url, LANE, ALL, ORDERS) as draining:
        left = draining.look()
        assert not any(one.drained for one in left.values())
        assert left[LANE] == Left(drained=False, events=1, causes=["no relay is running"])
        assert left[ALL].events == 2
        ((last,),) = look_up(url, "SELECT max(id) FROM outbox.events")
        # Written later: not waited for.
        add(outbox_postgres, keys[1])
        _publish(url, "lane = 1 AND id <= %s", last)
        assert {scope: one.drained for scope, one in draining.look().items()} == {LANE: True, ALL: False, ORDERS: False}
        _publish(url, "id <= %s", last)
        assert draining.drained()


def test_a_topic_is_drained_when_no_type_that_leads_to_it_is_left(outbox_postgres, url):
    router = Router(
        {"Order": Route("sales"), "Return": Route("sales"), "Bill": Route("bills", dead_letter_topic="dead")}
    )
    sales, dead = Scope(ScopeKind.TOPIC, "sales"), Scope(ScopeKind.TOPIC, "dead")
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, headers, from_relay) "
            "SELECT kind, 'k', 'T', headers, true FROM (VALUES ('Bill', NULL), ('Other', NULL), ('Return', NULL), "
            "('Bill', '{\"outbox-dead-letter\": \"x\"}'::jsonb)) AS v(kind, headers)"
        )
    with Draining(url, sales, dead, router=router) as draining:
        assert {scope: one.events for scope, one in draining.look().items()} == {sales: 1, dead: 1}
        _publish(url, "aggregate_type = 'Return'")
        assert {scope: one.events for scope, one in draining.look().items()} == {sales: 0, dead: 1}
        assert not draining.drained()
        _publish(url, "headers IS NOT NULL")
        assert draining.drained()


def test_an_open_transaction_of_before_is_waited_for_and_named(outbox_postgres, url):
    with psycopg.connect(url, application_name="slow writer") as old, psycopg.connect(url) as later:
        old.execute("SELECT pg_current_xact_id()")
        with Draining(url, ALL) as draining:
            later.execute("SELECT pg_current_xact_id()")
            (left,) = draining.look().values()
            assert not left.drained
            (_, cause) = left.causes
            assert "(slow writer)" in cause
            old.execute(
                "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('Order', 'k', 'T')"
            )
            old.commit()
            # The later one is open, and nothing waits for it.
            (left,) = draining.look().values()
            assert (left.drained, left.events) == (False, 1)
            _publish(url, "true")
            assert draining.drained()


def test_a_key_behind_a_dead_letter_holds_the_drain_and_is_named(outbox_postgres, url):
    add(outbox_postgres, "k1")
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO outbox.failures (lane, id, event_id, aggregate_type, aggregate_id, blocks, attempts, "
            "last_error, first_failed_at, last_failed_at, next_attempt_at) "
            "SELECT lane, id - 1, gen_random_uuid(), aggregate_type, "
            "aggregate_id, true, 5, 'bad', now(), now(), 'infinity' FROM outbox.events"
        )
    with Draining(url, ALL) as draining:
        (left,) = draining.look().values()
    assert not left.drained
    assert any("dead letters block keys of lane" in cause for cause in left.causes)


def test_a_loop_with_its_own_pauses_reads_what_is_not_paused(outbox_postgres, url):
    """The loop alone, over a real source: a lane is paused and resumed between turns."""
    add(outbox_postgres, *(f"k{number}" for number in range(40)))
    held, current, broker = HeldLanes(), CurrentPauses(), Broker()
    held.give(table(outbox_postgres, "me").acquire(4))
    failures = Failures("outbox", FailurePolicy(), Router())
    loop = WorkerLoop(
        lambda: PollingSource(Connector(url, "worker"), "outbox", failures),
        broker.publisher,  # type: ignore[arg-type]
        held=held,
        stop=threading.Event(),
        observer=Watcher(),
        settings=LoopSettings(batch_size=3),
        pauses=current,
    )
    try:
        assert loop._turn()
        before = len(broker.turns)
        current.now = Pauses(numbers=frozenset({1}), lanes=frozenset({1}))
        while loop._turn():
            pass
        assert all(1 not in turn for turn in broker.turns[before:])
        assert current.obeyed is current.now
        # What was sent of it is settled all the same.
        sent = sum(len(turn.get(1, ())) for turn in broker.turns)
        kept = look_up(url, "SELECT count(*) FROM outbox.events WHERE lane = 1")[0][0]
        total = sum(lane_of("Order", f"k{number}", 4) == 1 for number in range(40))
        assert (kept + sent, kept > 0) == (total, True)
        current.now = Pauses()
        while loop._turn():
            pass
        assert len(broker.log) == len(set(broker.log)) == 40
    finally:
        loop._finish()
        loop._close()
