"""run(job): consumers in threads of their own, with handles like those of Spark's streaming queries."""

from __future__ import annotations

import itertools
import json
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
from bench import Bench
from uuid_utils.compat import uuid7

from outbox.errors import ConfigurationError
from spark_jobs import ConsumerJob, run
from spark_jobs.driver import query
from spark_jobs.errors import EffectFailed, Fenced, JobError
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
    producer = bench.producer()
    for n in numbers:
        headers = [("ce_id", str(uuid7()).encode())]
        producer.produce(bench.topic, json.dumps({"n": n}).encode(), b"k", headers=headers, partition=partition)
    assert producer.flush(30) == 0


def seen(bench: Bench, group: str = "one") -> list[int]:
    return [n for (n,) in bench.rows(f"SELECT n FROM seen WHERE grp = '{group}' ORDER BY n")]


@pytest.fixture
def start(bench, monkeypatch):
    """Start consumers as a notebook does, with the settings in the environment; stop them in the end."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", bench.database.url)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", bench.topics.bootstrap_servers)
    started: list[query.ConsumerQuery] = []

    def starting(*arguments: Any, **options: Any) -> query.ConsumerQuery:
        started.append(run(*arguments, **options))
        return started[-1]

    yield starting
    for one in started:
        one.stop()


def test_once_ends_by_itself_and_shows_what_it_did(bench, start):
    send(bench, range(5))
    send(bench, [5, 6], partition=1)
    bench.send_raw(b"no JSON", [("ce_id", str(uuid7()).encode())], partition=1)
    handle = start(job(bench), bench.spark)
    assert handle.awaitTermination() is None
    assert seen(bench) == list(range(7))
    assert (handle.id, handle.name, handle.isActive, handle.exception()) == ("one", "one", False, None)
    assert handle.status == {"message": "Stopped", "isDataAvailable": False, "isTriggerActive": False}
    progress = handle.lastProgress
    assert [progress] == handle.recentProgress
    assert progress["id"] == progress["name"] == "one"
    assert progress["runId"] == handle.runId
    assert progress["batchId"] == 0
    assert {name: progress[name] for name in ("numInputRows", "applied", "duplicates", "dead")} == {
        "numInputRows": 8,
        "applied": 7,
        "duplicates": 0,
        "dead": 1,
    }
    assert progress["timestamp"].endswith("Z")
    assert progress["durationMs"] == {"triggerExecution": progress["batchDuration"]}
    assert progress["processedRowsPerSecond"] > 0
    assert progress["inputRowsPerSecond"] > 0
    (source,) = progress["sources"]
    assert source["description"] == f"Kafka[{bench.topic}]"
    assert json.loads(source["startOffset"]) == {bench.topic: {"0": 0, "1": 0}}
    assert json.loads(source["endOffset"]) == json.loads(source["latestOffset"]) == {bench.topic: {"0": 5, "1": 3}}
    assert progress["sink"]["numOutputRows"] == 7
    json.dumps(progress)
    # A handle of Spark's has these, and code that shows progress looks for them.
    assert {"id", "runId", "name", "timestamp", "batchId", "numInputRows", "sources", "sink"} <= progress.keys()


def test_continuous_goes_on_until_it_is_stopped(bench, start):
    handle = start(job(bench), bench.spark, "continuous")
    handle.processAllAvailable()
    assert (handle.isActive, handle.lastProgress, handle.awaitTermination(0.01)) == (True, None, False)
    for numbers in (range(3), range(3, 10)):
        send(bench, numbers)
        handle.processAllAvailable()
        assert seen(bench) == list(range(numbers.stop))
    assert handle.status["message"] == "Waiting for data to arrive"
    assert [one["batchId"] for one in handle.recentProgress] == list(range(len(handle.recentProgress)))
    assert sum(one["numInputRows"] for one in handle.recentProgress) == handle.totals.read == 10
    handle.stop()
    assert (handle.isActive, handle.awaitTermination(), handle.exception()) == (False, None, None)
    send(bench, [10])
    # Where it was left.
    start(job(bench), bench.spark).awaitTermination()
    assert seen(bench) == list(range(11))


def test_seconds_are_how_often_a_round_begins(bench, start):
    rounds: list[float] = []
    every = 1.5
    handle = start(
        job(bench),
        bench.spark,
        every,
        report=lambda text, _: rounds.append(time.monotonic()) if text == "round" else None,
    )
    for n in range(3):
        send(bench, [n])
        handle.processAllAvailable()
        assert seen(bench) == list(range(n + 1))
    handle.stop()
    assert len(rounds) == 3
    # A report comes at the end of a round: its length may differ from the next one's.
    longest = max(one["batchDuration"] for one in handle.recentProgress) / 1000
    assert all(later - earlier > every - longest for earlier, later in itertools.pairwise(rounds))


def test_a_round_that_runs_is_ended_before_stop_returns(bench, start):
    """The effect waits for a lock; stop() waits for the effect."""
    start(job(bench), bench.spark).awaitTermination()
    send(bench, range(5))
    with psycopg.connect(bench.database.url) as connection:
        connection.execute("LOCK TABLE seen IN EXCLUSIVE MODE")
        handle = start(job(bench), bench.spark, "continuous")
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        while bench.rows(waiting) == [(0,)]:
            assert handle.isActive, handle.exception()
        stopping = threading.Thread(target=handle.stop)
        stopping.start()
        assert not handle._thread.join(0.3)
        assert handle.isActive
    stopping.join(60)
    assert not handle.isActive
    assert seen(bench) == list(range(5))


def test_an_error_is_the_jobs_own(bench, start):
    send(bench, [1])
    handle = start(job(bench, effect="INSERT INTO nowhere SELECT n FROM batch"), bench.spark, "continuous")
    with pytest.raises(EffectFailed, match="nowhere") as caught:
        handle.awaitTermination(60)
    assert handle.exception() is caught.value
    assert not handle.isActive
    assert "nowhere" in handle.status["message"]
    with pytest.raises(EffectFailed):
        handle.processAllAvailable()
    handle.stop()


def test_two_groups_beside_each_other(bench, start):
    """One in the driver and one with Spark's jobs, at the same time: neither has the other's session, or its rows."""
    send(bench, range(3_000))
    send(bench, range(3_000, 4_000), partition=1)
    first = start(job(bench, "one"), bench.spark, "continuous", driver_records=100_000, max_records=500)
    second = start(job(bench, "two", transform=lambda rows: rows.filter("n >= 0")), bench.spark, "continuous")
    for handle in (first, second):
        handle.processAllAvailable()
        assert handle.isActive
    assert seen(bench, "one") == seen(bench, "two") == list(range(4_000))
    assert len(first.recentProgress) >= 8
    first.stop()
    send(bench, range(4_000, 4_010))
    second.processAllAvailable()
    assert len(seen(bench, "two")) == 4_010
    assert len(seen(bench, "one")) == 4_000


def test_the_younger_of_one_group_takes_it_over(bench, start):
    first = start(job(bench), bench.spark, "continuous")
    first.processAllAvailable()
    second = start(job(bench), bench.spark, "continuous")
    with pytest.raises(Fenced, match="taken over from generation 1: generation 2 now"):
        first.awaitTermination(60)
    assert isinstance(first.exception(), Fenced)
    send(bench, [1])
    second.processAllAvailable()
    assert (second.isActive, seen(bench)) == (True, [1])


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
        start(job(bench, effect=effect, transform=transform, atomic="batch"), spark).awaitTermination()
        assert seen(bench) == [10, 20]
        assert spark.conf.get("spark.sql.session.timeZone") == "America/New_York"
        assert context.getLocalProperty("spark.jobGroup.id") == "mine"
        # Without a thread of its own, as on a cluster's notebook with Runner: given back as well.
        bench.once(job(bench, "other"), driver_records=0)
        names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
        assert [context.getLocalProperty(name) for name in names] == ["mine", "my work", "false"]
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

    start(job(bench, transform=transform), bench.spark).awaitTermination()
    assert shown == [("outbox one", f"outbox one: {bench.topic}-0 0–6", "false")]
    tracker = bench.spark.sparkContext.statusTracker()
    assert tracker.getJobIdsForGroup("outbox one")


@pytest.mark.parametrize("trigger", ["now", 0, -1, True, float("nan"), float("inf")])
def test_a_trigger_is_one_of_three(bench, start, trigger):
    with pytest.raises(JobError, match="trigger: must be"):
        start(job(bench), bench.spark, trigger)


def test_what_is_wrong_is_said_before_anything_starts(bench, start, monkeypatch):
    with pytest.raises(JobError, match="topics"):
        start(replace(job(bench), topics=()), bench.spark)
    with pytest.raises(ConfigurationError, match="driver_records"):
        start(job(bench), bench.spark, driver_records=-1)
    monkeypatch.setenv("OUTBOX_CONSUMER__KEEP_DAY", "3")
    with pytest.raises(ConfigurationError, match="did you mean keep_days"):
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
    handle.awaitTermination()
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
query.awaitTermination()
print(query.totals.applied, query.isActive)
left_running = run(job, trigger="continuous")
left_running.processAllAvailable()
print(left_running.isActive)
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
