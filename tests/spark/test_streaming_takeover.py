"""exactly_once with two queries, and with ids where a checkpoint is lost or old."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812
from stream_to_sink import JOB, stream, with_ids

from outbox.consumer.errors import Fenced
from spark_jobs.driver import streaming
from spark_jobs.postgres.staging import StagingTables

__all__ = ["stream"]

pytestmark = pytest.mark.spark


def test_rows_with_ids_are_known_when_an_older_checkpoint_goes_on(stream, tmp_path):
    """One that is lost: test_outbox_sink.py."""
    for older in (None, stream.checkpoint, None):
        stream.add()
        stream.run(rows=with_ids(stream.rows()))
        if older is not None:
            # The second batch is planned anew.
            shutil.rmtree(older)
            shutil.copytree(tmp_path / "older", older)
        elif not (tmp_path / "older").exists():
            shutil.copytree(stream.checkpoint, tmp_path / "older")
    assert stream.seen() == list(range(9))
    assert stream.sink("SELECT batch_id, applied, duplicates FROM consumer.checkpoints") == [(2, 9, 3)]


def test_with_ids_an_emptied_checkpoint_may_begin_behind_what_came_meanwhile(stream):
    """It has the query's id, and of a source like Kafka's the start is the end of the topic by default."""
    stream.add()
    stream.run(rows=with_ids(stream.rows()))
    for folder in ("offsets", "commits", "sources"):
        shutil.rmtree(stream.checkpoint / folder)
    stream.add()
    with pytest.raises(StreamingQueryException, match=r"CheckpointConflict.*was emptied"):
        stream.run(rows=with_ids(stream.rows()))
    assert stream.seen() == [0, 1, 2]
    # The plan of the batch that was refused stays the same.
    stream.run(stream.function(from_beginning=True), with_ids(stream.rows()))
    assert stream.seen() == list(range(6))


def test_rows_with_ids_need_one_each(stream):
    stream.add()
    rows = stream.rows().withColumn("message_id", F.lit(None).cast("string"))
    with pytest.raises(StreamingQueryException, match="message_id is NULL"):
        stream.run(rows=rows)
    assert stream.sink("SELECT count(*) FROM consumer.checkpoints") == [(0,)]


def test_the_younger_of_two_queries_goes_on(stream):
    """Another driver takes the group over while a batch of this one is between its first look and its transaction."""
    taken: list[int] = []

    def transform(rows: Any) -> Any:
        # Before this the number was looked at; the rows are staged, and the transaction comes, after it.
        if taken == [1]:
            taken.append(stream.function()._group.store.take_over())
        return rows

    older = stream.function(replace(JOB, transform=transform))
    stream.add()
    stream.add()

    def first(rows: Any, batch_id: int) -> None:
        older(rows, batch_id)
        taken.append(batch_id + 1)

    with pytest.raises(StreamingQueryException, match="Fenced: group numbers was taken over from generation 1"):
        stream.run(first)
    assert taken == [1, 2]
    assert isinstance(older.exception(), Fenced)
    assert stream.seen() == [0, 1, 2]
    assert stream.left() == []
    # A query that is started again takes the group over itself.
    stream.run(older)
    assert stream.seen() == list(range(6))


def test_a_take_over_between_staging_and_the_transaction(stream, monkeypatch):
    """The rows are staged, and the group is another's: nothing of them is applied."""
    real = streaming.stage

    def staged(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        stream.function()._group.store.take_over()
        return found

    monkeypatch.setattr(streaming, "stage", staged)
    stream.add()
    with pytest.raises(StreamingQueryException, match="Fenced"):
        stream.run()
    assert stream.seen() == []
    assert stream.sink("SELECT count(*) FROM consumer.checkpoints") == [(0,)]
    assert stream.left() == []


def test_a_take_over_before_staging(stream, monkeypatch):
    """The newer query drops the table that this one has created for its tasks."""
    real = StagingTables.create

    def created(tables: StagingTables, *arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        plan = real(tables, *arguments, **options)
        newer = stream.function()
        newer._staging_tables().drop_older(newer._group.store.take_over())
        return plan

    monkeypatch.setattr(StagingTables, "create", created)
    stream.add()
    with pytest.raises(StreamingQueryException, match="Fenced"):
        stream.run()
    assert stream.seen() == []
    assert stream.left() == []
