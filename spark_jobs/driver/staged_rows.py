"""Have Spark's tasks stage rows, for one transaction of the driver to apply; see postgres/staging.py for the tables."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from outbox.consumer.errors import ConsumerUnavailable, shown
from outbox.consumer.model import RejectedRecord
from spark_jobs.outcomes import EffectError, RejectedRecords
from spark_jobs.postgres import lock_monitor
from spark_jobs.postgres.copying import Unfit, copy_rows
from spark_jobs.postgres.fitting import copy_fitting
from spark_jobs.postgres.sink import transaction
from spark_jobs.postgres.staging import StagePlan, named
from spark_jobs.spark import rows as spark
from spark_jobs.task import input as task_input
from spark_jobs.task.feed import Feed, rejected_from, rejected_text
from spark_jobs.task.input import TaskInput

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_REPORT: Final = "staged_by string, rows long, size long, rejected string, broken string"


@dataclass(frozen=True, slots=True)
class StagedRows:
    """What the tasks staged: under which names, how many rows, and for rounds their size in memory in bytes."""

    table: sql.Identifier
    names: list[str]
    rows: int
    size: int = 0


def stage(
    rows: DataFrame, plan: StagePlan, *, required: tuple[str, ...] = (), max_dead: int = 0, messages: bool
) -> StagedRows:
    """Stage rows. Raises RejectedRecords for messages that can't be applied, EffectError for rows of none.

    messages  a row that does not fit is rejected as a message; otherwise it is an EffectError.
    """
    reports = spark.in_tasks(
        rows, lambda batches: _stage(plan, required, max_dead, messages, task_input.from_spark(batches)), _REPORT
    ).collect()
    broken = [row.broken for row in reports if row.broken]
    if broken:
        raise EffectError(broken[0])
    rejected = [record for row in reports for record in rejected_from(row.rejected)]
    if rejected:
        raise RejectedRecords(sorted(rejected, key=lambda record: record.place)[: max_dead + 1])
    return StagedRows(
        plan.identifier,
        [row.staged_by for row in reports],
        sum(row.rows for row in reports),
        sum(row.size for row in reports),
    )


def _stage(
    plan: StagePlan, required: tuple[str, ...], max_dead: int, messages: bool, batches: TaskInput[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """COPY one task's rows under a name that only this attempt uses; the function of mapInArrow."""
    import pyarrow as pa

    name = uuid.uuid4().hex
    feed = Feed(required, batches, max_dead)
    found: list[RejectedRecord] = []
    broken = ""
    try:
        with transaction(plan.url, lock_monitor.names(plan.group)[1], batches) as cursor:
            rows = named(name, feed)
            if messages:
                copy_fitting(cursor, plan.identifier, plan.staged_columns, rows, found, max_dead)
            else:
                copy_rows(cursor, plan.identifier, plan.staged_columns, rows)
            found += feed.found
            if found:
                cursor.connection.rollback()
    except RejectedRecords as error:
        # More than may become dead letters. The rows after them were not read.
        found = list(error.found)
    except EffectError as error:
        # A retry of the task would fail in the same way, so the driver raises the error; the same below.
        broken = str(error)
    except (Unfit, psycopg.DataError) as error:
        broken = f"a row can't be staged: {error if isinstance(error, Unfit) else shown(error)}"
    except psycopg.errors.UndefinedTable as error:
        raise ConsumerUnavailable(f"{plan.table} is gone: a newer driver has dropped it") from error
    yield pa.RecordBatch.from_pydict(
        {
            "staged_by": [name],
            "rows": pa.array([0 if found else feed.rows], pa.int64()),
            "size": pa.array([feed.size], pa.int64()),
            "rejected": [rejected_text(found[: max_dead + 1])],
            "broken": [broken],
        }
    )
