"""A task of an at-most-once job that is killed at each step, and tried again as Spark does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import at_most_once_task
import pytest
from consumer_group import ConsumerGroup

SIZE = 5


@pytest.fixture
def group(outbox_postgres) -> ConsumerGroup:
    found = ConsumerGroup(outbox_postgres.url)
    found.begin([0])
    found.run("CREATE TABLE calls (id int GENERATED ALWAYS AS IDENTITY, n int); CREATE TABLE numbers (n int)")
    return found


@pytest.fixture(scope="module")
def killed() -> Iterator[Callable[[ConsumerGroup, int, str], None]]:
    """Run a range from an offset on in a process that is killed at a point."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    command, piped = [sys.executable, at_most_once_task.__file__], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=piped, stdout=piped, text=True) as process:
        asked, answered = process.stdin, process.stdout
        assert asked is not None
        assert answered is not None

        def run(group: ConsumerGroup, start: int, at: str) -> None:
            print(json.dumps({"url": group.url, "start": start, "count": SIZE, "at": at}), file=asked, flush=True)
            assert answered.readline() == f"{-signal.SIGKILL}\n"

        yield run


def calls(group: ConsumerGroup) -> list[int]:
    return [n for (n,) in group.run("SELECT n FROM calls ORDER BY id")]


def numbers(group: ConsumerGroup) -> list[int]:
    return [n for (n,) in group.run("SELECT n FROM numbers ORDER BY n")]


def losses(group: ConsumerGroup) -> list[tuple[int, int]]:
    assert group.run("SELECT count(*) FROM consumer.offsets WHERE unconfirmed_from IS NOT NULL") == [(0,)]
    return group.run("SELECT first_offset, end_offset FROM consumer.losses WHERE kind = 'given-up' ORDER BY id")


@pytest.mark.parametrize(
    ("at", "called", "retried"),
    [
        ("given-up", None, True),
        ("moved", 0, True),
        ("moved", 0, False),
        ("confirmed", 0, False),
        ("third", 3, True),
        ("applied", SIZE, False),
    ],
)
def test_killed_at_each_step(group, killed, at, called, retried):
    """Each message is called for at most once and in order; at most this range is lost, and recorded.

    What is stored is the same at each step behind the move, whether the range is tried again or not.
    """
    assert at_most_once_task.run(group.url, 0, SIZE)["outcome"] == "applied"
    killed(group, SIZE, at)
    if retried:
        # As Spark tries a task again. The job ends: otherwise all of a topic could be lost, one worker after the other.
        report = at_most_once_task.run(group.url, SIZE, SIZE)
        assert report["outcome"] == ("applied" if called is None else "broken")
        assert called is None or "t-0 from offset 5 on is recorded as lost" in report["detail"]
        assert losses(group) == ([] if called is None else [(SIZE, 2 * SIZE)])
    assert at_most_once_task.run(group.url, 2 * SIZE, SIZE)["outcome"] == "applied"
    lost = range(0) if called is None else range(SIZE, 2 * SIZE)
    assert losses(group) == ([(SIZE, 2 * SIZE)] if lost else [])
    all_three = [*range(3 * SIZE)]
    assert calls(group) == [n for n in all_three if n not in lost[called or 0 :]]
    assert numbers(group) == [n for n in all_three if n not in lost]
    assert group.run("SELECT next_offset, applied FROM consumer.offsets") == [(3 * SIZE, 3 * SIZE - len(lost))]


def test_a_function_that_fails_loses_its_range_and_is_not_called_again(group):
    report = at_most_once_task.run(group.url, 0, SIZE, fails=True)
    assert report["outcome"] == "broken"
    assert "the provider is away" in report["detail"]
    assert losses(group) == [(0, SIZE)]
    assert at_most_once_task.run(group.url, 0, SIZE)["outcome"] == "already"
    assert (calls(group), numbers(group), losses(group)) == ([*range(SIZE)], [], [(0, SIZE)])


def test_a_late_attempt_at_an_earlier_range_loses_only_that(group, killed):
    """What another attempt has given up meanwhile is that one's, and may be under way."""
    assert at_most_once_task.run(group.url, 0, SIZE)["outcome"] == "applied"
    killed(group, SIZE, "moved")
    assert at_most_once_task.run(group.url, 0, SIZE)["outcome"] == "already"
    assert group.run("SELECT unconfirmed_from, unconfirmed_end FROM consumer.offsets") == [(SIZE, 2 * SIZE)]
    assert group.run("SELECT count(*) FROM consumer.losses") == [(0,)]
