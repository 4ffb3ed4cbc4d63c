"""The format "outbox" with state upstream: a commit killed at each step, late data, and Spark's limits.

A driver that is killed: test_cluster.py; with state: test_streaming_state.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812
from sink_stream import SinkStream
from stream_state import KEYS, SIZE, counted, of_batches, stateful

__all__ = ["stateful"]

pytestmark = pytest.mark.spark


@pytest.fixture
def stream(stateful, outbox_postgres, tmp_path) -> SinkStream:
    return SinkStream(stateful, outbox_postgres.url, tmp_path)


def test_a_commit_that_is_killed_at_each_step(stream: SinkStream):
    """One query. Between COMMIT and Spark's own, the batch comes again and is known; its state is written all the
    same.
    """

    def run() -> None:
        stream.run(counted(stream.rows()), job="counted", mode="complete")

    for _ in range(2):
        stream.add(SIZE)
    run()
    assert stream.window_counts() == of_batches(2)
    for _ in range(2):
        stream.add(SIZE)
    for when, there in (("before", 2), ("within", 2), ("after", 3)):
        stream.trouble(f"commit dies {when}")
        with pytest.raises(StreamingQueryException, match="Python worker exited unexpectedly"):
            run()
        assert stream.window_counts() == of_batches(there)
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
