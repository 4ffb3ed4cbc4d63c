"""The rows of a task: of one partition, of any text, staged by others."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from consumer_group import COLUMNS, TOPIC_ID, event_id, numbered
from counting import Counting
from psycopg import sql
from task_sink import EFFECT, WAYS, Sink, sink

from outbox.consumer.model import META_PLACE, Range, RejectedRecord
from spark_jobs.dedup import strategies
from spark_jobs.dedup.strategies import DedupStore
from spark_jobs.errors import InputCut, Reject
from spark_jobs.outcomes import EffectError, RejectedRecords
from spark_jobs.postgres import batch_table as applying
from spark_jobs.postgres.fitting import copy_fitting
from spark_jobs.task import partition as task
from spark_jobs.task.input import in_memory

__all__ = ["sink"]


def test_rows_of_two_partitions_are_no_tasks(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own task would find its range applied, and would leave out what it has itself."""
    run = task.apply_rows

    def mixed(plan: task.TaskPlan, batches: Any) -> Any:
        (rows,) = batches
        other = pa.array([1] * rows.num_rows, pa.int32())
        index = rows.schema.names.index("message_part")
        return run(plan, in_memory([rows, rows.set_column(index, "message_part", other)]))

    monkeypatch.setattr(task, "apply_rows", mixed)
    for sink.way in WAYS:
        report = sink.apply([(event_id(1), 1)])
        assert (report["outcome"], sink.numbers(), sink.position()) == ("broken", [], 0)
        assert "message_part is not 0: the transform mixes partitions" in report["detail"]


@pytest.mark.parametrize("way", ["batch", "direct"])
def test_ranges_that_can_not_be_applied_together_keep_the_session(
    sink: Sink, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """A moved offset and a repeat are no errors, and the ranges are tried one by one right after that."""
    decoder: Any = SimpleNamespace(copyable=lambda parts: parts, note_size=lambda *_: None)
    straight = sink.straight() if way == "direct" else None
    with Counting(sink.url) as proxy, caplog.at_level(logging.INFO):
        one = replace(sink, url=proxy.url).plan(0, 0, 1, COLUMNS, EFFECT, decoder=decoder, direct=straight)
        plan = replace(one, ranges={("t", part): Range(TOPIC_ID, 0, 1) for part in (0, 1)})

        def together(first: int) -> bool:
            read = {("t", part): in_memory([numbered([first + part], part=part)]) for part in (0, 1)}
            return task.apply_all_in_one(plan, read) is not None

        assert together(1)
        # The offsets have moved.
        assert not together(3)
        sink.run("UPDATE consumer.offsets SET next_offset = 0")
        # Number 2 is a repeat.
        assert not together(2)
        assert together(3)
        assert (proxy.opened, proxy.terminated) == (1, 0)
    assert caplog.messages == []
    assert sink.run("SELECT n FROM numbers ORDER BY n") == [(1,), (2,), (3,), (4,)]


@pytest.mark.parametrize("digits", [18, 38])
def test_a_text_that_postgres_has_not_is_found_in_any_column(sink: Sink, digits: int) -> None:
    """Numbers of more than 18 digits are sent as CSV, of which COPY converts whole lines."""
    batch = pa.RecordBatch.from_pydict(
        {
            "message_topic": ["t"] * 3,
            "message_part": pa.array([0] * 3, pa.int32()),
            "message_offset": pa.array(range(3), pa.int64()),
            "number": pa.array([1, 2, None], pa.decimal128(digits)),
            "message_key": ["k", None, "k"],
            "message_note": pa.Array.from_buffers(
                pa.string(), 3, pa.array([b"good", b"\xff\xfe", b"a\0b"], pa.binary()).buffers()
            ),
        }
    )
    columns = {
        "number": f"numeric({digits})",
        "message_key": "text",
        "message_note": "text",
        "message_offset": "bigint",
    }
    found: list[RejectedRecord] = []
    with psycopg.connect(sink.url) as connection:
        cursor = connection.cursor()
        cursor.execute(
            "CREATE TEMPORARY TABLE noted (number numeric, message_key text, message_note text, message_offset bigint)"
        )
        copy_fitting(cursor, sql.Identifier("noted"), columns, [batch], found, max_dead=2)
        assert cursor.execute("SELECT message_offset FROM noted").fetchall() == []
        assert sorted(record.place[2] for record in found) == [1, 2]
        assert all(record.error.startswith("column message_note: ") for record in found), found
        assert {record.sqlstate for record in found} == {"22021"}
        # Where they are more than may be put aside, one more is enough.
        with pytest.raises(RejectedRecords, match=r"^1 messages can't be applied"):
            copy_fitting(cursor, sql.Identifier("noted"), columns, [batch], [], max_dead=0)


@pytest.mark.parametrize("digits", [18, 38])
def test_what_can_not_be_encoded_is_found_with_its_column_and_state(sink: Sink, digits: int) -> None:
    """Numbers of more than 18 digits are sent as CSV, together with the whole row."""
    place = {
        "message_topic": ["t"] * 2,
        "message_part": pa.array([0] * 2, pa.int32()),
        "message_offset": pa.array(range(2), pa.int64()),
    }
    number = pa.array([1, 2], pa.decimal128(digits))
    # The day after the last one of the year 9999.
    at = pa.array([0, 2_932_897], pa.date32())
    name = pa.array([event_id(1), "no UUID"])
    for column, kind, values, state in (("at", "date", at, "22008"), ("name", "uuid", name, "22P02")):
        columns = {"number": f"numeric({digits})", column: kind}
        found: list[RejectedRecord] = []
        with psycopg.connect(sink.url) as connection:
            cursor = connection.cursor()
            cursor.execute(f"CREATE TEMPORARY TABLE noted (number numeric, {column} {kind})".encode())
            batch = pa.RecordBatch.from_pydict({**place, "number": number, column: values})
            copy_fitting(cursor, sql.Identifier("noted"), columns, [batch], found, max_dead=1)
        (record,) = found
        assert (record.place[2], record.sqlstate) == (1, state)
        assert record.error.startswith(f"column {column}")


def test_how_many_savepoints_a_copy_keeps(sink: Sink) -> None:
    """A session with more than 64 makes every other one slower. Those that are rolled back do not count."""
    columns = {"n": "integer", "message_offset": "bigint"}
    batches = [numbered([number], start=number) for number in range(100)]
    copying = {"columns": columns, "max_dead": 2}

    def kept(given: list[pa.RecordBatch]) -> tuple[int, list[tuple[int, int]], list[int]]:
        found: list[RejectedRecord] = []
        with Counting(sink.url) as proxy, psycopg.connect(proxy.url) as connection:
            cursor = connection.cursor()
            cursor.execute("CREATE TEMPORARY TABLE noted (n int CHECK (n >= 0), message_offset bigint)")
            copy_fitting(cursor, sql.Identifier("noted"), batches=given, found=found, **copying)
            there = cursor.execute("SELECT count(*), count(DISTINCT xmin::text) FROM noted").fetchall()
        released = [one for one in proxy.statements if one.startswith(b"RELEASE")]
        undone = [one for one in proxy.statements if one.startswith(b"ROLLBACK TO")]
        return len(released) - len(undone), there, [record.place[2] for record in found]

    assert kept(batches) == (1, [(100, 1)], [])
    batches[70] = numbered([1, -1, 2], start=70)
    assert kept(batches) == (0, [(0, 0)], [71])


STAGED = {"line": "text", "n": "numeric(6,2)", **{name: kind for name, kind in COLUMNS.items() if name != "n"}}


def staged(
    sink: Sink, columns: dict[str, str], rows: list[tuple[str, str, int, str]], effect: Any, **limits: Any
) -> None:
    """Apply rows (task, line, offset, n) as executors have staged them."""
    listed = ", ".join(f"{name} {kind}" for name, kind in {**columns, **META_PLACE}.items())
    sink.run(
        f"DROP TABLE IF EXISTS staged; CREATE TABLE staged ({listed}, outbox_batch_staged_by text, "
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

    assert list(task.with_number(reading, given([7]))) == []
    with pytest.raises(InputCut, match=f"a task got {len(numbers)} numbers of ranges instead of one"):
        list(task.with_number(reading, given(numbers)))
    assert read == [7]
