"""The format "outbox" with state upstream: a commit that is killed, a join, and Spark's limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bench import Bench
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming import StreamingQueryListener
from sink_stream import SinkStream
from stream_state import KEYS, SIZE, counted, of_batches, stateful
from support import wait_until

__all__ = ["stateful"]

pytestmark = pytest.mark.spark


@pytest.fixture
def stream(stateful, outbox_postgres, tmp_path) -> SinkStream:
    return SinkStream(stateful, outbox_postgres.url, tmp_path)


def test_a_commit_that_is_killed(stream: SinkStream):
    """Between COMMIT and Spark's own, the batch comes again and is known; its state is written all the same.

    And one that is killed within its transaction. With its driver, between the two: test_recipes_pipeline.py.
    """

    def run() -> None:
        stream.run(counted(stream.rows()), job="counted", mode="complete")

    for _ in range(3):
        stream.add(SIZE)
    stream.trouble("commit of batch 1 dies after")
    with pytest.raises(StreamingQueryException, match="Python worker exited unexpectedly"):
        run()
    assert stream.window_counts() == of_batches(2)
    run()
    assert stream.window_counts() == of_batches(3)
    # And the checkpoint that this leaves is one that a query can start from.
    stream.add(SIZE)
    stream.trouble("commit dies within")
    with pytest.raises(StreamingQueryException, match="Python worker exited unexpectedly"):
        run()
    assert stream.window_counts() == of_batches(3)
    run()
    assert stream.window_counts() == of_batches(4)
    assert stream.checkpoints() == [("counts", 3, 4 * KEYS, 0)]
    assert stream.left() == []


def test_update_mode_is_refused_by_spark(stream: SinkStream):
    """PythonWriteBuilder lacks SupportsStreamingUpdateAsAppend. When this fails, exactly_once is needed no more."""
    stream.add()
    with pytest.raises(StreamingQueryException, match="troubled does not support Update mode"):
        stream.run(counted(stream.rows()), job="counted", mode="update")


class Heard(StreamingQueryListener):
    """The number of rows that each batch has read, by its query and number."""

    def __init__(self) -> None:
        self.read: dict[tuple[str, int], int] = {}

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        self.read[str(event.progress.id), event.progress.batchId] = event.progress.numInputRows

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        pass


@pytest.fixture
def heard(stateful) -> Iterator[Heard]:
    listener = Heard()
    stateful.streams.addListener(listener)
    yield listener
    stateful.streams.removeListener(listener)


def test_two_topics_joined(stream: SinkStream, bench: Bench, heard: Heard):
    """Orders and what was paid for them within an hour, in two topics. The commit is killed between COMMIT and Spark's.

    The batch comes again and is known, but its rows are in Spark's state: what comes later is joined with them.
    """
    payments = bench.topics.create_topic(bench.topics.name("payments"), 2)
    # A join has four stores of state in each.
    bench.spark.conf.set("spark.sql.shuffle.partitions", "1")

    def read(topic: str, n: str, minute: str) -> Any:
        source = {"kafka.bootstrap.servers": bench.topics.bootstrap_servers, "subscribe": topic}
        source |= {"startingOffsets": "earliest", "kafka.isolation.level": "read_committed"}
        messages = bench.spark.readStream.format("kafka").options(**source).load()
        event = F.from_json(F.col("value").cast("string"), "n long, minute long", {"mode": "FAILFAST"}).alias("event")
        at = F.timestamp_seconds(F.col("event.minute") * 60).alias(minute)
        return messages.select(event).select(F.col("event.n").alias(n), at).withWatermark(minute, "10 minutes")

    def send(topic: str, minute: int, *numbers: int) -> None:
        bench.produce([({"n": n, "minute": minute}, str(n)) for n in numbers], topic)

    def run() -> None:
        joined = read(bench.topic, "n", "placed").join(
            read(payments, "order", "paid"),
            F.expr("n = order AND paid BETWEEN placed AND placed + INTERVAL 1 HOUR"),
        )
        minutes = (F.unix_timestamp("paid") - F.unix_timestamp("placed")) / 60
        stream.run(joined.select("n", minutes.cast("long").alias("minutes")), job="paid")

    def paid() -> list[tuple[Any, ...]]:
        return stream.sink("SELECT n, minutes FROM paid ORDER BY n")

    # What comes at or before the watermark is left out, and at first that is 0.
    send(bench.topic, 1, *range(10))
    send(payments, 31, *range(5))
    send(payments, 62, 5)
    stream.trouble("commit dies after")
    with pytest.raises(StreamingQueryException, match="Python worker exited unexpectedly"):
        run()
    assert paid() == [(n, 30) for n in range(5)]
    send(payments, 46, 6, 7, 8)
    for topic in (bench.topic, payments):
        send(topic, 300, 20)
    run()
    expected = [*((n, 30) for n in range(5)), *((n, 45) for n in (6, 7, 8)), (20, 0)]
    assert paid() == expected
    assert stream.checkpoints() == [("paid", 2, len(expected), 0)]
    assert stream.left() == []
    # Batch 2 moves the watermark. Others' queries may still be heard of.
    ((query,),) = stream.sink("SELECT query_id::text FROM consumer.checkpoints")
    batches = {(query, 0): 16, (query, 1): 5, (query, 2): 0}
    wait_until(lambda: batches.items() <= heard.read.items(), 60, "the listener to hear of each batch")
