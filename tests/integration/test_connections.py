"""The consumer's sessions on a real Postgres: which stay open, what is left in them, and when they are replaced."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from consumer_group import ConsumerGroup
from counting import AnotherPid, Counting
from pgbouncer import PgBouncer
from proxy import TcpProxy
from psycopg import sql
from psycopg.adapt import Loader
from psycopg.rows import dict_row
from standby import Standby, either, set_parameter
from support import look_up, wait_until

from outbox._app import migrate as db
from spark_jobs.driver.runner import Options, Runner
from spark_jobs.errors import Fenced
from spark_jobs.job import ConsumerJob
from spark_jobs.model import Stored
from spark_jobs.postgres import connections
from spark_jobs.postgres import errors as postgres
from spark_jobs.postgres import lock_monitor as blockers
from spark_jobs.postgres.group_store import GroupState, Store
from spark_jobs.postgres.lock_monitor import LockMonitor
from spark_jobs.postgres.sink import transaction
from spark_jobs.task import partition as task
from spark_jobs.task.input import NO_INPUT

NAME = "test of sessions"
PID = "SELECT pg_backend_pid()"
# What one session may see otherwise than another.
STATE = """
SELECT session_user, current_user, current_setting('search_path'), current_setting('lock_timeout'),
       current_setting('transaction_isolation'), current_setting('transaction_read_only'),
       current_setting('client_encoding'), current_setting('application_name'), current_setting('TimeZone'),
       (SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()),
       (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_cursors WHERE name <> ''),
       (SELECT count(*) FROM pg_listening_channels()),
       (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())"""


@pytest.fixture
def url(outbox_postgres) -> str:
    return str(outbox_postgres.url)


def ask(url: str, query: str = PID, *, reset: bool = True) -> Any:
    with connections.transaction(url, NAME, reset=reset) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row if len(row) > 1 else row[0]


def use(url: str, do: Callable[[psycopg.Connection[Any]], object]) -> None:
    with connections.transaction(url, NAME, reset=True) as connection:
        do(connection)


def read(url: str, query: str = PID) -> Any:
    [(found,)] = connections.read(url, NAME, sql.SQL(query).format(), {})
    return found


def run(url: str, query: str, *values: object) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(query.encode(), values)


def sessions(url: str, name: str = NAME) -> list[int]:
    query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s ORDER BY pid"
    return [pid for (pid,) in look_up(url, query, name)]


def terminate(url: str, pid: int) -> None:
    look_up(url, "SELECT pg_terminate_backend(%s)", pid)
    wait_until(lambda: not look_up(url, "SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid), what="the session's end")


def with_default(url: str, setting: str, value: str) -> None:
    """Give the role a default in this database, for sessions to come."""
    with psycopg.connect(url, autocommit=True) as connection:
        user, name = map(sql.Identifier, (connection.info.user, connection.info.dbname))
        connection.execute(
            sql.SQL("ALTER ROLE {} IN DATABASE {} SET {} = {}").format(user, name, sql.Identifier(setting), value)
        )


# How a session is opened.


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such option")
def test_a_host_that_vanishes_is_noticed_within_a_minute(url):
    with connections.connect(url, NAME) as connection, socket.socket(fileno=os.dup(connection.fileno())) as opened:
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        found = [opened.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) for option in options]
    assert found == [30, 10, 3, 30_000]


def test_the_url_may_say_otherwise(url):
    with connections.connect(f"{url}?keepalives_idle=7&connect_timeout=3", NAME) as connection:
        given = connection.info.get_parameters()
    assert (given["keepalives_idle"], given["connect_timeout"], given["keepalives_count"]) == ("7", "3", "3")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_transactions_see_what_others_commit_meanwhile_whatever_the_roles_default_is(url, level):
    with_default(url, "default_transaction_isolation", level)
    isolation = "SELECT current_setting('transaction_isolation')"
    # On a new session and on a kept one.
    assert [ask(url, isolation), ask(url, isolation)] == ["read committed"] * 2
    with transaction(url, NAME, NO_INPUT) as cursor:
        assert cursor.execute(isolation).fetchone() == ("read committed",)
    with postgres.connect(url, NAME) as connection, connection.transaction():
        assert connection.execute(isolation).fetchone() == ("read committed",)


def test_the_caller_may_say_how_long_connecting_takes(url):
    with connections.connect(f"{url}?connect_timeout=3", NAME, connect_seconds=7) as connection:
        assert connection.info.get_parameters()["connect_timeout"] == "7"


def test_texts_are_sent_in_utf8_whatever_the_roles_default_is(url):
    with_default(url, "client_encoding", "LATIN1")
    for _ in range(2):
        assert ask(url, "SHOW client_encoding") == "UTF8"


def test_no_statement_is_prepared(url):
    """A pooler would give the next one to another session, which does not have it."""
    prepared = "SELECT count(*) FROM pg_prepared_statements"

    def often(connection: psycopg.Connection[Any]) -> None:
        for _ in range(10):
            connection.execute("SELECT 1 + %s", (1,))
        assert connection.execute(prepared.encode()).fetchone() == (0,)

    with connections.connect(url, NAME) as connection:
        often(connection)
    for _ in range(2):
        use(url, often)


def test_an_effect_that_has_ended_its_transaction_goes_on_in_one_like_it(url):
    """It must not; but what it does then is not to depend on a role's default."""
    with_default(url, "default_transaction_isolation", "serializable")
    for _ in range(2):
        with connections.transaction(url, NAME, reset=True) as connection:
            connection.commit()
            assert connection.execute("SHOW transaction_isolation").fetchone() == ("read committed",)


@pytest.fixture
def interrupting_signal() -> Iterator[None]:
    """Make SIGUSR1 do what Ctrl-C does: SIGINT itself is ignored where a shell has started the tests beside others."""
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("interrupting_signal")
def test_a_connection_that_comes_too_late_is_closed(url):
    """Nobody waits for it any more: the time was up, or Ctrl-C has ended the wait."""
    main = threading.get_ident()
    for seconds, interrupts, error in ((0.01, False, psycopg.errors.ConnectionTimeout), (60, True, KeyboardInterrupt)):
        asked, answer = threading.Event(), threading.Event()
        late: list[psycopg.Connection[Any]] = []

        def begin(asked=asked, answer=answer, late=late) -> psycopg.Connection[Any]:
            asked.set()
            answer.wait(60)
            late.append(psycopg.connect(url, application_name=NAME))
            return late[0]

        def interrupt(asked=asked) -> None:
            asked.wait(60)
            signal.pthread_kill(main, signal.SIGUSR1)

        interrupting = threading.Thread(target=interrupt)
        if interrupts:
            interrupting.start()
        with pytest.raises(error):
            connections._within(seconds, begin)
        answer.set()
        wait_until(lambda late=late: late and late[0].closed, what="it to be closed")
    # What is not too late is given back: a connection, or the error.
    with connections._within(60, lambda: psycopg.connect(url)) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    with pytest.raises(psycopg.OperationalError, match="refused"):
        connections._within(60, lambda: psycopg.connect("host=127.0.0.1 port=1"))


def test_a_name_is_what_postgres_shows(url):
    group = "Bestellungen für Käufer " * 5
    with connections.transaction(url, f"outbox driver {group}", reset=True):
        assert sessions(url, blockers.names(group)[0])


# What stays open.


def test_transactions_and_reads_share_one_session(url):
    found = {ask(url), ask(url, reset=False), read(url), ask(url)}
    assert sessions(url) == sorted(found)
    assert len(found) == 1


def test_another_address_or_name_has_a_session_of_its_own(url):
    first = ask(url)
    assert ask(f"{url}?keepalives_idle=7") != first
    with connections.transaction(url, "another", reset=True) as connection:
        assert connection.info.backend_pid != first
    assert ask(url) == first


def test_no_more_sessions_are_kept_than_a_process_needs(url):
    for number in range(2 * connections._MOST_KEPT):
        with connections.transaction(url, f"{NAME} {number}", reset=True):
            pass

    def left() -> int:
        return look_up(url, "SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, %s)", NAME)[0][0]

    wait_until(lambda: left() == connections._MOST_KEPT, what="the others to be closed")


def test_the_session_that_was_used_longest_ago_goes_first(url, monkeypatch):
    monkeypatch.setattr(connections, "_MOST_KEPT", 2)
    for name in ("one", "two", "one", "three"):
        with connections.transaction(url, name, reset=True):
            pass
    wait_until(lambda: not sessions(url, "two"), what="the session to be closed")
    assert (len(sessions(url, "one")), len(sessions(url, "three"))) == (1, 1)


def test_threads_never_share_a_session(url):
    # One is there already, for the first of them.
    ask(url)
    both = threading.Barrier(2, timeout=30)

    def work(_: int) -> tuple[int, int]:
        with connections.transaction(url, NAME, reset=True) as connection:
            both.wait()
            [(pid,)] = connection.execute(PID).fetchall()
            both.wait()
        return pid, threading.get_ident()

    with ThreadPoolExecutor(2) as pool:
        (first, one), (second, other) = pool.map(work, range(2))
    assert (first != second, one != other) == (True, True)
    wait_until(lambda: len(sessions(url)) == 1, what="one of them to be closed")


FORKED = """
import gc, os, sys
from spark_jobs.postgres import connections

def ask():
    with connections.transaction(sys.argv[1], "forked", reset=True) as connection:
        return connection.execute("SELECT pg_backend_pid()").fetchone()[0]

mine = ask()
connections.read(sys.argv[1], "another", connections.sql.SQL("SELECT 1").format(), {})
child = os.fork()
if child == 0:
    theirs = ask()
    gc.collect()
    # Not os._exit: what is done at the end of a process is done in the child as well.
    sys.exit(3 if theirs == mine else 0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(mine == ask())
"""


def test_a_fork_begins_with_no_session_and_leaves_its_parents_alone(url):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKED, url], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    # Closed at the process's exit.
    wait_until(lambda: sessions(url, "forked") == [], what="the sessions' end")


def test_what_a_driver_has_open_is_closed_with_it(url):
    db.upgrade_consumer(url)
    job = ConsumerJob("g", ["t"], "SELECT 1")
    names = blockers.names("g")
    with Runner(None, job, Options(url, {"bootstrap.servers": "127.0.0.1:1"}), lambda *_: None) as runner:
        runner._store.require_utf8()
        runner._store.make_days()
        with transaction(url, names[1], NO_INPUT):
            pass
        assert [len(sessions(url, name)) for name in names] == [1, 1]
    wait_until(lambda: not any(sessions(url, name) for name in names), what="the sessions' end")


def test_no_secret_is_shown(url):
    where = urlsplit(url)
    secret = url.replace(where.netloc, f"{where.username}:s3cret@{where.hostname}:{where.port}")
    store = Store(secret, "consumer", "g", "test")
    store.require_utf8()
    kept = connections._here()
    assert kept._sessions
    assert "s3cret" not in "".join(map(repr, (store, kept, *kept._sessions.values())))


# What a use leaves to the next one.

LEFT: dict[str, str] = {
    "a setting": "SET lock_timeout = '1s'",
    "a search path": "SET search_path = pg_catalog",
    "a custom setting": "SELECT set_config('TimeZone', 'Asia/Tokyo', false)",
    "a temporary table": "CREATE TEMPORARY TABLE batch (nothing int)",
    "an advisory lock": "SELECT pg_advisory_lock(1)",
    "a channel": "LISTEN somebody",
    "a plan": "PREPARE mine AS SELECT 1",
    "a cursor": "DECLARE mine CURSOR WITH HOLD FOR SELECT 1",
    "a role": "SET ROLE pg_monitor",
    "a user": "SET SESSION AUTHORIZATION pg_monitor",
    "an isolation level": "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    "an encoding": "SET client_encoding = 'LATIN1'",
    "a name": "SET application_name = 'somebody'",
}


@pytest.mark.parametrize("what", LEFT)
def test_nothing_of_an_effect_is_left_in_a_session(url, what):
    fresh = ask(url, STATE)
    pid = ask(url)
    with transaction(url, NAME, NO_INPUT) as cursor:
        cursor.execute(LEFT[what].encode())
    # At once, and not when the session is used again.
    assert look_up(url, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(0,)]
    assert (ask(url, STATE), ask(url)) == (fresh, pid)


def test_a_session_that_an_effect_has_made_read_only_is_not_used_again(url):
    pid = ask(url)
    ask(url, "SELECT set_config('default_transaction_read_only', 'on', false)")
    assert ask(url, "SELECT current_setting('transaction_read_only')") == "off"
    assert ask(url) != pid


class Shouting(Loader):
    def load(self, data: Any) -> str:
        return f"{bytes(data)!r}!"


def test_nothing_of_an_effect_is_left_in_the_driver_of_a_session(url):
    with transaction(url, NAME, NO_INPUT) as cursor:
        connection = cursor.connection
        connection.row_factory = dict_row
        connection.prepare_threshold = 0
        connection.adapters.register_loader("int4", Shouting)
        connection.add_notice_handler(lambda _: pytest.fail("a notice of somebody else's transaction"))
        pid = connection.info.backend_pid
    with connections.transaction(url, NAME, reset=True) as again:
        assert again.execute("SELECT 1, pg_backend_pid()").fetchone() == (1, pid)
        again.execute("DO 'BEGIN RAISE NOTICE $$here$$; END'")
        assert again.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
        # Whoever kept something of the use before has nothing of this one.
        for late in (lambda: cursor.execute("SELECT 1"), lambda: connection.execute("SELECT 1")):
            with pytest.raises(psycopg.OperationalError, match="closed"):
                late()
        assert connection.closed
        connection.close()
        assert again.execute("SELECT 1").fetchone() == (1,)


def test_a_session_that_an_effect_leaves_in_pipeline_mode_is_not_used_again(url):
    with transaction(url, NAME, NO_INPUT) as cursor:
        pipeline = cursor.connection.pipeline()
        pipeline.__enter__()
        pid = cursor.connection.info.backend_pid
    assert ask(url) != pid
    wait_until(lambda: pid not in sessions(url), what="the session's end")


def test_an_effect_hears_its_notices(url):
    for _ in range(2):
        heard: list[str | None] = []
        with transaction(url, NAME, NO_INPUT) as cursor:
            cursor.connection.add_notice_handler(lambda notice, heard=heard: heard.append(notice.message_primary))
            cursor.execute("DO 'BEGIN RAISE NOTICE $$here$$; END'")
        assert heard == ["here"]


# When a session is replaced.


def test_after_an_error_a_session_is_not_used_again(url):
    pid = ask(url)
    run(url, "CREATE TABLE numbers (n int)")

    def of_the_server(connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO numbers VALUES (1)")
        connection.execute("SELECT 1 / 0")

    def of_the_effect(connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO numbers VALUES (2)")
        raise ZeroDivisionError

    with pytest.raises(psycopg.errors.DivisionByZero):
        use(url, of_the_server)
    second = ask(url)
    with pytest.raises(ZeroDivisionError):
        use(url, of_the_effect)
    # One that was caught: COMMIT is a ROLLBACK.
    with connections.transaction(url, NAME, reset=True) as connection:
        third = connection.info.backend_pid
        connection.execute("INSERT INTO numbers VALUES (3)")
        with suppress(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
    last = ask(url)
    assert len({pid, second, third, last}) == 4
    assert look_up(url, "SELECT count(*) FROM numbers") == [(0,)]
    with pytest.raises(psycopg.errors.DivisionByZero):
        read(url, "SELECT 1 / 0")
    assert ask(url) != last
    wait_until(lambda: len(sessions(url)) == 1, what="the others' end")


def test_what_an_error_leaves_is_rolled_back_before_its_session_is_closed(url):
    """The server may take a while to notice the end of a connection, and its locks would last as long."""
    with Counting(url) as counting:
        for again in range(2):
            with pytest.raises(ZeroDivisionError):
                use(counting.url, lambda _: 1 / 0)
            assert counting.statements[-1] == b"ROLLBACK"
            wait_until(lambda again=again: counting.terminated == again + 1, what="the session's end")


def test_a_read_that_fails_is_not_repeated_where_its_session_is_still_there(url):
    with Counting(url) as counting:
        read(counting.url)
        counting.statements.clear()
        with pytest.raises(psycopg.errors.DivisionByZero) as caught:
            read(counting.url, "SELECT 1 / 0")
        assert (counting.statements, counting.opened) == ([b"SELECT 1 / 0"], 1)
        # And the session is not left to whoever holds the error.
        wait_until(lambda: counting.terminated == 1, what="the session's end")
        assert caught.value


class Ending(dict[str, object]):
    """Values of a statement: to look at them ends a session, and then the process is asked to end."""

    def __init__(self, session: Any) -> None:
        super().__init__(number=1)
        self._session = session
        self.looks = 0

    def __getitem__(self, name: str) -> object:
        self.looks += 1
        self._session.close()
        raise KeyboardInterrupt


def test_a_read_that_is_interrupted_is_not_repeated(url):
    read(url)
    values = Ending(connections._here()._sessions[url, NAME])
    with pytest.raises(KeyboardInterrupt):
        connections.read(url, NAME, sql.SQL("SELECT %(number)s").format(), values)
    assert values.looks == 1


def test_a_session_whose_first_use_fails_is_closed(url, monkeypatch):
    """While the error is still somebody's, and its frames hold the session."""
    with Counting(url) as counting:
        with pytest.raises(psycopg.errors.DivisionByZero) as caught:
            read(counting.url, "SELECT 1 / 0")
        wait_until(lambda: counting.terminated == 1, what="the session's end")
        assert caught.value
        for use_it in (read, ask):
            use_it(counting.url)
        monkeypatch.setattr(connections, "_BEGIN", "BEGIN with nonsense")
        # The one that was kept, and the one that takes its place.
        with pytest.raises(psycopg.errors.SyntaxError) as caught_too:
            ask(counting.url)
        wait_until(lambda: (counting.opened, counting.terminated) == (3, 3), what="both sessions' ends")
        assert caught_too.value


class Interrupted(str):
    """A statement that is interrupted before it is sent."""

    __slots__ = ()

    def encode(self, *_: object) -> bytes:
        raise KeyboardInterrupt


def test_a_session_whose_begin_is_interrupted_is_closed(url, monkeypatch):
    with Counting(url) as counting:
        ask(counting.url)
        monkeypatch.setattr(connections, "_BEGIN", Interrupted())
        for ended in (1, 2):
            # Kept, and new.
            with pytest.raises(KeyboardInterrupt) as caught:
                ask(counting.url)
            wait_until(lambda ended=ended: counting.terminated == ended, what="the session's end")
            assert caught.value is not None
        assert counting.opened == 2


def test_a_session_in_a_transaction_is_not_used_again(url):
    pid = read(url)
    assert connections.read(url, NAME, sql.SQL("BEGIN").format(), {}) == []
    assert read(url) != pid
    wait_until(lambda: pid not in sessions(url), what="the session's end")


def test_what_is_committed_is_so_although_its_session_is_lost_before_it_is_cleaned(url):
    """An error would have the range read again: right, and for nothing."""
    run(url, "CREATE TABLE numbers (n int)")
    with Counting(url) as counting:
        for number, cut_at in enumerate((b"SELECT pg_backend_pid()", b"DISCARD ALL")):
            counting.cut_at = cut_at
            use(counting.url, lambda connection, n=number: connection.execute("INSERT INTO numbers VALUES (%s)", (n,)))
            assert counting.statements[-1] == cut_at
        counting.cut_at = None
        assert look_up(url, "SELECT array_agg(n ORDER BY n) FROM numbers") == [([0, 1],)]
        assert ask(counting.url)


def test_a_standby_is_not_kept(private_postgres):
    """It may be promoted, or not; and somebody else is the primary now."""
    primary = private_postgres({"wal_level": "replica"})
    database = private_postgres.database(primary)
    with Standby(primary) as standby:
        wait_until(standby.caught_up, what="the standby")
        url = standby.url(database.name)
        assert read(url) != read(url)
        connections.close_all()


def test_a_session_that_the_server_ended_is_replaced_unseen(url):
    for again in (ask, read, lambda url: ask(url, reset=False)):
        pid = again(url)
        terminate(url, pid)
        assert again(url) != pid


def test_a_session_that_ends_in_the_middle_is_a_server_that_is_away(url):
    ask(url)

    def before_a_statement(connection: psycopg.Connection[Any]) -> None:
        terminate(url, connection.info.backend_pid)
        connection.execute("SELECT 1")

    def before_commit(connection: psycopg.Connection[Any]) -> None:
        connection.execute("SELECT 1")
        terminate(url, connection.info.backend_pid)

    for ended in (before_a_statement, before_commit):
        with pytest.raises(postgres.AWAY):
            use(url, ended)
        assert ask(url)


def test_a_round_survives_a_restart_of_the_server(private_postgres):
    server = private_postgres()
    url = private_postgres.database(server).url
    group = ConsumerGroup(url)
    group.begin([0])
    store = Store(url, "consumer", "g", "test")
    ask(url)
    before = store.state(["t"], 1, keep_order=False)
    server.kill()
    server.start()
    assert store.state(["t"], 1, keep_order=False) == before
    assert ask(url)
    server.kill()
    # While it is away both fail as before, and work again after that.
    for again in (lambda: store.stored(["t"]), store.take_over, lambda: ask(url)):
        with pytest.raises(postgres.AWAY):
            again()
    server.start()
    assert (store.take_over(), bool(ask(url))) == (2, True)


def test_a_server_that_becomes_read_only_is_let_go_of(private_postgres):
    server = private_postgres()
    url = private_postgres.database(server).url
    ConsumerGroup(url).begin([0])
    store = Store(url, "consumer", "g", "test")
    (driver,) = [store.stored(["t"]) and sessions(url, "outbox driver g")]
    worker = ask(url)
    set_parameter(server.url(), "default_transaction_read_only", "on")
    # One that writes has its error, and the other is told with its answer.
    with pytest.raises(postgres.AWAY):
        use(url, lambda connection: connection.execute("UPDATE consumer.groups SET owner = 'x'"))
    store.stored(["t"])
    wait_until(lambda: sessions(url, NAME) == sessions(url, "outbox driver g") == [], what="both to be closed")
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
        connection.execute("SELECT pg_reload_conf()")
    wait_until(lambda: ask(url, "SELECT current_setting('transaction_read_only')") == "off", what="writes to be taken")
    assert store.take_over() == 2
    assert (ask(url) != worker, sessions(url, "outbox driver g") != driver) == (True, True)


@pytest.fixture
def later(monkeypatch) -> Callable[[float], None]:
    """Let time pass for the ages of sessions."""
    passed = 0.0
    monkeypatch.setattr(connections, "_clock", lambda: time.monotonic() + passed)

    def let(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    return let


def test_a_primary_that_goes_on_after_a_failover_is_not_asked_for_ever(private_postgres, later):
    """The name leads to the new primary, and the old one does not know that it is none: a split brain."""
    primary = private_postgres({"wal_level": "replica"})
    database = private_postgres.database(primary)
    ConsumerGroup(database.url).begin([0])
    address = urlsplit(database.url)
    with Standby(primary) as standby, TcpProxy("127.0.0.1", primary.port) as name:
        url = database.url.replace(f"{address.hostname}:{address.port}", name.address)
        store = Store(url, "consumer", "g", "test")
        assert (store.take_over(), ask(url, "SELECT inet_server_port()")) == (2, primary.port)
        wait_until(standby.caught_up, what="the standby")
        standby.promote()
        name.lead_to(standby.port)
        run(standby.url(database.name), "UPDATE consumer.offsets SET next_offset = 7")
        # Nothing tells these sessions: the server is there, and takes writes.
        at = ("t", 0)
        assert (store.stored(["t"])[at].next_offset, ask(url, "SELECT inet_server_port()")) == (0, primary.port)
        later(connections.MAX_AGE_SECONDS)
        assert (store.stored(["t"])[at].next_offset, ask(url, "SELECT inet_server_port()")) == (7, standby.port)
        connections.close_all()


@pytest.mark.parametrize("again", [ask, read, lambda url: ask(url, reset=False)], ids=["effect", "read", "own"])
def test_a_session_is_kept_for_some_minutes(url, later, again):
    pid = again(url)
    later(connections.MAX_AGE_SECONDS - 60)
    # Use makes it no younger.
    assert again(url) == pid
    later(61)
    assert again(url) != pid
    wait_until(lambda: pid not in sessions(url), what="the session's end")


def test_a_session_that_was_in_use_when_it_became_too_old_is_closed_after_that(url, later):
    with connections.transaction(url, NAME, reset=True) as connection:
        pid = connection.info.backend_pid
        later(connections.MAX_AGE_SECONDS + 1)
        assert connection.execute(PID).fetchone() == (pid,)
    wait_until(lambda: sessions(url) == [], what="the session's end")


def test_other_settings_of_a_role_reach_a_driver_that_runs(url, later):
    assert ask(url, "SHOW work_mem") != "77MB"
    with_default(url, "work_mem", "77MB")
    assert ask(url, "SHOW work_mem") != "77MB"
    later(connections.MAX_AGE_SECONDS)
    assert ask(url, "SHOW work_mem") == "77MB"


def test_a_failover_is_followed_to_the_new_primary(private_postgres):
    primary = private_postgres({"wal_level": "replica"})
    database = private_postgres.database(primary)
    ConsumerGroup(database.url).begin([0])
    with Standby(primary) as standby:
        url = either(primary, standby, database.name)
        store = Store(url, "consumer", "g", "test")
        assert (store.take_over(), ask(url, "SELECT inet_server_port()")) == (2, primary.port)
        wait_until(standby.caught_up, what="the standby")
        primary.kill()
        standby.promote()
        assert (store.take_over(), ask(url, "SELECT inet_server_port()")) == (3, standby.port)
        connections.close_all()


# Behind a pooler.


def test_a_session_that_another_process_answers_is_not_cleaned_and_not_kept(url):
    """By this a pooler is known, with no pooler here."""
    with AnotherPid(url) as pooler:
        ask(pooler.url, reset=False)
        assert pooler.opened == 1
        ask(pooler.url)
        assert b"DISCARD ALL" not in pooler.statements
        assert connections._here().take((pooler.url, NAME)) is None
    with Counting(url) as counting:
        for _ in range(2):
            ask(counting.url)
        # Asked once for each session.
        assert counting.statements.count(b"SELECT pg_backend_pid()") == 2 + 1
        assert (counting.statements.count(b"DISCARD ALL"), counting.opened) == (2, 1)


def test_behind_a_pooler_nothing_of_others_is_reset(url):
    """Each transaction has another session of the server there: DISCARD ALL would be somebody else's."""
    with PgBouncer(url, size=1) as pooler, psycopg.connect(pooler.url, autocommit=True) as other:
        other.execute("SET lock_timeout = '77s'")
        for _ in range(3):
            assert ask(pooler.url, "SELECT current_setting('lock_timeout')") == "77s"
            assert other.execute("SHOW lock_timeout").fetchone() == ("77s",)
        # Not kept: which session the effect had can't be told.
        assert connections._here().take((pooler.url, NAME)) is None


def test_behind_a_pooler_the_driver_keeps_its_connection(url):
    ConsumerGroup(url).begin([0])
    with PgBouncer(url, size=2) as pooler:
        store = Store(pooler.url, "consumer", "g", "test")
        store.stored(["t"])
        kept = connections._here()._sessions[pooler.url, "outbox driver g"]
        for generation in (2, 3):
            assert store.take_over() == generation
            assert store.state(["t"], generation, keep_order=True).stored == {("t", 0): Stored("topic-id", 0)}
            with connections.transaction(pooler.url, "outbox driver g", reset=False) as connection:
                query = "SELECT current_setting('application_name'), current_setting('client_encoding')"
                assert connection.execute(query).fetchone() == ("outbox driver g", "UTF8")
        assert connections._here()._sessions[pooler.url, "outbox driver g"] is kept
        connections.close_all()


# What a driver asks.


@pytest.fixture
def counting(url) -> Iterator[Counting]:
    ConsumerGroup(url).begin([0, 1])
    with Counting(url) as proxy:
        yield proxy
        connections.close_all()


def test_an_idle_round_is_one_statement_and_no_connection(counting):
    store = Store(counting.url, "consumer", "g", "test")
    asked: dict[str, Callable[[], object]] = {
        "state": lambda: store.state(["t"], 1, keep_order=True),
        "stored": lambda: store.stored(["t"]),
        "retried": lambda: store.retried(["t"], 100, keep_order=True),
    }
    asked["state"]()
    counting.statements.clear()
    for name, ask_it in asked.items():
        ask_it()
        assert len(counting.statements) == 1, (name, counting.statements)
        counting.statements.clear()
    assert counting.opened == 1


def test_a_driver_has_one_session_with_its_upkeep(counting):
    store = Store(counting.url, "consumer", "g", "test")
    store.require_utf8()
    store.setup("SET search_path = pg_catalog; CREATE TABLE public.made (n int)")
    store.take_over()
    store.make_days()
    store.forget_days()
    assert store.column_types("made") == {"n": "integer"}
    assert counting.opened == 1


def test_tasks_of_a_process_share_a_session(counting):
    group = ConsumerGroup(counting.url)
    plan = group.plan(0, 0, 5, {}, "")
    task.step_over(plan, [("t", 0)])
    counting.statements.clear()
    task.step_over(replace(plan, ranges={("t", 1): plan.ranges["t", 0]}), [("t", 1)])
    assert counting.opened == 1
    kinds = Counter(statement.split()[0] for statement in counting.statements)
    assert kinds == {b"BEGIN": 1, b"SELECT": 1, b"UPDATE": 2, b"COMMIT": 1, b"DISCARD": 1}


def dead_letter(url: str, offset: int, key: str, state: str, reason: str, part: int = 0) -> None:
    run(
        url,
        "INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_key, message_headers, "
        "message_time, reason, error, state) "
        "VALUES ('g', 't', 'topic-id', %s, %s, %s::text::bytea, '[]', now(), %s, '', %s)",
        part,
        offset,
        key,
        reason,
        state,
    )


def test_the_state_of_a_group(url):
    ConsumerGroup(url).begin([0, 1])
    store = Store(url, "consumer", "g", "test")

    def waits(keep_order: bool) -> bool:
        found = store.state(["t"], 1, keep_order=keep_order)
        assert found == GroupState(dict.fromkeys([("t", 0), ("t", 1)], Stored("topic-id", 0)), found.retry_waits)
        assert bool(store.retried(["t"], 10, keep_order=keep_order)) == found.retry_waits
        return found.retry_waits

    assert (waits(False), waits(True)) == (False, False)
    dead_letter(url, 1, "a", "dead", "failed")
    dead_letter(url, 2, "a", "dead", "behind")
    assert (waits(False), waits(True)) == (False, False)
    # Nothing is in front of it any more.
    run(url, "DELETE FROM consumer.dead_letters WHERE message_offset = 1")
    assert (waits(False), waits(True)) == (False, True)
    run(url, "DELETE FROM consumer.dead_letters")
    dead_letter(url, 3, "b", "retry", "failed")
    assert (waits(False), waits(True)) == (True, True)
    # Of other topics nothing is asked.
    assert store.state(["other"], 1, keep_order=True) == GroupState({}, False)
    with pytest.raises(Fenced, match="generation 1 now, by test"):
        store.state(["t"], 7, keep_order=False)
    with pytest.raises(Fenced, match="its row is gone"):
        Store(url, "consumer", "nobody", "test").state(["t"], 1, keep_order=False)


@pytest.mark.parametrize("keep_order", [False, True])
def test_whether_dead_letters_wait_is_read_in_an_index(url, keep_order):
    """Thousands that are dead, and some that wait behind them; another group retries, or has, thousands."""
    ConsumerGroup(url).begin([0])
    run(
        url,
        "INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_key, message_headers, "
        "message_time, reason, error, state) SELECT grp, 't', 'topic-id', 0, n, (n %% 5000)::text::bytea, '[]', now(), "
        "CASE WHEN n < 20000 THEN 'failed' ELSE 'behind' END, repeat('x', 500), "
        "CASE WHEN grp = 'g' OR %s THEN 'dead' ELSE 'retry' END "
        "FROM generate_series(1, 20010) AS n, unnest('{g,other}'::text[]) AS grp",
        keep_order,
    )
    run(url, "ANALYZE consumer.dead_letters")
    store = Store(url, "consumer", "g", "test")
    explained = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {}").format(store._names["retry_waits"])
    values = {"grp": "g", "topics": ["t"], "keep_order": keep_order}
    [(found,)] = connections.read(url, NAME, explained, values)
    nodes, left = [], [found[0]["Plan"]]
    while left:
        node = left.pop()
        nodes.append(node)
        left += node.get("Plans", ())
    assert "dead_letters_waiting" in {node.get("Index Name") for node in nodes}
    assert not [node for node in nodes if node["Node Type"] == "Seq Scan"], found
    blocks = found[0]["Plan"]["Shared Hit Blocks"] + found[0]["Plan"]["Shared Read Blocks"]
    assert blocks < (20 if not keep_order else 250), found


# The lock monitor.


def test_the_lock_monitor_replaces_a_session_that_is_old(url, later):
    name = connections.application_name("outbox watch g")
    with LockMonitor(url, "g", lambda *_: None, check_seconds=0.05):
        (first,) = wait_until(lambda: sessions(url, name), what="the monitor's session")
        later(connections.MAX_AGE_SECONDS)
        wait_until(lambda: first not in sessions(url, name), what="its end")
        assert wait_until(lambda: sessions(url, name), what="another session") != [first]


def test_the_lock_monitor_keeps_a_session_and_replaces_it(url):
    group = "Bestellungen für Käufer"
    driver, _ = blockers.names(group)
    name = connections.application_name(f"outbox watch {group}")
    told: list[str] = []
    run(url, "CREATE TABLE numbers (n int)")
    with LockMonitor(url, group, lambda text, figures: told.append(f"{text} {figures['waiting']}"), check_seconds=0.05):
        (first,) = wait_until(lambda: sessions(url, name), what="the monitor's session")

        def looks() -> Any:
            query = "SELECT query_start FROM pg_stat_activity WHERE application_name = %s"
            return look_up(url, query, name)

        begun = looks()
        wait_until(lambda: looks() != begun, what="another look")
        assert sessions(url, name) == [first]
        terminate(url, first)
        wait_until(lambda: sessions(url, name), what="another session")
        with psycopg.connect(url) as blocker:
            blocker.execute("LOCK TABLE numbers")

            def wait() -> None:
                with connections.transaction(url, driver, reset=False) as connection:
                    connection.execute("SELECT count(*) FROM numbers")

            waiting = threading.Thread(target=wait)
            waiting.start()
            wait_until(lambda: told, what="a report")
            blocker.rollback()
            waiting.join(30)
    assert told == [f"waiting for a lock {driver}"]
    wait_until(lambda: sessions(url, name) == [], what="the session's end")
