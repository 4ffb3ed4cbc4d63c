"""The consumer's sessions on a real Postgres: which stay open, what is left in them, and when they are replaced."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from sessions_support import NAME, PID, ask, read, sessions, url, use, with_default
from support import wait_until

from outbox._clients.threads import within
from outbox.consumer import connections
from outbox.consumer import postgres_errors as postgres
from spark_jobs.driver.options import Options
from spark_jobs.driver.runner import Runner
from spark_jobs.job import ConsumerJob
from spark_jobs.postgres import lock_monitor as blockers
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.sink import transaction
from spark_jobs.task.input import NO_INPUT

__all__ = ["url"]

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


def test_transactions_see_what_others_commit_meanwhile_whatever_the_roles_default_is(url):
    with_default(url, "default_transaction_isolation", "repeatable read")
    isolation = "SELECT current_setting('transaction_isolation')"
    # On a new session and on a kept one.
    assert [ask(url, isolation), ask(url, isolation)] == ["read committed"] * 2
    with transaction(url, NAME, NO_INPUT) as cursor:
        assert cursor.execute(isolation).fetchone() == ("read committed",)
    with postgres.connect(url, NAME) as connection, connection.transaction():
        assert connection.execute(isolation).fetchone() == ("read committed",)


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
    for seconds, interrupts, error in ((0.01, False, TimeoutError), (60, True, KeyboardInterrupt)):
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
            within(seconds, begin, late=psycopg.Connection.close)
        answer.set()
        wait_until(lambda late=late: late and late[0].closed, what="it to be closed")
    # What is not too late is given back: a connection, or the error.
    with within(60, lambda: psycopg.connect(url)) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    with pytest.raises(psycopg.OperationalError, match="refused"):
        within(60, lambda: psycopg.connect("host=127.0.0.1 port=1"))


# What stays open.


def test_transactions_and_reads_share_one_session(url):
    found = {ask(url), ask(url, reset=False), read(url), ask(url)}
    assert sessions(url) == sorted(found)
    assert len(found) == 1


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
from outbox.consumer import connections

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
    job = ConsumerJob("g", ["t"], "SELECT 1")
    names = blockers.names("g")
    with Runner(None, job, Options(url, {"bootstrap.servers": "127.0.0.1:1"}), lambda *_: None) as runner:
        runner._store.require_utf8()
        runner._store.retention().make()
        with transaction(url, names[1], NO_INPUT):
            pass
        assert [len(sessions(url, name)) for name in names] == [1, 1]
    wait_until(lambda: not any(sessions(url, name) for name in names), what="the sessions' end")


def test_no_secret_is_shown(url):
    where = urlsplit(url)
    secret = url.replace(where.netloc, f"{where.username}:s3cret@{where.hostname}:{where.port}")
    store = PostgresGroupStore(secret, "consumer", "g", "test")
    store.require_utf8()
    kept = connections._here()
    assert kept._sessions
    assert "s3cret" not in "".join(map(repr, (store, kept, *kept._sessions.values())))
