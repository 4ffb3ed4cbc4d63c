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
before is a duplicate; the first row of each id in a batch counts. Without that column there is only the
compare-and-swap, which is enough for a source that does not repeat messages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from outbox.consumer.connections import process_name
from outbox.errors import OutboxError
from spark_jobs.driver.checkpoints import Batch, planned
from spark_jobs.driver.staged_rows import stage
from spark_jobs.driver.stream_group import (
    ONE_QUERY,
    StreamGroup,
    StreamOptions,
    failing,
    stream_options,
    without_causes,
)
from spark_jobs.job import ConsumerJob
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.postgres.staging import StagingTables
from spark_jobs.spark import job_groups
from spark_jobs.spark import rows as spark
from spark_jobs.spark.errors import understood
from spark_jobs.spark.installed import require_installed
from spark_jobs.spark.session import REQUIRED_CONF

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Settings on which the form of the rows depends; set for the batch, whatever the user's session has.
_CONF: Final = ("spark.sql.session.timeZone", "spark.sql.execution.arrow.useLargeVarTypes")


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
    accepted = {"accept": accept, "from_beginning": from_beginning, "patience": patience}
    return ExactlyOnce(job, stream_options(database_url, consumer_schema, keep_days, **accepted))


class ExactlyOnce:
    """The function that ``exactly_once`` returns, called by Spark with each batch, also in several runs of a query."""

    def __init__(self, job: ConsumerJob, options: StreamOptions) -> None:
        self._job = job
        self._group = StreamGroup(job, options, process_name())
        self._lock = threading.Lock()
        self._generations: dict[str, int] = {}
        self._error: BaseException | None = None

    def exception(self) -> BaseException | None:
        """Return the error that ended the last batch, as it was raised; Spark shows only its text."""
        return self._error

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Apply a batch, unless it was applied before. Raises the error that ends the query."""
        self._error = None
        try:
            batch = planned(rows, batch_id)
            with _for_batch(rows, self._job.group, batch):
                self._group.until_servers_answer(batch, lambda: self._apply(rows, batch))
        except OutboxError as error:
            self._error = error
            bare = without_causes(error)
        else:
            return
        raise bare

    @understood()
    def _apply(self, planned_rows: DataFrame, batch: Batch) -> None:
        """Apply a batch once, unless the sink has it."""
        rows = planned_rows if self._job.transform is None else self._job.transform(planned_rows)
        # A stream's own column of this name would be taken for the reason why a row can't be applied.
        rows, columns = spark.copyable(rows.drop(PROBLEM))
        if self._group.decide(self._group.stored(), batch, columns) == "applied":
            # Spark commits the batch with what its tasks report of the state they wrote: without a run there is none,
            # and the checkpoint could never be started again (stateStore.checkpointFormatVersion=2).
            planned_rows.write.format("noop").mode("overwrite").save()
            return
        generation = self._begin(batch)
        effect = self._group.effect(columns)
        tables = self._staging_tables()
        try:
            with failing(batch):
                staged = stage(rows, tables.create(columns, generation, check=True), messages=False)
                self._group.commit(batch, generation, columns, effect, staged)
        finally:
            # What can't be dropped now is dropped by the next run of the group.
            tables.drop_made()

    def _begin(self, batch: Batch) -> int:
        """Take the group over, once for each run of a query; and maintain the days of ids."""
        with self._lock:
            generation = self._generations.get(batch.run_id)
            if generation is None:
                generation = self._generations[batch.run_id] = self._group.take_over()
                self._staging_tables().drop_older(generation)
            self._group.maintain_days()
            return generation

    def _staging_tables(self) -> StagingTables:
        return StagingTables(self._group.store, ONE_QUERY)


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
