"""Jobs at-most-once on real Spark: workers and effects that fail, beside an exactly-once job of the same topic."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import at_most_once_job
import pytest
from at_most_once_job import at_most_once, calling, once_killing
from bench import ROOT, Bench, Consumer, expected
from support import wait_until

from outbox.consumer.errors import EffectFailed
from spark_jobs import ConsumerJob

pytestmark = pytest.mark.spark

NAMES = "abcdefgh"


def once_raising(marker: Path) -> Callable[[int, int], None]:
    def fail(_part: int, _offset: int) -> None:
        if not marker.exists():
            marker.touch()
            raise ValueError("the provider is away")

    return fail


def job(bench: Bench, effect: Any, atomic: str) -> ConsumerJob:
    return at_most_once(effect, atomic).with_topics([bench.topic])


def called(calls: Path) -> list[tuple[int, int]]:
    return [tuple(map(int, line.split())) for line in calls.read_text().splitlines()]


def losses(bench: Bench) -> list[tuple[int, int, int]]:
    return bench.rows("SELECT part, first_offset, end_offset FROM consumer.losses WHERE grp = 'calls' ORDER BY part")


def positions(bench: Bench) -> dict[int, int]:
    rows = "SELECT part, next_offset FROM consumer.offsets WHERE grp = 'calls' AND unconfirmed_from IS NULL"
    return dict(bench.rows(rows))


def check(bench: Bench, calls: Path, sent: int) -> None:
    """Each message was called for once or is recorded as lost, and the neighbour has all."""
    ends = positions(bench)
    assert sum(ends.values()) == sent
    found, lost = called(calls), {(part, at) for part, first, end in losses(bench) for at in range(first, end)}
    assert len(found) == len(set(found))
    for part, end in ends.items():
        of_part = [at for where, at in found if where == part]
        assert of_part == sorted(of_part)
        assert {(part, at) for at in set(range(end)) - set(of_part)} <= lost
    bench.once()
    assert bench.totals() == expected(NAMES, sent // len(NAMES))


def test_a_worker_that_is_killed_in_the_effect(bench, tmp_path):
    calls, marker = tmp_path / "calls", tmp_path / "killed"
    bench.orders(NAMES, range(1, 3))
    bench.once()
    given = job(bench, calling(calls, once_killing(marker)), "partition")
    with pytest.raises(EffectFailed, match="recorded as lost"):
        bench.once(given, max_records=6)
    bench.orders(NAMES, range(3, 5))
    bench.once(given, max_records=6)
    assert marker.exists()
    # One range of one partition.
    [(part, first, end)] = losses(bench)
    assert (part, end - first <= 6) == (1, True)
    check(bench, calls, 4 * len(NAMES))


@pytest.mark.parametrize("atomic", ["partition", "batch"])
def test_an_effect_that_fails_ends_the_job_which_goes_on_behind_it(bench, tmp_path, atomic):
    calls, marker = tmp_path / "calls", tmp_path / "failed"
    bench.orders(NAMES, range(1, 3))
    given = job(bench, calling(calls, once_raising(marker)), atomic)
    with pytest.raises(EffectFailed, match="the provider is away"):
        bench.once(given)
    assert losses(bench)
    before = called(calls)
    bench.orders(NAMES, range(3, 5))
    bench.once(given)
    assert called(calls)[: len(before)] == before
    # Each partition of the round, at most: none of its messages is called for again.
    ends = positions(bench)
    assert all(end <= ends[part] for part, _, end in losses(bench))
    check(bench, calls, 4 * len(NAMES))


def test_a_driver_that_is_killed_in_the_effect(bench, consumer: Consumer, tmp_path):
    """Before it could record anything: the next claim does. What the effect had called is not called again.

    At other steps: tests/integration/spark_jobs/task/test_task_at_most_once.py.
    """
    calls = tmp_path / "called"
    bench.orders(NAMES, range(1, 3))
    folders = os.pathsep.join([str(Path(at_most_once_job.__file__).parent), str(ROOT)])
    consumer.start("--once", "--master", "local[1,4]", job="at_most_once_job:job", PYTHONPATH=folders)
    consumer.ended(-signal.SIGKILL)
    wait_until(bench.has_no_session, 60, "the sessions of the killed driver to end")
    unconfirmed = "SELECT count(*) FROM consumer.offsets WHERE grp = 'calls' AND unconfirmed_from = 0"
    assert (losses(bench), bench.rows(unconfirmed)) == ([], [(2,)])
    before = called(calls)
    given = job(bench, calling(calls, lambda *_: None), "batch")
    bench.once(given)
    lost = losses(bench)
    assert [first for _, first, _ in lost] == [0, 0]
    bench.orders(NAMES, range(3, 5))
    bench.once(given)
    assert losses(bench) == lost
    assert called(calls)[: len(before)] == before
    check(bench, calls, 4 * len(NAMES))


def test_what_does_not_decode_is_recorded_and_is_no_dead_letter(bench, tmp_path):
    calls = tmp_path / "calls"
    bench.orders(NAMES, range(1, 2), part=0)
    bench.send_raw(b"{", [], partition=0)
    given = job(bench, calling(calls, lambda *_: None), "partition")
    bench.once(given)
    assert losses(bench) == [(0, len(NAMES), len(NAMES) + 1)]
    assert bench.rows("SELECT count(*) FROM consumer.dead_letters WHERE grp = 'calls'") == [(0,)]
    assert sorted(called(calls)) == [(0, at) for at in range(len(NAMES))]
