"""Take-over and fencing on real Spark: whoever is late, stalled or cut off writes nothing twice, and says why."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
from bench import Bench, Consumer, expected
from faults import stalling
from proxy import Connection, TcpProxy
from support import wait_until

from outbox.consumer.errors import Fenced
from spark_jobs import OffsetsOnly
from spark_jobs.job import ConsumerJob

pytestmark = pytest.mark.spark

PATIENCE = 240.0


@dataclass
class Markers:
    """Files by which an effect says where it is and is let go."""

    stalls: Path
    may_go: Path

    @property
    def stalled(self) -> bool:
        return self.stalls.exists()

    def stall(self) -> Callable[[], None]:
        return stalling(self.stalls, self.may_go)


@pytest.fixture
def markers(tmp_path) -> Markers:
    return Markers(tmp_path / "stalls", tmp_path / "go")


def stalling_in_transaction(bench: Bench, markers: Markers, order: str) -> ConsumerJob:
    """The work is done, the transaction open, when a batch with this order stalls; it is to go on in it."""
    stall, statement = markers.stall(), bench.job.effect

    def effect(cursor, table):
        cursor.execute(statement)
        if order in table["order_id"].to_pylist():
            stall()
            cursor.execute("SELECT 1")

    return replace(bench.job, effect=effect)


def stalling_before_transaction(bench: Bench, markers: Markers, order: str) -> ConsumerJob:
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import StringType

    stall = markers.stall()

    def passing(value):
        if value == order:
            stall()
        return value

    passing_column = F.udf(passing, StringType()).asNondeterministic()
    return replace(bench.job, transform=lambda rows: rows.withColumn("order_id", passing_column(rows["order_id"])))


def signal_all(tree: list[psutil.Process], number: signal.Signals) -> None:
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(number)


def stands_still(member: psutil.Process) -> bool:
    try:
        return member.status() in {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}
    except psutil.NoSuchProcess:
        return True


def generation(bench: Bench) -> int:
    return bench.rows("SELECT generation FROM consumer.groups")[0][0]


def test_a_take_over_records_what_the_job_declares(bench):
    """Of the job that was started last."""
    declared = "SELECT strategy, atomic FROM consumer.groups"
    bench.once()
    assert bench.rows(declared) == [("Dedup", "partition")]
    bench.once(replace(bench.job, strategy=OffsetsOnly(), atomic="batch"))
    assert bench.rows(declared) == [("OffsetsOnly", "batch")]


def test_two_drivers_at_once(bench, drive):
    bench.orders("abcdefgh", range(1, 5))
    older = drive(bench.runner(max_records=6, patience=PATIENCE))
    wait_until(lambda: sum(bench.positions().values()) >= 6, PATIENCE, "the older one's progress")
    younger = drive(bench.runner(max_records=20, patience=PATIENCE))
    with pytest.raises(Fenced, match="group order-totals was taken over from generation 1: "):
        older.result()
    bench.orders("abcdefgh", range(5, 7))
    wait_until(lambda: sum(bench.positions().values()) == 48, PATIENCE, "the younger one to apply the rest")
    younger.stop()
    assert bench.totals() == expected("abcdefgh", 6)


def test_a_driver_that_was_stopped_and_wakes_up_after_the_take_over(bench, consumer: Consumer):
    """The whole process tree, as a suspended machine: the driver, its JVM and its workers."""
    bench.orders("abcdefgh", range(1, 3))
    consumer.start("--continuous")
    tree: list[psutil.Process] = []

    def halted() -> bool:
        """Stop all of it; not within a transaction of its own: the take-over would wait for that (see below)."""
        driver = psutil.Process(consumer.process.pid)
        tree[:] = [driver, *driver.children(recursive=True)]
        signal_all(tree, signal.SIGSTOP)
        # A signal that is sent has not stopped anybody yet.
        wait_until(lambda: all(map(stands_still, tree)), PATIENCE, "all to stand still")
        open_ones = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND starts_with(application_name, 'outbox ') AND xact_start IS NOT NULL"
        )
        if bench.rows(open_ones) == [(0,)]:
            return True
        signal_all(tree, signal.SIGCONT)
        return False

    try:
        wait_until(lambda: sum(bench.positions().values()) == 16, PATIENCE, "the older one's work")
        wait_until(halted, PATIENCE, "the older one to stand still between two transactions")
        bench.orders("abcdefgh", range(3, 5))
        bench.once(patience=PATIENCE)
        assert bench.totals() == expected("abcdefgh", 4)
        bench.orders("abcdefgh", range(5, 7))
        signal_all(tree, signal.SIGCONT)
        consumer.ended(1, "group order-totals was taken over from generation 1")
    finally:
        for member in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    # It has written nothing since, though there was something to apply.
    assert bench.totals() == expected("abcdefgh", 4)
    bench.once(patience=PATIENCE)
    assert bench.totals() == expected("abcdefgh", 6)


def test_a_task_that_stalls_in_its_transaction_holds_the_take_over_up(bench, drive, markers):
    bench.orders("ab", range(1, 3))
    older = drive(bench.runner(stalling_in_transaction(bench, markers, "a"), patience=PATIENCE))
    wait_until(lambda: markers.stalled, PATIENCE, "the task to stall")
    younger = drive(bench.runner(patience=PATIENCE), once=True)
    wait_until(lambda: bench.waits_for_a_lock("outbox driver order-totals"), PATIENCE, "the take-over to wait")
    told = wait_until(
        lambda: [figures for text, figures in bench.reports if text == "waiting for a lock"], PATIENCE, "a report"
    )
    assert "outbox consumer order-totals" in told[0]["blocked_by"]
    assert "idle in transaction" in told[0]["blocked_by"]
    assert (generation(bench), younger.ended) == (1, False)
    markers.may_go.touch()
    assert younger.result().applied <= 2
    with pytest.raises(Fenced, match="taken over from generation 1"):
        older.result()
    assert bench.totals() == expected("ab", 2)
    bench.orders("ab", range(3, 4))
    assert bench.once(patience=PATIENCE).applied == 2
    assert bench.totals() == expected("ab", 3)


def test_a_task_that_stalls_before_its_transaction_writes_nothing_after_the_take_over(bench, drive, markers):
    bench.orders("ab", range(1, 3))
    older = drive(bench.runner(stalling_before_transaction(bench, markers, "a"), patience=PATIENCE))
    wait_until(lambda: markers.stalled, PATIENCE, "the task to stall")
    assert bench.once(patience=PATIENCE).applied >= 2
    assert bench.totals() == expected("ab", 2)
    markers.may_go.touch()
    with pytest.raises(Fenced, match=rf"taken over from generation 1: {bench.topic}-\d at offset 0, "):
        older.result()
    assert bench.totals() == expected("ab", 2)
    assert generation(bench) == 2


class LostCommit(TcpProxy):
    """In front of Postgres: swallows the answer to the first COMMIT of what moves offsets, and cuts it off there."""

    def __init__(self, host: str, port: int, times: int) -> None:
        super().__init__(host, port)
        self.left = times
        self._tasks: set[Connection] = set()
        self._deaf: set[Connection] = set()

    def _from_client(self, connection: Connection, data: bytes) -> None:
        if b"SET next_offset" in data:
            self._tasks.add(connection)
        with self._changed:
            if connection in self._tasks and self.left and b"COMMIT\0" in data:
                self.left -= 1
                self._deaf.add(connection)
        self._to_target(connection, data)

    def _from_target(self, connection: Connection, data: bytes) -> None:
        if connection in self._deaf:
            self._close(connection)
        else:
            self._to_client(connection, data)


@pytest.fixture
def lost_commit(bench) -> Iterator[LostCommit]:
    """Once for each of the topic's partitions."""
    where = urlsplit(bench.database.url)
    with LostCommit(where.hostname, where.port, 2) as proxy:
        netloc = where.netloc.replace(f"{where.hostname}:{where.port}", proxy.address)
        through = where._replace(netloc=netloc).geturl()
        bench.database = SimpleNamespace(url=through)
        yield proxy


@pytest.mark.parametrize(("strategy", "who"), [("dedup", "driver"), ("adding", "executor")])
def test_the_answer_to_a_commit_is_lost(bench, lost_commit, strategy, who):
    """The driver looks again, and finds the ranges applied. Also where ids can not tell."""
    from spark_jobs.dedup.strategies import Natural

    bench.orders("abcdefgh", range(1, 3))
    job = bench.job
    if strategy == "adding":
        # No dedup table: only the offsets know. Each message adds, so a second time would show.
        job = replace(
            job,
            strategy=Natural(["message_id"]),
            setup="CREATE TABLE IF NOT EXISTS added (n bigint)",
            effect="INSERT INTO added SELECT 1 FROM batch",
        )
    bench.once(job, patience=PATIENCE, driver_records=0 if who == "executor" else 2_000)
    assert lost_commit.left == 0
    assert sum(bench.positions().values()) == 16
    assert bench.rows("SELECT sum(applied)::int, sum(duplicates)::int FROM consumer.offsets") == [(16, 0)]
    waited = [text for text, _ in bench.reports if text == "waiting for a server"]
    # Both ranges were tried, though the first had failed: one wait is for both. Their figures went with the answers;
    # those in the database count.
    assert waited == ["waiting for a server"]
    if strategy == "adding":
        assert bench.rows("SELECT count(*) FROM added") == [(16,)]
    else:
        assert bench.totals() == expected("abcdefgh", 2)


@pytest.mark.parametrize(("setting", "error"), [("lock_timeout", "LockNotAvailable"), (None, "waiting for a lock")])
def test_a_lock_on_the_sinks_table(bench, drive, setting, error):
    """Where the sink has a time-out, tasks fail and are tried again; else they wait, and the blocker is named."""
    bench.once(patience=PATIENCE)
    bench.orders("ab", range(1, 3))
    with psycopg.connect(bench.database.url, autocommit=True, application_name="psql of somebody") as connection:
        if setting is not None:
            # Long enough for every other statement on a slow machine: it stays when the lock is gone.
            bench.limit(setting, "2s")
        with connection.transaction():
            connection.execute("LOCK TABLE order_totals IN ACCESS EXCLUSIVE MODE")
            job = replace(bench.job, setup=None)
            driver = drive(bench.runner(job, patience=PATIENCE), once=True)

            def told() -> list[str]:
                return [f"{text} {figures}" for text, figures in bench.reports if error in f"{text} {figures}"]

            wait_until(told, PATIENCE, "the driver to say what it waits for")
            if setting is None:
                assert "psql of somebody" in told()[0]
                assert f"pg_terminate_backend({connection.info.backend_pid})" in told()[0]
            assert not driver.ended
            assert sum(dict(bench.positions()).values()) == 0
    driver.result()
    assert bench.totals() == expected("ab", 2)
    assert bench.rows("SELECT sum(applied)::int, sum(duplicates)::int FROM consumer.offsets") == [(4, 0)]


def test_the_sink_ends_a_session_that_idles_in_its_transaction(bench, drive, markers):
    # Long enough for a driver and tasks that do not stall, on a slow machine too.
    bench.limit("idle_in_transaction_session_timeout", "2s")
    bench.orders("ab", range(1, 3))
    driver = drive(bench.runner(stalling_in_transaction(bench, markers, "a"), patience=PATIENCE), once=True)
    wait_until(lambda: markers.stalled, PATIENCE, "the effect to stall")
    # Sessions of workers that have nothing to do stay open; the stalled one is the only one in a transaction.
    mine = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox consumer order-totals' "
        "AND datname = current_database() AND xact_start IS NOT NULL"
    )
    wait_until(lambda: bench.rows(mine) == [(0,)], PATIENCE, "Postgres to end the session")
    markers.may_go.touch()
    driver.result()
    assert bench.totals() == expected("ab", 2)
    assert bench.rows("SELECT sum(applied)::int, sum(duplicates)::int FROM consumer.offsets") == [(4, 0)]
