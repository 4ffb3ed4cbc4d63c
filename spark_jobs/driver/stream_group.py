"""The group of a Spark stream in the sink: decide about a batch, and apply its staged rows in one transaction.

``streaming`` (foreachBatch) and ``outbox_sink`` (a data source) use this. They differ in how Spark passes a batch to
them, and in which process they run; their crash tables say what follows.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg
from psycopg import sql

from outbox.consumer.errors import ConsumerUnavailable, EffectFailed, JobError, shown
from outbox.consumer.patience import Patience
from outbox.consumer.postgres_errors import clear_errors, passing
from outbox.errors import OutboxError
from spark_jobs.dedup.strategies import REMEMBER_FRESH, Dedup, DedupStore, forgotten_before, keep_first
from spark_jobs.driver.checkpoints import Batch, Decision, Stored, decide
from spark_jobs.driver.server_wait import wait_for_servers
from spark_jobs.driver.staged_rows import StagedRows
from spark_jobs.job import ConsumerJob
from spark_jobs.outcomes import EffectError
from spark_jobs.postgres import lock_monitor
from spark_jobs.postgres.batch_table import BatchTable
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.lock_monitor import LockMonitor
from spark_jobs.postgres.sink import PostgresSinks, transaction
from spark_jobs.task.input import NO_INPUT

if TYPE_CHECKING:
    from spark_jobs.job import PythonEffect

T = TypeVar("T")

_LOG: Final = logging.getLogger(__name__)

STREAM: Final = "Stream"
"""What is stored as the strategy of a group: its rows decide what is remembered."""
ONE_QUERY: Final = "One query a group: stop the other, or give this job a group of its own"
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
_FORGOTTEN: Final = """
SELECT message_id FROM batch, {groups} AS groups
 WHERE groups.grp = %(grp)s AND {day} < groups.forgotten_before AND {day} <> date '1970-01-01' LIMIT 1"""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Where the sink is, and what the user has accepted; see ``exactly_once``."""

    url: str = field(repr=False)
    schema: str
    keep_days: int
    accept: str | None = None
    from_beginning: bool = False
    patience: float = 60.0


def stream_options(
    database_url: str | None, consumer_schema: str | None, keep_days: int | None, **accepted: Any
) -> StreamOptions:
    """Return the options; those of the settings that are None are read as ``outbox consume`` reads them.

    accepted  the others of StreamOptions. Raises ConfigurationError.
    """
    # Imported here, because executors import this module and have no pydantic.
    from outbox._app.settings import load

    settings = load(
        database_url=database_url,
        consumer_schema=consumer_schema,
        consumer={} if keep_days is None else {"keep_days": keep_days},
    )
    url = settings.require_database()
    return StreamOptions(url, settings.consumer_schema, settings.consumer.keep_days, **accepted)


class StreamGroup:
    """A group whose rows are a stream's, in the sink. ``owner`` is only informative."""

    def __init__(self, job: ConsumerJob, options: StreamOptions, owner: str) -> None:
        _check_job(job)
        self.job = job
        self.options = options
        self.owner = owner
        self.store = PostgresGroupStore(options.url, options.schema, job.group, owner)
        self._sinks = PostgresSinks(job, self.store)
        self._dedup = DedupStore(options.schema, job.group)

    def take_over(self) -> int:
        """Become the group's only query; returns the generation. Raises JobError."""
        self.store.require_utf8()
        self.store.setup(self.job.setup)
        return self.store.take_over(STREAM, "batch")

    def maintain_days(self) -> None:
        """Maintain the days of ids: a query may run for weeks, and days are created for a few ahead."""
        self.store.maintain_days(self.options.keep_days, report)

    def effect(self, columns: Mapping[str, str]) -> str | PythonEffect:
        """Return the job's effect for rows of these columns. Raises JobError."""
        self._sinks.look_again()
        return self._sinks.effect(columns, "stream")

    def stored(self) -> Stored | None:
        with clear_errors("reading how far the stream is"), self.store.transaction() as connection:
            return self._read_stored(connection.cursor())

    def decide(self, stored: Stored | None, batch: Batch, columns: Mapping[str, str]) -> Decision:
        """Return whether the batch must be applied. Raises CheckpointConflict and JobError."""
        ids = "message_id" in columns
        if self.options.from_beginning and not ids:
            raise JobError("from_beginning: the stream's rows have no column message_id by which repeats are known")
        return decide(
            self.job.group,
            stored,
            batch,
            accept=self.options.accept,
            ids=ids,
            from_beginning=self.options.from_beginning,
        )

    def commit(
        self, batch: Batch, generation: int, columns: Mapping[str, str], effect: str | PythonEffect, staged: StagedRows
    ) -> bool:
        """Apply what is staged and move to the batch, in one transaction. Returns False if the sink has the batch."""
        ids = "message_id" in columns
        with transaction(self.options.url, lock_monitor.names(self.job.group)[0], NO_INPUT) as cursor:
            # The row lock prevents a take-over until COMMIT.
            self.store.rows.require(cursor.connection, generation, advice=ONE_QUERY)
            stored = self._read_stored(cursor)
            decision = self.decide(stored, batch, columns)
            if decision == "applied":
                cursor.connection.rollback()
                return False
            if decision == "accepted":
                self._dedup.run(
                    cursor, _ACCEPTED, state=self.options.accept, query_id=batch.query_id, batch_id=batch.batch_id
                )
            if not self._swap(cursor, stored, batch):
                raise ConsumerUnavailable(f"batch {batch.batch_id}: another transaction has moved the group meanwhile")
            applying = BatchTable(cursor, self._dedup, columns, Dedup(), effect, bisect=False, max_dead=0)
            if staged.names:
                applying.take(staged.table, staged.names, staged.rows)
            if ids:
                self._drop_repeats(cursor)
            fresh = applying.count() if ids else staged.rows
            self._dedup.run(cursor, _COUNT, applied=fresh, duplicates=staged.rows - fresh)
            if fresh:
                applying.apply()
        return True

    def until_servers_answer(self, batch: Batch, attempt: Callable[[], T]) -> T | None:
        """Return what an attempt at a batch returns, repeating it while servers are away; report what blocks it.

        If the COMMIT of an attempt has succeeded without an answer, the next attempt finds that. Raises
        ConsumerUnavailable when no patience is left, and EffectFailed for database errors that will not pass.
        """

        def attempted() -> T:
            try:
                return attempt()
            except psycopg.Error as error:
                if passing(error):
                    raise
                raise EffectFailed(f"batch {batch.batch_id}: {shown(error)}") from error

        with LockMonitor(self.options.url, self.job.group, report):
            return wait_for_servers(attempted, Patience(self.options.patience), report, then="start the query again")

    def _swap(self, cursor: psycopg.Cursor[Any], stored: Stored | None, batch: Batch) -> bool:
        """Move the sink from ``stored`` to the batch. Returns False if the sink no longer has ``stored``."""
        moved = self._dedup.run(
            cursor,
            _SWAP,
            query_id=batch.query_id,
            batch_id=batch.batch_id,
            content=batch.contents_after(stored),
            old_query=stored.query_id if stored else None,
            old_batch=stored.batch_id if stored else None,
            old_content=stored.contents if stored else None,
        )
        return moved.rowcount == 1

    def _read_stored(self, cursor: psycopg.Cursor[Any]) -> Stored | None:
        row = self._dedup.run(cursor, _STORED).fetchone()
        return None if row is None else Stored(*row)

    def _drop_repeats(self, cursor: psycopg.Cursor[Any]) -> None:
        """Leave in ``batch`` only rows whose ids were never applied."""
        if cursor.execute(_WITHOUT_ID).fetchone() == (True,):
            raise EffectError("a row's message_id is NULL: each row needs one, or leave the column out")
        cursor.execute(keep_first(sql.SQL("message_id"), sql.SQL("ctid")))
        self._dedup.run(cursor, REMEMBER_FRESH)
        if forgotten_before(cursor, self._dedup) is not None and (
            old := self._dedup.run(cursor, _FORGOTTEN).fetchone()
        ):
            raise EffectError(
                f"message_id {old[0]} is of a day that is forgotten (keep_days): it may have been applied before"
            )


@contextmanager
def failing(batch: Batch) -> Iterator[None]:
    """Turn an error that the rows or the effect have caused into EffectFailed."""
    try:
        yield
    except (EffectError, JobError) as error:
        raise EffectFailed(f"batch {batch.batch_id}: {error}") from error


def without_causes(error: OutboxError) -> OutboxError:
    """Return a copy to raise in Spark, which gets the whole chain as one text, with the JVM's stack of each error.

    Spark matches patterns in that text. A long one has killed its thread (StackOverflowError) without a visible error.
    """
    return copy.copy(error).with_traceback(None)


def report(text: str, figures: Mapping[str, Any]) -> None:
    _LOG.warning("%s: %s", text, "  ".join(f"{name}={value}" for name, value in figures.items()))


def _check_job(job: ConsumerJob) -> None:
    meaningless = {"schema": None, "types": None, "keep_order": False, "start": "earliest", "delivery": "exactly-once"}
    for name, usual in meaningless.items():
        if getattr(job, name) != usual:
            raise JobError(f"{name}: has no meaning for a stream, whose rows are the stream's own; leave it out")
    if job.strategy != Dedup():
        raise JobError(
            f"strategy: {job.strategy} is for Kafka's messages; a batch of a stream is applied once "
            "without any, and rows with a column message_id are known by it. Leave strategy out; to have no ids "
            "remembered, leave that column out"
        )
