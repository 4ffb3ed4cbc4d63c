"""The format "outbox" with state upstream: a driver killed at each step, late data, joins, and Spark's limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812
from sink_stream import SinkStream
from stream_to_sink import killed

pytestmark = pytest.mark.spark

CONF = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
    "spark.sql.shuffle.partitions": "2",
}
KEYS = 7
SIZE = 70


@pytest.fixture
def stream(spark, outbox_postgres, tmp_path) -> Any:
    before = {name: spark.conf.get(name, None) for name in CONF}
    for name, value in CONF.items():
        spark.conf.set(name, value)
    yield SinkStream(spark, outbox_postgres.url, tmp_path)
    for name, value in before.items():
        spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def counted(rows: Any) -> Any:
    return rows.groupBy((F.col("n") % KEYS).alias("k")).agg(F.count("*").alias("number"))


def window_counts(stream: SinkStream) -> list[tuple[Any, ...]]:
    return stream.sink("SELECT k, number FROM window_counts ORDER BY k, number")


def of_batches(batches: int) -> list[tuple[int, int]]:
    """What the sink has after so many batches: for each batch each key, with its number of rows so far."""
    return sorted((k, batch * SIZE // KEYS) for batch in range(1, batches + 1) for k in range(KEYS))


KILLED = """
import json, os, sys
from pathlib import Path
from sink_jobs import Troubled
from pyspark.sql import functions as F
from spark_jobs.spark.session import start

source, checkpoint, conf, keys = sys.argv[1:]
spark = start("killed", conf=json.loads(conf))
spark.dataSource.register(Troubled)
rows = spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).csv(source)
counted = rows.groupBy((F.col("n") % int(keys)).alias("k")).agg(F.count("*").alias("number"))
writing = counted.writeStream.format("troubled").outputMode("complete").option("job", "sink_jobs:counted")
try:
    writing.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
except Exception:
    os.kill(os.getpid(), 9)
"""


def test_a_commit_and_a_driver_that_are_killed(stream: SinkStream, monkeypatch: pytest.MonkeyPatch):
    """Between COMMIT and Spark's own, the batch comes again and is known; its state is written all the same.

    One query, killed three times. Before COMMIT only the commit's process is killed, which ends the transaction as the
    end of the driver does: another driver takes ten seconds of processor time.
    """

    def run() -> None:
        stream.run(counted(stream.rows()), job="counted", mode="complete")

    for _ in range(2):
        stream.add(SIZE)
    run()
    assert window_counts(stream) == of_batches(2)
    for _ in range(2):
        stream.add(SIZE)
    for when in ("before", "within"):
        stream.trouble(f"commit dies {when}")
        with pytest.raises(StreamingQueryException, match="Python worker exited unexpectedly"):
            run()
        assert window_counts(stream) == of_batches(2)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    stream.trouble("driver dies after")
    killed(stream, KILLED, json.dumps(CONF), str(KEYS))
    assert window_counts(stream) == of_batches(3)
    run()
    assert window_counts(stream) == of_batches(4)
    stream.add(SIZE)
    run()
    assert window_counts(stream) == of_batches(5)
    assert stream.checkpoints() == [("counts", 4, 5 * KEYS, 0)]
    assert stream.left() == []


def test_update_mode_is_refused_by_spark(stream: SinkStream):
    """PythonWriteBuilder lacks SupportsStreamingUpdateAsAppend. When this fails, exactly_once is needed no more."""
    stream.add()
    with pytest.raises(StreamingQueryException, match="troubled does not support Update mode"):
        stream.run(counted(stream.rows()), job="counted", mode="update")


def at(rows: Any) -> Any:
    return rows.withColumn("at", F.timestamp_seconds("n")).withWatermark("at", "5 seconds")


def test_windows_with_late_data(stream: SinkStream):
    """A window is written once, when the watermark has passed it; what comes later is left out."""
    windows = at(stream.rows()).groupBy(F.window("at", "10 seconds").alias("w")).agg(F.count("*").alias("number"))
    rows = windows.select(F.unix_timestamp("w.start").alias("k"), "number")
    stream.add(20)
    stream.next = 100
    stream.add(2)
    stream.run(rows, job="counted")
    assert window_counts(stream) == [(0, 10), (10, 10)]
    stream.next = 0
    stream.add(5)
    stream.next = 200
    stream.add(1)
    stream.run(rows, job="counted")
    assert window_counts(stream) == [(0, 10), (10, 10), (100, 2)]


def test_a_join_of_two_streams(stream: SinkStream, tmp_path: Path):
    (tmp_path / "paid").mkdir()
    paid = SinkStream.__new__(SinkStream)
    paid.__dict__.update(stream.__dict__, source=tmp_path / "paid")
    paid.next = 2
    for one in (stream, paid, stream, paid):
        one.add()
    left, right = at(stream.rows()), at(paid.rows()).selectExpr("n AS m", "at AS paid_at")
    joined = left.join(right, F.expr("n = m AND paid_at BETWEEN at AND at + INTERVAL 5 SECONDS"))
    stream.run(joined.select("n"), job="plain")
    assert stream.seen() == [2, 3, 4, 5]
    stream.add()
    stream.run(joined.select("n"), job="plain")
    assert stream.seen() == [2, 3, 4, 5, 6, 7]
