"""A consumer group at offset 0, for what a task does without Spark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import psycopg
import pyarrow as pa

from outbox.consumer.model import Range
from spark_jobs.dedup.strategies import Dedup
from spark_jobs.postgres.sink import PostgresSink
from spark_jobs.task.partition import TaskPlan

TOPIC_ID = "topic-id"
COLUMNS = {
    "n": "integer",
    "message_id": "uuid",
    "message_topic": "text",
    "message_part": "integer",
    "message_offset": "bigint",
    "message_key": "text",
    "message_type": "text",
    "message_time": "timestamptz",
    "message_tombstone": "boolean",
}
"""Of rows with a number, as they come to a task: the types in Postgres."""
NOON = dt.datetime(2026, 3, 4, 12, tzinfo=dt.UTC)


def event_id(number: int, when: dt.datetime = NOON) -> str:
    """A UUIDv7 of a time."""
    milliseconds = f"{int(when.timestamp() * 1000):012x}"
    return f"{milliseconds[:8]}-{milliseconds[8:]}-7000-8000-{number:012x}"


def rows_of(
    size: int, start: int = 0, *, part: int = 0, when: dt.datetime = NOON, **columns: Sequence[Any] | None
) -> pa.RecordBatch:
    """Return rows of messages at the offsets from ``start`` on. ``columns``: of the payload, or in place of others."""
    given = {name: values for name, values in columns.items() if values is not None}
    return pa.RecordBatch.from_pydict(
        {
            "message_id": [event_id(number) for number in range(start, start + size)],
            "message_topic": ["t"] * size,
            "message_part": pa.array([part] * size, pa.int32()),
            "message_offset": pa.array(range(start, start + size), pa.int64()),
            "message_key": ["k"] * size,
            "message_type": ["x"] * size,
            "message_time": pa.array([when] * size, pa.timestamp("us", "UTC")),
            "message_tombstone": [False] * size,
            **given,
        }
    )


def numbered(numbers: Sequence[int], ids: Sequence[str] | None = None, **given: Any) -> pa.RecordBatch:
    """Return rows with these numbers; an id is made of its number if not given."""
    made = {"n": pa.array(numbers, pa.int32()), "message_id": ids or [event_id(number) for number in numbers]}
    return rows_of(len(numbers), **{**made, **given})


@dataclass
class ConsumerGroup:
    """Group ``g`` of topic ``t``, in generation 1."""

    url: str

    def run(self, query: str) -> list[Any]:
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(query)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def begin(self, parts: Iterable[int]) -> None:
        """Make the group, at the beginning of these partitions."""
        self.run("INSERT INTO consumer.groups (grp, owner) VALUES ('g', 'test')")
        for part in parts:
            self.run(
                "INSERT INTO consumer.offsets (grp, topic, part, topic_id, next_offset, generation) "
                f"VALUES ('g', 't', {part}, '{TOPIC_ID}', 0, 1)"
            )

    def plan(self, part: int, start: int, size: int, columns: Mapping[str, str], effect: str, **other: Any) -> TaskPlan:
        """Return the plan for a range of one partition. ``other`` are fields of the plan, or of its sink."""
        of_sink = {field.name: other.pop(field.name) for field in fields(PostgresSink) if field.name in other}
        defaults = {"generation": 1, "strategy": Dedup(), "bisect": True}
        sink = PostgresSink(self.url, "consumer", "g", columns=columns, effect=effect, **{**defaults, **of_sink})
        plan = {"log_ends": {}, "required": sink.strategy.required, "max_dead": 10, **other}
        return TaskPlan(sink=sink, ranges={("t", part): Range(TOPIC_ID, start, start + size)}, **plan)
