"""The contract of a consumer group in Postgres at-most-once, of an inbox as of a Spark job.

See the crash tables of outbox/inbox/_at_most_once.py and spark_jobs/postgres/at_most_once.py. Killed processes:
tests/acceptance/test_inbox_at_most_once.py, tests/integration/spark_jobs/task/test_task_at_most_once.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from group_sides import BAD, BEGIN, Bench, Side, bench, messages
from support import wait_until

from outbox.consumer.errors import Fenced
from outbox.consumer.groups import GroupRows
from outbox.errors import ConfigurationError

__all__ = ["bench"]


class Killed(BaseException):
    """The process ends here."""


def kill() -> None:
    raise Killed


@pytest.fixture
def most(bench: Bench) -> Side:
    found = bench.side(at_most_once=True)
    found.claim()
    return found


def losses(bench: Bench) -> list[tuple[Any, ...]]:
    return bench.run("SELECT part, first_offset, end_offset FROM consumer.losses WHERE kind = 'given-up' ORDER BY id")


def unconfirmed(bench: Bench) -> tuple[Any, ...]:
    return bench.run("SELECT unconfirmed_from, unconfirmed_end FROM consumer.offsets WHERE part = 0")[0]


def test_the_position_is_committed_before_the_effect(bench, most):
    seen: list[Any] = []

    def look() -> None:
        seen.append((bench.stands()[0], bench.stands()[2], unconfirmed(bench), bench.numbers()))

    most.apply_at_most_once(messages(1, 2), look)
    assert seen == [(BEGIN + 2, 0, (BEGIN, BEGIN + 2), [])]
    assert (bench.stands(), unconfirmed(bench), bench.numbers()) == ((BEGIN + 2, 1, 2, 0, 0), (None, None), [1, 2])
    assert losses(bench) == []
    assert bench.run("SELECT strategy FROM consumer.groups") == [("AtMostOnce",)]
    assert bench.run("SELECT count(*) FROM consumer.processed_messages") == [(0,)]


@pytest.mark.parametrize(("default", "expected"), [("off", "on"), ("remote_write", "remote_write")])
def test_the_first_commit_is_durable_before_the_effect_whatever_the_default_is(bench, monkeypatch, default, expected):
    """Otherwise a server that stops at once forgets the position, and its messages have their effect again."""
    [(name,)] = bench.run("SELECT current_database()")
    bench.run(f'ALTER DATABASE "{name}" SET synchronous_commit = {default}')
    mark, seen = GroupRows.mark_unconfirmed, []

    def noting(self: Any, connection: Any, *arguments: Any) -> None:
        mark(self, connection, *arguments)
        seen.extend(connection.execute("SHOW synchronous_commit").fetchone())

    monkeypatch.setattr(GroupRows, "mark_unconfirmed", noting)
    most = bench.side(at_most_once=True)
    most.claim()
    most.apply_at_most_once(messages(1, 2))
    assert (seen, bench.numbers()) == ([expected], [1, 2])


@pytest.mark.parametrize("at_most_once", [True, False])
def test_what_is_not_confirmed_is_recorded_once_by_the_next_claim_whatever_it_is(bench, most, at_most_once):
    with pytest.raises(Killed):
        most.apply_at_most_once(messages(1, 2), kill)
    for _ in range(2):
        later = bench.side(at_most_once=at_most_once)
        later.claim()
        assert losses(bench) == [(0, BEGIN, BEGIN + 2)]
        assert (later.next_offset(), later.next_offset(1)) == (BEGIN + 2, BEGIN)
    after = messages(3, at=BEGIN + 2)
    if at_most_once:
        later.apply_at_most_once(after)
    else:
        later.apply(after)
    assert (bench.numbers(), bench.stands()[2], unconfirmed(bench)) == ([3], 1, (None, None))


def test_a_claim_between_the_two_leaves_no_effect(bench, most):
    later = bench.side(at_most_once=True)
    with pytest.raises(Fenced):
        most.apply_at_most_once(messages(1, 2), later.claim)
    assert (bench.numbers(), losses(bench)) == ([], [(0, BEGIN, BEGIN + 2)])
    assert bench.stands() == (BEGIN + 2, 2, 0, 0, 0)


def test_an_older_claim_gives_nothing_up(bench, most):
    bench.side(at_most_once=True).claim()
    with pytest.raises(Fenced):
        most.apply_at_most_once(messages(1))
    assert (bench.numbers(), losses(bench), unconfirmed(bench)) == ([], [], (None, None))
    assert bench.stands()[0] == BEGIN


def test_a_message_that_fails_is_recorded_and_the_others_are_applied(bench, most):
    most.apply_at_most_once(messages(1, BAD, 3, BAD, BAD))
    assert bench.numbers() == [1, 3]
    assert losses(bench) == [(0, at, at + 1) for at in (BEGIN + 1, BEGIN + 3, BEGIN + 4)]
    assert (bench.stands(), bench.letters()) == ((BEGIN + 5, 1, 2, 0, 0), [])
    [(detail,)] = bench.run("SELECT detail FROM consumer.losses ORDER BY id LIMIT 1")
    assert detail.startswith(f"t-0: message {BEGIN + 1} was given up (at-most-once), failed: ")
    # Its key does not wait.
    most.apply_at_most_once(messages(4, at=BEGIN + 5))
    assert bench.numbers() == [1, 3, 4]


def test_a_dead_letter_that_is_written_during_the_claim_is_seen(bench):
    """The claim waits for the transaction that writes it."""
    side = bench.side()
    side.claim()
    most = bench.side(at_most_once=True)
    with psycopg.connect(bench.database.url) as writing, ThreadPoolExecutor(1) as pool:
        writing.execute("SELECT FROM consumer.offsets WHERE part = 0 FOR UPDATE")
        writing.execute(
            "INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_headers, "
            "message_time, reason, error) VALUES ('g', 't', 'topic-id', 0, 5, '[]', now(), 'failed', 'why')"
        )
        claiming = pool.submit(most.claim)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        wait_until(lambda: bench.run(waits) == [(1,)] or claiming.done(), 30, "the claim to wait")
        writing.commit()
        with pytest.raises(ConfigurationError, match="retry or discard them before"):
            claiming.result(30)
    assert bench.stands()[1] == 1
