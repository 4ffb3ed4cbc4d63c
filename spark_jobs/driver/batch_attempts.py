"""Rounds with ``atomic="batch"``: executors stage rows, and one transaction of the driver applies all partitions.

| step | where     | what                                                                                    |
|------|-----------|-----------------------------------------------------------------------------------------|
| 1    | executors | copy rows into a staging table of this round, each attempt of a task under its own name |
| 2    | driver    | BEGIN; move all offsets; count the rows of the attempts that reported; dedup            |
| 3    | executors | only with a shuffle: transform the messages that are not repeats, into a second table   |
| 4    | driver    | write the counts; run the effect; COMMIT; drop the round's tables                       |

| crash point                         | result                                                                         |
|-------------------------------------|--------------------------------------------------------------------------------|
| the driver before COMMIT            | rolled back, offsets too; the next one stages again and drops what is left     |
| COMMIT sent, answer lost            | the next round reads the offsets, which have moved                             |
| the group was taken over            | before a table is created: Fenced; after that no offset moves: Fenced          |

The staging tables have a crash table of their own (postgres/staging.py).
The first table is created in a transaction that holds the group's row, the second while the round's transaction holds
the offsets, so a superseded driver leaves no table that its successor does not find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import psycopg

from outbox.consumer.errors import ConsumerUnavailable, JobError
from outbox.consumer.letters import RetryRecord
from outbox.consumer.model import MessageRef, Partition, RetryRequest
from spark_jobs.dedup.strategies import Natural, Version
from spark_jobs.driver.round_context import OffsetRanges, RoundContext, RoundState
from spark_jobs.driver.staged_rows import StagedRows, stage
from spark_jobs.effects.mapped import Upsert
from spark_jobs.job import META
from spark_jobs.outcomes import RangeOutcome
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.postgres.batch_table import BatchTable
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.sink import PostgresSink, PostgresSinks, forgiven, translated
from spark_jobs.postgres.staging import StagingTables
from spark_jobs.sink import Move
from spark_jobs.spark import rows as spark
from spark_jobs.spark.rows import Offsets, Prepared, Source
from spark_jobs.task.input import NO_INPUT
from spark_jobs.task.partition import RangeStopped, TaskResult, stopping

# Each message is one row here, because the transform has not run yet.
_READ: Final = """
CREATE TEMPORARY TABLE outbox_batch_read ON COMMIT DROP AS
SELECT message_topic, message_part, message_offset FROM batch"""
_REPEATS: Final = """
SELECT message_topic, message_part, pg_catalog.array_agg(message_offset ORDER BY message_offset)
  FROM outbox_batch_read AS r
 WHERE NOT EXISTS (
       SELECT FROM batch WHERE (batch.message_topic, batch.message_part, batch.message_offset)
                             = (r.message_topic, r.message_part, r.message_offset))
 GROUP BY 1, 2"""


class BatchAttempts:
    """Applies the ranges of a round in one transaction of the driver. Its interface is that of PartitionAttempts."""

    each_alone: Final = False
    finds_behind: Final = False

    def __init__(self, context: RoundContext, store: PostgresGroupStore, sinks: PostgresSinks) -> None:
        self._context = context
        self._job = context.job
        self._sinks = sinks
        self._tables = StagingTables(store)

    def attempt(self, planned: OffsetRanges, state: RoundState, generation: int) -> dict[Partition, TaskResult]:
        dead = state.dead_offsets()

        def source(without: Offsets) -> Source:
            offsets = {part: [*dead.get(part, ()), *without.get(part, ())] for part in planned.ranges}
            return self._context.source(planned, offsets)

        try:
            return self._apply(source, planned, state, generation, {})
        except RangeStopped as stop:
            return planned.as_one(TaskResult(stop.outcome, detail=stop.detail))
        finally:
            self._tables.drop_made()

    def attempt_retry(self, letters: Sequence[RetryRecord], state: RoundState, generation: int) -> TaskResult:
        def source(without: Offsets) -> Source:
            out = {(*partition, offset) for partition, offsets in without.items() for offset in offsets}
            return self._context.letters([one for one in letters if one.place not in out])

        ids = {one.place: (one.id, one.reason) for one in letters}
        try:
            results = self._apply(source, OffsetRanges({}, {}), state, generation, ids)
        except RangeStopped as stop:
            return TaskResult(stop.outcome, detail=stop.detail)
        finally:
            self._tables.drop_made()
        read, fresh = sum(one.read for one in results.values()), sum(one.fresh for one in results.values())
        return TaskResult(RangeOutcome.APPLIED, read, fresh)

    def _apply(
        self,
        source: Callable[[Offsets], Source],
        planned: OffsetRanges,
        state: RoundState,
        generation: int,
        retried: Mapping[MessageRef, RetryRequest],
    ) -> dict[Partition, TaskResult]:
        """Stage, then apply. Returns the report on each partition. Raises RangeStopped.

        source  returns the messages without those at some offsets.
        """
        self._tables.drop_older(generation)
        prepared = spark.prepare(self._job, source({}))
        shuffled = prepared.moved
        most = max(self._job.max_dead, len(retried))
        staged, columns = self._stage_first(prepared, generation, most)
        # With a shuffle the effect applies to the transform's result; see _transformed.
        effect = "" if shuffled else self._sinks.effect(columns)
        sink = replace(self._sinks.prepared({}, generation), columns=columns, effect=effect)
        with stopping("the round"), sink.transaction("the round", NO_INPUT, most=most, here=True) as into:
            cursor = into.cursor
            # The transaction stays open while executors work for it.
            cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            for partition, range_ in sorted(planned.ranges.items()):
                if not into.fence(partition, range_):
                    raise ConsumerUnavailable(f"{partition[0]}-{partition[1]}: the range was applied meanwhile")
            if retried and not into.hold(retried):
                raise RangeStopped(RangeOutcome.ALREADY, "")
            applying = sink.applying(cursor, most)
            applying.take(staged.table, staged.names, staged.rows)
            read = applying.per_partition()
            before = applying.places() if retried else set()
            if shuffled:
                cursor.execute(_READ)
            applying.reduce(suspect=bool(retried or self._context.suspicious), forgiven=forgiven(retried))
            fresh = applying.per_partition()
            taken = before
            if fresh and shuffled:
                repeats = {(topic, part): offsets for topic, part, offsets in cursor.execute(_REPEATS)}
                applying = self._transformed(cursor, source(repeats), sink, most)
                if planned.ranges:
                    self._require_all(source(repeats), sum(fresh.values()))
                taken = _taken(applying, before, repeats)
            if retried:
                into.resolve_as(fresh, taken)
            for partition, range_ in sorted(planned.ranges.items()):
                counts = read.get(partition, 0), fresh.get(partition, 0)
                into.move(Move(partition, range_, planned.log_ends.get(partition), *counts, state.letters(partition)))
            if fresh:
                into.run(applying)
        committed = into.now()
        # One average for all topics of the round. With a shuffle there is none: the staged rows have no content.
        average = 0 if shuffled or not staged.rows else staged.size / staged.rows
        return {
            partition: TaskResult(
                RangeOutcome.APPLIED,
                read.get(partition, 0),
                fresh.get(partition, 0),
                size=int(average * read.get(partition, 0)),
                committed=committed,
            )
            for partition in (planned.ranges or read)
        }

    def _transformed(self, cursor: psycopg.Cursor[Any], source: Source, sink: PostgresSink, most: int) -> BatchTable:
        """Run the transform over the messages that are not repeats, and replace them in ``batch`` by its result."""
        prepared = spark.prepare(self._job, source)
        columns = prepared.columns
        plan = self._tables.create(columns, sink.generation, check=sink.at_most_once)
        staged = stage(prepared.rows, plan, max_dead=most, messages=True)
        with_effect = replace(sink, columns=columns, effect=self._sinks.effect(columns, "shuffled"), bisect=False)
        cursor.execute("DROP TABLE batch")
        applying = with_effect.applying(cursor, most)
        applying.take(staged.table, staged.names, staged.rows)
        return applying

    def _require_all(self, source: Source, messages: int) -> None:
        """Raise ConsumerUnavailable unless the transform has read all messages whose ids are about to be remembered.

        If they are all there now, the transform has read them all: compaction removes messages and brings none back.
        """
        if self._context.compacted(self._job.topics) and (left := source.rows.count()) != messages:
            raise ConsumerUnavailable(
                f"Kafka compacted a topic between two reads: of {messages} messages {left} are left; the round is "
                "retried"
            )

    def _check_shuffled(self, columns: Mapping[str, str]) -> None:
        """Raise JobError for what can't work after a shuffle, before anything is staged."""
        if isinstance(self._job.strategy, Natural | Version):
            raise JobError(
                "strategy: Natural and Version look at messages; with a shuffle there are none left to look at"
            )
        if isinstance(self._job.effect, Upsert) and self._job.effect.deletes:
            raise JobError(
                "Upsert: deletes does not go with a transform that shuffles, whose joins may leave out tombstones; "
                "join in an effect of your own SQL"
            )
        self._sinks.effect(columns, "shuffled")

    def _stage_first(self, prepared: Prepared, generation: int, most: int) -> tuple[StagedRows, Mapping[str, str]]:
        """Stage the rows that the round's transaction begins with. Returns their columns too.

        Raises RangeStopped or Undecoded.
        """
        rows, columns = prepared.rows, prepared.columns
        if prepared.moved:
            self._check_shuffled(columns)
            # Only the columns of META are staged: dedup needs no others, and the content is read again.
            rows, columns = spark.copyable(prepared.source.rows.select(*META, PROBLEM))
        with stopping("the round"), translated("the round"):
            plan = self._tables.create(columns, generation, check=True)
            staged = stage(rows, plan, required=self._job.reducing.required, max_dead=most, messages=True)
        if not staged.names:
            self._context.require_decoded(prepared.source)
        return staged, columns


def _taken(applying: BatchTable, messages: set[MessageRef], repeats: Offsets) -> set[MessageRef]:
    """Return the messages that were repeats or that the transform kept.

    Rows that do not name their messages stand for all messages: if there is any such row, all were kept, else none.
    """
    if not messages:
        return messages
    repeated = {(*partition, offset) for partition, offsets in repeats.items() for offset in offsets}
    if applying.placed:
        return repeated | applying.places()
    return repeated | (messages if applying.count() else set())
