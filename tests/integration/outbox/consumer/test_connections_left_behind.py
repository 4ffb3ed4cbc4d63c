"""What an effect, an error or an interruption leaves in a session of the consumer, and which are not used again."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psycopg
import pytest
from counting import Counting
from psycopg import sql
from psycopg.adapt import Loader
from psycopg.rows import dict_row
from sessions_support import NAME, ask, read, run, sessions, url, use
from support import look_up, wait_until

from outbox.consumer import connections
from spark_jobs.postgres.sink import transaction
from spark_jobs.task.input import NO_INPUT

__all__ = ["url"]


LEFT = (
    "SET lock_timeout = '1s'",
    "SET search_path = pg_catalog",
    "SELECT set_config('TimeZone', 'Asia/Tokyo', false)",
    "CREATE TEMPORARY TABLE batch (nothing int)",
    "SELECT pg_advisory_lock(1)",
    "LISTEN somebody",
    "PREPARE mine AS SELECT 1",
    "DECLARE mine CURSOR WITH HOLD FOR SELECT 1",
    "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    "SET client_encoding = 'LATIN1'",
    "SET application_name = 'somebody'",
)
# What one session may see otherwise than another.
STATE = """
SELECT session_user, current_user, current_setting('search_path'), current_setting('lock_timeout'),
       current_setting('transaction_isolation'), current_setting('transaction_read_only'),
       current_setting('client_encoding'), current_setting('application_name'), current_setting('TimeZone'),
       (SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()),
       (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_cursors WHERE name <> ''),
       (SELECT count(*) FROM pg_listening_channels()),
       (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())"""


@pytest.mark.parametrize("role", ["SET ROLE pg_monitor", "SET SESSION AUTHORIZATION pg_monitor"])
def test_nothing_of_an_effect_is_left_in_a_session(url, role):
    fresh = ask(url, STATE)
    pid = ask(url)
    with transaction(url, NAME, NO_INPUT) as cursor:
        for statement in (*LEFT, role):
            cursor.execute(statement.encode())
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
        # The one that was kept, and then a new one.
        errors = []
        for _ in range(2):
            with pytest.raises(psycopg.errors.SyntaxError) as caught_too:
                ask(counting.url)
            errors.append(caught_too.value)
        wait_until(lambda: (counting.opened, counting.terminated) == (3, 3), what="both sessions' ends")


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
        for number, cut_at in enumerate((b"SELECT pg_catalog.pg_backend_pid()", b"DISCARD ALL")):
            counting.cut_at = cut_at
            use(counting.url, lambda connection, n=number: connection.execute("INSERT INTO numbers VALUES (%s)", (n,)))
            assert counting.statements[-1] == cut_at
        counting.cut_at = None
        assert look_up(url, "SELECT array_agg(n ORDER BY n) FROM numbers") == [([0, 1],)]
        assert ask(counting.url)
