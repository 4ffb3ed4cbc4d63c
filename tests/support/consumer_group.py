"""A consumer group at offset 0, for what a task does without Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import psycopg

from outbox._app import migrate as db
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


@dataclass
class ConsumerGroup:
    """Group ``g`` of topic ``t``, in generation 1."""

    url: str

    def run(self, query: str) -> list[Any]:
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(query)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def begin(self, parts: Iterable[int]) -> None:
        """Make the tables, and the group at the beginning of these partitions."""
        db.upgrade_consumer(self.url)
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
