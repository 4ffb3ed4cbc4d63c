"""A query whose batches are applied exactly once: what its tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import functions as F  # noqa: N812

from spark_jobs import ConsumerJob, exactly_once
from spark_jobs.driver.streaming import ExactlyOnce

SEEN = "CREATE TABLE IF NOT EXISTS seen (n bigint)"
EFFECT = "INSERT INTO seen SELECT n FROM batch ORDER BY n"
JOB = ConsumerJob("numbers", effect=EFFECT, setup=SEEN)


class Stream:
    """A folder of files with numbers, as a stream with a checkpoint; each file is a batch."""

    def __init__(self, spark: Any, url: str, folder: Path) -> None:
        self.spark = spark
        self.url = url
        self.source = folder / "source"
        self.source.mkdir()
        self.checkpoint = folder / "checkpoint"
        self.next = 0

    def add(self, count: int = 3, columns: str = "n") -> None:
        """Write one more file: a batch of so many numbers."""
        numbers = range(self.next, self.next + count)
        self.next += count
        # Renamed, so that Spark never finds half of it.
        path = self.source.parent / f"{self.next:08}.csv"
        path.write_text("".join(f"{n}\n" for n in numbers))
        # Spark takes the oldest first.
        os.utime(path, (1_700_000_000 + self.next, 1_700_000_000 + self.next))
        path.rename(self.source / path.name)

    def rows(self) -> Any:
        read = self.spark.readStream.schema("n long").option("maxFilesPerTrigger", 1)
        return read.csv(str(self.source))

    def function(self, job: ConsumerJob = JOB, **options: Any) -> ExactlyOnce:
        return exactly_once(job, database_url=self.url, **options)

    def start(self, function: Callable[[Any, int], None], rows: Any = None) -> Any:
        """Start a query over what is there now; it ends by itself."""
        writing = (self.rows() if rows is None else rows).writeStream.foreachBatch(function)
        return writing.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()

    def run(self, function: Callable[[Any, int], None] | None = None, rows: Any = None) -> None:
        """Run a query to its end. Raises what ended it."""
        assert self.start(function or self.function(), rows).awaitTermination(120)

    def sink(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(query.encode()).fetchall()

    def seen(self) -> list[int]:
        return [n for (n,) in self.sink("SELECT n FROM seen ORDER BY n")]

    def left(self) -> list[tuple[Any, ...]]:
        """The staging tables."""
        return self.sink("SELECT relname FROM pg_class WHERE relname LIKE 'staged%'")


def with_ids(rows: Any) -> Any:
    """Add ids without a time in them."""
    return rows.withColumn("message_id", F.concat(F.lit("00000000-0000-8000-8000-"), F.lpad(F.col("n"), 12, "0")))


@pytest.fixture
def stream(spark, outbox_postgres, tmp_path) -> Stream:
    return Stream(spark, outbox_postgres.url, tmp_path)
