"""exactly_once on a stream with state: see stream_state.py."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from pyspark.errors import StreamingQueryException
from stream_state import KEYS, SIZE, counted, of_batches, stateful
from stream_to_sink import Stream

from spark_jobs import ConsumerJob
from spark_jobs.driver import stream_group

__all__ = ["stateful"]

pytestmark = pytest.mark.spark

SETUP = "CREATE TABLE IF NOT EXISTS told (k bigint, number bigint)"
EFFECT = "INSERT INTO told SELECT k, number FROM batch"
JOB = ConsumerJob("counts", effect=EFFECT, setup=SETUP)


class Counts(Stream):
    """A stream whose batches change the counts of all keys."""

    def add(self, count: int = SIZE, columns: str = "n") -> None:
        super().add(count, columns)

    def run(self, function: Any = None, rows: Any = None) -> None:
        writing = counted(self.rows()).writeStream.foreachBatch(function or self.function(JOB)).outputMode("update")
        writing = writing.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True)
        assert writing.start().awaitTermination(180)

    def told(self) -> list[tuple[Any, ...]]:
        return self.sink("SELECT k, number FROM told ORDER BY k, number")


@pytest.fixture
def counts(stateful, outbox_postgres, tmp_path) -> Counts:
    return Counts(stateful, outbox_postgres.url, tmp_path)


class Stopped(Exception):
    """Ends a query where a test wants it."""


def test_a_query_that_ends_between_commit_and_sparks_own(counts):
    """With its second batch: it comes again and is known; its state must be written all the same.

    A driver that is killed there, in a query of the format "outbox": test_recipes_pipeline.py.
    """
    function = counts.function(JOB)

    def around(rows: Any, batch_id: int) -> None:
        function(rows, batch_id)
        if batch_id == 1:
            raise Stopped

    for _ in range(3):
        counts.add()
    with pytest.raises(StreamingQueryException, match="Stopped"):
        counts.run(around)
    assert counts.told() == of_batches(2)
    counts.run()
    assert counts.told() == of_batches(3)
    # And the checkpoint that this leaves is one that a query can start from.
    counts.add()
    counts.run()
    assert counts.told() == of_batches(4)
    assert counts.sink("SELECT batch_id, applied FROM consumer.checkpoints") == [(3, 4 * KEYS)]
    assert counts.left() == []


def test_a_batch_that_is_tried_again(counts, monkeypatch):
    """The sink is away before and after COMMIT: the next try of the batch must not break the checkpoint either."""
    real = stream_group.transaction
    troubles: list[str] = []

    def lose(when: str) -> None:
        if troubles[:1] == [when]:
            troubles.pop(0)
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    class Losing:
        def __init__(self, *arguments: Any) -> None:
            self.inner = real(*arguments)

        def __enter__(self) -> Any:
            lose("before")
            return self.inner.__enter__()

        def __exit__(self, *error: object) -> Any:
            self.inner.__exit__(*error)
            if error[0] is None:
                lose("after")

    function, planned = counts.function(JOB), ["before", "before", "after"]

    def around(rows: Any, batch_id: int) -> None:
        if batch_id == 1:
            troubles.extend(planned)
            planned.clear()
        function(rows, batch_id)

    for _ in range(2):
        counts.add()
    monkeypatch.setattr(stream_group, "transaction", Losing)
    counts.run(around)
    assert planned == troubles == []
    assert counts.told() == of_batches(2)
    counts.add()
    counts.run()
    assert counts.told() == of_batches(3)
