"""The recipe order_pipeline, by Spark's own command: killed in the middle, continued, and after a full refresh."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import connector
import pyspark
import pytest
from bench import ROOT, Bench
from recipes_support import RECIPES
from sink_stream import SinkStream
from support import wait_until

pytestmark = pytest.mark.spark

RECIPE = RECIPES / "order_pipeline"
FLOW = {
    "from spark_jobs import register\n": "from sink_jobs import Troubled\n",
    "register(spark)\n": "spark.dataSource.register(Troubled)\n",
    '"outbox", {': '"troubled", {"databaseUrl": os.environ["OUTBOX_DATABASE_URL"], ',
}
"""What is another line in the test: its sink can kill Spark's driver, and a server has not the client's environment."""


@pytest.fixture
def stream(outbox_postgres, tmp_path) -> SinkStream:
    return SinkStream(None, outbox_postgres.url, tmp_path)


class Pipeline:
    """The recipe as its user has it, in a folder of its own."""

    def __init__(self, stream: SinkStream, bench: Bench, folder: Path) -> None:
        self._folder, self._stream, self._log = folder / "order_pipeline", stream, folder / "log"
        shutil.copytree(RECIPE, self._folder)
        self._edit("transformations/orders.py", FLOW)
        self._edit("spark-pipeline.yml", {"file:///var/lib/order_pipeline": (folder / "storage").as_uri()})
        self._environment = os.environ | {
            "KAFKA_SERVERS": bench.topics.bootstrap_servers,
            "ORDER_TOPIC": bench.topic,
            "OUTBOX_DATABASE_URL": stream.url,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_SUBMIT_ARGS": f"--jars {','.join(map(str, connector.fetch()))} pyspark-shell",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
        }

    def _edit(self, name: str, changes: dict[str, str]) -> None:
        text = (self._folder / name).read_text()
        for line, other in changes.items():
            assert text.count(line) == 1, line
            text = text.replace(line, other)
        (self._folder / name).write_text(text)

    def run(self, server: str, *arguments: str) -> None:
        """Run it to its end, on a server of Spark Connect."""
        with self._running(server, *arguments) as process:
            process.wait(300)
        log = self._log.read_text(errors="replace")
        assert "Run is COMPLETED" in log
        # The client of Spark 4.2 does not know what its own Python workers count, and fails when the run has ended.
        assert (process.returncode, "UNKNOWN_RESPONSE" in log) in {(0, False), (1, True)}

    def run_until(self, trouble: str) -> None:
        """Run it, with a Spark of its own, until this trouble came."""
        self._stream.trouble(trouble)
        with self._running("local[2,4]") as process:
            wait_until(lambda: process.poll() is not None or self._came(), 300, trouble)
            assert process.returncode is None

    @contextlib.contextmanager
    def _running(self, remote: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        spark_pipelines = Path(pyspark.__file__).with_name("bin") / "spark-pipelines"
        with self._log.open("wb") as output:
            process = subprocess.Popen(
                [spark_pipelines, "--remote", remote, "run", *arguments],
                cwd=self._folder,
                env=self._environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            # Without its driver, the client would try to reach it for minutes.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            print(self._log.read_text(errors="replace"))

    def _came(self) -> bool:
        return self._stream.sink("SELECT * FROM trouble") == []


@pytest.fixture
def pipeline(stream: SinkStream, bench: Bench, tmp_path: Path) -> Pipeline:
    return Pipeline(stream, bench, tmp_path)


@pytest.fixture
def bench(outbox_postgres, outbox_kafka) -> Bench:
    return Bench(None, outbox_postgres, outbox_kafka)


def test_each_order_counts_once(bench: Bench, stream: SinkStream, pipeline: Pipeline, connect: str, tmp_path: Path):
    def counted() -> tuple[list[tuple], list[tuple]]:
        return stream.sink("SELECT customer, orders, cents::int FROM customer_totals"), stream.checkpoints()

    bench.orders("ab", range(1, 4))
    pipeline.run_until("driver dies after")
    assert counted() == ([("c", 6, 60)], [("customer-totals", 0, 6, 0)])
    (checkpoint,) = (tmp_path / "storage" / "_checkpoints").rglob("orders/0")
    assert (checkpoint / "offsets" / "0").exists()
    assert not (checkpoint / "commits" / "0").exists()
    # Spark runs the batch again, and then the next one.
    bench.orders("a", [4])
    pipeline.run(connect)
    assert counted() == ([("c", 7, 70)], [("customer-totals", 1, 7, 0)])
    # A checkpoint that is new, and all messages from the beginning.
    bench.orders("a", [5])
    pipeline.run(connect, "--full-refresh-all")
    assert counted() == ([("c", 8, 80)], [("customer-totals", 0, 8, 7)])
    assert (checkpoint.parent / "1" / "commits" / "0").exists()
    assert stream.left() == []
