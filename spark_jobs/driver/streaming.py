"""``stream.writeStream.foreachBatch(exactly_once(job))``: apply each batch of any Spark stream to the sink once.

Spark calls a ``foreachBatch`` function with each batch at least once, in order. The sink stores the number of the last
batch with a hash of its plan, and moves both by compare-and-swap in the transaction of the effect; so a repeated batch
is recognized. ``checkpoints`` decides whether a batch may follow the one that the sink has.

| what happens                                | what the sink has, and what follows                                    |
|---------------------------------------------|------------------------------------------------------------------------|
| killed, or an error, before COMMIT          | the batch before: Spark plans the same one again; it is applied        |
| killed, or an error, after COMMIT           | this batch: its plan runs again for its state; nothing is applied      |
| the answer to COMMIT is lost                | read again on a new connection: applied or not                         |
| a server is away                            | waited for (``patience``), then ConsumerUnavailable: start it again    |
| two queries of one group at once            | the newer takes over; the older is Fenced at its next batch            |
| a staging task dies, or runs twice          | rows that no task has reported are never read                          |
| Postgres crashes while rows are staged      | the staging table is empty; the count differs: staged again            |

Rows with a column ``message_id`` (a UUID as text) are also deduplicated by it, as with Dedup: an id that was applied
before is a duplicate; of rows with the same id in a batch the first counts. Without that column there is only the
compare-and-swap, which is enough for a source that does not repeat messages.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, LiteralString

import psycopg

from outbox.consumer.connections import process_name
from outbox.consumer.errors import ConsumerUnavailable, EffectFailed, JobError, shown
from outbox.consumer.patience import Patience
from outbox.consumer.postgres_errors import clear_errors, passing
from outbox.consumer.statements import statement
from outbox.errors import OutboxError
from spark_jobs.dedup.strategies import REMEMBER_FRESH, Dedup, DedupStore, forgotten_before
from spark_jobs.driver.checkpoints import Batch, Decision, Stored, decide, planned
from spark_jobs.driver.server_wait import wait_for_servers
from spark_jobs.driver.staged_rows import StagedRows, stage
from spark_jobs.job import ConsumerJob
from spark_jobs.outcomes import EffectError
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.postgres import lock_monitor
from spark_jobs.postgres.batch_table import BatchTable
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.lock_monitor import LockMonitor
from spark_jobs.postgres.sink import PostgresSinks, transaction
from spark_jobs.postgres.staging import StagingTables
from spark_jobs.spark import job_groups
from spark_jobs.spark import rows as spark
from spark_jobs.spark.errors import understood
from spark_jobs.spark.installed import require_installed
from spark_jobs.spark.session import REQUIRED_CONF
from spark_jobs.task.input import NO_INPUT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_jobs.job import PythonEffect

_LOG: Final = logging.getLogger(__name__)
# What the form of the rows depends on; set for the batch, whatever the user's session has.
_CONF: Final = ("spark.sql.session.timeZone", "spark.sql.execution.arrow.useLargeVarTypes")

STREAM: Final = "Stream"
"""What is stored as the strategy of a group: its rows decide what is remembered."""
_ONE_QUERY: Final = "One query a group: stop the other, or give this job a group of its own"
_STORED: Final = "SELECT query_id::text, batch_id, content FROM {checkpoints} WHERE grp = %(grp)s"
# Compares with the state that the decision was based on: another transaction may have changed the row since.
_SWAP: Final = """
INSERT INTO {checkpoints} AS c (grp, query_id, batch_id, content)
VALUES (%(grp)s, %(query_id)s, %(batch_id)s, %(content)s)
ON CONFLICT (grp) DO UPDATE
   SET query_id = excluded.query_id, batch_id = excluded.batch_id, content = excluded.content,
       updated_at = pg_catalog.now()
 WHERE (c.query_id::text, c.batch_id, c.content)
     = (%(old_query)s::text, %(old_batch)s::bigint, %(old_content)s::text)"""
_COUNT: Final = """
UPDATE {checkpoints} SET applied = applied + %(applied)s, duplicates = duplicates + %(duplicates)s
 WHERE grp = %(grp)s"""
_ACCEPTED: Final = """
INSERT INTO {audit} (what, details) VALUES ('checkpoint accepted', pg_catalog.jsonb_build_object('group', %(grp)s::text,
    'instead of', %(state)s::text, 'query', %(query_id)s::text, 'batch', %(batch_id)s::bigint))"""
_WITHOUT_ID: Final = "SELECT EXISTS (SELECT FROM batch WHERE message_id IS NULL)"
_FIRST: Final = """
DELETE FROM batch USING (
    SELECT ctid AS place, pg_catalog.row_number() OVER (PARTITION BY message_id ORDER BY ctid) AS number
      FROM batch) AS numbered
 WHERE numbered.place = batch.ctid AND numbered.number > 1"""
_FORGOTTEN: Final = """
SELECT message_id FROM batch, {groups} AS groups
 WHERE groups.grp = %(grp)s AND {day} < groups.forgotten_before AND {day} <> date '1970-01-01' LIMIT 1"""


def exactly_once(
    job: ConsumerJob,
    *,
    database_url: str | None = None,
    consumer_schema: str | None = None,
    keep_days: int | None = None,
    accept: str | None = None,
    from_beginning: bool = False,
    patience: float = 60.0,
) -> ExactlyOnce:
    """Return a function for ``foreachBatch`` that applies each batch of a stream once.

    job             its ``topics`` are ignored: the stream is read. ``batch`` has the stream's columns, so ``schema``
                    and ``types`` can't be given, and the stream does its own decoding. ``effect``, ``setup`` and
                    ``transform`` are as for any job. A row that can't be applied ends the query before its batch:
                    without a place in Kafka to identify it there are no dead letters.
    accept          continue although the batch does not follow what the sink has, from the one state that
                    CheckpointConflict has named.
    from_beginning  each new query of the group reads its source from the beginning, so losing a checkpoint is fine:
                    repeats are recognized by their ``message_id``, which the rows must have.
    patience        how many seconds to wait for servers in a batch.

    The others are settings: those not given are read from ``OUTBOX_…`` variables and the file, as ``outbox consume``
    does. Raises ConfigurationError and JobError.
    """
    require_installed()
    from outbox._app.settings import load

    settings = load(
        database_url=database_url,
        consumer_schema=consumer_schema,
        consumer={} if keep_days is None else {"keep_days": keep_days},
    )
    return ExactlyOnce(
        job,
        settings.require_database(),
        settings.consumer_schema,
        settings.consumer.keep_days,
        accept=accept,
        from_beginning=from_beginning,
        patience=patience,
    )


class ExactlyOnce:
    """The function that ``exactly_once`` returns, called by Spark with each batch, also in several runs of a query."""

    def __init__(
        self,
        job: ConsumerJob,
        url: str,
        schema: str,
        keep_days: int,
        *,
        accept: str | None,
        from_beginning: bool,
        patience: float,
    ) -> None:
        _check_job(job)
        self._job = job
        self._url = url
        self._schema = schema
        self._keep_days = keep_days
        self._accept = accept
        self._from_beginning = from_beginning
        self._patience = patience
        self._store = PostgresGroupStore(url, schema, job.group, process_name())
        self._sinks = PostgresSinks(url, schema, job, self._store)
        self._lock = threading.Lock()
        self._generations: dict[str, int] = {}
        self._maintained_at: float | None = None
        self._error: BaseException | None = None

    def exception(self) -> BaseException | None:
        """Return the error that ended the last batch, as it was raised; Spark shows only its text."""
        return self._error

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Apply a batch, unless it was applied before. Raises the error that ends the query."""
        self._error = None
        try:
            batch = planned(rows, batch_id)
            with _for_batch(rows, self._job.group, batch), LockMonitor(self._url, self._job.group, _report):
                wait_for_servers(
                    lambda: self._attempt(rows, batch), Patience(self._patience), _report, then="start the query again"
                )
        except OutboxError as error:
            self._error = error
            # Without its causes: Spark gets the whole chain as one text, with the JVM's stack of each error, and
            # matches patterns in it. A long text has killed its thread (StackOverflowError) without any visible error.
            bare = copy.copy(error).with_traceback(None)
        else:
            return
        raise bare

    def _attempt(self, rows: DataFrame, batch: Batch) -> None:
        """Apply a batch once. If the COMMIT of an earlier attempt has succeeded without an answer, this finds that."""
        try:
            with understood():
                self._apply(rows, batch)
        except psycopg.Error as error:
            if passing(error):
                raise
            raise EffectFailed(f"batch {batch.batch_id}: {shown(error)}") from error

    def _apply(self, planned_rows: DataFrame, batch: Batch) -> None:
        rows = planned_rows if self._job.transform is None else self._job.transform(planned_rows)
        # A stream's own column of this name would be taken for the reason why a row can't be applied.
        rows, columns = spark.copyable(rows.drop(PROBLEM))
        ids = "message_id" in columns
        if self._from_beginning and not ids:
            raise JobError("from_beginning: the stream's rows have no column message_id by which repeats are known")
        if self._decide(self._stored(), batch, ids=ids) == "applied":
            # Spark commits the batch with what its tasks report of the state they wrote: without a run there is none,
            # and the checkpoint could never be started again (stateStore.checkpointFormatVersion=2).
            planned_rows.write.format("noop").mode("overwrite").save()
            return
        generation = self._begin(batch)
        self._sinks.look_again()
        effect = self._sinks.effect(columns, "stream")
        tables = self._staging_tables()
        try:
            staged = stage(rows, tables.create(columns, generation, check=True), messages=False)
            self._commit(batch, generation, columns, effect, staged)
        except (EffectError, JobError) as error:
            raise EffectFailed(f"batch {batch.batch_id}: {error}") from error
        finally:
            # What can't be dropped now is dropped by the next run of the group.
            tables.drop_made()

    def _commit(
        self, batch: Batch, generation: int, columns: Mapping[str, str], effect: str | PythonEffect, staged: StagedRows
    ) -> None:
        """Apply what is staged and move to the batch, in one transaction."""
        ids = "message_id" in columns
        with transaction(self._url, lock_monitor.names(self._job.group)[0], NO_INPUT) as cursor:
            self._require(cursor.connection, generation)
            stored = self._read_stored(cursor)
            decision = self._decide(stored, batch, ids=ids)
            if decision == "applied":
                cursor.connection.rollback()
                return
            if decision == "accepted":
                self._run(cursor, _ACCEPTED, state=self._accept, query_id=batch.query_id, batch_id=batch.batch_id)
            if not self._swap(cursor, stored, batch):
                raise ConsumerUnavailable(f"batch {batch.batch_id}: another transaction has moved the group meanwhile")
            applying = BatchTable(
                cursor,
                DedupStore(self._schema, self._job.group),
                columns,
                Dedup(),
                effect,
                bisect=False,
                max_dead=0,
            )
            applying.take(staged.table, staged.names, staged.rows)
            if ids:
                self._drop_repeats(cursor)
            fresh = applying.count() if ids else staged.rows
            self._run(cursor, _COUNT, applied=fresh, duplicates=staged.rows - fresh)
            if fresh:
                applying.apply()

    # The compare-and-swap.

    def _decide(self, stored: Stored | None, batch: Batch, *, ids: bool) -> Decision:
        return decide(self._job.group, stored, batch, accept=self._accept, ids=ids, from_beginning=self._from_beginning)

    def _swap(self, cursor: psycopg.Cursor[Any], stored: Stored | None, batch: Batch) -> bool:
        """Move the sink from ``stored`` to the batch. Returns False if the sink no longer has ``stored``."""
        moved = self._run(
            cursor,
            _SWAP,
            query_id=batch.query_id,
            batch_id=batch.batch_id,
            content=batch.content,
            old_query=stored.query_id if stored else None,
            old_batch=stored.batch_id if stored else None,
            old_content=stored.content if stored else None,
        )
        return moved.rowcount == 1

    def _require(self, connection: psycopg.Connection[Any], generation: int) -> None:
        """Raise Fenced unless the group is still ours. The row lock prevents a take-over until COMMIT."""
        self._store.rows.require(connection, generation, advice=_ONE_QUERY)

    def _stored(self) -> Stored | None:
        with clear_errors("reading how far the stream is"), self._store.transaction() as connection:
            return self._read_stored(connection.cursor())

    def _read_stored(self, cursor: psycopg.Cursor[Any]) -> Stored | None:
        row = self._run(cursor, _STORED).fetchone()
        return None if row is None else Stored(*row)

    def _begin(self, batch: Batch) -> int:
        """Take the group over, once for each run of a query; and maintain the days of ids, once an hour."""
        with self._lock:
            generation = self._generations.get(batch.run_id)
            if generation is None:
                self._store.require_utf8()
                self._store.setup(self._job.setup)
                generation = self._generations[batch.run_id] = self._store.take_over(STREAM, "batch")
                self._staging_tables().drop_older(generation)
            # A query may run for weeks, and partitions are created for a few days ahead only.
            if self._maintained_at is None or time.monotonic() - self._maintained_at > 3600:
                self._store.maintain_days(self._keep_days, _report)
                self._maintained_at = time.monotonic()
            return generation

    def _drop_repeats(self, cursor: psycopg.Cursor[Any]) -> None:
        """Leave in ``batch`` only rows whose ids were never applied."""
        dedup = DedupStore(self._schema, self._job.group)
        if cursor.execute(_WITHOUT_ID).fetchone() == (True,):
            raise EffectError("a row's message_id is NULL: each row needs one, or leave the column out")
        cursor.execute(_FIRST)
        dedup.run(cursor, REMEMBER_FRESH)
        if forgotten_before(cursor, dedup) is not None and (old := dedup.run(cursor, _FORGOTTEN).fetchone()):
            raise EffectError(
                f"message_id {old[0]} is of a day that is forgotten (keep_days): it may have been applied before"
            )

    def _staging_tables(self) -> StagingTables:
        return StagingTables(self._store, self._url, self._schema, self._job.group, _ONE_QUERY)

    def _run(self, cursor: psycopg.Cursor[Any], query: LiteralString, **values: object) -> psycopg.Cursor[Any]:
        return cursor.execute(statement(self._schema, query), {"grp": self._job.group, **values})


@contextmanager
def _for_batch(rows: DataFrame, group: str, batch: Batch) -> Iterator[None]:
    """Describe the batch's Spark jobs, which stay in the query's job group, and set _CONF; restore both at the end."""
    session = rows.sparkSession
    before = {name: str(session.conf.get(name)) for name in _CONF}
    shown = f"{job_groups.name(group)}: batch {batch.batch_id} of query {batch.query_id}"
    with job_groups.described_as(session, shown):
        for name in _CONF:
            session.conf.set(name, REQUIRED_CONF[name])
        try:
            yield
        finally:
            # The session belongs to the query, whose other operations must not see our settings.
            for name, value in before.items():
                session.conf.set(name, value)


def _report(text: str, figures: Mapping[str, Any]) -> None:
    _LOG.warning("%s: %s", text, "  ".join(f"{name}={value}" for name, value in figures.items()))


def _check_job(job: ConsumerJob) -> None:
    meaningless = {"schema": None, "types": None, "keep_order": False, "start": "earliest", "delivery": "exactly-once"}
    for name, usual in meaningless.items():
        if getattr(job, name) != usual:
            raise JobError(f"{name}: has no meaning for exactly_once, whose rows are the stream's own; leave it out")
    if not isinstance(job.strategy, Dedup):
        raise JobError(
            f"strategy: {type(job.strategy).__name__} is for Kafka's messages; a batch of a stream is applied once "
            "without any, and rows with a column message_id are known by it. Leave strategy out; to have no ids "
            "remembered, leave that column out"
        )
