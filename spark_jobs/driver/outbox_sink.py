"""The streaming format "outbox": a Python data source whose tasks stage rows, and whose commit applies them once.

    register(spark)
    rows.writeStream.format("outbox").option("job", "package.module:job").option("checkpointLocation", …).start()

Spark runs ``write`` in the tasks, and then ``commit`` in a Python process of the driver, at least once for each batch
and with the same number after a restart. ``commit`` reads from the checkpoint what Spark has planned for the batch, and
moves the sink to it by compare-and-swap in the transaction of the effect; ``checkpoints`` decides what may follow.
Everything here runs in processes that Spark starts, so it needs no driver on this machine: Spark Connect suffices.

| what happens                                  | what the sink has, and what follows                                  |
|-----------------------------------------------|----------------------------------------------------------------------|
| a task dies before or after its COPY's COMMIT | Spark runs it again under another name; only rows whose name has     |
| or runs twice; an executor dies               | come with a message to the driver are read                           |
| an upstream step fails in the middle          | the task fails: its message does not come, though its rows may have  |
| killed, or an error, before COMMIT            | the batch before: started again, Spark runs the same one; applied    |
| killed, or an error, after COMMIT             | this batch: Spark runs it again, for its state too; nothing applied  |
| the driver dies, the commit's process not yet | one of both transactions moves the sink, the other finds it moved    |
| the answer to COMMIT is lost                  | read again on a new connection: applied or not                       |
| a server is away                              | waited for (``patienceSeconds``), then ConsumerUnavailable           |
| Postgres crashes while rows are staged        | the staging table is empty: StagedRowsLost; start the query again    |
| two queries of one group at once              | of one checkpoint: Spark ends one, each batch is applied once; of    |
|                                               | two: CheckpointConflict                                              |
| ``abort``                                     | drops the staging table, and no more: COMMIT may have succeeded      |
"""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from outbox._clients import credentials
from outbox.consumer import connections
from outbox.consumer.errors import EffectFailed, JobError, shown
from outbox.consumer.patience import Patience
from outbox.consumer.statements import statement
from outbox.errors import OutboxError
from spark_jobs.driver.checkpoints import QUERY_ID, Batch, planned_in
from spark_jobs.driver.server_wait import wait_for_servers
from spark_jobs.driver.staged_rows import StagedRows
from spark_jobs.driver.stream_group import StreamGroup, StreamOptions, failing, report, stream_options, without_causes
from spark_jobs.errors import StagedRowsLost
from spark_jobs.job import ConsumerJob, find_job
from spark_jobs.payloads.json_output import json_text
from spark_jobs.postgres import lock_monitor, staging
from spark_jobs.postgres.copying import Unfit, copy_rows
from spark_jobs.postgres.sink import transaction
from spark_jobs.spark.rows import stream_columns
from spark_jobs.task.feed import Feed
from spark_jobs.task.input import NO_INPUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

N = TypeVar("N", int, float)

_OPTIONS: Final = (
    *("job", "checkpointLocation", "group", "accept", "fromBeginning", "patienceSeconds"),
    *("databaseUrl", "consumerSchema", "keepDays"),
)
# DataStreamWriter.queryName passes the name on.
_SPARKS: Final = {"queryname"}
_OWNER: Final = "SELECT generation FROM {groups} WHERE grp = %(grp)s AND owner = %(owner)s"
# Spark's local property of a batch's tasks: the run of the query, whose job group they are.
_RUN: Final = "spark.jobGroup.id"


def register(spark: SparkSession) -> None:
    """Make the format "outbox" known to a session, which may be one of Spark Connect."""
    spark.dataSource.register(OutboxSinkSource)


class OutboxSinkSource(DataSource):
    """The format "outbox" of ``writeStream``. Its options:

    job                 the ConsumerJob as MODULE:NAME, for the driver to import. ``batch`` has the stream's columns;
                        what ``exactly_once`` says of a job holds, but there is no ``transform``.
    checkpointLocation  as Spark has it: a path that the driver's Python can read, or a URI that pyarrow.fs knows.
    group               instead of the job's.

    accept, fromBeginning, patienceSeconds, databaseUrl, consumerSchema, keepDays: the arguments of ``exactly_once``.
    """

    @classmethod
    def name(cls) -> str:
        return "outbox"

    def streamWriter(self, schema: StructType, overwrite: bool) -> OutboxWriter:  # noqa: ARG002, N802  Spark's
        """Return the writer. Raises JobError and ConfigurationError for options, a job or columns that can't work.

        overwrite  the output mode is complete: ``batch`` has all rows of the result, and the effect decides.
        """
        job, where, _ = _requested(self.options)
        columns, form = stream_columns(schema)
        group = job.group
        plan = staging.StagePlan(where.url, where.schema, staging.new_name(group, staging.SHARED), group, columns)
        return OutboxWriter(dict(self.options), plan, form, where.patience, credentials.chosen())


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task has staged: rows with ``name`` in a staging table. ``broken``: why they can't be applied."""

    table: str
    name: str
    rows: int
    broken: str
    query_id: str | None
    run_id: str | None


@dataclass
class OutboxWriter(DataSourceStreamArrowWriter):
    """Stages rows in tasks, and applies them in the driver: each of these calls is in another process.

    options   as Spark has them: tasks can't be given the job, whose module they need not have.
    form      the rows' columns as Arrow types.
    provider  of credentials: workers load no settings.
    """

    options: Mapping[str, str]
    plan: staging.StagePlan
    form: pa.Schema
    patience: float
    provider: str | None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """COPY a task's rows under a name that only this attempt uses.

        The end of the rows is no proof that all of them came. If not, Spark fails the task and drops this message.
        """
        credentials.use(self.provider)
        plan, session = self.plan, lock_monitor.names(self.plan.group)[1]
        name, broken = uuid.uuid4().hex, ""
        feed = Feed((), (self._formed(batch) for batch in iterator), 0)
        batches = iter(feed)
        try:
            if (first := next(batches, None)) is not None:
                self._create_table(session)
                with transaction(plan.url, session, NO_INPUT) as cursor:
                    rows = staging.named(name, itertools.chain([first], batches))
                    copy_rows(cursor, plan.identifier, plan.staged_columns, rows)
        except (Unfit, psycopg.DataError) as error:
            # A retry of the task would fail in the same way, so the commit raises it.
            broken = f"a row can't be staged: {error if isinstance(error, Unfit) else shown(error)}"
        task = TaskContext.get()
        query, run = (None if task is None else task.getLocalProperty(key) for key in (QUERY_ID, _RUN))
        return Staged(plan.table, name, feed.rows, broken, query, run)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """Apply a batch, unless it was applied before. Raises the error that ends the query."""
        try:
            self._commit(_staged(messages), batchId)
        except OutboxError as error:
            bare = without_causes(error)
        else:
            return
        raise bare

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803  Spark's
        """Drop what was staged. The batch itself may have been applied: the error may have come after COMMIT."""
        self._drop(_group(tuple(self.options.items()), ""), _staged(messages))

    def _commit(self, staged: list[Staged], batch_id: int) -> None:
        _, _, checkpoint = _requested(self.options)
        batch = planned_in(checkpoint, batch_id, staged[0].run_id or "")
        _require_query(batch, staged, checkpoint)
        group = _group(tuple(self.options.items()), f"query {batch.query_id}, run {batch.run_id}")

        def attempt() -> bool | StagedRowsLost:
            try:
                return _apply(group, batch, self.plan, staged)
            except StagedRowsLost as error:
                # Another attempt here would not find them either: Spark has to run the tasks again.
                return error

        applied = group.until_servers_answer(batch, attempt)
        if isinstance(applied, StagedRowsLost):
            raise applied
        if applied:
            # Also the tables of attempts that died: no other task's rows are needed.
            staging.drop_shared(group.store)
        else:
            # Not all tables of the group: another run of the query may be ahead, and its tasks are writing.
            self._drop(group, staged)

    def _drop(self, group: StreamGroup, staged: list[Staged]) -> None:
        for table in {one.table for one in staged}:
            staging.drop(group.store, sql.Identifier(self.plan.schema, table))

    def _create_table(self, session: str) -> None:
        def create() -> None:
            with connections.transaction(self.plan.url, session, reset=False) as connection:
                staging.create_shared(connection, self.plan)

        wait_for_servers(create, Patience(self.patience), report, then="start the query again")

    def _formed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the columns of ``batch`` in the form that COPY accepts, whatever the session's settings are."""
        columns = []
        for field in self.form:
            column = batch.column(field.name).cast(field.type)
            if field.name == "message_tombstone":
                # As in rows.copyable.
                column = column.fill_null(False)
            columns.append(json_text(column) if self.plan.columns[field.name] == "jsonb" else column)
        return pa.RecordBatch.from_arrays(columns, names=self.form.names)


def _apply(group: StreamGroup, batch: Batch, plan: staging.StagePlan, staged: list[Staged]) -> bool:
    """Apply a batch. Returns False if the sink has it."""
    if group.decide(group.stored(), batch, plan.columns) == "applied":
        return False
    if broken := [one.broken for one in staged if one.broken]:
        raise EffectFailed(f"batch {batch.batch_id}: {broken[0]}")
    there = [one for one in staged if one.rows]
    table = sql.Identifier(plan.schema, staged[0].table)
    rows = StagedRows(table, [one.name for one in there], sum(one.rows for one in there))
    generation = _generation(group)
    group.maintain_days()
    effect = group.effect(plan.columns)
    with failing(batch):
        return group.commit(batch, generation, plan.columns, effect, rows)


def _generation(group: StreamGroup) -> int:
    """Take the group over, unless this run of the query has it: no process lives as long as the run."""
    with group.store.transaction() as connection:
        values = {"grp": group.job.group, "owner": group.owner}
        row = connection.execute(statement(group.options.schema, _OWNER), values).fetchone()
    return group.take_over() if row is None else int(row[0])


def _staged(messages: list[WriterCommitMessage | None]) -> list[Staged]:
    return [one for one in messages if isinstance(one, Staged)]


def _require_query(batch: Batch, staged: list[Staged], checkpoint: str) -> None:
    """Raise JobError if the folder that was read is another query's: a path may mean another place to Python."""
    others = {one.query_id for one in staged} - {batch.query_id, None}
    if others:
        raise JobError(
            f"checkpointLocation {checkpoint}: what Python reads there is of query {batch.query_id}, and this is query "
            f"{others.pop()}; give a path or URI that means the same to Spark and to the driver's Python"
        )


def _requested(options: Mapping[str, str]) -> tuple[ConsumerJob, StreamOptions, str]:
    """Return the job, its options and the checkpoint's folder. Raises JobError and ConfigurationError."""
    given = {name.lower(): value for name, value in options.items()}
    names = {name.lower(): name for name in _OPTIONS}
    if unknown := sorted(set(given) - set(names) - _SPARKS):
        raise JobError(f"option {unknown[0]}: the format outbox has {', '.join(_OPTIONS)}")
    for name in ("job", "checkpointlocation"):
        if not given.get(name):
            raise JobError(f"option {names[name]}: must be given to the query")
    job = find_job(given["job"])
    if job.transform is not None:
        raise JobError("transform: apply it to the stream, before writeStream; the format outbox gets rows, not plans")
    again = given.get("frombeginning", "false")
    if again.lower() not in ("true", "false"):
        raise JobError(f"option fromBeginning: must be true or false, not {again!r}")
    patience = _number(given, "patienceSeconds", float)
    where = stream_options(
        given.get("databaseurl"),
        given.get("consumerschema"),
        _number(given, "keepDays", int),
        accept=given.get("accept"),
        from_beginning=again.lower() == "true",
        patience=60.0 if patience is None else patience,
    )
    return replace(job, group=given.get("group", job.group)), where, given["checkpointlocation"]


def _number(given: Mapping[str, str], name: str, kind: type[N]) -> N | None:
    text = given.get(name.lower())
    try:
        return None if text is None else kind(text)
    except ValueError:
        raise JobError(f"option {name}: must be a number, not {text!r}") from None


@functools.lru_cache(maxsize=16)
def _group(options: tuple[tuple[str, str], ...], owner: str) -> StreamGroup:
    """Return the group. Kept, so that a process maintains its days once an hour and not in each batch."""
    job, where, _ = _requested(dict(options))
    return StreamGroup(job, where, owner)
