"""A consumer group at offset 0, for what a task does without Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from outbox._app import migrate as db
from spark_jobs.dedup.strategies import Dedup
from spark_jobs.driver.planner import Range
from spark_jobs.task.partition import TaskPlan

TOPIC_ID = "topic-id"


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
        """Return the plan for a range of one partition."""
        return TaskPlan(
            url=self.url,
            schema="consumer",
            group="g",
            generation=other.pop("generation", 1),
            ranges={("t", part): Range(TOPIC_ID, start, start + size)},
            log_ends={},
            columns=columns,
            effect=effect,
            strategy=Dedup(),
            bisect=True,
            max_dead=10,
            **other,
        )
