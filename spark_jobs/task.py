"""One Kafka partition, one Postgres transaction: fence, copy, dedup, apply, commit.

| crash point                                          | result                                                       |
|------------------------------------------------------|--------------------------------------------------------------|
| before COMMIT                                        | rolled back; the retry reads the same range                  |
| COMMIT sent, answer lost; or killed right after it   | the retry finds next_offset = end: already applied           |
| two attempts at once (speculation, a lost executor)  | the second waits for the offsets row, then finds it moved    |
| the group was taken over meanwhile                   | the generation differs: nothing is written, Fenced           |
| a zombie past the take-over                          | the same; the take-over itself waits for a running COMMIT    |
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from spark_jobs.planner import Partition, Range
from spark_jobs.tables import DAY_OF_ID

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_jobs.job import PythonEffect

CORRUPT: Final = "message_corrupt"
"""Column that holds a payload which did not decode; never copied."""

REPORT: Final = "topic string, part int, outcome string, read long, fresh long, detail string"
"""What a task tells the driver, as Spark DDL. outcome: applied, already, fenced, bad, failed."""

_MOVE: Final = """
UPDATE {offsets} SET next_offset = %(end)s, updated_at = now()
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s
   AND topic_id = %(topic_id)s AND next_offset = %(start)s AND generation = %(generation)s"""
_LOOK: Final = """
SELECT next_offset, generation, topic_id FROM {offsets}
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s"""
_REMEMBER: Final = "INSERT INTO {processed} (grp, day, message_id) SELECT %(grp)s, {day}, message_id FROM batch"
# A message that stands twice in one batch: the lower offset is the first time.
_DROP_REPEATS: Final = """
DELETE FROM batch AS later USING batch AS first
 WHERE later.message_id = first.message_id AND later.message_offset > first.message_offset"""
# In the order of ids, so that two partitions that hold the same ids wait for each other in one direction only.
_REMEMBER_FRESH: Final = """
WITH fresh AS (
    INSERT INTO {processed} (grp, day, message_id)
    SELECT %(grp)s, {day}, message_id FROM batch ORDER BY message_id
        ON CONFLICT DO NOTHING RETURNING message_id)
DELETE FROM batch WHERE NOT EXISTS (SELECT 1 FROM fresh WHERE fresh.message_id = batch.message_id)"""


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Everything a task needs, sent to the executors with the code. ``columns`` are those of ``batch``, with types."""

    url: str
    schema: str
    group: str
    generation: int
    ranges: Mapping[Partition, Range]
    columns: Mapping[str, str]
    effect: str | PythonEffect
    suspects: frozenset[Partition] = frozenset()
    """Partitions that had repeats lately: there the fast path would only fail again."""


class _Stop(Exception):
    """Ends the transaction with a report instead of a retry."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


def run(plan: TaskPlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Be the function of mapInArrow: take one partition's rows, apply them, report.

    Failures that a retry can mend (a server that is away) are raised and Spark tries again; what would fail again is
    reported, so that the driver can end the job with the reason.
    """
    import pyarrow as pa

    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        # No rows: the partition's range held only transaction markers, or all was filtered. The driver moves it on.
        return
    partition = (first.column("message_topic")[0].as_py(), first.column("message_part")[0].as_py())
    count = _Count(first, batches)
    try:
        outcome, fresh, detail = "applied", _apply(plan, partition, count), ""
        if fresh is None:
            outcome, fresh = "already", 0
    except _Stop as stop:
        outcome, fresh, detail = stop.outcome, 0, stop.detail
    yield pa.RecordBatch.from_pydict(
        {
            "topic": [partition[0]],
            "part": pa.array([partition[1]], pa.int32()),
            "outcome": [outcome],
            "read": pa.array([count.rows], pa.int64()),
            "fresh": pa.array([fresh], pa.int64()),
            "detail": [detail],
        }
    )


class _Count:
    """The partition's batches, counted as they go by, and checked before they are copied."""

    def __init__(self, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> None:
        self._first: pa.RecordBatch | None = first
        self._rest = rest
        self.rows = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._first is not None:
            first, self._first = self._first, None
            yield self._checked(first)
        for batch in self._rest:
            yield self._checked(batch)

    def _checked(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self.rows += batch.num_rows
        for column, what in (
            (CORRUPT, "the payload does not fit the job's schema"),
            ("message_id", "there is no id: neither a header ce_id nor a header id"),
        ):
            if column not in batch.schema.names:
                continue
            values = batch.column(column)
            bad = values.is_valid() if column == CORRUPT else values.is_null()
            if bad.true_count:
                row = bad.index(True).as_py()
                where = "-".join(str(batch.column(name)[row]) for name in ("message_topic", "message_part"))
                raise _Stop("bad", f"{where} offset {batch.column('message_offset')[row]}: {what}")
        return batch


def _apply(plan: TaskPlan, partition: Partition, batches: _Count) -> int | None:
    """Apply a partition's rows. Gives the number of fresh ones, None when the range was applied before."""
    topic, part = partition
    span = plan.ranges[partition]
    shown = f"{topic}-{part} offsets {span.start} to {span.end - 1}"
    names = {
        "offsets": sql.Identifier(plan.schema, "offsets"),
        "processed": sql.Identifier(plan.schema, "processed_messages"),
        "day": sql.SQL(DAY_OF_ID),
    }
    values = {
        "grp": plan.group,
        "topic": topic,
        "part": part,
        "topic_id": span.topic_id,
        "start": span.start,
        "end": span.end,
        "generation": plan.generation,
    }
    # Kept whole for a Python effect only; SQL sees the rows in the table.
    kept: list[pa.RecordBatch] | None = [] if callable(plan.effect) else None
    with psycopg.connect(plan.url, application_name=f"outbox consumer {plan.group}"[:63]) as connection:
        cursor = connection.cursor()
        if cursor.execute(sql.SQL(_MOVE).format(**names), values).rowcount == 0:
            _explain(cursor, names, values, shown)
            return None
        try:
            _copy(cursor, plan.columns, batches, kept)
            _dedup(connection, cursor, names, values, suspect=partition in plan.suspects)
            row = cursor.execute("SELECT count(*) FROM batch").fetchone()
            assert row is not None
            if row[0]:
                _effect(cursor, plan.effect, kept)
        except psycopg.OperationalError:
            raise
        except psycopg.Error as error:
            first_line = str(error).strip().partition("\n")[0]
            raise _Stop("failed", f"{shown}: {type(error).__name__}: {first_line}") from error
        return int(row[0])


def _explain(
    cursor: psycopg.Cursor[Any], names: Mapping[str, sql.Composable], values: Mapping[str, Any], shown: str
) -> None:
    """Return when the range was applied before by this generation; stop otherwise."""
    row = cursor.execute(sql.SQL(_LOOK).format(**names), values).fetchone()
    if row is not None and row == (values["end"], values["generation"], values["topic_id"]):
        return
    now = "its row is gone" if row is None else f"it stands at offset {row[0]} in generation {row[1]}"
    raise _Stop(
        "fenced", f"group {values['grp']} was taken over from generation {values['generation']}: {shown}, {now}"
    )


def _copy(
    cursor: psycopg.Cursor[Any],
    columns: Mapping[str, str],
    batches: _Count,
    kept: list[pa.RecordBatch] | None,
) -> None:
    """Stream the batches into the temporary table ``batch``. Arrow writes the CSV: no row passes through Python."""
    from pyarrow import csv

    fields = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in columns.items()
    )
    cursor.execute(sql.SQL("CREATE TEMPORARY TABLE batch ({}) ON COMMIT DROP").format(fields))
    listed = sql.SQL(", ").join(map(sql.Identifier, columns))
    # "all_valid": every value in quotes and NULL bare, so that an empty text and NULL stay apart.
    options = csv.WriteOptions(include_header=False, quoting_style="all_valid")
    with cursor.copy(sql.SQL("COPY batch ({}) FROM STDIN (FORMAT csv)").format(listed)) as copy:
        for batch in batches:
            chosen = batch.select(list(columns))
            if kept is not None:
                kept.append(chosen)
            sink = io.BytesIO()
            csv.write_csv(chosen, sink, options)
            copy.write(sink.getbuffer())


def _dedup(
    connection: psycopg.Connection[Any],
    cursor: psycopg.Cursor[Any],
    names: Mapping[str, sql.Composable],
    values: Mapping[str, Any],
    *,
    suspect: bool,
) -> None:
    """Leave only the rows in ``batch`` whose message was never applied, and remember their ids."""
    if not suspect:
        try:
            with connection.transaction():
                cursor.execute(sql.SQL(_REMEMBER).format(**names), values)
            return
        except psycopg.errors.UniqueViolation:
            # Something repeats. The savepoint took the ids back; find out which, the slower way.
            pass
    cursor.execute("ANALYZE batch")
    cursor.execute(_DROP_REPEATS)
    cursor.execute(sql.SQL(_REMEMBER_FRESH).format(**names), values)


def _effect(cursor: psycopg.Cursor[Any], effect: str | PythonEffect, kept: list[pa.RecordBatch] | None) -> None:
    if isinstance(effect, str):
        cursor.execute(effect.encode())
        return
    import pyarrow as pa
    import pyarrow.compute as pc

    assert kept is not None
    table = pa.Table.from_batches(kept)
    offsets = [row[0] for row in cursor.execute("SELECT message_offset FROM batch").fetchall()]
    if len(offsets) < table.num_rows:
        table = table.filter(pc.is_in(table["message_offset"], pa.array(offsets, pa.int64())))
    try:
        effect(cursor, table)
    except psycopg.Error:
        raise
    except Exception as error:
        raise _Stop("failed", f"the effect raised {type(error).__name__}: {error}") from error
