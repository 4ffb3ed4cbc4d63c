"""Take-over and fencing on real Spark: whoever is late, stalled or cut off writes nothing twice, and says why.

A session that the sink ends in its transaction: test_input.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import psycopg
import pytest
from bench import Bench, expected
from faults import stalling
from proxy import Connection, TcpProxy
from support import wait_until

from outbox.consumer.errors import Fenced
from spark_jobs import OffsetsOnly
from spark_jobs.job import ConsumerJob
from spark_jobs.postgres import lock_monitor

pytestmark = pytest.mark.spark

PATIENCE = 240.0


@pytest.fixture(autouse=True)
def _soon_told(monkeypatch) -> None:
    """What blocks a group is looked for every second, and not every five."""
    monkeypatch.setattr(lock_monitor, "CHECK_SECONDS", 1.0)


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


def test_a_lock_on_the_sinks_table(bench, drive):
    """Tasks wait, and the blocker is named. Where the sink has a time-out: test_poison.py."""
    bench.once(patience=PATIENCE)
    bench.orders("ab", range(1, 3))
    with psycopg.connect(bench.database.url, autocommit=True, application_name="psql of somebody") as connection:
        with connection.transaction():
            connection.execute("LOCK TABLE order_totals IN ACCESS EXCLUSIVE MODE")
            driver = drive(bench.runner(replace(bench.job, setup=None), patience=PATIENCE), once=True)

            def told() -> list[str]:
                return [f"{text} {figures}" for text, figures in bench.reports if text == "waiting for a lock"]

            wait_until(told, PATIENCE, "the driver to say what it waits for")
            assert "psql of somebody" in told()[0]
            assert f"pg_terminate_backend({connection.info.backend_pid})" in told()[0]
            assert not driver.ended
            assert sum(dict(bench.positions()).values()) == 0
    driver.result()
    assert bench.totals() == expected("ab", 2)
    assert bench.rows("SELECT sum(applied)::int, sum(duplicates)::int FROM consumer.offsets") == [(4, 0)]
