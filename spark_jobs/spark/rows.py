"""Kafka's messages as Spark rows, for jobs whose transform, nested fields or ids need Spark.

Each task reads one partition's range itself, with ``task.reader``, and decodes it; Spark runs the rest of the plan.
Two Python workers take part in such a task, and each needs its own proof that its input is complete:

| worker      | reads                             | the proof that nothing is missing                              |
|-------------|-----------------------------------|----------------------------------------------------------------|
| reading     | its number, which names the range | the mark for the end of its input, and exactly one number      |
|             | the range, from Kafka             | the reader's (``task.reader``); without it the task fails      |
| applying    | what Spark makes of the rows      | the mark for the end of its input, which Spark leaves out when |
|             |                                   | the reading worker or the transform has failed                 |

Which task has which range is known from the partitions of the plan's leaf: a plan with the same partitions has moved no
rows.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal

from outbox._clients import credentials
from outbox.consumer.errors import JobError
from outbox.consumer.letters import RetryRecord
from outbox.consumer.model import Partition, Range
from outbox.event import TRACEPARENT, TRACESTATE
from spark_jobs.dedup.strategies import WHOLE_TIMES, Dedup, Fingerprint, OffsetsOnly, Strategy, uuid8
from spark_jobs.effects.produce import Traced
from spark_jobs.job import KEPT, META, OWN, ConsumerJob
from spark_jobs.payloads.decoding import PROBLEM, arrow_type, as_read
from spark_jobs.spark.errors import UNDECODED
from spark_jobs.task import partition as task
from spark_jobs.task.decoder import TaskDecoder
from spark_jobs.task.reader import ReaderSettings

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

    from spark_jobs.task.incoming import Messages

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_AS_ONE: Final = "declare atomic='batch'"
_MOVING: Final = ("Exchange", "Coalesce", "CartesianProduct", "Union", "CollectLimit", "TakeOrdered", "GlobalLimit")
_OWN_WORKERS: Final = "OUTBOX_CONSUMER_TASKS"
# All threads of the driver share the environment, and it is read while the function is wrapped.
_MAKING: Final = threading.Lock()
# META's types as Spark spells them. They must be exactly these: the binary format identifies columns by position only.
_META_KINDS: Final = {
    name: {"uuid": "string", "text": "string", "integer": "int", "timestamptz": "timestamp"}.get(kind, kind)
    for name, kind in META.items()
}
_TRACE: Final = dict.fromkeys((TRACEPARENT, TRACESTATE), "string")
_SYSTEM: Final = frozenset({"ctid", "tableoid", "xmin", "xmax", "cmin", "cmax"})
# A line of a plan: three characters for each level, whether it runs as generated code, and the node's name.
_NODE: Final = re.compile(r"^((?:[ :]  )*(?:[+:]- )?)[\s*()\d]*(\w+)")
_NUMBER: Final = f"{OWN}task"
"""The only column of a plan's leaf: the task's number. A plan that contains it contains our messages."""
_PLAIN: Final = {
    "string": "text",
    "bigint": "bigint",
    "int": "integer",
    "smallint": "smallint",
    "tinyint": "smallint",
    "double": "double precision",
    "float": "real",
    "boolean": "boolean",
    "date": "date",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
    "binary": "bytea",
}

Offsets = Mapping[Partition, Sequence[int]]
"""The offsets of messages to leave out, by partition. There may be as many as a round has messages."""


@dataclass(frozen=True, slots=True)
class Source:
    """Decoded rows of messages: the payload's columns, those of META, and PROBLEM.

    leaf        the leaf of the rows' plan.
    partitions  the Kafka partition of each task, in the order of the tasks; empty for dead letters.
    """

    rows: DataFrame
    leaf: DataFrame
    partitions: Sequence[Partition]

    def tasks(self, rows: DataFrame) -> dict[int, Partition]:
        """Return which task has which partition of ``rows``, which were made from this source.

        Raises JobError unless each task has the whole range of one partition. A plan does not show everything that
        moves rows, so this inspects what Spark is going to run. If two tasks had rows of one partition, rows would be
        lost: the first task moves the offset, and the second finds its range already applied.
        """
        here, there = (_parts(one) for one in (rows, self.leaf))
        # No tasks: Spark saw that all rows are filtered.
        if here.isEmpty():
            return {}
        if not here.equals(there):
            raise JobError(
                "transform: what it gives does not come from one Kafka partition for each of Spark's tasks (it comes "
                f"from {here.toString()[:100]}), but each partition is a transaction of its own; don't use toPandas, "
                f"rdd.repartition, rdd.coalesce or checkpoint, or {_AS_ONE}"
            )
        return dict(enumerate(self.partitions))


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows for the tasks that apply or stage them.

    source   the decoded messages that they are made of.
    rows     what the job's transform makes of these, in the form that COPY accepts.
    columns  of ``batch``, with their Postgres types.
    moved    the transform moves rows between partitions, which it may only with ``atomic="batch"``.
    """

    source: Source
    rows: DataFrame
    columns: Mapping[str, str]
    moved: bool


def prepare(job: ConsumerJob, source: Source) -> Prepared:
    """Apply the job's transform to messages. Raises JobError for one that would break exactly-once."""
    rows, moved = shaped(source.rows, job)
    rows, columns = copyable(rows)
    return Prepared(source, rows, columns, moved)


def of_ranges(
    session: SparkSession,
    job: ConsumerJob,
    decoder: TaskDecoder,
    ranges: Mapping[Partition, Range],
    without: Offsets,
    settings: ReaderSettings,
) -> Source:
    """Return the messages of the ranges, except those at the offsets in ``without``, with one task per partition."""
    partitions = sorted(ranges)
    left_out = {partition: frozenset(without.get(partition, ())) for partition in partitions}
    leaf = _leaf(session, len(partitions))
    read = functools.partial(task.read_range, decoder, dict(ranges), left_out)
    each = functools.partial(task.with_reader, read, partitions, settings)
    rows = in_tasks(leaf, functools.partial(task.with_number, each), _schema(job), pool="read")
    return Source(decoded(rows, job), leaf, partitions)


def of_letters(session: SparkSession, job: ConsumerJob, decoder: TaskDecoder, letters: Sequence[RetryRecord]) -> Source:
    """Return dead letters that are retried, all in one task and in their order."""
    leaf = _leaf(session, 1)
    by_partition = groupby(letters, lambda letter: letter.place[:2])
    parts = [_messages(topic, part, list(some)) for (topic, part), some in by_partition]
    made = functools.partial(task.with_number, lambda _: decoder.decoding(parts))
    return Source(decoded(in_tasks(leaf, made, _schema(job), pool="read"), job), leaf, ())


def by_ranges(
    session: SparkSession, count: int, do: Callable[[int], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """Return the results of a function for each number below ``count``, with one task per number."""
    return in_tasks(_leaf(session, count), functools.partial(task.with_number, do), schema)


def _leaf(session: SparkSession, tasks: int) -> DataFrame:
    """Return one row per task: the task's number.

    It is made from an existing RDD. The partitions of two plans can be compared only if both are built on the same RDD,
    and each planning of ``range`` would create another one.
    """
    from pyspark.sql import DataFrame as Classic

    numbers = session.range(0, tasks, 1, tasks).toDF(_NUMBER)._jdf  # noqa: SLF001
    spark = session._jsparkSession  # noqa: SLF001
    return Classic(spark.internalCreateDataFrame(numbers.queryExecution().toRdd(), numbers.schema(), False), session)


def _messages(topic: str, part: int, letters: Sequence[RetryRecord]) -> Messages:
    from spark_jobs.task.incoming import Messages

    return Messages(
        topic,
        part,
        [one.place[2] for one in letters],
        [(one.time - _EPOCH) // dt.timedelta(milliseconds=1) for one in letters],
        [one.key for one in letters],
        [one.value for one in letters],
        [one.message_headers() for one in letters],
    )


def _parts(rows: DataFrame) -> Any:
    """Return the partitions of what Spark is going to run, as a Java list."""
    return rows._jdf.queryExecution().toRdd().toJavaRDD().partitions()  # noqa: SLF001


def _schema(job: ConsumerJob) -> StructType:
    """Return the columns that the reading worker produces. VARIANT is text there; see ``decoded``."""
    from pyspark.sql.types import DataType, StringType, StructType

    names = _META_KINDS | (_TRACE if isinstance(job.schema, Traced) else {})
    meta = DataType.fromDDL(", ".join(f"{name} {kind}" for name, kind in names.items()))
    assert isinstance(meta, StructType)
    payload = as_read(job.decoder.task_plan()[0])
    return StructType([*meta.fields, *payload.fields]).add(PROBLEM, StringType())


def task_decoder(job: ConsumerJob) -> TaskDecoder:
    """Return how a task turns Kafka's messages into rows."""
    from spark_jobs.task.incoming import Incoming

    job.payload_columns()
    chosen = None if job.types is None else tuple(job.types)
    fields, plan = job.decoder.task_plan()
    traced = isinstance(job.schema, Traced)
    plan()  # Raises here what would otherwise fail in every task.
    incoming = Incoming(
        chosen, ids_from(job.strategy), traced, job.strategy.key if isinstance(job.strategy, Dedup) else None
    )
    columns = _columns(job, fields, traced=traced)
    return TaskDecoder(arrow_type(_schema(job)), plan, incoming, columns, job.max_payload_bytes)


def _columns(job: ConsumerJob, fields: StructType, *, traced: bool) -> Mapping[str, str] | None:
    """Return the columns of ``batch`` with their Postgres types; None if Spark has to process the rows first.

    That is so with a transform, with types whose JSON only Spark writes, and with ids made from decoded columns.
    """
    types = {field.name: _in_postgres(field.dataType) for field in fields.fields}
    if job.transform is not None or None in types.values() or ids_from(job.strategy) == "columns":
        return None
    columns = {name: kind for name, kind in types.items() if kind is not None}
    columns |= dict.fromkeys((TRACEPARENT, TRACESTATE), "text") if traced else {}
    return columns | META


def _in_postgres(kind: DataType) -> str | None:
    """Return the Postgres type of a column that a task can copy itself; None for any other."""
    from spark_jobs.payloads.json_output import has_json

    plain = _plain(kind.simpleString())
    nested = plain is None and "variant" not in kind.simpleString() and has_json(arrow_type(kind))
    return "jsonb" if nested else plain


def decoded(rows: DataFrame, job: ConsumerJob) -> DataFrame:
    """Return the reading worker's rows with the payload's columns, those of META, and PROBLEM."""
    from pyspark.sql import functions as F  # noqa: N812  the name everybody knows it by
    from pyspark.sql.types import VariantType

    for field in job.decoder.task_plan()[0].fields:
        if isinstance(field.dataType, VariantType):
            text, parsed = F.col(field.name), F.try_parse_json(F.col(field.name))
            unfit = F.when(text.isNotNull() & parsed.isNull(), "the payload is too large or too deep for VARIANT")
            rows = rows.withColumn(PROBLEM, F.coalesce(PROBLEM, unfit)).withColumn(field.name, parsed)
    if isinstance(job.strategy, Fingerprint) and job.strategy.decoded:
        # A tombstone's content is its key.
        gone = uuid8(F.sha2(F.col("message_key").cast("binary"), 256))
        content = F.when(F.col(PROBLEM).isNull(), job.strategy.message_id())
        rows = rows.withColumn("message_id", F.when(F.col("message_tombstone"), gone).otherwise(content))
    return rows.select(*(f"`{name}`" for name in job.payload_columns()), *META, PROBLEM)


def ids_from(strategy: Strategy) -> Literal["headers", "content", "columns", "place"]:
    """Return what the messages' ids are made from; see Incoming."""
    match strategy:
        case Fingerprint():
            return "columns" if strategy.decoded else "content"
        case OffsetsOnly() | Dedup(allow_producer_repeats=True):
            return "place"
        case _:
            return "headers"


def shaped(rows: DataFrame, job: ConsumerJob) -> tuple[DataFrame, bool]:
    """Return the result of the job's transform for decoded rows, and whether it has moved them; see prepare.

    A row with a PROBLEM must not reach the transform, which would take its NULLs for values or silently filter it out.
    Instead, the whole range fails with UNDECODED in the error, and the driver takes the row out.
    """
    from pyspark.sql import functions as F  # noqa: N812

    if job.transform is None:
        return rows, False
    # rand() keeps Spark from moving the transform's filters below this: it moves them past deterministic columns only.
    fail = F.raise_error(F.concat(F.lit(f"{UNDECODED} "), F.rand().cast("string")))
    guarded = rows.withColumn(
        "message_topic", F.when(F.col(PROBLEM).isNull(), F.col("message_topic")).otherwise(fail)
    ).drop(PROBLEM)
    result = job.transform(guarded)
    if job.atomic == "batch" and moves_rows(result, guarded):
        return result, True
    if _shuffles(result):
        raise JobError(
            "transform: it moves rows between partitions (an aggregation, distinct, repartition, sort, or a join that "
            "is none with functions.broadcast(another table)), but each partition is a transaction of its own; "
            f"aggregate in the effect's SQL, or {_AS_ONE}"
        )
    missing = [name for name in KEPT if name not in result.columns]
    if missing:
        raise JobError(f"transform: the result has no column {missing[0]}; keep the columns {', '.join(KEPT)}")
    return result, False


def moves_rows(rows: DataFrame, source: DataFrame) -> bool:
    """Return whether rows are, or may be, in other partitions than in ``source``.

    That is so after a shuffle, and for rows that were created anew (``toPandas``, ``rdd``, ``checkpoint``): their plan
    does not show where they come from.
    """
    here, there = (one._jdf.queryExecution().analyzed().collectLeaves() for one in (rows, source))  # noqa: SLF001
    return not here.equals(there) or _shuffles(rows)


def _shuffles(rows: DataFrame) -> bool:
    """Return whether the plan has a shuffle, or anything else that moves messages' rows to other partitions.

    A join with a broadcast table leaves the messages' rows where they are, however the table was made; unless it was
    made from the messages, because then it contains rows of all partitions.
    """
    plan = rows._jdf.queryExecution().executedPlan().toString()  # noqa: SLF001  the only way to see it
    within: int | None = None
    for line in plan.splitlines():
        # Only the names of nodes count: a column may be called ExchangeRate.
        if not (found := _NODE.match(line)):
            continue
        depth, node = len(found[1]), found[2]
        if within is not None and depth > within:
            if f"{_NUMBER}#" in line:
                return True
            continue
        within = None
        if node == "BroadcastExchange":
            within = depth
        elif node == "ReusedExchange" and "], BroadcastExchange " in line:
            # The broadcast itself is in another place of the plan.
            continue
        elif any(sign in node for sign in _MOVING):
            return True
    return False


def require_one_task(rows: DataFrame) -> None:
    """Raise JobError if dead letters that are retried in one transaction would be in several tasks."""
    if rows._jdf.queryExecution().toRdd().getNumPartitions() > 1:  # noqa: SLF001
        raise JobError(
            "transform: it spreads dead letters that are retried over several tasks, but they are one transaction; "
            f"don't use toPandas or rdd.repartition, or {_AS_ONE}"
        )


def in_tasks(
    rows: DataFrame,
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: StructType | str,
    *,
    pool: Literal["apply", "read"] = "apply",
) -> DataFrame:
    """Return the results of a function for the rows of each task, in Python workers that run nothing else.

    Each worker keeps its session in the sink, or its Kafka client, and Spark gives a task the worker that has been idle
    for the longest time. If a transform in Python shared these workers, every one of them would have both in the end.
    Spark keeps workers with different environments apart, so a ``pool`` has no more workers than there are tasks at a
    time.
    """
    environment = rows.sparkSession.sparkContext.environment
    # Workers load no settings.
    chosen = credentials.chosen()
    provider = {credentials.VARIABLE: chosen} if chosen and credentials.VARIABLE not in environment else {}
    with _MAKING:
        environment[_OWN_WORKERS] = pool
        environment |= provider
        try:
            return rows.mapInArrow(functools.partial(task.in_worker, function), schema)
        finally:
            del environment[_OWN_WORKERS]
            for name in provider:
                del environment[name]


def _plain(kind: str) -> str | None:
    """Return the Postgres type of a Spark type; None for a nested type, or one without a counterpart."""
    return kind.replace("decimal", "numeric") if kind.startswith("decimal(") else _PLAIN.get(kind)


def copyable(rows: DataFrame) -> tuple[DataFrame, dict[str, str]]:
    """Return the rows in a form that COPY accepts, and the columns of ``batch`` with their Postgres types.

    Nested values and VARIANT become jsonb. Raises JobError for a type without a counterpart.
    """
    from pyspark.sql import functions as F  # noqa: N812

    types: dict[str, str] = {}
    picked: list[Column] = []
    for name, kind in rows.dtypes:
        column = F.col(f"`{name}`")
        if name == PROBLEM:
            picked.append(column)
            continue
        types[name] = _of_column(name, kind)
        if kind == "void":
            column = column.cast(_META_KINDS[name])
        elif types[name] == "jsonb":
            column = F.to_json(column, WHOLE_TIMES)
        if name == "message_tombstone":
            # A row that a join added is not a tombstone. NULL would match neither a condition nor its opposite.
            column = F.coalesce(column, F.lit(False))
        picked.append(column.alias(name))
    return rows.select(*picked), types


def stream_columns(schema: StructType) -> tuple[dict[str, str], pa.Schema]:
    """Return the columns of ``batch`` for rows of this schema with their Postgres types, and their Arrow types.

    Raises JobError for a type without a counterpart.
    """
    import pyarrow as pa
    from pyspark.sql import types as t

    from spark_jobs.payloads.json_output import has_json

    types: dict[str, str] = {}
    form: list[pa.Field] = []
    atoms: list[DataType] = [t.StringType(), t.IntegerType(), t.LongType(), t.TimestampType(), t.BooleanType()]
    meta = {one.simpleString(): one for one in atoms}
    for field in schema.fields:
        name, kind = field.name, field.dataType.simpleString()
        # As in exactly_once, a stream's own column of this name is left out.
        if name == PROBLEM:
            continue
        if name in types:
            raise JobError(f"column {name}: two columns have the name; rename one")
        types[name] = _of_column(name, kind)
        read = meta[_META_KINDS[name]] if kind == "void" else field.dataType
        if types[name] == "jsonb" and ("variant" in kind or not has_json(arrow_type(read))):
            raise JobError(f"column {name}: {kind} can't be written as JSON here; use to_json in the query")
        form.append(pa.field(name, arrow_type(read)))
    return types, pa.schema(form)


def _of_column(name: str, kind: str) -> str:
    """Return the Postgres type of a column of ``batch``. Raises JobError for a name or type that can't be one."""
    if name.startswith(OWN) or name in _SYSTEM:
        raise JobError(f"column {name}: the name is reserved for the consumer or Postgres; rename yours")
    if name in META:
        if kind not in ("void", _META_KINDS[name]):
            raise JobError(f"transform: column {name} must stay {_META_KINDS[name]}, and is {kind}; rename yours")
        return META[name]
    if (plain := _plain(kind)) is not None:
        return plain
    if kind == "variant" or kind.startswith(("struct<", "map<", "array<")):
        return "jsonb"
    raise JobError(f"column {name}: {kind} has no counterpart in Postgres; cast it in the transform")
