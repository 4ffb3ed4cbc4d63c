"""The inbox's consumer at-most-once: what fails or is interrupted is recorded, and never tried again.

tests/acceptance/test_inbox_at_most_once.py kills it; tests/integration/outbox/consumer has the contract of its rows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import psycopg
import pytest
from inbox_log import _quick, keys, log, losing
from inbox_support import Log, apply
from psycopg import pq
from support import wait_until
from uuid_utils.compat import uuid7

from outbox import ConfigurationError
from outbox.inbox import HandlerFailed, Reject

__all__ = ["_quick", "log"]

MOST: dict[str, Any] = {"delivery": "at-most-once", "batch": 10}


def losses(log: Log) -> list[Any]:
    """The offsets that were given up."""
    query = "SELECT kind, first_offset, end_offset, detail FROM consumer.losses WHERE accepted_at IS NULL ORDER BY id"
    return log.run(query)


def lost(log: Log) -> list[tuple[int, int]]:
    assert {kind for kind, *_ in losses(log)} <= {"given-up"}
    return [(first, end) for _, first, end, _ in losses(log)]


def applied(log: Log) -> list[int]:
    return [at for (at,) in log.run("SELECT at FROM effects ORDER BY id")]


def counts(log: Log) -> tuple[int, ...]:
    query = "SELECT next_offset, applied, duplicates, dead, unconfirmed_from, unconfirmed_end FROM consumer.offsets"
    return log.run(query)[0]


def passed(log: Log, count: int) -> Any:
    return lambda: log.run("SELECT next_offset FROM consumer.offsets WHERE unconfirmed_from IS NULL") == [(count,)]


class Handler:
    """Has its effect outside of the handler's transaction too, and then fails at some offsets, each in its own way."""

    def __init__(self, fails: Mapping[int, Callable[[Any], object]] | None = None) -> None:
        self.fails = fails or {}
        self.calls: list[int] = []

    def __call__(self, connection: Any, message: Any) -> None:
        self.calls.append(message.offset())
        apply(connection, message)
        self.fails.get(message.offset(), lambda _: None)(connection)


def fail(_: Any) -> None:
    raise ValueError("no such number\0")


def reject(_: Any) -> None:
    raise Reject("no such number")


def swallow(connection: Any) -> None:
    with contextlib.suppress(psycopg.Error):
        connection.execute("SELECT 1/0")


def violate_late(connection: Any) -> None:
    connection.execute("UPDATE late SET n = -2 WHERE n = -1")


def end_session(connection: Any) -> None:
    with psycopg.connect(connection.info.dsn, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s, 10000)", (connection.info.backend_pid,))


def idle(connection: Any) -> None:
    """Take longer than ``idle_seconds``."""
    pid = connection.info.backend_pid
    with psycopg.connect(connection.info.dsn, autocommit=True) as admin:
        query = "SELECT FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: not admin.execute(query, (pid,)).fetchall(), 30, "the end of the session")


def commit(connection: Any) -> None:
    connection.execute("COMMIT")


def roll_back(connection: Any) -> None:
    connection.execute("ROLLBACK")


def die(_: Any) -> None:
    raise SystemExit


def test_what_fails_is_recorded_and_neither_tried_again_nor_waited_for(log):
    with psycopg.connect(log.database.url) as connection:
        connection.execute("CREATE TABLE late (id serial, n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    log.produce(keys(50, 4))
    ways = {13: fail, 17: reject, 25: swallow, 33: violate_late}
    handler = Handler(ways)

    def handle(connection: Any, message: Any) -> None:
        """Violates a deferred constraint until the message is complete."""
        connection.execute("INSERT INTO late (n) VALUES (-1), (-1)")
        handler(connection, message)
        if connection.info.transaction_status is not pq.TransactionStatus.INERROR:
            connection.execute("UPDATE late SET n = id WHERE n = -1")

    with log.consuming(handle, **MOST) as running:
        running.wait(passed(log, 50), "the position")
    assert handler.calls == list(range(50))
    # Without what the handler had changed before it failed; the other messages of its batch and key go on.
    assert applied(log) == [at for at in range(50) if at not in ways]
    assert lost(log) == [(at, at + 1) for at in ways]
    assert f"{log.topic}-0: message 13 was given up (at-most-once), " in losses(log)[0][3]
    assert counts(log) == (50, 46, 0, 0, None, None)
    assert log.letters() == []


def test_a_batch_that_is_not_confirmed_is_lost_and_no_handler_is_called_again(log):
    log.produce(keys(60, 4))
    handler = Handler({13: end_session, 33: idle})
    with log.consuming(handler, **MOST, idle_seconds=1.0) as running:
        running.wait(passed(log, 60), "the position")
    assert len(handler.calls) == len(set(handler.calls))
    assert applied(log) == [*range(10), *range(20, 30), *range(40, 60)]
    assert lost(log) == [(10, 20), (30, 40)]
    assert counts(log) == (60, 40, 0, 0, None, None)


def test_a_handler_that_always_fails_stops_the_consumer(log):
    log.produce(keys(60))
    with log.consuming(Handler(dict.fromkeys(range(5, 60), fail)), **MOST, most_dead=12) as running:
        error = running.error()
    assert isinstance(error, HandlerFailed)
    assert (error.offset, error.given_up) == (17, True)
    assert "Nothing was skipped" not in str(error)
    assert "as the 12 before it" in str(error)
    # The batch was given up as a whole: each was tried, once.
    assert lost(log) == [(at, at + 1) for at in range(5, 20)]
    with log.consuming(**MOST) as running:
        running.wait(passed(log, 60), "the rest")
    assert applied(log) == [*range(5), *range(20, 60)]


def test_a_handler_that_loses_each_batch_stops_the_consumer(log):
    """A batch that was lost as a whole counts as a message that failed, until one is applied."""
    log.produce(keys(70))
    handler = Handler({5: end_session, 15: idle, 35: idle, 45: end_session, 55: idle})
    with log.consuming(handler, **MOST, idle_seconds=1.0, most_dead=2) as running:
        error = running.error()
    assert isinstance(error, HandlerFailed)
    assert (error.offset, error.given_up) == (55, True)
    assert "offsets 50 to 59 are recorded as lost, as the 2 failures before them: " in str(error)
    assert len(handler.calls) == len(set(handler.calls))
    # Also the last one, without a claim that follows.
    assert lost(log) == [(at, at + 10) for at in (0, 10, 30, 40, 50)]
    assert (applied(log), counts(log)[0]) == ([*range(20, 30)], 60)


def test_a_handler_that_ends_the_transaction_stops_the_consumer(log):
    """What it had confirmed is committed: of the rest nothing would be recorded."""
    log.produce(keys(40))
    handler = Handler({11: reject, 13: commit})
    with log.consuming(handler, **MOST) as running:
        error = running.error()
    assert isinstance(error, HandlerFailed)
    assert (error.offset, error.given_up) == (13, True)
    assert "the transaction was ended" in str(error)
    assert handler.calls == list(range(14))
    # The effect of the message itself was committed, and whether all of it is not known.
    assert applied(log) == [*range(11), 12, 13]
    assert lost(log) == [(11, 12), *((at, at + 1) for at in range(13, 20))]
    assert counts(log) == (20, 12, 0, 0, None, None)


def test_a_batch_whose_handler_rolls_back_is_lost_as_a_whole_and_recorded_once(log):
    log.produce(keys(40))
    handler = Handler({11: reject, 13: roll_back})
    with log.consuming(handler, **MOST) as running:
        running.wait(passed(log, 40), "the position")
    assert handler.calls == [*range(14), *range(20, 40)]
    assert applied(log) == [*range(10), *range(20, 40)]
    assert lost(log) == [(10, 20)]
    assert counts(log) == (40, 30, 0, 0, None, None)


def test_a_lock_that_others_hold_for_long_is_waited_for(log):
    [id_] = log.produce(keys(1))
    connect = lambda: psycopg.connect(log.database.url, options="-c lock_timeout=100")  # noqa: E731
    with psycopg.connect(log.database.url) as holding:
        holding.execute("INSERT INTO consumer.groups (grp, owner) VALUES (%s, 'x')", (log.group,))
        holding.commit()
        holding.execute(
            "INSERT INTO consumer.processed_messages (grp, day, message_id)"
            " VALUES (%s, (now() AT TIME ZONE 'UTC')::date, %s)",
            (log.group, id_),
        )
        with log.consuming(database=connect, **MOST) as running:
            running.wait(lambda: any("lock timeout" in str(one.why) for one in running.stalled()), "the timeout")
            holding.rollback()
            running.wait(passed(log, 1), "the position")
    assert (applied(log), lost(log)) == ([0], [])


def test_messages_that_no_handler_may_get_are_recorded(log):
    ids = [uuid7() for _ in range(6)]
    log.produce(keys(6), ids=[*ids[:2], None, *ids[3:]])
    with log.consuming(**MOST) as running:
        running.wait(passed(log, 6), "the position")
    assert lost(log) == [(2, 3)]
    assert "no-id" in losses(log)[0][3]
    assert counts(log) == (6, 5, 0, 0, None, None)
    with log.consuming(**MOST) as running:
        # What was published twice, and what was given up: neither comes late.
        log.produce(keys(6), ids=ids)
        running.wait(passed(log, 12), "the position")
    assert counts(log) == (12, 6, 5, 0, None, None)


def test_lost_answers_to_commit(log):
    """Each third answer is lost, whatever was committed: each message is applied once, or recorded as lost."""
    commits = itertools.count()
    log.produce(keys(300))
    handler = Handler()
    lose = lambda: next(commits) % 40 == 39  # noqa: E731
    with log.consuming(handler, database=losing(log, lose), **MOST, dedup=False) as running:
        running.wait(passed(log, 300), "the position")
    assert len(handler.calls) == len(set(handler.calls))
    assert applied(log) == sorted(applied(log))
    missing = set(range(300)) - set(applied(log))
    assert missing == {at for first, end in lost(log) for at in range(first, end)}
    assert missing
    assert counts(log)[1] == 300 - len(missing)


def test_what_is_lost_is_named_and_accepted(log):
    log.produce(keys(40))
    # The session ends in the last batch, and no claim follows.
    with log.consuming(Handler({35: die}), **MOST) as running:
        assert isinstance(running.error(), SystemExit)
    assert (lost(log), counts(log)) == ([], (40, 30, 0, 0, 30, 40))

    def run(*words: str) -> str:
        return log.command(*words).output

    # It may be under way, for some minutes.
    assert "given up" not in run("offsets", "show", "--group", log.group)
    with psycopg.connect(log.database.url) as connection:
        connection.execute("UPDATE consumer.offsets SET updated_at = now() - interval '6 minutes'")
    shown = run("offsets", "show", "--group", log.group)
    assert "messages 30 to 39 were given up (at-most-once), and their effect is not confirmed yet" in shown
    problems = json.loads(run("status", "--json"))["problems"]
    assert f"group {log.group}: 1 loss to accept: `outbox offsets show`" in problems
    # Another group, or none, changes nothing.
    with log.consuming(**MOST) as running:
        running.wait(lambda: lost(log) == [(30, 40)], "the record")
    assert (
        f"group {log.group}: 1 loss to accept: `outbox offsets show`" in json.loads(run("status", "--json"))["problems"]
    )
    assert "it has given up messages of" in run("doctor")
    run("offsets", "reset", log.group, "--topic", log.topic, "--to", "loss", "--reason", "known")
    assert (lost(log), counts(log)[0]) == ([], 40)
    assert "loss" not in " ".join(json.loads(run("status", "--json"))["problems"])


@pytest.mark.parametrize("command", [["reset", "--to", "loss"], ["set"]])
def test_a_loss_that_a_move_finds_itself_is_not_accepted_by_it(log, command):
    """The operator has not seen it."""
    log.produce(keys(10))
    with log.consuming(**MOST) as running:
        running.wait(passed(log, 10), "the position")
    with psycopg.connect(log.database.url) as connection:
        connection.execute("UPDATE consumer.offsets SET unconfirmed_from = 4, unconfirmed_end = 6")
    name, *options = command
    where = [log.topic, "0", "10"] if name == "set" else ["--topic", log.topic]
    for open_ in ([(4, 6)], []):
        words = ["offsets", name, log.group, *where, *options, "--reason", "known"]
        assert log.command(*words).exit_code == 0
        assert (lost(log), counts(log)[0], counts(log)[4]) == (open_, 10, None)


def test_a_move_by_an_operator_records_what_was_given_up(log):
    log.produce(keys(10))
    with psycopg.connect(log.database.url) as connection:
        connection.execute("INSERT INTO consumer.groups (grp, owner) VALUES (%s, 'killed')", (log.group,))
        connection.execute(
            "INSERT INTO consumer.offsets (grp, topic, part, topic_id, next_offset, generation, unconfirmed_from, "
            "unconfirmed_end) VALUES (%s, %s, 0, 'id', 6, 1, 4, 6)",
            (log.group, log.topic),
        )
    command = ["offsets", "forget", log.group, "--topic", log.topic, "--reason", "moved"]
    assert log.command(*command).exit_code == 0
    assert log.run("SELECT kind, first_offset, end_offset, accepted_at IS NULL FROM consumer.losses") == [
        ("given-up", 4, 6, False)
    ]


def test_dead_letters_from_before_are_refused(log):
    """To retry one is to be late."""
    log.produce(keys(3))
    with log.consuming(Handler({1: fail}), on_failure="dead-letter", attempts=1) as running:
        running.wait(lambda: log.letters(), "the dead letter")
    with log.consuming(**MOST) as running:
        error = running.error()
    assert isinstance(error, ConfigurationError)
    assert "retry or discard them before" in str(error)
