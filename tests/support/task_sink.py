"""A group that stands at offset 0 and the task that applies messages to it, without Spark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from consumer_group import COLUMNS, NOON, ConsumerGroup, numbered

from spark_jobs.dedup.strategies import Dedup
from spark_jobs.effects.mapped import Insert
from spark_jobs.postgres import direct_copy as direct
from spark_jobs.postgres.direct_copy import DirectCopy
from spark_jobs.task import partition as task
from spark_jobs.task.feed import rejected_from
from spark_jobs.task.input import TaskInput, in_memory

EFFECT = "INSERT INTO numbers SELECT n, message_offset FROM batch ORDER BY message_offset"
WAYS = ("batch", "direct", "lenient")
"""Through ``batch``, ids by COPY; straight into the sink's table; and through ``batch`` with ids by SQL."""


@dataclass
class Sink(ConsumerGroup):
    """A group that stands at offset 0 in generation 1.

    told   the outcomes of all reports.
    given  how a task gets its rows.
    """

    way: str = "batch"
    given: Callable[[list[pa.RecordBatch]], TaskInput] = in_memory
    told: list[str] = field(default_factory=list)

    def apply(
        self,
        messages: list[tuple[str, int]],
        start: int = 0,
        *,
        part: int = 0,
        generation: int = 1,
        when: dt.datetime = NOON,
        keys: list[str] | None = None,
        types: list[str] | None = None,
        **plan: Any,
    ) -> dict[str, Any]:
        """Apply messages (id, n) from an offset on, as a task does, and again as the driver would. Gives the report."""
        numbers, ids = [n for _, n in messages], [name for name, _ in messages]
        rows = numbered(numbers, ids, start=start, part=part, when=when, message_key=keys, message_type=types)
        straight = "effect" not in plan and isinstance(plan.get("strategy", Dedup()), Dedup)
        given = {
            "columns": COLUMNS,
            "effect": EFFECT,
            "generation": generation,
            "lenient": frozenset({("t", part)} if self.way == "lenient" else ()),
            "direct": self.straight() if self.way == "direct" and straight else None,
            **plan,
        }
        made = self.plan(part, start, len(messages), **given)
        (report,) = task.apply_rows(made, self.given([rows]))
        found: dict[str, Any] = report.to_pylist()[0]
        self.told.append(found["outcome"])
        if found["outcome"] == "fallback":
            (report,) = task.apply_rows(replace(made, slow=frozenset({("t", part)})), self.given([rows]))
            found = report.to_pylist()[0]
        return found

    def straight(self) -> DirectCopy:
        columns = COLUMNS | {"n": "integer", "message_offset": "bigint"}
        effect = Insert("numbers", {"n": "n", "place": "message_offset"})
        with psycopg.connect(self.url) as connection:
            found = direct.direct_for(connection.cursor(), effect, Dedup(), columns, list(columns))
        assert found is not None
        return found

    def numbers(self) -> list[int]:
        return [n for (n,) in self.run("SELECT n FROM numbers ORDER BY place, n")]

    def position(self) -> int:
        ((position,),) = self.run("SELECT next_offset FROM consumer.offsets WHERE part = 0")
        return int(position)


@pytest.fixture
def sink(outbox_postgres) -> Sink:
    made = Sink(outbox_postgres.url)
    made.begin([0, 1])
    made.run("CREATE TABLE numbers (n int CHECK (n < 100), place bigint)")
    return made


def outcomes(report: dict[str, Any]) -> list[tuple[int, str]]:
    assert report["outcome"] == "rejected", report
    return [(record.place[2], record.reason) for record in rejected_from(report["detail"])]
