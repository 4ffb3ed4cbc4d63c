"""Attempts that apply each partition in its own transaction, in the task that has its rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from outbox.consumer.errors import ConsumerUnavailable, CorruptRecords, EffectFailed
from outbox.consumer.letters import RetryRecord
from outbox.consumer.model import Partition
from spark_jobs.dedup.strategies import Dedup, Fingerprint, OffsetsOnly
from spark_jobs.driver.round_context import ENDING, OffsetRanges, RoundContext, RoundState
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.errors import InputCut
from spark_jobs.outcomes import RangeOutcome
from spark_jobs.spark import rows as spark
from spark_jobs.task import input as task_input
from spark_jobs.task import partition as task
from spark_jobs.task.partition import TaskPlan, TaskResult
from spark_jobs.task.reader import TooMuch

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Row

    from spark_jobs.spark.rows import Prepared
    from spark_jobs.task.incoming import Messages
    from spark_jobs.task.input import TaskInput


class PartitionAttempts:
    """Applies each partition in its own transaction; ``rounds`` decides what follows from the outcomes.

    each_alone    whether an outcome concerns its partition alone, and not the whole round.
    finds_behind  whether the tasks read Kafka's messages, and put aside those behind dead letters of earlier rounds.
                  A transform must not see those.
    """

    each_alone: Final = True

    def __init__(self, context: RoundContext) -> None:
        self._context = context
        self._job = context.job

    @property
    def finds_behind(self) -> bool:
        return self._context.task_decoder.columns is not None

    def attempt(self, planned: OffsetRanges, state: RoundState, generation: int) -> Mapping[Partition, TaskResult]:
        """Apply the ranges once. Raises Undecoded, and the errors that Spark's are translated into."""
        if self._context.task_decoder.columns is not None:
            return self._attempt_reading(self._context.task_decoder.columns, planned, state, generation)
        prepared = spark.prepare(self._job, self._context.source(planned, state.dead_offsets()))
        tasks = prepared.source.tasks(prepared.rows)
        plan = replace(self._context.plan(planned, state, generation, prepared.columns), tasks=tasks)
        results = _reports(prepared, functools.partial(task.apply_rows, plan))
        if not tasks:
            # Spark saw that no row passes the transform, and ran no task.
            self._context.require_decoded(prepared.source)
            return dict.fromkeys(planned.ranges, TaskResult(RangeOutcome.EMPTY))
        _require_reports(planned, results)
        return results

    def _attempt_reading(
        self, columns: Mapping[str, str], planned: OffsetRanges, state: RoundState, generation: int
    ) -> Mapping[Partition, TaskResult]:
        """Have each task read its range itself or, if there are few messages, do the tasks' work in the driver."""
        plan = replace(self._context.plan(planned, state, generation, columns), decoder=self._context.task_decoder)
        if self._few(planned) and (read := self._read_in_driver(plan)) is not None:
            return self._apply_in_driver(plan, read)
        apply = functools.partial(task.read_and_apply, plan)
        results = reported(self._context.by_ranges(planned, apply, task.REPORT).collect())
        _require_reports(planned, results)
        return results

    def _apply_in_driver(
        self, plan: TaskPlan, read: Mapping[Partition, TaskInput[Messages]]
    ) -> Mapping[Partition, TaskResult]:
        """Apply what was read: all of it in one transaction, or else each range in its own."""
        if len(read) > 1 and self._as_one and self._context.all_is_well(plan):
            again = {partition: messages.again() for partition, messages in read.items()}
            if (results := task.apply_all_in_one(plan, again)) is not None:
                return results
            self._context.keep_apart()
            # The messages are looked at once more.
            self._context.forget_times()
        return task.apply_in_driver(plan, read)

    @property
    def _as_one(self) -> bool:
        """Return whether it makes no difference to the effect whether ``batch`` has rows of several partitions.

        For SQL of the user's it may. The strategies are those that leave all rows, unless there is a repeat.
        """
        return (
            # At-most-once moves the offsets in transactions of their own.
            self._job.delivery == "exactly-once"
            and isinstance(self._job.effect, Insert | Upsert)
            and isinstance(self._job.strategy, Dedup | Fingerprint | OffsetsOnly)
        )

    def _read_in_driver(self, plan: TaskPlan) -> Mapping[Partition, TaskInput[Messages]] | None:
        """Read the ranges. None if tasks should: the messages are large, or one of several ranges can't be read."""
        try:
            return task.read_in_driver(plan, self._context.reading)
        except TooMuch:
            return None
        except (ConsumerUnavailable, CorruptRecords, InputCut):
            if len(plan.ranges) == 1:
                raise
            return None

    def _few(self, planned: OffsetRanges) -> bool:
        """Return whether starting Spark tasks would cost more than their work. Custom effects run in executors."""
        return isinstance(self._job.effect, str | Insert | Upsert) and self._context.driver_may_read(planned)

    def attempt_retry(self, letters: Sequence[RetryRecord], state: RoundState, generation: int) -> TaskResult:
        """Apply dead letters once, all in one transaction."""
        prepared = spark.prepare(self._job, self._context.letters(letters))
        spark.require_one_task(prepared.rows)
        plan = self._context.plan(OffsetRanges({}, {}), state, generation, prepared.columns)
        plan = replace(plan, max_dead=len(letters))
        ids = {one.place: (one.id, one.reason) for one in letters}
        results = _reports(prepared, functools.partial(task.report_retry, plan, ids))
        if not results:
            # Spark saw that the transform filters all rows, and ran no task. The letters are resolved all the same.
            self._context.require_decoded(prepared.source)
            return task.apply_retry(plan, ids, task_input.in_memory(()))
        (result,) = results.values()
        return result


def _reports(
    prepared: Prepared, run: Callable[[TaskInput[pa.RecordBatch]], Iterator[pa.RecordBatch]]
) -> dict[Partition, TaskResult]:
    return reported(spark.in_tasks(prepared.rows, lambda rows: run(task_input.from_spark(rows)), task.REPORT).collect())


def _require_reports(planned: OffsetRanges, results: Mapping[Partition, TaskResult]) -> None:
    """Raise ConsumerUnavailable if a task has not reported: nothing else shows whether its range was applied."""
    silent = sorted(planned.ranges.keys() - results.keys())
    if silent and not any(one.outcome in ENDING for one in results.values()):
        raise ConsumerUnavailable(f"a task did not report what became of {silent[0]}; the range is read again")


def reported(reports: Iterable[Row]) -> dict[Partition, TaskResult]:
    """Return the reports of an attempt's tasks by partition. Raises EffectFailed if two tasks name the same one."""
    results: dict[Partition, TaskResult] = {}
    # In the order of task.REPORT.
    for topic, part, outcome, *figures in reports:
        if (topic, part) in results:
            raise EffectFailed(
                f"{topic}-{part}: two tasks had rows of it, so one of them may have moved its offset over rows of the "
                "other: compare the sink with the topic, and set the group back with `outbox offsets` if need be"
            )
        results[topic, part] = TaskResult(RangeOutcome(outcome), *figures)
    return results
