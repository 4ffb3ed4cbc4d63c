"""The same job on a Spark standalone cluster: spark-submit, executors killed, and two attempts at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import psycopg
import pyspark
import pytest
from bench import Bench, expected, ided, order
from spark_cluster import Cluster
from support import wait_until

from spark_jobs.cli import submitted as submitted_file

pytestmark = pytest.mark.spark

SPARK_HOME = Path(pyspark.__file__).parent

# A project as users have it: a package with local imports, here with places to stall at that the test controls.
PROJECT = {
    "shop/__init__.py": "",
    "shop/places.py": "from pathlib import Path\n\nMARKERS = Path({markers!r})\n",
    "shop/stalls.py": """
import os
import time

from .places import MARKERS


def stall(name):
    '''Say that an attempt is here; only the first of all waits to be let go.'''
    (MARKERS / f"{name}-{os.getpid()}").touch()
    try:
        (MARKERS / f"{name}.first").touch(exist_ok=False)
    except FileExistsError:
        return
    deadline = time.monotonic() + 240
    while not (MARKERS / f"{name}.go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody let {name} go")
        time.sleep(0.02)
""",
    "jobs/orders.py": """
from dataclasses import replace

from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from shop.stalls import stall
from spark_jobs import order_totals


@F.udf(StringType())
def passing(order_id):
    if order_id.startswith("before"):
        stall("before")
    return order_id


def effect(cursor, table):
    cursor.execute(order_totals.job.effect)
    for name in ("inside", "killed"):
        if any(order_id.startswith(name) for order_id in table["order_id"].to_pylist()):
            stall(name)


job = replace(
    order_totals.job, effect=effect, transform=lambda rows: rows.withColumn("order_id", passing("order_id"))
)
""",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


class Project:
    """The user's folder, and the markers by which a job's attempts are seen and let go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.markers = folder / "markers"
        self.markers.mkdir()
        for name, text in PROJECT.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("{markers!r}", repr(str(self.markers))))
        self.log = folder / "submit.log"

    def attempts(self, name: str) -> int:
        return len(list(self.markers.glob(f"{name}-*")))

    def go(self, name: str) -> None:
        (self.markers / f"{name}.go").touch()


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path)


@contextmanager
def submitted(project: Project, cluster: Cluster, bench: Bench, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the documented command with the cluster's options, from the user's folder."""
    env = os.environ | {
        "OUTBOX_DATABASE_URL": bench.database.url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": bench.topics.bootstrap_servers,
        "OUTBOX_CONSUMER__DRIVER_RECORDS": "0",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PATH": f"{SPARK_HOME / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    modules = shutil.make_archive(str(project.folder.parent / "jobs"), "zip", project.folder)
    command = ["spark-submit", "--name", "outbox jobs.orders:job", "--py-files", modules]
    settings = {
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.pyspark.python": sys.executable,
    }
    conf = [word for item in settings.items() for word in ("--conf", "=".join(item))]
    consume = [
        submitted_file.__file__,
        "consume",
        "jobs.orders:job",
        "--continuous",
        "--topic",
        bench.topic,
        "--max-records",
        "1500",
        "--json",
    ]
    with project.log.open("ab") as log:
        process = subprocess.Popen(
            [*command, "--master", cluster.url, *conf, *options, *consume],
            env=env,
            cwd=project.folder,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    except BaseException:
        print(project.log.read_text()[-20_000:])
        raise
    finally:
        end(process)
        try:
            process.wait(60)
        finally:
            process.kill()


def end(process: subprocess.Popen[bytes]) -> None:
    """Let the driver end its round and exit. spark-submit, its parent, would end it at once."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            # A process that has ended meanwhile has no command line.
            with suppress(psutil.NoSuchProcess):
                if "submitted.py" in " ".join(child.cmdline()):
                    child.terminate()
                    return
        process.terminate()


def waiting(process: subprocess.Popen[bytes], condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait, but not for a process that has ended."""
    wait_until(lambda: process.poll() is not None or condition(), seconds, what)
    assert process.poll() is None, f"spark-submit ended before {what}"


def send(bench: Bench, orders: list[str], seqs: range, repeats: int = 0) -> None:
    """Send events; of each so many one comes twice."""
    events = [(order(name, seq), name, None, ided()) for seq in seqs for name in orders]
    again = [2 if repeats and number % repeats == 0 else 1 for number in range(1, len(events) + 1)]
    bench.produce(one for event, times in zip(events, again, strict=True) for one in [event] * times)


def applied(bench: Bench, like: str = "%") -> int:
    try:
        with psycopg.connect(bench.database.url) as connection:
            query = "SELECT coalesce(sum(events_applied), 0) FROM order_totals WHERE order_id LIKE %s"
            return connection.execute(query, (like,)).fetchone()[0]
    except psycopg.errors.UndefinedTable:
        return 0


SPECULATION = {
    "": "true",
    ".interval": "100ms",
    ".quantile": "0.5",
    ".multiplier": "1.01",
    ".minTaskRuntime": "100ms",
    ".task.duration.threshold": "1s",
}


def test_twins_and_killed_executors_on_a_cluster(cluster, project, outbox_postgres, outbox_kafka):
    """One run in which a task has a twin that overtakes it, one that waits for it, and both are killed with their JVMs.

    One test, because starting a driver and executors is what takes long.
    """
    bench = Bench(None, outbox_postgres, outbox_kafka, partitions=3)
    orders = [f"o{number}" for number in range(60)]
    options = [word for name, value in SPECULATION.items() for word in ("--conf", f"spark.speculation{name}={value}")]

    def waiting_for_a_lock() -> int:
        with psycopg.connect(bench.database.url) as connection:
            query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
            return connection.execute(query, ("%offsets%FOR UPDATE%",)).fetchone()[0]

    with submitted(project, cluster, bench, *options) as process:
        # Stalled before its transaction: the twin on the other worker commits meanwhile.
        send(bench, ["before"], range(1, 11))
        waiting(process, lambda: applied(bench, "before") == 10, 240, "the twin's commit")
        assert project.attempts("before") >= 2
        assert not (project.markers / "before.go").exists()
        project.go("before")
        # Stalled in its transaction: the twin waits for the row of the offsets, and then finds it moved.
        send(bench, ["inside"], range(1, 11))
        # Who comes second may wait before the first one, which has the row, has got to its effect.
        waiting(process, lambda: project.attempts("inside"), 240, "an attempt to stand in its effect")
        waiting(process, lambda: waiting_for_a_lock() == 1, 240, "the twin to wait for the first attempt")
        assert (project.attempts("inside"), applied(bench, "inside")) == (1, 0)
        project.go("inside")
        waiting(process, lambda: applied(bench, "inside") == 10, 240, "the first attempt's commit")
        # Killed in a transaction that has done its work, in the midst of thousands of others' events.
        send(bench, orders, range(1, 21), repeats=19)
        send(bench, ["killed"], range(1, 3))
        send(bench, orders, range(21, 61), repeats=19)
        waiting(process, lambda: project.attempts("killed") == 1, 240, "an attempt to stand in its transaction")
        executors = cluster.executors()
        assert len(executors) == 2
        for executor in executors:
            executor.kill()
        waiting(process, lambda: project.attempts("killed") >= 2, 240, "another attempt, in another JVM")
        total = 60 * len(orders) + 22
        waiting(process, lambda: applied(bench) >= total, 240, "everything to be applied")
        end(process)
        assert process.wait(120) == 0
    figures = json.loads(next(line for line in reversed(project.log.read_text().splitlines()) if line[:1] == "{"))
    assert figures["group"] == "order-totals"
    assert bench.totals() == expected(orders, 60) | expected(("before", "inside"), 10) | expected(["killed"], 2)
    repeats = 20 * len(orders) // 19 + 40 * len(orders) // 19
    assert sum(bench.positions().values()) == total + repeats
    assert bench.rows("SELECT count(*) FROM consumer.processed_messages") == [(total,)]
