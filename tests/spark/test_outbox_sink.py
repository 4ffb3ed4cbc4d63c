"""The format "outbox": whatever dies, each batch of a query is in the sink once; and what can't be known is refused."""

from __future__ import annotations

import shutil
from typing import Any

import psycopg
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType
from sink_stream import SinkStream, stream
from stream_to_sink import Stream, with_ids

from outbox.consumer.errors import JobError
from outbox.errors import ConfigurationError
from spark_jobs import OutboxSinkSource
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.staging import SHARED, StagePlan, StagingTables, create_shared, new_name

__all__ = ["stream"]

pytestmark = pytest.mark.spark


def test_whatever_dies_and_a_restart(stream: SinkStream):
    """One query, which goes on where each trouble has ended it: each of its batches is applied and counted once."""

    def trouble_came(there: int) -> None:
        assert (stream.sink("SELECT * FROM trouble"), stream.seen()) == ([], list(range(there)))

    def ended(what: str, there: int, why: str | None = None) -> None:
        stream.trouble(what)
        with pytest.raises(StreamingQueryException, match=why):
            stream.run()
        trouble_came(there)

    for _ in range(3):
        stream.add()
    # After its copy a task's rows are staged twice. A session that ends is another try of the commit; what is there
    # then is not applied again.
    for what in ("task dies before", "task dies after", "session ends", "commit runs twice"):
        stream.trouble(what)
    # A query's name comes among the options.
    stream.run(queryName="numbered")
    trouble_came(9)
    assert stream.checkpoints() == [("numbers", 2, 9, 0)]
    # A run takes the group over once, in its first batch.
    assert stream.sink("SELECT strategy, atomic, generation FROM consumer.groups") == [("Stream", "batch", 1)]
    assert stream.left() == []
    stream.add()
    ended("commit dies within", 9)
    ended("effect fails", 9)
    # As Postgres leaves an unlogged table after a crash.
    ended("rows are lost", 9, "StagedRowsLost: 3 rows were staged and 0 are there")
    a_row_that_the_sink_refuses(stream)
    assert stream.checkpoints() == [("numbers", 2, 9, 0)]
    ended("commit dies after", 12)
    stream.add()
    ended("commit of batch 4 fails after", 15)
    one_way_replaces_the_other(stream)
    assert stream.checkpoints() == [("numbers", 6, 21, 0)]


def a_row_that_the_sink_refuses(stream: SinkStream) -> None:
    """It ends the query before its batch, the fourth."""
    with psycopg.connect(stream.url) as connection:
        connection.execute("ALTER TABLE seen ADD CHECK (n <> 10)")
    with pytest.raises(StreamingQueryException, match=r"EffectFailed: batch 3: .*seen_n_check"):
        stream.run(job="plain")
    assert stream.seen() == list(range(9))
    with psycopg.connect(stream.url) as connection:
        connection.execute("ALTER TABLE seen DROP CONSTRAINT seen_n_check")


def one_way_replaces_the_other(stream: SinkStream) -> None:
    """A query goes on with exactly_once, and back: the checkpoint is Spark's, and both store of it the same."""
    stream.add()
    assert Stream.start(stream, stream.function()).awaitTermination(120)
    assert stream.seen() == list(range(18))
    # What a driver of the group has staged is left to it: it may have taken the group over just after a COMMIT.
    ((generation,),) = stream.sink("SELECT generation::int FROM consumer.groups")
    store = PostgresGroupStore(stream.url, "consumer", "numbers", "test")
    plan = StagingTables(store).create({"n": "bigint"}, generation, check=False)
    stream.add()
    stream.run()
    assert stream.seen() == list(range(21))
    assert stream.sink("SELECT generation FROM consumer.groups") == [(generation + 1,)]
    assert stream.left() == [(plan.table,)]


def test_rows_of_an_upstream_that_fails_in_the_middle(stream: SinkStream, small_batches):
    """The writer's input ends as if all was well, and its COPY is committed; the task fails, and none of it is read."""

    @F.udf("long")
    def once(n):
        from pyspark import TaskContext

        if n == 2_500 and TaskContext.get().attemptNumber() == 0:
            raise ValueError("in the middle")
        return n

    stream.add(3_001)
    stream.run(stream.rows().withColumn("n", once("n")), job="plain")
    assert stream.seen() == list(range(3_001))
    assert stream.left() == []


def test_an_older_and_a_lost_checkpoint_are_refused(stream: SinkStream, tmp_path: Any):
    stream.add()
    stream.run()
    shutil.copytree(stream.checkpoint, tmp_path / "older")
    stream.add()
    stream.run()
    stream.add()
    shutil.rmtree(stream.checkpoint)
    shutil.copytree(tmp_path / "older", stream.checkpoint)
    # Batch 1 again by its number, and by its place in the source; but Spark has planned it anew.
    with pytest.raises(StreamingQueryException, match=r"CheckpointConflict.*older copy"):
        stream.run()
    shutil.rmtree(stream.checkpoint)
    with pytest.raises(StreamingQueryException, match=r"CheckpointConflict.*a new one") as caught:
        stream.run()
    assert stream.seen() == list(range(6))
    # They did not end the query that has the group.
    assert stream.sink("SELECT generation FROM consumer.groups") == [(2,)]
    state = str(caught.value).partition("accept='")[2].partition("'")[0]
    with psycopg.connect(stream.url) as connection:
        connection.execute("TRUNCATE seen")
    stream.run(accept=state)
    assert stream.seen() == list(range(9))
    assert stream.sink("SELECT what, details->>'instead of' FROM consumer.audit") == [("checkpoint accepted", state)]


def test_rows_with_ids_are_known_when_a_checkpoint_is_lost(stream: SinkStream):
    stream.add()
    stream.run(with_ids(stream.rows()), fromBeginning="true")
    shutil.rmtree(stream.checkpoint)
    stream.add(4)
    twice = with_ids(stream.rows()).withColumn("n", F.explode(F.array(F.col("n"), F.col("n") + 100)))
    stream.run(twice, fromBeginning="true")
    # A function is given what is left of them, too.
    assert stream.seen() == list(range(7))
    assert stream.checkpoints() == [("numbers", 1, 7, 3 + 7)]


def test_an_overlapping_start_on_one_checkpoint_sets_nothing_back(stream: SinkStream, tmp_path: Any):
    """Another Spark has read a batch before it was committed, and applies it after two later ones."""

    def run() -> None:
        stream.run(with_ids(stream.rows()))

    def ended() -> None:
        stream.trouble("commit fails after")
        with pytest.raises(StreamingQueryException, match="Planned"):
            run()

    mine, other = stream.checkpoint, tmp_path / "other"
    stream.add()
    ended()
    shutil.copytree(mine, other)
    for _ in range(2):
        stream.add()
    run()
    assert stream.checkpoints() == [("numbers", 2, 9, 0)]
    # The tasks of the query that is ahead are filling it.
    table = new_name("numbers", SHARED)
    with psycopg.connect(stream.url) as connection:
        create_shared(connection, StagePlan(stream.url, "consumer", table, "numbers", {"n": "bigint"}))
    stream.checkpoint = other
    generation = stream.sink("SELECT generation FROM consumer.groups")
    ended()
    # It applies nothing, so it does not take the group over.
    assert stream.sink("SELECT generation FROM consumer.groups") == generation
    assert stream.checkpoints() == [("numbers", 2, 9, 0)]
    assert stream.left() == [(table,)]
    stream.checkpoint = mine
    stream.add()
    run()
    assert stream.seen() == list(range(12))
    assert stream.left() == []


def test_a_value_that_no_column_takes(stream: SinkStream):
    stream.add()
    with pytest.raises(StreamingQueryException, match="EffectFailed: batch 0: a row can't be staged"):
        stream.run(stream.rows().withColumn("text", F.lit("a\0b")))
    assert stream.left() == []


def test_types_and_a_users_session_settings(stream: SinkStream):
    """Nested values are jsonb, and times are instants, whatever zone and Arrow types the session has."""
    conf = stream.spark.conf
    theirs = {"spark.sql.session.timeZone": "America/New_York", "spark.sql.execution.arrow.useLargeVarTypes": "true"}
    before = {name: conf.get(name) for name in theirs}
    rows = stream.rows().select(
        F.col("n").cast("int").alias("n"),
        F.timestamp_seconds("n").alias("at"),
        F.expr("CAST(n / 4 AS decimal(10,2))").alias("price"),
        F.col("n").cast("string").cast("binary").alias("raw"),
        F.struct(F.timestamp_seconds("n").alias("at"), F.lit('ä"').alias("text")).alias("detail"),
        F.array(F.lit("x"), F.lit(None)).alias("list"),
        F.create_map(F.lit("k"), F.col("n")).alias("named"),
    )
    stream.add(2)
    for name, value in theirs.items():
        conf.set(name, value)
    try:
        stream.run(rows, job="typed")
    finally:
        for name, value in before.items():
            conf.set(name, value)
    found = stream.sink("SELECT n, at = to_timestamp(n), price::text, raw, detail, list, named FROM typed ORDER BY n")
    assert found == [
        (
            *(n, True, f"{n / 4:.2f}", str(n).encode()),
            {"at": f"1970-01-01T00:00:0{n}.000000Z", "text": 'ä"'},
            *(["x", None], {"k": n}),
        )
        for n in range(2)
    ]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"keepDays": "many"}, "option keepDays: must be a number, not 'many'"),
        ({"fromBeginning": "yes"}, "option fromBeginning: must be true or false, not 'yes'"),
        ({"job": "sink_jobs:moving"}, "transform: apply it to the stream"),
        ({"job": "sink_jobs:none_such"}, "there is no 'none_such' in sink_jobs"),
        ({"jobs": "x"}, "option jobs: the format outbox has job, checkpointLocation"),
    ],
)
def test_options_that_can_not_work(options: dict[str, str], why: str):
    """What a query says of them: below."""
    given = {"job": "sink_jobs:plain", "checkpointLocation": "/tmp", "databaseUrl": "postgresql://"} | options
    with pytest.raises((JobError, ConfigurationError), match=why):
        OutboxSinkSource(given).streamWriter(StructType().add("n", "long"), overwrite=False)


def test_a_query_with_such_options(stream: SinkStream, tmp_path: Any):
    """Spark's default location, which is not among the options, is none that the sink knows."""
    stream.add()
    stream.spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "default"))
    try:
        with pytest.raises(StreamingQueryException, match="JobError: option checkpointLocation: must be given"):
            stream.run(checkpointLocation="")
    finally:
        stream.spark.conf.unset("spark.sql.streaming.checkpointLocation")
    assert stream.checkpoints() == []
