"""The format "outbox" with state upstream: a commit and a driver killed, late data, and Spark's limits."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812
from sink_stream import SinkStream
from stream_state import KEYS, SIZE, counted, of_batches, stateful
from stream_to_sink import killed

__all__ = ["stateful"]

pytestmark = pytest.mark.spark


@pytest.fixture
def stream(stateful, outbox_postgres, tmp_path) -> SinkStream:
    return SinkStream(stateful, outbox_postgres.url, tmp_path)


KILLED = """
import os, sys
from sink_jobs import Troubled
from spark_jobs.spark.session import start
from stream_state import CONF, counted

source, checkpoint = sys.argv[1:]
spark = start("killed", conf=CONF)
spark.dataSource.register(Troubled)
rows = spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).csv(source)
writing = counted(rows).writeStream.format("troubled").outputMode("complete").option("job", "sink_jobs:counted")
try:
    writing.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
except Exception:
    os.kill(os.getpid(), 9)
"""


def test_a_commit_and_a_driver_that_are_killed(stream: SinkStream):
    """Between COMMIT and Spark's own, the batch comes again and is known; its state is written all the same.

    One query, killed three times. Before COMMIT only the commit's process is killed, which ends the transaction as the
    end of the driver does: another driver takes ten seconds of processor time.
    """

    def run() -> None:
        stream.run(counted(stream.rows()), job="counted", mode="complete")

    for _ in range(2):
        stream.add(SIZE)
    run()
    assert stream.window_counts() == of_batches(2)
    for _ in range(2):
        stream.add(SIZE)
    for when in ("before", "within"):
        stream.trouble(f"commit dies {when}")
        with pytest.raises(StreamingQueryException, match="Python worker exited unexpectedly"):
            run()
        assert stream.window_counts() == of_batches(2)
    stream.trouble("driver dies after")
    killed(stream, KILLED)
    assert stream.window_counts() == of_batches(3)
    run()
    assert stream.window_counts() == of_batches(4)
    stream.add(SIZE)
    run()
    assert stream.window_counts() == of_batches(5)
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
    assert stream.window_counts() == [(0, 10), (10, 10)]
    stream.next = 0
    stream.add(5)
    stream.next = 200
    stream.add(1)
    stream.run(rows, job="counted")
    assert stream.window_counts() == [(0, 10), (10, 10), (100, 2)]
