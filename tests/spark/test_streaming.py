"""exactly_once: whatever ends a query, each of its batches is in the sink once; and what can't be known is refused."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from bench import ided
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812
from stream_to_sink import EFFECT, SEEN, Stream, stream

from outbox.consumer.errors import EffectFailed, JobError
from spark_jobs import ConsumerJob, Insert, Upsert
from spark_jobs.postgres.staging import StagingTables

__all__ = ["stream"]

pytestmark = pytest.mark.spark


def test_batches_are_applied_once_and_counted(stream):
    """Also one that comes again; and of the second one a filter leaves no row: the third follows it."""
    function = stream.function()

    def again(rows: Any, batch_id: int) -> None:
        function(rows, batch_id)
        function(rows, batch_id)
        # In another driver, which finds nothing to apply, and so does not take the group over.
        stream.function()(rows, batch_id)

    for _ in range(3):
        stream.add()
    stream.run(again, stream.rows().filter("n NOT BETWEEN 3 AND 5"))
    assert stream.seen() == [0, 1, 2, 6, 7, 8]
    assert stream.sink("SELECT grp, batch_id, applied, duplicates FROM consumer.checkpoints") == [("numbers", 2, 6, 0)]
    assert stream.sink("SELECT strategy, atomic, generation FROM consumer.groups") == [("Stream", "batch", 1)]
    stream.add()
    stream.run()
    assert stream.seen() == [0, 1, 2, *range(6, 12)]
    assert stream.left() == []


class Stopped(Exception):
    """Ends a query where a test wants it."""


def test_an_error_before_and_after_commit_and_a_restart(stream, monkeypatch):
    """Nothing is tidied up behind it, as when the driver is killed; that: test_recipes_pipeline.py."""

    # The effect is done, and the transaction is not: the number has moved with it, or neither has.
    def effect(cursor: psycopg.Cursor[Any], _: Any) -> None:
        cursor.execute(EFFECT)
        raise Stopped

    def before(rows: Any, batch_id: int) -> None:
        with pytest.raises(EffectFailed, match="Stopped"):
            stream.function(ConsumerJob("numbers", effect=effect))(rows, batch_id)
        raise Stopped

    def after(rows: Any, batch_id: int) -> None:
        stream.function()(rows, batch_id)
        raise Stopped

    stream.add()
    stream.run()
    stream.add()
    for ended, there in ((before, 3), (after, 6)):
        with monkeypatch.context() as patched:
            patched.setattr(StagingTables, "drop_made", lambda _: None)
            with pytest.raises(StreamingQueryException, match="Stopped"):
                stream.run(ended)
        assert stream.seen() == list(range(there)), ended
        assert len(stream.left()) == 1
    stream.add()
    stream.run()
    assert stream.seen() == list(range(9))
    assert stream.left() == []


def test_many_rows_in_a_batch_in_their_order(stream, small_batches):
    """The order is the stream's own: of each key the last row counts, which nothing else says."""
    stream.add(2_501)
    stream.add(1)
    setup = SEEN + "; CREATE TABLE IF NOT EXISTS told (at bigint GENERATED ALWAYS AS IDENTITY, n bigint, kind text)"

    def effect(cursor: psycopg.Cursor[Any], rows: Any) -> None:
        numbers = rows.column("n").to_pylist()
        cursor.executemany("INSERT INTO seen VALUES (%s)", [(n,) for n in numbers])
        cursor.execute("INSERT INTO told (n, kind) VALUES (%s, %s)", (len(numbers), str(rows.schema.field("at").type)))
        assert numbers == sorted(numbers)

    rows = stream.rows().withColumn("at", F.timestamp_seconds("n"))
    stream.run(stream.function(ConsumerJob("many", effect=effect, setup=setup)), rows)
    assert stream.seen() == list(range(2_502))
    assert stream.sink("SELECT n, kind FROM told ORDER BY at") == [
        (2_501, "timestamp[us, tz=UTC]"),
        (1, "timestamp[us, tz=UTC]"),
    ]


def test_insert_and_upsert_take_the_streams_columns(stream):
    setup = (
        "CREATE TABLE IF NOT EXISTS log (n int, name text, detail jsonb);"
        "CREATE TABLE IF NOT EXISTS latest (name text PRIMARY KEY, n int)"
    )
    effects = {"log": Insert("log"), "latest": Upsert("latest", ["name"], ["name", "n"], version="n")}
    groups = [stream.function(ConsumerJob(name, effect=one, setup=setup)) for name, one in effects.items()]

    def both(rows: Any, batch_id: int) -> None:
        for function in groups:
            function(rows, batch_id)

    name = F.format_string("k%d", F.col("n") % 2).alias("name")
    stream.add(5)
    stream.run(both, stream.rows().select("n", name, F.struct("n").alias("detail")))
    assert stream.sink("SELECT n, name, detail->>'n' FROM log ORDER BY n") == [
        (n, f"k{n % 2}", str(n)) for n in range(5)
    ]
    assert stream.sink("SELECT name, n FROM latest ORDER BY name") == [("k0", 4), ("k1", 3)]


def test_a_value_that_no_column_takes(stream):
    stream.add()
    rows = stream.rows().withColumn("text", F.lit("a\0b"))
    function = stream.function()
    with pytest.raises(StreamingQueryException, match="can't be staged"):
        stream.run(function, rows)
    assert isinstance(function.exception(), EffectFailed)
    assert stream.left() == []


def test_the_rate_source_and_a_users_session_settings(stream):
    """Any source; and neither time zone nor job group of the query are others afterwards."""
    found = []
    function = stream.function(ConsumerJob("rate", effect="INSERT INTO seen SELECT value FROM batch", setup=SEEN))

    def around(rows: Any, batch_id: int) -> None:
        context = rows.sparkSession.sparkContext
        names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
        before = [context.getLocalProperty(name) for name in names]
        zone = rows.sparkSession.conf.get("spark.sql.session.timeZone")
        function(rows, batch_id)
        after = [context.getLocalProperty(name) for name in names]
        found.append((zone, rows.sparkSession.conf.get("spark.sql.session.timeZone"), before == after))
        done.set()

    done = threading.Event()
    session = stream.spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    rows = session.readStream.format("rate").option("rowsPerSecond", 100).load()
    writing = rows.writeStream.foreachBatch(around).option("checkpointLocation", str(stream.checkpoint))
    query = writing.start()
    try:
        assert done.wait(120)
    finally:
        query.stop()
    assert set(found) == {("America/New_York", "America/New_York", True)}
    numbers = stream.seen()
    assert numbers == list(range(len(numbers)))


def test_outside_of_a_query_there_is_no_batch(stream):
    with pytest.raises(JobError, match="no query is running here"):
        stream.function()(stream.spark.range(3).withColumnRenamed("id", "n"), 0)


def test_sparks_own_kafka_source_with_repeats(bench, small_batches, tmp_path):
    """Batches of many messages, some sent twice; of each key the latest message counts, as the columns say."""
    count, most = 5_200, 2_600
    messages = [({"n": n}, f"k{n % 10}", n % 2, ided()) for n in range(count)]
    repeated = messages[::100]
    bench.produce([*messages, *repeated])
    read = bench.spark.readStream.format("kafka").options(
        **{
            "kafka.bootstrap.servers": bench.topics.bootstrap_servers,
            "subscribe": bench.topic,
            "startingOffsets": "earliest",
            "includeHeaders": "true",
            "maxOffsetsPerTrigger": str(most),
        }
    )
    rows = read.load().select(
        F.from_json(F.col("value").cast("string"), "n long").n.alias("n"),
        F.expr("CAST(filter(headers, h -> h.key = 'ce_id')[0].value AS STRING)").alias("message_id"),
        F.col("key").cast("string").alias("message_key"),
        F.col("topic").alias("message_topic"),
        F.col("partition").alias("message_part"),
        F.col("offset").alias("message_offset"),
        F.col("value").isNull().alias("message_tombstone"),
    )
    stream = Stream(bench.spark, bench.database.url, tmp_path)
    setup = "CREATE TABLE IF NOT EXISTS latest (k text PRIMARY KEY, n int)"
    job = ConsumerJob("kafka", effect=Upsert("latest", ["k"], {"k": "message_key", "n": "n"}), setup=setup)
    stream.run(stream.function(job), rows)
    assert stream.sink("SELECT k, n FROM latest ORDER BY k") == [(f"k{n}", count - 10 + n) for n in range(10)]
    assert stream.sink("SELECT batch_id, applied, duplicates FROM consumer.checkpoints") == [(2, count, len(repeated))]
    assert stream.sink("SELECT count(*) FROM consumer.processed_messages") == [(count,)]


def test_an_error_of_sparks_is_told_in_a_line(stream):
    """Spark's own text of an error in a job has pages; the cause is in the function's exception()."""
    broken = F.udf(lambda n: n // 0, "long")
    stream.add()
    function = stream.function()
    with pytest.raises(StreamingQueryException, match=r"EffectFailed.*ZeroDivisionError") as caught:
        stream.run(function, stream.rows().withColumn("n", broken("n")))
    assert len(str(caught.value)) < 4_000
    assert isinstance(function.exception(), EffectFailed)
    assert function.exception().__cause__ is not None
