"""The rows of a task: of one partition, of any text, staged by others."""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from consumer_group import COLUMNS, event_id
from psycopg import sql
from task_sink import WAYS, Sink, sink

from outbox.consumer.model import RejectedRecord
from spark_jobs.dedup import strategies
from spark_jobs.dedup.strategies import DedupStore
from spark_jobs.errors import InputCut, Reject
from spark_jobs.outcomes import EffectError, RejectedRecords
from spark_jobs.postgres import batch_table as applying
from spark_jobs.postgres.unfit import without_unfit
from spark_jobs.task import partition as task
from spark_jobs.task.input import in_memory

__all__ = ["sink"]


def test_rows_of_two_partitions_are_no_tasks(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own task would find its range applied, and would leave out what it has itself."""
    run = task.run

    def mixed(plan: task.TaskPlan, batches: Any) -> Any:
        (rows,) = batches
        other = pa.array([1] * rows.num_rows, pa.int32())
        index = rows.schema.names.index("message_part")
        return run(plan, in_memory([rows, rows.set_column(index, "message_part", other)]))

    monkeypatch.setattr(task, "run", mixed)
    for sink.way in WAYS:
        report = sink.apply([(event_id(1), 1)])
        assert (report["outcome"], sink.numbers(), sink.position()) == ("broken", [], 0)
        assert "message_part is not 0: the transform mixes partitions" in report["detail"]


def test_a_shorter_range_that_was_committed_meanwhile_is_no_take_over(sink: Sink) -> None:
    """A task that its driver had given up on: the round is planned anew instead of ending the job."""
    sink.apply([(event_id(1), 1)])
    assert sink.apply([(event_id(1), 1), (event_id(2), 2)])["outcome"] == "moved"
    assert sink.numbers() == [1]


def test_a_text_that_postgres_has_not_is_found_in_any_column(sink: Sink) -> None:
    columns = {**COLUMNS, "message_note": "text"}
    batch = pa.RecordBatch.from_pydict(
        {
            "message_topic": ["t"] * 3,
            "message_part": pa.array([0] * 3, pa.int32()),
            "message_offset": pa.array(range(3), pa.int64()),
            "message_note": pa.Array.from_buffers(
                pa.string(), 3, pa.array([b"good", b"\xff\xfe", b"a\0b"], pa.binary()).buffers()
            ),
        }
    )
    found: list[RejectedRecord] = []
    texts = [name for name, kind in applying.textual(columns).items() if kind == "text" and name in batch.schema.names]
    (left,) = without_unfit([batch], texts, found, max_dead=2)
    assert left.column("message_offset").to_pylist() == [0]
    assert sorted(record.place[2] for record in found) == [1, 2]
    # Where they are more than may be put aside, one more is enough.
    with pytest.raises(RejectedRecords, match=r"^1 messages can't be applied"):
        list(without_unfit([batch], texts, [], max_dead=0))


STAGED = {"line": "text", "n": "numeric(6,2)", **{name: kind for name, kind in COLUMNS.items() if name != "n"}}


def staged(
    sink: Sink, columns: dict[str, str], rows: list[tuple[str, str, int, str]], effect: Any, **limits: Any
) -> None:
    """Apply rows (task, line, offset, n) as executors have staged them."""
    listed = ", ".join(f"{name} text" for name in columns if name not in applying.META_PLACE)
    sink.run(
        f"DROP TABLE IF EXISTS staged; CREATE TABLE staged ({listed}, message_topic text, message_part int, "
        "message_offset bigint, outbox_batch_staged_by text, "
        "outbox_batch_staged_at bigint GENERATED ALWAYS AS IDENTITY)"
    )
    with psycopg.connect(sink.url) as connection:
        cursor = connection.cursor()
        cursor.executemany(
            "INSERT INTO staged (outbox_batch_staged_by, line, message_offset, n, message_topic, message_part) "
            "VALUES (%s, %s, %s, %s, 't', 0)",
            rows,
        )
        options = {"bisect": True, "max_dead": 2, **limits}
        one = applying.BatchTable(
            cursor, DedupStore("consumer", "g"), columns, strategies.Natural(["n"]), effect, **options
        )
        one.take(sql.Identifier("staged"), ["b", "a"], len(rows))
        one.apply()


def test_rows_that_were_staged_come_in_their_order(sink: Sink) -> None:
    """That of the messages; or that of the transform's result, where the rows are no messages any more."""
    seen: list[list[str]] = []

    def look(_: object, rows: pa.Table) -> None:
        seen.append(rows["line"].to_pylist())

    # Wide and narrow ones: a table fills the gaps that wide ones leave with what comes later.
    wide = [
        ("ab"[number % 3 % 2], f"{number}-" + "x" * (number * 379 % 1900), number // 2, "1") for number in range(600)
    ]
    shuffled = random.Random(7).sample(wide, len(wide))
    staged(sink, STAGED, shuffled, look)
    assert [int(line.partition("-")[0]) // 2 for line in seen[0]] == [number // 2 for number in range(600)]
    no_messages = {"line": "text", "n": "numeric(6,2)"}
    staged(sink, no_messages, shuffled, look)
    assert seen[1] == [line for task in "ba" for by, line, *_ in shuffled if by == task]

    def refuse(*_: object) -> None:
        raise Reject("not today", "some id")

    with pytest.raises(EffectError, match=r"some id \(not today\).*of no one message"):
        staged(sink, no_messages, shuffled[:2], refuse)


def test_what_does_not_fit_of_staged_rows_is_found_message_by_message(sink: Sink) -> None:
    rows = [("a", "x", 0, "1"), ("b", "x", 1, "?"), ("a", "y", 1, "?"), ("a", "z", 1, "?"), ("b", "x", 2, "12345")]
    with pytest.raises(RejectedRecords) as caught:
        staged(sink, STAGED, rows, "SELECT 1")
    assert [record.place[2] for record in caught.value.found] == [1, 2]
    # All of them fail together and none of them alone: then they are all there, once.
    sink.run(
        "CREATE SEQUENCE tries; CREATE DOMAIN later AS text CHECK (nextval('tries') > 1); CREATE TABLE lines (n bigint)"
    )
    good = [("a", "x", number, "1") for number in range(5)]
    staged(sink, {**STAGED, "line": "later"}, good, "INSERT INTO lines SELECT message_offset FROM batch")
    assert sink.run("SELECT n FROM lines ORDER BY n") == [(number,) for number in range(5)]


@pytest.mark.parametrize("numbers", [[], [3, 4]])
def test_a_task_that_is_not_told_its_number_reads_nothing(monkeypatch: pytest.MonkeyPatch, numbers: list[int]) -> None:
    """No number is no empty range: what came after it would be stepped over."""
    monkeypatch.setattr(task, "from_spark", lambda batches: batches)
    read: list[int] = []

    def reading(number: int) -> Any:
        read.append(number)
        return iter(())

    def given(of: list[int]) -> list[pa.RecordBatch]:
        return [pa.RecordBatch.from_pydict({"n": pa.array([number], pa.int64())}) for number in of]

    assert list(task.of_number(reading, given([7]))) == []
    with pytest.raises(InputCut, match=f"a task got {len(numbers)} numbers of ranges instead of one"):
        list(task.of_number(reading, given(numbers)))
    assert read == [7]
