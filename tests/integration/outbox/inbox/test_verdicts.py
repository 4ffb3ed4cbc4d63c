"""A message that ends each transaction it is in: no error of its own, and the inbox does not retry it for ever."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from inbox_log import _quick, short_pauses
from inbox_support import Log, apply

from outbox.consumer.postgres_errors import MOST_STRIKES
from outbox.inbox import HandlerFailed

__all__ = ["_quick", "short_pauses"]

pytestmark = pytest.mark.usefixtures("short_pauses")

MESSAGES = 300
BAD = 150
"""Its offset: more than one transaction before it and behind it."""
TRIES = 3 * MOST_STRIKES


@pytest.fixture
def log(outbox_postgres, outbox_kafka) -> Log:
    log = Log(outbox_postgres, outbox_kafka, 2)
    for partition in (0, 1):
        log.produce([f"k{partition}-{number}" for number in range(MESSAGES)], partition=partition)
    return log


def ended_session(connection: Any) -> None:
    """As transaction_timeout does, or who kills long transactions, or a server process without memory."""
    with psycopg.connect(connection.info.dsn, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
    connection.execute("SELECT")


def too_many_temporary_files(connection: Any) -> None:
    connection.execute("DO $$ BEGIN RAISE configuration_limit_exceeded; END $$")


def deadlock(connection: Any) -> None:
    connection.execute("DO $$ BEGIN RAISE deadlock_detected; END $$")


def statement_timeout(connection: Any) -> None:
    connection.execute("SET LOCAL statement_timeout = '10ms'")
    connection.execute("SELECT pg_sleep(60)")


def bad_data(connection: Any) -> None:
    connection.execute("DO $$ BEGIN RAISE data_exception; END $$")


class Bad:
    """A handler that some messages of partition 0 do not let through, each in its own way, until it is cured."""

    def __init__(self, *ways: Callable[[Any], None]) -> None:
        self.ways = {BAD + 40 * number: way for number, way in enumerate(ways)}
        self.calls: Counter[int] = Counter()
        self.cured = threading.Event()

    def __call__(self, connection: Any, message: Any) -> None:
        apply(connection, message)
        at = message.offset()
        if message.partition() == 0 and at in self.ways and not self.cured.is_set():
            self.calls[at] += 1
            self.ways[at](connection)


def test_it_becomes_a_dead_letter_and_its_neighbours_are_applied(log):
    bad = Bad(ended_session, too_many_temporary_files, deadlock, statement_timeout)
    with log.consuming(bad, on_failure="dead-letter", attempts=3) as running:
        running.wait(lambda: log.positions() == {0: MESSAGES, 1: MESSAGES}, "the positions")
        letters = {(letter["part"], letter["message_offset"]): letter for letter in log.letters()}
        assert letters.keys() == {(0, at) for at in bad.ways}
        assert {letter["reason"] for letter in letters.values()} == {"failed"}
        assert log.count() == 2 * MESSAGES - len(bad.ways)
        # As long as it might be a server that is restarted, it is no attempt.
        for at, way in bad.ways.items():
            assert 3 <= bad.calls[at] <= 2 * MOST_STRIKES + 4, way.__name__
        log.retry()
        before = sum(letter["attempts"] for letter in letters.values())
        tried = "SELECT sum(attempts) FROM consumer.dead_letters WHERE state = 'dead'"
        running.wait(lambda: log.run(tried) == [(before + len(bad.ways),)], "the verdicts on the retries")
        bad.cured.set()
        log.retry()
        running.wait(lambda: log.count() == 2 * MESSAGES, "the effects")
    log.check()


def test_or_stops_the_consumer(log):
    bad = Bad(statement_timeout)
    with log.consuming(bad, attempts=3) as running:
        error = running.error()
    assert isinstance(error, HandlerFailed)
    assert (error.partition, error.offset, error.attempts) == (0, BAD, 3)
    assert log.positions()[0] == BAD
    bad.cured.set()
    with log.consuming(bad) as running:
        running.wait(lambda: log.count() == 2 * MESSAGES, "the effects")
    log.check()


def exhaust(
    log: Log, table: str, state: str, *, part: int = 0, at: int = BAD, deferred: bool = False, times: int = TRIES
) -> str:
    """Let a server be without resources for a while: more often than any message may be tried.

    Returns the query that says whether that is over.
    """
    name = f"exhausted_{table}_{part}_{at}"
    when = f"(NEW.part = {part} AND NEW.at = {at})" if table == "effects" else "(true)"
    kind = "CONSTRAINT TRIGGER {} AFTER INSERT ON {} DEFERRABLE INITIALLY DEFERRED"
    kind = kind if deferred else "TRIGGER {} BEFORE INSERT ON {}"
    with psycopg.connect(log.database.url) as connection:
        connection.execute(
            f"CREATE SEQUENCE {name}; "
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF nextval('public.{name}') <= {times} THEN RAISE {state}; END IF; RETURN NEW; END $$; "
            f"CREATE {kind.format(name, f'consumer.{table}' if table == 'dead_letters' else table)} "
            f"FOR EACH ROW WHEN {when} EXECUTE FUNCTION {name}()"
        )
    return f"SELECT last_value > {times} FROM {name}"


def test_a_server_without_resources_is_no_messages_fault(log):
    passed = [
        exhaust(log, "effects", "disk_full"),
        exhaust(log, "effects", "out_of_memory", at=BAD + 40, deferred=True),
        exhaust(log, "effects", "too_many_connections", at=BAD + 80),
        # And locks.
        exhaust(log, "effects", "lock_not_available", at=BAD + 120, times=MOST_STRIKES),
    ]
    with log.consuming(on_failure="dead-letter", attempts=1) as running:
        running.wait(lambda: log.count() == 2 * MESSAGES, "the effects")
    assert [log.run(query) for query in passed] == [[(True,)]] * len(passed)
    assert log.letters() == []
    log.check()


def by_a_repository(connection: Any, message: Any) -> None:
    try:
        apply(connection, message)
    except psycopg.Error as error:
        raise LookupError("the repository failed") from error


def by_sqlalchemy(connection: Any, message: Any) -> None:
    """As an engine over the given connection does, and without the cause."""
    try:
        apply(connection, message)
    except psycopg.Error as error:
        raise sa.exc.OperationalError("INSERT", {}, error) from None


def test_nor_are_errors_that_the_handler_wraps(log):
    handlers = by_a_repository, by_sqlalchemy
    passed = [exhaust(log, "effects", "disk_full", part=part) for part, _ in enumerate(handlers)]

    def handle(connection: Any, message: Any) -> None:
        handlers[message.partition()](connection, message)

    with log.consuming(handle, on_failure="dead-letter", attempts=1) as running:
        running.wait(lambda: log.count() == 2 * MESSAGES or log.letters() != [], "the effects")
    assert log.letters() == []
    assert [log.run(query) for query in passed] == [[(True,)]] * 2
    log.check()


def test_nor_while_a_dead_letter_is_stored_or_retried(log):
    bad = Bad(bad_data)
    passed = exhaust(log, "dead_letters", "disk_full")
    with log.consuming(bad, on_failure="dead-letter", attempts=1) as running:
        running.wait(lambda: log.positions() == {0: MESSAGES, 1: MESSAGES}, "the positions")
        assert log.run(passed) == [(True,)]
        bad.cured.set()
        passed = exhaust(log, "effects", "disk_full")
        log.retry()
        running.wait(lambda: log.count() == 2 * MESSAGES, "the effects")
    assert log.run(passed) == [(True,)]
    log.check()


def test_who_locks_the_position_makes_no_dead_letter(log):
    """The claim itself times out: that says nothing of the messages."""
    connection = log.database.connect()
    failed: list[int] = []

    class Impatient(psycopg.Connection[Any]):
        def transaction(self, *arguments: Any, **options: Any) -> Any:
            self.execute("SET statement_timeout = '50ms'")
            return super().transaction(*arguments, **options)

    def handle(here: Any, message: Any) -> None:
        apply(here, message)
        # In the turn of the other partition: its own row is locked by this very transaction.
        if not failed and message.partition() == 0:
            connection.execute("SELECT FROM consumer.offsets WHERE part = 1 FOR SHARE")
            failed.append(message.offset())

    given = {"database": lambda: Impatient.connect(log.database.url, autocommit=True), "attempts": 2}
    with log.consuming(handle, on_failure="dead-letter", batch=1, **given) as running:
        running.wait(lambda: log.positions().get(0) == MESSAGES, "the other partition")
        connection.rollback()
        running.wait(lambda: log.count() == 2 * MESSAGES, "the effects")
    assert log.letters() == []
    log.check()


def test_a_partition_that_stands_is_named_since_when_and_why(log):
    """While the other one moves; and not any more when it has moved itself."""
    bad = Bad(bad_data)
    with log.consuming(bad, attempts=10**6) as running:
        running.wait(lambda: log.positions() == {0: BAD, 1: MESSAGES}, "the other partition")

        def failing() -> bool:
            return any("data_exception" in one.why for one in running.stalled())

        running.wait(failing, "the reason")
        (first,) = running.stalled()
        assert (first.topic, first.partition, first.offset) == (log.topic, 0, BAD)
        assert running.stalled(3600) == []
        calls = bad.calls.total()
        running.wait(lambda: bad.calls.total() > calls + 2, "more attempts")
        assert [one.since for one in running.stalled()] == [first.since]
        bad.cured.set()
        running.wait(lambda: log.count() == 2 * MESSAGES and running.stalled() == [], "the effects")
    log.check()
