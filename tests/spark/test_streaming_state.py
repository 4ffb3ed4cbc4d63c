"""exactly_once on a stream with state whose checkpoints name their state's files: stateStore.checkpointFormatVersion 2.

Spark commits a batch of such a query with what its tasks have reported of the state they wrote.
"""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from pyspark.sql import functions as F  # noqa: N812
from stream_to_sink import Stream, killed

from spark_jobs import ConsumerJob
from spark_jobs.driver import stream_group

pytestmark = pytest.mark.spark

CONF = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
    "spark.sql.shuffle.partitions": "2",
}
SETUP = "CREATE TABLE IF NOT EXISTS told (k bigint, number bigint)"
EFFECT = "INSERT INTO told SELECT k, number FROM batch"
JOB = ConsumerJob("counts", effect=EFFECT, setup=SETUP)
KEYS = 7
SIZE = 70


def counted(rows: Any) -> Any:
    return rows.groupBy((F.col("n") % KEYS).alias("k")).agg(F.count("*").alias("number"))


def of_batches(batches: int) -> list[tuple[int, int]]:
    """What the sink has after so many batches: for each batch each key, with its number of rows so far."""
    return sorted((k, batch * SIZE // KEYS) for batch in range(1, batches + 1) for k in range(KEYS))


class Counts(Stream):
    """A stream whose batches change the counts of all keys."""

    def add(self, count: int = SIZE, columns: str = "n") -> None:
        super().add(count, columns)

    def run(self, function: Any = None, rows: Any = None) -> None:
        session = self.spark.newSession()
        for name, value in CONF.items():
            session.conf.set(name, value)
        read = session.readStream.schema("n long").option("maxFilesPerTrigger", 1).csv(str(self.source))
        writing = counted(read).writeStream.foreachBatch(function or self.function(JOB)).outputMode("update")
        writing = writing.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True)
        assert writing.start().awaitTermination(180)

    def told(self) -> list[tuple[Any, ...]]:
        return self.sink("SELECT k, number FROM told ORDER BY k, number")


@pytest.fixture
def counts(spark, outbox_postgres, tmp_path) -> Counts:
    return Counts(spark, outbox_postgres.url, tmp_path)


KILLED = """
import json, os, signal, sys
from pyspark.sql import functions as F
from spark_jobs import ConsumerJob, exactly_once
from spark_jobs.spark.session import start

source, checkpoint, conf, keys = sys.argv[1:]
spark = start("killed", conf=json.loads(conf))
function = exactly_once(ConsumerJob("counts", effect="INSERT INTO told SELECT k, number FROM batch"))

def around(rows, batch_id):
    function(rows, batch_id)
    if batch_id == 2:
        os.kill(os.getpid(), signal.SIGKILL)

rows = spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).csv(source)
counted = rows.groupBy((F.col("n") % int(keys)).alias("k")).agg(F.count("*").alias("number"))
writing = counted.writeStream.foreachBatch(around).outputMode("update")
writing.option("checkpointLocation", checkpoint).start().awaitTermination()
"""


def test_a_driver_killed_between_commit_and_sparks_own(counts):
    """With its third batch: it comes again and is applied; its state must be written all the same."""
    for _ in range(2):
        counts.add()
    counts.run()
    for _ in range(3):
        counts.add()
    killed(counts, KILLED, json.dumps(CONF), str(KEYS))
    assert counts.told() == of_batches(3)
    counts.run()
    assert counts.told() == of_batches(5)
    # And the checkpoint that this leaves is one that a query can start from.
    counts.add()
    counts.run()
    assert counts.told() == of_batches(6)
    assert counts.sink("SELECT batch_id, applied FROM consumer.checkpoints") == [(5, 6 * KEYS)]
    assert counts.left() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_batch_that_is_tried_again(counts, monkeypatch, when):
    """The sink is away before or after COMMIT: the next try of the batch must not break the checkpoint either."""
    real = stream_group.transaction
    lost: list[int] = []

    class Losing:
        def __init__(self, *arguments: Any) -> None:
            self.inner = real(*arguments)

        def __enter__(self) -> Any:
            if when == "before" and len(lost) < 2:
                lost.append(1)
                raise psycopg.OperationalError("server closed the connection unexpectedly")
            return self.inner.__enter__()

        def __exit__(self, *error: object) -> Any:
            self.inner.__exit__(*error)
            if error[0] is None and not lost:
                lost.append(1)
                raise psycopg.OperationalError("server closed the connection unexpectedly")

    counts.add()
    counts.run()
    for _ in range(2):
        counts.add()
    monkeypatch.setattr(stream_group, "transaction", Losing)
    counts.run()
    assert lost
    assert counts.told() == of_batches(3)
    counts.add()
    counts.run()
    assert counts.told() == of_batches(4)
