"""Jobs at-most-once on real Spark: workers and effects that fail, beside an exactly-once job of the same topic."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from bench import Bench, expected

from outbox.consumer.errors import EffectFailed
from spark_jobs import ConsumerJob, OffsetsOnly

pytestmark = pytest.mark.spark

NAMES = "abcdefgh"


def calling(calls: Path, fail: Callable[[int, int], None]) -> Callable[[Any, Any], None]:
    """Return an effect that calls another system: a file with a line for each message, none of which is undone.

    It calls ``fail`` with the partition and the offset of each.
    """

    def effect(_cursor: Any, table: Any) -> None:
        for place in zip(table["message_part"].to_pylist(), table["message_offset"].to_pylist(), strict=True):
            with calls.open("a") as file:
                print(*place, file=file)
            fail(*place)

    return effect


def once_killing(marker: Path) -> Callable[[int, int], None]:
    """The first message of partition 1 at offset 3 or later kills its process."""

    def kill(part: int, offset: int) -> None:
        if part == 1 and offset >= 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def once_raising(marker: Path, url: str) -> Callable[[int, int], None]:
    """The first message fails. In ``marker`` is of how many partitions others see by then that they were given up."""

    def fail(_part: int, _offset: int) -> None:
        if not marker.exists():
            unconfirmed = "SELECT count(*) FROM consumer.offsets WHERE grp = 'calls' AND unconfirmed_from = 0"
            with psycopg.connect(url) as other:
                [(count,)] = other.execute(unconfirmed).fetchall()
            marker.write_text(str(count))
            raise ValueError("the provider is away")

    return fail


def job(bench: Bench, effect: Any, atomic: str) -> ConsumerJob:
    most = {"strategy": OffsetsOnly(), "atomic": atomic, "delivery": "at-most-once"}
    return replace(bench.job, group="calls", effect=effect, setup=None, **most)


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


@pytest.mark.parametrize(("atomic", "given_up"), [("partition", {"1", "2"}), ("batch", {"2"})])
def test_an_effect_that_fails_ends_the_job_which_goes_on_behind_it(bench, tmp_path, atomic, given_up):
    """And a driver that dies in it leaves to the next claim what it has not recorded.

    What that does: tests/integration/outbox/consumer/test_group_at_most_once.py. Tasks that are killed at each step:
    tests/integration/spark_jobs/task/test_task_at_most_once.py.
    """
    calls, marker = tmp_path / "calls", tmp_path / "failed"
    bench.orders(NAMES, range(1, 3))
    given = job(bench, calling(calls, once_raising(marker, bench.database.url)), atomic)
    with pytest.raises(EffectFailed, match="the provider is away"):
        bench.once(given)
    assert marker.read_text() in given_up
    assert losses(bench)
    before = called(calls)
    bench.orders(NAMES, range(3, 5))
    bench.once(given)
    assert called(calls)[: len(before)] == before
    # Each partition of the round, at most: none of its messages is called for again.
    ends = positions(bench)
    assert all(end <= ends[part] for part, _, end in losses(bench))
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
