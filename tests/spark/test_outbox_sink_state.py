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
from support import wait_until

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
IDLE = """
SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outbox driver counts'
   AND pid IN (SELECT pid FROM pg_locks WHERE relation = 'consumer.checkpoints'::regclass)"""


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


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_driver_that_is_killed(stream: SinkStream, when: str, monkeypatch: pytest.MonkeyPatch):
    """Between COMMIT and Spark's own, the batch comes again and is known; its state is written all the same."""
    support = str(Path(__file__).parents[1] / "support")
    monkeypatch.setenv("PYTHONPATH", support)
    for _ in range(2):
        stream.add(SIZE)
    stream.run(counted(stream.rows()), job="counted", mode="complete")
    assert window_counts(stream) == of_batches(2)
    for _ in range(2):
        stream.add(SIZE)
    stream.trouble(f"driver dies {when}")
    killed(stream, KILLED, json.dumps(CONF), str(KEYS))
    # The server may notice a moment later that the commit's process is gone.
    wait_until(lambda: stream.sink(IDLE) == [(0,)], 60, "the transaction's end")
    assert window_counts(stream) == of_batches(3 if when == "after" else 2)
    stream.run(counted(stream.rows()), job="counted", mode="complete")
    assert window_counts(stream) == of_batches(4)
    stream.add(SIZE)
    stream.run(counted(stream.rows()), job="counted", mode="complete")
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
