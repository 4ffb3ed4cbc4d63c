"""run(job): consumers in threads of their own, and their handles."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from bench import Bench, ided

from outbox.consumer.errors import EffectFailed, JobError
from outbox.errors import ConfigurationError
from spark_jobs import ConsumerJob, RunningConsumer, run
from spark_jobs.spark import session

pytestmark = pytest.mark.spark

SETUP = "CREATE TABLE IF NOT EXISTS seen (grp text, n bigint)"


def job(bench: Bench, group: str = "one", **declared: Any) -> ConsumerJob:
    given: dict[str, Any] = {
        "effect": f"INSERT INTO seen SELECT '{group}', n FROM batch ORDER BY message_part, message_offset",
        "schema": "n long",
        "setup": SETUP,
    }
    return ConsumerJob(group, [bench.topic], **(given | declared))


def send(bench: Bench, numbers: Any, partition: int = 0) -> None:
    bench.produce(({"n": n}, "k", partition) for n in numbers)


def seen(bench: Bench, group: str = "one") -> list[int]:
    return [n for (n,) in bench.rows(f"SELECT n FROM seen WHERE grp = '{group}' ORDER BY n")]


@pytest.fixture
def start(bench, monkeypatch):
    """Start consumers as a notebook does, with the settings in the environment; stop them in the end."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", bench.database.url)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", bench.topics.bootstrap_servers)
    started: list[RunningConsumer] = []

    def starting(*arguments: Any, **options: Any) -> RunningConsumer:
        started.append(run(*arguments, **options))
        return started[-1]

    yield starting
    for one in started:
        one.stop()


def test_once_ends_by_itself_and_shows_what_it_did(bench, start):
    send(bench, range(5))
    send(bench, [5, 6], partition=1)
    bench.send_raw(b"no JSON", ided(), partition=1)
    handle = start(job(bench), bench.spark)
    assert handle.wait()
    assert seen(bench) == list(range(7))
    assert (handle.group, handle.running, handle.error) == ("one", False, None)
    totals = handle.totals
    assert (totals.read, totals.applied, totals.duplicates, totals.dead, totals.rounds) == (8, 7, 0, 1, 1)
    assert repr(handle) == "<RunningConsumer 'one': stopped>"


def test_continuous_goes_on_until_it_is_stopped(bench, start):
    handle = start(job(bench), bench.spark, "continuous")
    assert handle.wait_until_caught_up()
    assert (handle.running, handle.wait(0.01)) == (True, False)
    for numbers in (range(3), range(3, 10)):
        send(bench, numbers)
        assert handle.wait_until_caught_up()
        assert seen(bench) == list(range(numbers.stop))
    assert handle.totals.read == 10
    handle.stop()
    assert (handle.running, handle.wait(), handle.error) == (False, True, None)
    send(bench, [10])
    # Where it was left.
    start(job(bench), bench.spark).wait()
    assert seen(bench) == list(range(11))


def test_seconds_are_how_often_a_round_begins(bench, start):
    rounds: list[tuple[float, float]] = []
    every = 1.5

    def report(text: str, figures: Any) -> None:
        if text == "round":
            rounds.append((time.monotonic(), figures["round_seconds"]))

    handle = start(job(bench), bench.spark, every, report=report)
    for n in range(3):
        send(bench, [n])
        handle.wait_until_caught_up()
        assert seen(bench) == list(range(n + 1))
    handle.stop()
    assert len(rounds) == 3
    # A report comes at the end of a round: its length may differ from the next one's.
    longest = max(seconds for _, seconds in rounds)
    assert all(later - earlier > every - longest for (earlier, _), (later, _) in itertools.pairwise(rounds))


def test_a_round_that_runs_is_ended_before_stop_returns(bench, start):
    """The effect waits for a lock; stop() waits for the effect."""
    start(job(bench), bench.spark).wait()
    send(bench, range(5))
    with psycopg.connect(bench.database.url) as connection:
        connection.execute("LOCK TABLE seen IN EXCLUSIVE MODE")
        handle = start(job(bench), bench.spark, "continuous")
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'seen'::regclass"
        while bench.rows(waiting) == [(0,)]:
            assert handle.running, handle.error
        stopping = threading.Thread(target=handle.stop)
        stopping.start()
        assert not handle._thread.join(0.3)
        assert handle.running
    stopping.join(60)
    assert not handle.running
    assert seen(bench) == list(range(5))


def test_an_error_is_the_jobs_own(bench, start):
    send(bench, [1])
    handle = start(job(bench, effect="INSERT INTO nowhere SELECT n FROM batch"), bench.spark, "continuous")
    with pytest.raises(EffectFailed, match="nowhere") as caught:
        handle.wait(60)
    assert handle.error is caught.value
    assert not handle.running
    assert "nowhere" in repr(handle)
    with pytest.raises(EffectFailed):
        handle.wait_until_caught_up()
    handle.stop()


def test_two_groups_beside_each_other(bench, start):
    """One in the driver and one with Spark's jobs, at the same time: neither has the other's session, or its rows."""
    send(bench, range(3_000))
    send(bench, range(3_000, 4_000), partition=1)
    first = start(job(bench, "one"), bench.spark, "continuous", driver_records=100_000, max_records=500)
    second = start(job(bench, "two", transform=lambda rows: rows.filter("n >= 0")), bench.spark, "continuous")
    for handle in (first, second):
        handle.wait_until_caught_up()
        assert handle.running
    assert seen(bench, "one") == seen(bench, "two") == list(range(4_000))
    assert first.totals.rounds >= 8
    first.stop()
    send(bench, range(4_000, 4_010))
    second.wait_until_caught_up()
    assert len(seen(bench, "two")) == 4_010
    assert len(seen(bench, "one")) == 4_000


def test_views_and_settings_of_the_users_session(bench, start):
    """The transform finds the user's view; the session keeps its own settings, and the thread its job group."""
    spark = bench.spark.newSession()
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    spark.createDataFrame([(1, 10), (2, 20)], "n long, m long").createOrReplaceTempView("factors")

    def transform(rows: Any) -> Any:
        return rows.sparkSession.sql("SELECT {r}.*, m FROM {r} JOIN factors USING (n)", r=rows)

    send(bench, [1, 2, 3])
    effect = "INSERT INTO seen SELECT 'one', m FROM batch"
    context = spark.sparkContext
    context.setJobGroup("mine", "my work")
    try:
        start(job(bench, effect=effect, transform=transform, atomic="batch"), spark).wait()
        assert seen(bench) == [10, 20]
        assert spark.conf.get("spark.sql.session.timeZone") == "America/New_York"
        assert context.getLocalProperty("spark.jobGroup.id") == "mine"
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            context.setLocalProperty(name, None)


def test_sparks_jobs_say_whose_they_are(bench, start):
    """What the UI shows: one group of jobs for the consumer, and for each round its partitions and offsets."""
    send(bench, range(7))
    shown: list[tuple[str, ...]] = []

    def transform(rows: Any) -> Any:
        context = rows.sparkSession.sparkContext
        names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
        shown.append(tuple(context.getLocalProperty(name) for name in names))
        return rows

    start(job(bench, transform=transform), bench.spark).wait()
    assert shown == [("outbox one", f"outbox one: {bench.topic}-0 0–6", "false")]
    tracker = bench.spark.sparkContext.statusTracker()
    assert tracker.getJobIdsForGroup("outbox one")


def test_what_is_wrong_is_said_before_anything_starts(bench, start, monkeypatch):
    for trigger in ("now", 0, -1, True, float("nan"), float("inf")):
        with pytest.raises(JobError, match="trigger: must be"):
            start(job(bench), bench.spark, trigger)
    with pytest.raises(JobError, match="topics"):
        start(replace(job(bench), topics=()), bench.spark)
    with pytest.raises(ConfigurationError, match="driver_records"):
        start(job(bench), bench.spark, driver_records=-1)
    monkeypatch.setenv("OUTBOX_CONSUMER__KEEP_DAY", "3")
    with pytest.raises(ConfigurationError, match="did you mean OUTBOX_CONSUMER__KEEP_DAYS"):
        start(job(bench), bench.spark)
    monkeypatch.delenv("OUTBOX_CONSUMER__KEEP_DAY")
    monkeypatch.delenv("OUTBOX_DATABASE_URL")
    with pytest.raises(ConfigurationError, match="OUTBOX_DATABASE_URL"):
        start(job(bench), bench.spark)
    monkeypatch.delenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS")
    with pytest.raises(ConfigurationError, match="OUTBOX_KAFKA__BOOTSTRAP_SERVERS"):
        start(job(bench), bench.spark, database_url=bench.database.url)


def test_arguments_win_over_the_environment_and_the_session_is_found(bench, start, monkeypatch):
    monkeypatch.setenv("OUTBOX_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nowhere")
    monkeypatch.setenv("OUTBOX_CONSUMER__KEEP_DAYS", "3")
    send(bench, [1])
    handle = start(job(bench), database_url=bench.database.url)
    handle.wait()
    assert seen(bench) == [1]
    assert handle._runner._options.keep_days == 3


def test_a_folder_of_the_same_name_in_the_way_of_workers(bench, start, tmp_path, monkeypatch):
    (tmp_path / "spark_jobs").mkdir()
    # Without this file it is no package, and hides nothing.
    monkeypatch.chdir(tmp_path)
    session.beside(bench.spark)
    (tmp_path / "spark_jobs" / "__init__.py").touch()
    with pytest.raises(JobError, match="hides the package spark_jobs"):
        start(job(bench), bench.spark)


def test_two_threads_without_garbage_collection():
    """Each switches it off for a while; the last one to end switches it on again."""
    import gc

    from spark_jobs.task import reader

    collection = reader._GarbageCollection()
    assert gc.isenabled()
    with collection.off():
        inner = collection.off()
        inner.__enter__()
    assert not gc.isenabled()
    inner.__exit__(None, None, None)
    assert gc.isenabled()


PROGRAM = """
from spark_jobs import ConsumerJob, Insert, run
import sys

setup = "CREATE TABLE IF NOT EXISTS seen (n int)"
job = ConsumerJob("program", [sys.argv[1]], Insert("seen"), schema="n long", setup=setup)
query = run(job)
query.wait()
print(query.totals.applied, query.running)
left_running = run(job, trigger="continuous")
left_running.wait_until_caught_up()
print(left_running.running)
"""


def test_a_program_of_its_own_without_a_session(bench, tmp_path):
    """It makes the session itself, and ends although a consumer still runs."""
    send(bench, range(3))
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, bench.topic],
        env=os.environ
        | {
            "OUTBOX_DATABASE_URL": bench.database.url,
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": bench.topics.bootstrap_servers,
            "PYTHONPATH": str(root),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "3 False\nTrue\n"), ended.stderr[-3000:]
    assert "Traceback" not in ended.stderr
    assert [n for (n,) in bench.rows("SELECT n FROM seen ORDER BY n")] == [0, 1, 2]
