"""Rounds with ``atomic="batch"``: executors stage rows, one transaction of the driver applies all partitions at once.

| step | where     | what                                                                                     |
|------|-----------|------------------------------------------------------------------------------------------|
| 1    | executors | rows into the group's staging table, each attempt of a task under a name of its own      |
| 2    | driver    | BEGIN; all offsets move; the rows of the attempts that reported are counted; dedup       |
| 3    | executors | only with a shuffle: the transform, over what is no repeat; its result is staged as well |
| 4    | driver    | counts; the effect; COMMIT; what was staged is deleted                                   |

| crash point                         | result                                                                       |
|-------------------------------------|------------------------------------------------------------------------------|
| a task before or after its COMMIT   | Spark tries again under another name; what the first one left is never read  |
| the driver before COMMIT            | rolled back, offsets too; the next one stages anew and drops what is left    |
| COMMIT sent, answer lost            | the next round reads the offsets, which have moved                           |
| Postgres crashes                    | a staging table is unlogged and empty then; the count differs: tried again   |
| the group was taken over            | no offset moves: Fenced; older staging tables go with the take-over          |
"""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from spark_jobs import session as spark
from spark_jobs import task, task_input
from spark_jobs.applying import Applying, Broken, Culprit, Culprits, textual, without_unfit
from spark_jobs.copying import copy_csv
from spark_jobs.decoding import PROBLEM
from spark_jobs.effects import PLACED, Upsert
from spark_jobs.errors import ConsumerUnavailable, JobError
from spark_jobs.job import META
from spark_jobs.letters import Retried
from spark_jobs.planner import Partition
from spark_jobs.rounds import Rounds, Span, State, Told
from spark_jobs.strategies import Natural, Place, Version
from spark_jobs.task import Feed, Stop, TaskPlan, Wish, culprits_text, stopping
from spark_jobs.task_input import NO_INPUT, TaskInput

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_REPORT: Final = "staged_by string, rows long, culprits string, broken string"
_OLDER: Final = r"""
SELECT relname FROM pg_class
 WHERE relkind = 'r' AND relnamespace = to_regnamespace(%(schema)s)
   AND relname LIKE %(like)s AND split_part(relname, '_', 3)::bigint < %(generation)s"""


@dataclass(frozen=True, slots=True)
class _StagePlan:
    """What an executor needs to stage rows."""

    url: str
    schema: str
    table: str
    group: str
    columns: tuple[str, ...]
    required: tuple[str, ...]
    max_dead: int


@dataclass(frozen=True, slots=True)
class _Staged:
    """What the executors staged: under which names, and how many rows."""

    table: sql.Identifier
    names: list[str]
    rows: int


class BatchRounds(Rounds):
    """Applies rounds, each in one transaction of the driver."""

    _prepared: int | None = None

    @functools.cached_property
    def _made(self) -> dict[str, dict[str, str]]:
        """The staging tables that this driver has made, with their columns."""
        return {}

    def _stand_behind(self, state: State, span: Span, keys: Mapping[tuple[str, bytes], None]) -> None:
        # Spark reads, and a transform must not see these messages: they are looked for beforehand.
        self._put_behind(state, span, keys)

    def _attempt(self, span: Span, state: State, generation: int) -> dict[Partition, Told]:
        def rows(without: Iterable[Place]) -> DataFrame:
            return spark.chosen(self._source(span), self._job, {*state.dead, *without})

        try:
            return self._apply(rows, span, state, generation, {})
        except Stop as stop:
            self._clear_away(stop, generation)
            # One transaction, one answer: the first partition gives it, the others are tried again with it.
            told = dict.fromkeys(span.ranges, Told("culprits", detail="[]"))
            return told | {min(span.ranges): Told(stop.outcome, detail=stop.detail)}

    def _attempt_retry(self, rows: DataFrame, letters: Sequence[Retried], state: State, generation: int) -> Told:
        def chosen(without: Iterable[Place]) -> DataFrame:
            return spark.chosen(rows, self._job, without)

        ids = {one.place: (one.id, one.reason) for one in letters}
        try:
            told = self._apply(chosen, Span({}, {}), state, generation, ids)
        except Stop as stop:
            self._clear_away(stop, generation)
            return Told(stop.outcome, detail=stop.detail)
        return Told("applied", sum(one.read for one in told.values()), sum(one.fresh for one in told.values()))

    def _apply(
        self,
        rows: Callable[[Iterable[Place]], DataFrame],
        span: Span,
        state: State,
        generation: int,
        retried: Mapping[Place, Wish],
    ) -> dict[Partition, Told]:
        """Stage, then apply. Gives what became of each partition. Raises Stop."""
        self._prepare(generation)
        messages = spark.decoded(rows(()), self._job)
        result = spark.shaped(messages, self._job)
        shuffled = self._job.transform is not None and spark.moves_rows(result, messages)
        if shuffled:
            self._check_shuffled(result)
        # With a shuffle only who the messages are: that is what dedup needs, and their content is read again.
        first = messages.select(*META, PROBLEM) if shuffled else result
        first, columns = spark.copyable(first)
        most = max(self._job.max_dead, len(retried))
        with stopping("the round"):
            staged = self._stage(first, columns, f"{generation}_m", self._job.strategy.required, most)
        plan = self._plan(span, state, generation, {} if shuffled else columns)
        plan = replace(plan, columns=columns, max_dead=most)
        name = f"outbox driver {self._job.group}"
        with stopping("the round"), task.transaction(self._url, name, NO_INPUT) as cursor:
            # The transaction stays open while executors work for it.
            cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            for partition in sorted(span.ranges):
                if not task.move(cursor, plan, partition):
                    raise ConsumerUnavailable(f"{partition[0]}-{partition[1]}: the range was applied meanwhile")
            if retried and not task.hold(cursor, plan, retried):
                return {}
            applying = plan.applying(cursor)
            self._take(applying, staged)
            read = applying.per_partition()
            before = applying.places() if shuffled or retried else set()
            applying.reduce(suspect=bool(retried or plan.suspects), forgiven=task.forgiven(retried))
            fresh = applying.per_partition()
            taken = before
            if fresh and shuffled:
                repeats = before - applying.places()
                applying = self._transformed(cursor, rows(repeats), plan, generation)
                if span.ranges:
                    self._require_all(rows(repeats), len(before - repeats))
                if retried:
                    taken = repeats | _kept(applying, before)
            if retried:
                task.resolve(cursor, plan, retried, fresh, taken)
            _settle(cursor, plan, read, fresh)
            if fresh:
                applying.apply()
        self._empty(staged)
        return {
            partition: Told("applied", read.get(partition, 0), fresh.get(partition, 0))
            for partition in (span.ranges or read)
        }

    def _transformed(self, cursor: psycopg.Cursor[Any], rows: DataFrame, plan: TaskPlan, generation: int) -> Applying:
        """Run the transform over what is fresh, and put its result in the place of the messages."""
        result, columns = spark.copyable(spark.shaped(spark.decoded(rows, self._job), self._job))
        staged = self._stage(result, columns, f"{generation}_r", (), plan.max_dead)
        upsert = self._job.effect if isinstance(self._job.effect, Upsert) else None
        if upsert:
            upsert.note(cursor)
        with_effect = replace(plan, columns=columns, effect=self._effect_after(columns), bisect=False)
        cursor.execute("DROP TABLE batch")
        applying = with_effect.applying(cursor)
        self._take(applying, staged)
        if upsert and (lost := upsert.missed(cursor, tuple(columns), self._store.column_types(upsert.table))):
            raise Broken(
                f"the transform has left out the tombstone {lost}, and with it the delete of a row that is there: join "
                "from the left, and keep the rows with message_tombstone in every filter"
            )
        return applying

    def _require_all(self, rows: DataFrame, messages: int) -> None:
        """Raise ConsumerUnavailable unless the transform has read all messages whose ids are about to be remembered.

        Of what is there now still it has: compaction takes messages away and brings none back.
        """
        if self._reading.compacted(self._job.topics) and (left := rows.count()) != messages:
            raise ConsumerUnavailable(
                f"Kafka compacted a topic between two reads: of {messages} messages {left} are left; the round is "
                "tried again"
            )

    def _check_shuffled(self, result: DataFrame) -> None:
        """Raise JobError for what can't work after a shuffle, before anything is staged."""
        if isinstance(self._job.strategy, Natural | Version):
            raise JobError(
                "strategy: Natural and Version look at messages; with a shuffle there are none left to look at"
            )
        self._effect_after(spark.copyable(result)[1])

    def _effect_after(self, columns: Mapping[str, str]) -> Any:
        """Return the effect for what a shuffle has left. Its rows may still be messages, and then have their order."""
        effect = self._job.effect
        needed = PLACED | {"message_key"} if isinstance(effect, Upsert) and effect.deletes else PLACED
        return self._effect(columns, placed=set(columns) >= needed, shuffled=True)

    def _take(self, applying: Applying, staged: _Staged) -> None:
        taken = applying.take(staged.table, staged.names)
        if taken != staged.rows:
            raise ConsumerUnavailable(
                f"{staged.rows} rows were staged and {taken} are there: Postgres has crashed meanwhile, which empties "
                "a staging table"
            )

    def _stage(
        self, rows: DataFrame, columns: Mapping[str, str], suffix: str, required: tuple[str, ...], max_dead: int
    ) -> _Staged:
        """Stage rows. Raises Culprits for messages, and Broken for rows of no one message, that can't be applied."""
        table = f"{self._stem()}_{suffix}"
        as_text = textual(columns)
        fields = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in as_text.items()
        )
        named = sql.Identifier(self._schema, table)
        with self._store.transaction() as connection:
            # Columns may be other ones in each round, as after a pivot.
            if self._made.get(table) != as_text:
                connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(named))
            # Each time: a younger driver drops what the older ones have. That the group is its own, the offsets say.
            connection.execute(
                sql.SQL(
                    "CREATE UNLOGGED TABLE IF NOT EXISTS {} ({}, outbox_batch_staged_by text, "
                    "outbox_batch_staged_at bigint GENERATED ALWAYS AS IDENTITY)"
                ).format(named, fields)
            )
            # Of attempts that ended without COMMIT; what a task that nobody waits for still adds, the next one takes.
            connection.execute(sql.SQL("DELETE FROM {}").format(named))
        self._made[table] = as_text
        plan = _StagePlan(self._url, self._schema, table, self._job.group, tuple(columns), required, max_dead)
        reports = rows.mapInArrow(lambda batches: _stage(plan, task_input.from_spark(batches)), _REPORT).collect()
        broken = [row.broken for row in reports if row.broken]
        if broken:
            raise Broken(broken[0])
        culprits = [culprit for row in reports for culprit in task.culprits_from(row.culprits)]
        if culprits:
            raise Culprits(sorted(culprits, key=lambda culprit: culprit.place)[: max_dead + 1])
        return _Staged(
            named,
            [row.staged_by for row in reports],
            sum(row.rows for row in reports),
        )

    def _prepare(self, generation: int) -> None:
        """Drop what older generations of the group have left."""
        if self._prepared != generation:
            self._drop_before(generation)
            self._prepared = generation

    def _clear_away(self, stop: Stop, generation: int) -> None:
        """Drop what this driver has staged, when the group was taken over: its successor has looked already."""
        if stop.outcome == "fenced":
            self._drop_before(generation + 1)

    def _drop_before(self, generation: int) -> None:
        with self._store.transaction() as connection:
            values = {
                "schema": sql.Identifier(self._schema).as_string(connection),
                "like": f"{self._stem()}\\_%",
                "generation": generation,
            }
            for (name,) in connection.execute(_OLDER, values).fetchall():
                # The driver whose they are may be dropping them too.
                connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(self._schema, name)))

    def _empty(self, staged: _Staged) -> None:
        # Gone when a younger driver has dropped it: the next transaction here finds that out, and says so.
        with self._store.transaction() as connection, suppress(psycopg.errors.UndefinedTable):
            connection.execute(
                sql.SQL("DELETE FROM {} WHERE outbox_batch_staged_by = ANY(%s)").format(staged.table), (staged.names,)
            )

    def _stem(self) -> str:
        return f"staged_{hashlib.sha256(self._job.group.encode()).hexdigest()[:12]}"


def _settle(
    cursor: psycopg.Cursor[Any], plan: TaskPlan, read: Mapping[Partition, int], fresh: Mapping[Partition, int]
) -> None:
    for partition in sorted(plan.ranges):
        task.settle(cursor, plan, partition, read=read.get(partition, 0), fresh=fresh.get(partition, 0))


def _kept(applying: Applying, messages: set[Place]) -> set[Place]:
    """Return which messages a transform has kept; of rows that do not say which they are made of, all or none."""
    if applying.placed:
        return applying.places()
    return messages if applying.count() else set()


def _stage(plan: _StagePlan, batches: TaskInput[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Be the function of mapInArrow: COPY one partition's rows, under a name that no other attempt has."""
    import pyarrow as pa

    name = uuid.uuid4().hex
    feed = Feed(plan.required, batches, plan.max_dead)
    found: list[Culprit] = []
    texts = [name for name, kind in textual(dict.fromkeys(plan.columns, "text")).items() if kind == "text"]
    table = sql.Identifier(plan.schema, plan.table)

    def named() -> Iterator[pa.RecordBatch]:
        for batch in without_unfit(feed, texts, found, plan.max_dead):
            yield batch.append_column("outbox_batch_staged_by", pa.array([name] * batch.num_rows, pa.string()))

    broken = ""
    try:
        with task.transaction(plan.url, f"outbox consumer {plan.group}", batches) as cursor:
            copy_csv(cursor, table, [*plan.columns, "outbox_batch_staged_by"], named())
            found += feed.found
            if found:
                cursor.connection.rollback()
    except Culprits as error:
        # More than may become dead letters: what comes after them was not read.
        found = list(error.found)
    except Broken as error:
        # Another try of the task would find the same: the driver is to say so.
        broken = str(error)
    yield pa.RecordBatch.from_pydict(
        {
            "staged_by": [name],
            "rows": pa.array([0 if found else feed.rows], pa.int64()),
            "culprits": [culprits_text(found[: plan.max_dead + 1])],
            "broken": [broken],
        }
    )
