"""Calls to other systems while callers, the provider and the database die, stall and hang on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import external_support
import psycopg
import pytest
from external_support import Sink, in_thread, lease_runs_out, payments, provider, sink
from nursery import NURSERY, Forked
from restored import stop_flushing
from support import wait_until

from outbox._app import migrate as db
from outbox._clients.clock import uptime
from outbox.consumer import connections
from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.postgres_errors import MOST_STRIKES, clear_errors
from outbox.external import caller as caller_module
from outbox.external.caller import Caller

__all__ = ["provider", "sink"]


@pytest.fixture
def start(sink, provider, tmp_path) -> Callable[..., Forked]:
    """Return a function that starts a caller in a process of its own."""

    def started(point: str, timeout: float = 2.0) -> Forked:
        argv = [external_support.__file__, sink.url, provider.url, point, str(timeout)]
        return NURSERY.fork(argv, os.environ, tmp_path, tmp_path / "caller.log")

    return started


POINTS = (
    "before call",
    "after call",
    "in the confirming transaction",
    "told confirmed",
    "told reserved",
    "told cancelling",
    "before cancel",
    "after cancel",
    "in the cancelling transaction",
    "told cancelled",
)


def test_a_caller_killed_at_any_point_is_resumed_and_nothing_counts_twice(sink, provider, start):
    """One process after the other is killed, each at another point, with work for all of them; the last one ends."""
    external = payments(provider.url, cancel=True)
    good, taken_back = [], []
    for turn, point in enumerate(POINTS):
        names = [f"good{turn}-{n}" for n in range(3)]
        good += names
        taken_back += [f"bad{turn}"]
        provider.tell(names[0], "done-drop")
        provider.tell(f"bad{turn}", "done-drop", *["refuse"] * 20)
        # Of three keys in all turns: what a killed caller leaves holds up what comes after it, which is parked.
        sink.reserve(external, [*((name, f"k{n}") for n, name in enumerate(names)), (f"bad{turn}", "k0")])
        process = start(point)
        assert process.wait(120), point
        assert process.exit_code == -9, point
        if turn:
            # The first one's leases run out by themselves.
            lease_runs_out(sink)
    process = start("none")
    assert process.wait(120)
    assert process.exit_code == 0
    assert sink.states() == dict.fromkeys(good, "confirmed") | dict.fromkeys(taken_back, "cancelled")
    assert sink.orders() == dict.fromkeys(good, ("paid", 1)) | dict.fromkeys(taken_back, ("cancelled", 1))
    assert provider.standing() == Counter(good)
    assert Counter(provider.effects()) <= Counter(good + taken_back)
    assert not sink.rows("SELECT FROM consumer.reservations WHERE parked")
    for name in good + taken_back:
        assert len({key for _, _, key, _ in provider.requests(name)} - {None}) <= 2


def test_killed_while_the_provider_stalls(sink, provider, start):
    external = payments(provider.url)
    provider.tell("done", "done-stall")
    provider.tell("not-done", "stall")
    sink.reserve(external, ["done", "not-done"])
    process = start("none", timeout=60.0)
    wait_until(lambda: len(provider.requests()) == 2, 60, "both calls to be under way")
    process.signal(signal.SIGKILL)
    assert process.wait(30)
    assert sink.states() == {"done": "calling", "not-done": "calling"}
    assert sink.drain(external, until="due") == {}
    lease_runs_out(sink)
    process = start("none", timeout=60.0)
    assert process.wait(120)
    assert process.exit_code == 0
    # The first request of the one comes through only now, after its repetition.
    provider.release()
    wait_until(lambda: provider.under_way == 0, what="the provider to end")
    assert provider.standing() == Counter(["done", "not-done"])
    assert sink.orders() == {"done": ("paid", 1), "not-done": ("paid", 1)}


def test_stopping_ends_the_calls_under_way_and_begins_none(sink, provider):
    external = payments(provider.url, workers=1)
    provider.tell("first", "stall")
    sink.reserve(external, ["first", "second"])
    stop = threading.Event()
    thread = in_thread(lambda: external.drain(sink.connect, stop, until="stopped"))
    wait_until(provider.requests, what="the first call")
    stop.set()
    provider.release()
    thread.join(60)
    assert not thread.is_alive()
    assert sink.states() == {"first": "confirmed", "second": "reserved"}


@pytest.mark.parametrize("then", ["release", "signal"])
def test_a_signal_lets_the_call_end_and_a_second_one_does_not(sink, provider, tmp_path, then):
    (tmp_path / "cli_external.py").write_text(
        f"from external_support import payments\nexternal = payments({provider.url!r}, workers=1)\n"
    )
    external = payments(provider.url)
    provider.tell("first", "done-stall")
    sink.reserve(external, ["first", "second"])
    log = tmp_path / "external.log"
    paths = os.pathsep.join([str(tmp_path), str(Path(external_support.__file__).parent)])
    environment = os.environ | {"OUTBOX_DATABASE_URL": sink.url, "PYTHONPATH": paths}
    argv = ["-m", "relay.cli", "external", "run", "cli_external:external"]
    process = NURSERY.fork(argv, environment, tmp_path, log)
    try:
        wait_until(lambda: provider.requests("first"), 60, "the call")
        process.signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in log.read_text(), 60, "the first signal to be heard")
        # The provider keeps the call open: it is waited for.
        assert process.running
        if then == "release":
            provider.release()
        else:
            process.signal(signal.SIGINT)
        # Long before the call's lease is over, which the first signal alone would wait for.
        assert process.wait(60), log.read_text()
        assert process.exit_code == (0 if then == "release" else 1), log.read_text()
    finally:
        process.signal(signal.SIGKILL)
    assert "Traceback" not in log.read_text()
    if then == "release":
        assert sink.states() == {"first": "confirmed", "second": "reserved"}
        return
    assert "outbox: ended in the middle of a call, after two signals" in log.read_text()
    assert sink.states() == {"first": "calling", "second": "reserved"}
    provider.release()
    lease_runs_out(sink)
    sink.drain(external)
    assert sink.orders() == {"first": ("paid", 1), "second": ("paid", 1)}
    assert provider.standing() == Counter(["first", "second"])
    assert len({key for _, _, key, _ in provider.requests("first")}) == 1


def test_after_a_slow_ask_nothing_is_called_that_could_outlive_the_lease(sink, provider, monkeypatch):
    """Another caller may have the reservation by then, and its ``ask`` would not find a call that is under way."""
    passed, asked = 0.0, []
    monkeypatch.setattr(caller_module, "uptime", lambda: uptime() + passed)

    def ask(call):
        nonlocal passed
        asked.append(call.attempt)
        if len(asked) == 1:
            # So much that the lease is not over, but would be before the call's end.
            passed = external.lease_seconds - external.timeout

    external = payments(provider.url, ask=ask)
    provider.tell("o", "drop")
    (message_id,) = sink.reserve(external, ["o"])
    reports: list[dict[str, Any]] = []
    assert sink.drain(external, report=lambda _, figures: reports.append(dict(figures))) == {
        "attempts": 3,
        "retrying": 2,
        "confirmed": 1,
    }
    assert asked == [2, 3]
    assert reports[1] == {
        "message_id": str(message_id),
        "attempt": 2,
        "error": "the lease ran out before the call",
        "answer": "later",
    }
    assert [path for _, path, _, _ in provider.requests()] == ["/charges"] * 2


def test_a_call_that_does_not_keep_its_timeout_is_reported_once_and_keeps_its_thread(sink):
    """Only the function can keep it: the caller goes on without the thread, and takes the answer when it comes."""
    held, overdue, reports = threading.Event(), threading.Event(), []

    def stuck(call):
        if call.request["order"] == "a":
            assert held.wait(60)
        return {}

    def report(text, figures):
        if text.startswith("a call does not keep its timeout"):
            reports.append((figures["message_id"], figures["attempt"]))
            overdue.set()

    external = payments("http://localhost", call=stuck, timeout=0.1, lease=2.0, workers=1)
    first, _ = sink.reserve(external, ["a", "b"])
    caller, looks = Caller(external, sink.connect, report), []
    look = caller._warn_of_overdue
    caller._warn_of_overdue = lambda: looks.append(look())
    thread = in_thread(lambda: caller.run(threading.Event()))
    try:
        assert overdue.wait(60)
        seen = len(looks)
        wait_until(lambda: len(looks) >= seen + 3, what="more looks")
        assert sink.states() == {"a": "calling", "b": "reserved"}
    finally:
        held.set()
        thread.join(60)
    assert reports == [(str(first), 1)]
    assert sink.states() == {"a": "confirmed", "b": "confirmed"}
    assert caller.counts.late == 0


def test_the_database_dies_during_the_call_and_the_answer_waits_for_it(private_postgres, provider):
    server = private_postgres()
    database = private_postgres.database(server)
    db.upgrade_consumer(database.url)
    sink = Sink(database.url)
    external = payments(provider.url)
    provider.tell("o", "done-stall")
    sink.reserve(external, ["o"])
    counts: list[dict[str, int]] = []
    reports: list[str] = []
    thread = in_thread(
        lambda: counts.append(sink.drain(external, report=lambda text, _: reports.append(text), patience=120))
    )
    wait_until(provider.requests, what="the call")
    server.kill()
    provider.release()
    wait_until(lambda: "waiting for the database" in reports, what="the caller to notice")
    server.start()
    thread.join(120)
    assert counts == [{"attempts": 1, "confirmed": 1}]
    assert len(provider.requests()) == 1
    assert sink.orders() == {"o": ("paid", 1)}
    server.kill()
    with pytest.raises(ConsumerUnavailable, match="nothing is lost"):
        sink.drain(external, patience=0.1)


def test_the_database_loses_commits_during_the_call_but_not_the_claim(private_postgres, provider):
    """With synchronous_commit off. The claim is the only trace of a call: without it no caller would ask."""
    server = private_postgres({"synchronous_commit": "off", "wal_writer_delay": "10s"})
    database = private_postgres.database(server)
    db.upgrade_consumer(database.url)
    sink = Sink(database.url)
    external = payments(provider.url, ask=True)
    provider.tell("o", "done-stall")
    (message_id,) = sink.reserve(external, ["o"])
    with sink.connect() as connection:
        connection.execute("CHECKPOINT")
    stop_flushing(database.url)

    def drain() -> None:
        with contextlib.suppress(ConsumerUnavailable):
            sink.drain(external, patience=0.1)

    thread = in_thread(drain)
    wait_until(provider.requests, what="the call")
    server.kill()
    provider.release()
    thread.join(60)
    assert not thread.is_alive()
    server.start()
    assert sink.states() == {"o": "calling"}
    lease_runs_out(sink)
    assert sink.drain(external) == {"attempts": 1, "confirmed": 1}
    assert [path for _, path, _, _ in provider.requests()] == ["/charges", f"/charges/{message_id}"]


def test_a_caller_does_not_stay_with_one_session_for_ever(sink, provider, monkeypatch):
    """The server may not be the primary any more, and not know it; see test_connections."""
    passed = 0.0
    monkeypatch.setattr(connections, "_clock", lambda: time.monotonic() + passed)
    opened: list[int] = []

    def connect() -> psycopg.Connection[Any]:
        connection = sink.connect()
        opened.append(connection.info.backend_pid)
        return connection

    stop = threading.Event()
    caller = Caller(payments(provider.url), connect)
    thread = in_thread(lambda: caller.run(stop, until="stopped", poll=0.02))
    try:
        wait_until(lambda: opened, what="a session")
        passed = connections.MAX_AGE_SECONDS
        wait_until(lambda: len(opened) > 1, what="another session")
        wait_until(lambda: not sink.rows("SELECT FROM pg_stat_activity WHERE pid = %s", opened[0]), what="its end")
    finally:
        stop.set()
        thread.join(60)


def test_a_caller_that_stalls_in_a_transaction_or_meets_a_standby_goes_on(sink, provider):
    """A sink may end transactions that are idle or long; after a failover an address may still be the standby's."""
    standbys = ["default_transaction_read_only=on"]
    ends = ["idle_in_transaction_session_timeout", "transaction_timeout"]
    waited: list[str] = []

    def connect():
        connection = sink.connect()
        if standbys:
            connection.execute(f"SET {standbys.pop()}")
        return connection

    def stall(cursor, end):
        cursor.execute(f"SET LOCAL {end} = '50ms'")
        pid = cursor.connection.info.backend_pid
        wait_until(lambda: not sink.rows("SELECT FROM pg_stat_activity WHERE pid = %s", pid), what="the session's end")
        cursor.execute("SELECT 1")

    def settle(cursor, _settled):
        if ends:
            stall(cursor, ends.pop(0))
        cursor.execute("INSERT INTO orders VALUES ('o', 'paid')")

    def report(text, figures):
        if text == "waiting for the database":
            waited.append(figures["error"])

    external = payments(provider.url, on_confirmed=settle)
    sink.reserve(external, ["o"])
    counts = external.drain(connect, threading.Event(), report=report)
    assert (counts.attempts, counts.confirmed, counts.retrying) == (1, 1, 0)
    assert sink.orders() == {"o": ("paid", 1)}
    signs = ("read-only", "idle-in-transaction timeout", "transaction timeout")
    assert [next(sign for sign in signs if sign in error) for error in waited] == list(signs)

    # A person's command does not wait; it says so.
    def command(end):
        with clear_errors("looking"), sink.connect() as connection, connection.transaction():
            stall(connection.cursor(), end)

    for end in ("idle_in_transaction_session_timeout", "transaction_timeout"):
        with pytest.raises(ConsumerUnavailable, match="transaction timeout"):
            command(end)


def test_sql_that_always_ends_its_session_counts_as_failed_and_holds_up_no_other(sink, provider, monkeypatch):
    monkeypatch.setattr(caller_module, "_LONGEST_PAUSE", 0.2)

    def settle(cursor, settled):
        if settled.request["order"] == "a":
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        cursor.execute("INSERT INTO orders VALUES (%s, 'paid')", [settled.request["order"]])

    external = payments(provider.url, on_confirmed=settle, max_attempts=2, workers=1)
    stop = threading.Event()
    sink.reserve(external, ["a", "b"])
    thread = in_thread(lambda: external.drain(sink.connect, stop, until="stopped", patience=None))
    try:
        wait_until(lambda: sink.states() == {"a": "stuck", "b": "confirmed"}, 60, what="both to be settled")
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    assert len(provider.requests("a")) == 1
    assert (
        "terminating connection"
        in sink.rows("SELECT last_error FROM consumer.reservations WHERE state = 'stuck'")[0][0]
    )


def test_a_cancellation_whose_commit_fails_again_and_again_is_no_call_again(sink, provider, monkeypatch):
    """As where a pooler ends each COMMIT that waits for a standby: there is no SQL of the user's that has failed."""
    monkeypatch.setattr(caller_module, "_LONGEST_PAUSE", 0.2)
    external = payments(provider.url, cancel=True, max_attempts=100)
    provider.tell("o", "done-drop", "refuse")
    provider.tell("cancel o", "503")
    with sink.connect() as connection:
        connection.execute("CREATE SEQUENCE ended")
        # A sequence counts also what is rolled back.
        connection.execute(
            "CREATE FUNCTION ended() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF nextval('public.ended') <= "
            f"{MOST_STRIKES + 1} THEN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60); END IF; "
            "RETURN NULL; END $$"
        )
        connection.execute(
            "CREATE CONSTRAINT TRIGGER ended AFTER UPDATE ON consumer.reservations DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW WHEN (OLD.taking_back AND NEW.state = 'cancelling' AND NEW.last_error LIKE '%503%') "
            "EXECUTE FUNCTION ended()"
        )
    sink.reserve(external, ["o"])
    counts = sink.drain(external, patience=None)
    assert (counts["cancelled"], counts.get("confirmed")) == (1, None)
    assert sink.rows("SELECT last_value FROM ended")[0][0] > MOST_STRIKES + 1
    assert sink.states() == {"o": "cancelled"}
    assert len(provider.requests("o", "/charges")) == 2
    assert (provider.effects(), provider.standing()) == (["o"], Counter())


def test_a_stop_does_not_wait_for_the_database_beyond_the_leases(sink, provider):
    def settle(cursor, settled):
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    external = payments(provider.url, on_confirmed=settle, timeout=1.0, lease=1.5)
    sink.reserve(external, ["a"])
    stop = threading.Event()
    away: list[float] = []

    def connect() -> psycopg.Connection[Any]:
        if away:
            raise psycopg.OperationalError("nobody listens")
        return sink.connect()

    def report(text: str, _figures: Mapping[str, Any]) -> None:
        if text == "waiting for the database":
            away.append(time.monotonic())
            stop.set()

    thread = in_thread(lambda: external.drain(connect, stop, until="stopped", report=report, patience=None))
    thread.join(30)
    assert not thread.is_alive()
    assert sink.states() == {"a": "calling"}
