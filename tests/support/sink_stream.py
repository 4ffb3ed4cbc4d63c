"""A query into the format "outbox": what its tests share."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from sink_jobs import TROUBLE, Troubled
from stream_to_sink import Stream

from spark_jobs import register


class SinkStream(Stream):
    """A folder of files with numbers, as a stream into the sink by its format."""

    def start(  # type: ignore[override]
        self, rows: Any = None, job: str = "numbers", mode: str = "append", **options: str
    ) -> Any:
        """Start a query over what is there now; it ends by itself."""
        rows = self.rows() if rows is None else rows
        register(rows.sparkSession)
        rows.sparkSession.dataSource.register(Troubled)
        given = {
            "job": f"sink_jobs:{job}",
            "databaseUrl": self.url,
            "checkpointLocation": str(self.checkpoint),
            "patienceSeconds": "20",
        }
        given = {name: value for name, value in (given | options).items() if value}
        writing = rows.writeStream.format("troubled").outputMode(mode).options(**given)
        return writing.trigger(availableNow=True).start()

    def run(self, rows: Any = None, **options: str) -> None:  # type: ignore[override]
        """Run a query to its end. Raises what ended it."""
        assert self.start(rows, **options).awaitTermination(180)

    def trouble(self, what: str) -> None:
        """Plan a trouble."""
        with psycopg.connect(self.url) as connection:
            connection.execute(TROUBLE.encode())
            connection.execute("INSERT INTO trouble VALUES (%s)", (what,))

    def window_counts(self) -> list[tuple[Any, ...]]:
        return self.sink("SELECT k, number FROM window_counts ORDER BY k, number")

    def checkpoints(self) -> list[tuple[Any, ...]]:
        return self.sink("SELECT grp, batch_id, applied, duplicates FROM consumer.checkpoints")


@pytest.fixture
def stream(spark, outbox_postgres, tmp_path) -> SinkStream:
    return SinkStream(spark, outbox_postgres.url, tmp_path)
