"""The Spark session of a consumer, and the batch of one round as a DataFrame."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from outbox.event import TRACEPARENT, TRACESTATE
from spark_jobs.dedup.strategies import WHOLE_TIMES, Fingerprint, OffsetsOnly, Strategy, uuid8
from spark_jobs.effects.produce import Traced
from spark_jobs.errors import JobError
from spark_jobs.job import KEPT, META, OWN, ConsumerJob
from spark_jobs.model import Partition, Place, Range
from spark_jobs.payloads.decoding import PROBLEM, LateDecoder, arrow_type, nullable
from spark_jobs.spark.errors import HIDDEN, UNDECODED
from spark_jobs.task.partition import Late

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

DEFAULT_MASTER: Final = "local[2,4]"
"""Two cores, and four tries for a task: plain ``local[2]`` gives a task no second try."""

REQUIRED_CONF: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.execution.arrow.useLargeVarTypes": "false",
    "spark.sql.adaptive.enabled": "false",
    # Spark's own list. Without kafka in it another reader comes, whose tasks do not say what they read; see tasks.
    "spark.sql.sources.useV1SourceList": "avro,csv,json,kafka,orc,parquet,text",
}
"""What the consumer counts on in every Spark, wherever it runs."""

# Measured: with these the reader is about twice as fast as with the Java client's defaults. Larger ones are no faster,
# and dangerous: Spark keeps up to 64 consumers, each with a fetch or two in the heap. With 8 MiB and 10,000 records it
# was 13 MB for each, of a heap that is 1 GB where nobody has said more.
READER_OPTIONS: Final = {
    "max.poll.records": "2000",
    "max.partition.fetch.bytes": str(2 * 1024 * 1024),
    "fetch.min.bytes": str(1024 * 1024),
    "fetch.max.wait.ms": "50",
}
_OURS: Final = frozenset({"isolation.level", "group.id", "enable.auto.commit", "auto.offset.reset"})
_AS_ONE: Final = "declare atomic='batch'"
_MOVING: Final = ("Exchange", "Coalesce", "CartesianProduct", "Union", "CollectLimit", "TakeOrdered", "GlobalLimit")
_READ: Final = re.compile(r"KafkaSourceRDDPartition\((\d+),KafkaOffsetRange\(([\w.-]+)-(\d+),(\d+),(\d+),")
"""A part of a round as Spark's Kafka source has it: its number, topic, partition, first offset and end."""
_OWN_WORKERS: Final = "OUTBOX_CONSUMER_TASKS"
# The environment is all threads' of the driver, and is read while the function is wrapped.
_MAKING: Final = threading.Lock()
# Not "$", which in Java also stands before a last newline.
_UUID: Final = r"\A[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\z"
# META's types as Spark spells them: in the binary format they are told by nothing but their place.
_META_KINDS: Final = {
    name: {"uuid": "string", "text": "string", "integer": "int", "timestamptz": "timestamp"}.get(kind, kind)
    for name, kind in META.items()
}
_SYSTEM: Final = frozenset({"ctid", "tableoid", "xmin", "xmax", "cmin", "cmax"})
_JAVA_OPTIONS: Final = (
    *("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"),
    *("SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS"),
)
_PLACE: Final = {"topic": "topic", "partition": "part", "offset": "offset"}
_COLLECTOR: Final = re.compile(r"-XX:\+Use\w+GC\b")
# A line of a plan: three characters for each level, whether it runs as generated code, and the node's name.
_NODE: Final = re.compile(r"^((?:[ :]  )*(?:[+:]- )?)[\s*()\d]*(\w+)")
_KAFKA: Final = re.compile(r"KafkaRelation\(.*\)")
"""What a plan calls a source of Kafka, with its partitions and offsets."""
_AS_LITERALS: Final = 1_000
"""Up to so many messages are left out by a condition. More of them cost less as a table."""
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


def start(
    name: str,
    *,
    master: str | None = None,
    jars: Iterable[Path] = (),
    packages: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start or get the session. ``packages`` are Maven coordinates, instead of ``jars``.

    Under spark-submit its own options count: master, jars, packages and Python are left as they were given there.
    """
    if submitted():
        master, jars, packages = None, (), None
    else:
        master = master or DEFAULT_MASTER
        # Workers start with this interpreter, not with any python3 of the path; and they find the user's modules.
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        paths = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        require_not_hidden(paths)
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    settings = {**REQUIRED_CONF, "spark.ui.showConsoleProgress": "false"}
    if master is not None:
        builder = builder.master(master)
        settings |= {
            "spark.ui.enabled": "false",
            # Of a transform that shuffles. Spark's own 200 is for more than a round; each is a task and a connection.
            "spark.sql.shuffle.partitions": "16",
            "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / "outbox-spark-warehouse"),
        }
        if master.startswith("local"):
            settings |= {
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                **_collector(conf or {}),
            }
    if packages:
        settings["spark.jars.packages"] = packages
    elif jar_list := ",".join(str(jar) for jar in jars):
        settings["spark.jars"] = jar_list
    for key, value in (settings | dict(conf or {})).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    # What goes wrong is raised, and shown once: not also as a page of JSON by Spark's own logger.
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    if not submitted():
        session.sparkContext.setLogLevel("OFF")
    return session


def active() -> SparkSession | None:
    """Return the session that this process has, if it has one. Raises JobError for one of Spark Connect."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:  # noqa: SLF001  there is no other way to ask without making one
        return None
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def beside(session: SparkSession) -> SparkSession:
    """Return a session of the same Spark for a consumer's own use: a clone, with the settings that it counts on.

    Spark does the same for each streaming query. The clone has the session's temporary views and functions. Raises
    JobError for a session of Spark Connect, which has no driver here.
    """
    from pyspark.sql import SparkSession

    if not hasattr(session, "_jsparkSession"):
        raise JobError("spark: a session of Spark Connect is on another machine; a consumer needs Spark's driver here")
    if str(session.sparkContext.master).startswith("local"):
        # There workers begin in this folder.
        require_not_hidden([str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    made = SparkSession(session.sparkContext, session._jsparkSession.cloneSession())  # noqa: SLF001
    for name, value in REQUIRED_CONF.items():
        made.conf.set(name, value)
    return made


def require_not_hidden(paths: Iterable[str]) -> None:
    """Raise JobError where a worker that looks for modules in these folders first would find another spark_jobs."""
    ours = Path(__file__).resolve().parents[1]
    for path in paths:
        for found in (Path(path) / ours.name, Path(path) / f"{ours.name}.py"):
            if found.resolve() == ours:
                return
            if (found / "__init__.py").is_file() or (found.suffix and found.is_file()):
                raise JobError(HIDDEN.format(found=found, ours=ours))


def _collector(conf: Mapping[str, str]) -> dict[str, str]:
    """Choose the garbage collector, where nobody else has: two of them in its options, and a JVM does not start.

    Fetches of MiBs are what G1 is slow with: it took up to half as much CPU again for reading a message.
    """
    given = " ".join([*conf.values(), *(os.environ.get(name, "") for name in _JAVA_OPTIONS)])
    folders = (os.environ.get("SPARK_CONF_DIR"), os.environ.get("SPARK_HOME") and f"{os.environ['SPARK_HOME']}/conf")
    configured = any(folder and (Path(folder) / "spark-defaults.conf").exists() for folder in folders)
    if configured or _COLLECTOR.search(given):
        return {}
    return {"spark.driver.defaultJavaOptions": "-XX:+UseParallelGC"}


def submitted() -> bool:
    """Return whether spark-submit started this process: then Spark's JVM is there already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def source(
    session: SparkSession,
    job: ConsumerJob,
    ranges: Mapping[Partition, Range],
    bootstrap_servers: str,
    kafka: Mapping[str, str],
) -> DataFrame:
    """Return the messages of the ranges as Spark's Kafka source has them, one Spark partition for each Kafka partition.

    Both ends are pinned: ``latest`` would be looked up anew by every action. Raises JobError for options that would
    break the promise.
    """
    for name in kafka:
        if name in _OURS:
            raise JobError(f"spark.kafka option {name!r} is set by the consumer itself; remove it")
    options = {**READER_OPTIONS, **kafka, "isolation.level": "read_committed", "bootstrap.servers": bootstrap_servers}
    reader = session.read.format("kafka").options(
        **{f"kafka.{name}": value for name, value in options.items()},
        **{
            "assign": json.dumps(_by_topic({partition: partition[1] for partition in ranges}, as_list=True)),
            "startingOffsets": json.dumps(_by_topic({partition: span.start for partition, span in ranges.items()})),
            "endingOffsets": json.dumps(_by_topic({partition: span.end for partition, span in ranges.items()})),
            "failOnDataLoss": "true",
            "includeHeaders": "true",
            # A fixed group: otherwise the executors' pool of consumers never finds one to use again.
            "kafka.group.id": f"{job.group}-spark",
        },
    )
    return reader.load()


def chosen(rows: DataFrame, job: ConsumerJob, without: Iterable[Place] = ()) -> DataFrame:
    """Return the messages that the job is to apply: of its types, and ``without`` those named."""
    if job.types is not None:
        rows = rows.filter(_header("ce_type", "event-type").isin(list(job.types)))
    return left_in(rows, without)


def left_in(rows: DataFrame, without: Iterable[Place]) -> DataFrame:
    """Return the messages ``without`` those named."""
    from pyspark.sql import functions as F  # noqa: N812  the name everybody knows it by

    named = set(without)
    if len(named) > _AS_LITERALS:
        offsets: dict[Partition, list[int]] = defaultdict(list)
        for topic, part, offset in named:
            offsets[topic, part].append(offset)
        return without_offsets(rows, offsets)
    left_out = places(named)
    return rows if left_out is None else rows.filter(~F.coalesce(left_out, F.lit(False)))


def without_offsets(rows: DataFrame, offsets: Mapping[Partition, Sequence[int]]) -> DataFrame:
    """Return the messages but for those at these offsets, however many these are.

    They are a table that every task gets, and not a condition, of which each literal is made, analysed and sent by the
    driver: 60,000 took it 20 seconds. What is left stays in its partition and in its order. Kafka's columns for a
    message's place are never NULL, and equality is exact.
    """
    import pyarrow as pa
    from pyspark.sql import functions as F  # noqa: N812

    named = [
        pa.table(
            {
                "outbox_topic": pa.repeat(topic, len(of_part)),
                "outbox_part": pa.repeat(pa.scalar(part, pa.int32()), len(of_part)),
                "outbox_offset": pa.array(of_part, pa.int64()),
            }
        )
        for (topic, part), of_part in sorted(offsets.items())
        if of_part
    ]
    if not named:
        return rows
    away = F.broadcast(rows.sparkSession.createDataFrame(pa.concat_tables(named)))
    same = [F.col(here) == F.col(f"outbox_{there}") for here, there in _PLACE.items()]
    return rows.join(away, same, "left_anti")


def places(named: Iterable[Place]) -> Column | None:
    """Return a condition on Kafka's columns that is true for these messages; None when there are none."""
    from pyspark.sql import functions as F  # noqa: N812

    # One list, however many: of some hundred conditions, one within the other, Spark's stack overflows.
    texts = [f"{topic}/{part}/{offset}" for topic, part, offset in sorted(named)]
    place = F.concat_ws("/", "topic", F.col("partition").cast("string"), F.col("offset").cast("string"))
    return place.isin(texts) if texts else None


def decoded(rows: DataFrame, job: ConsumerJob) -> DataFrame:
    """Return the payload's columns, those of META, and PROBLEM."""
    from pyspark.sql import functions as F  # noqa: N812

    payload = job.payload_columns()
    meta = _meta(job)
    # Before the payload's columns, which may have names of Kafka's.
    rows = rows.select(*(column.alias(name) for name, column in meta.items()), "value", "headers")
    rows = job.decoder.decode(rows)
    if "message_id" not in meta:
        # A tombstone's content is its key.
        gone = uuid8(F.sha2(F.col("message_key").cast("binary"), 256))
        made = F.when(F.col("message_tombstone"), gone).when(F.col(PROBLEM).isNull(), _message_id(job))
        rows = rows.withColumn("message_id", made)
    return rows.select(*(f"`{name}`" for name in payload), *META, PROBLEM)


def late(job: ConsumerJob) -> Late | None:
    """Return how a task makes rows of ``batch`` from Kafka's own; None for a job that needs Spark for it.

    That is one with a transform, with nested fields (Spark writes their JSON), or with ids made of the content.
    """
    from pyspark.sql.types import StringType

    from spark_jobs.task.incoming import Incoming

    by_content = isinstance(job.strategy, Fingerprint) and job.strategy.decoded
    if job.transform is not None or by_content or not isinstance(job.decoder, LateDecoder):
        return None
    found = job.decoder.late()
    if found is None:
        return None
    job.payload_columns()
    fields, plan = found
    types = {field.name: _plain(field.dataType.simpleString()) for field in fields.fields}
    if None in types.values():
        return None
    plan()  # What can't work is an error here, and not of every task.
    kind = arrow_type(nullable(fields).add(PROBLEM, StringType()))
    traced = isinstance(job.schema, Traced)
    columns = {name: kind_ for name, kind_ in types.items() if kind_ is not None}
    columns |= dict.fromkeys((TRACEPARENT, TRACESTATE), "text") if traced else {}
    chosen = None if job.types is None else tuple(job.types)
    return Late(columns | META, kind, plan, Incoming(chosen, ids_from(job.strategy), traced))


def ids_from(strategy: Strategy) -> Literal["headers", "content", "place"]:
    """Return what the messages' ids are made of; see Incoming."""
    match strategy:
        case Fingerprint():
            return "content"
        case OffsetsOnly():
            return "place"
        case _:
            return "headers"


def shaped(rows: DataFrame, job: ConsumerJob) -> DataFrame:
    """Apply the job's transform to decoded rows. Raises JobError for one that would break the promise.

    A row with a PROBLEM must not meet the transform, which would take its NULLs for values or filter it away without a
    word: the whole range fails with UNDECODED in the error instead, and the driver takes the row out.
    """
    from pyspark.sql import functions as F  # noqa: N812

    if job.transform is None:
        return rows
    # rand() keeps Spark from moving the transform's filters below this: only what is deterministic may be moved.
    fail = F.raise_error(F.concat(F.lit(f"{UNDECODED} "), F.rand().cast("string")))
    guarded = rows.withColumn(
        "message_topic", F.when(F.col(PROBLEM).isNull(), F.col("message_topic")).otherwise(fail)
    ).drop(PROBLEM)
    result = job.transform(guarded)
    if job.atomic == "batch" and moves_rows(result, guarded):
        return result
    if _shuffles(result, guarded):
        raise JobError(
            "transform: it moves rows between partitions (an aggregation, distinct, repartition, sort, or a join that "
            "is none with functions.broadcast(another table)), but each partition is a transaction of its own; "
            f"aggregate in the effect's SQL, or {_AS_ONE}"
        )
    missing = [name for name in KEPT if name not in result.columns]
    if missing:
        raise JobError(f"transform: the result has no column {missing[0]}; keep the columns {', '.join(KEPT)}")
    return result


def moves_rows(rows: DataFrame, source: DataFrame) -> bool:
    """Return whether rows are in other partitions than in ``source``, or may be.

    That is after a shuffle, and for rows that were made anew (``toPandas``, ``rdd``, ``checkpoint``), of which the plan
    does not say where they come from.
    """
    here, there = (one._jdf.queryExecution().analyzed().collectLeaves() for one in (rows, source))  # noqa: SLF001
    return not here.equals(there) or _shuffles(rows, source)


def _shuffles(rows: DataFrame, source: DataFrame) -> bool:
    """Return whether the plan has a shuffle, or anything else that brings rows of ``source`` into other partitions.

    A table that is sent whole to all tasks leaves the rows that it is joined with where they are, however it was made
    itself; unless it was made of the source, whose rows would meet those of all partitions in it.
    """
    plan = rows._jdf.queryExecution().executedPlan().toString()  # noqa: SLF001  the only way to see it
    leaves = source._jdf.queryExecution().analyzed().collectLeaves().mkString("\n")  # noqa: SLF001
    kafka = _KAFKA.findall(leaves)
    within: int | None = None
    for line in plan.splitlines():
        # The nodes' names only: a column may be called ExchangeRate.
        if not (found := _NODE.match(line)):
            continue
        depth, node = len(found[1]), found[2]
        if within is not None and depth > within:
            if any(one in line for one in kafka):
                return True
            continue
        within = None
        if node == "BroadcastExchange":
            within = depth
        elif node == "ReusedExchange" and "], BroadcastExchange " in line:
            # It stands, whole, in another place of the plan.
            continue
        elif any(sign in node for sign in _MOVING):
            return True
    return False


def tasks(rows: DataFrame, ranges: Mapping[Partition, Range]) -> dict[int, Partition]:
    """Return which task applies which partition: each the whole range of one. Raises JobError where that is not so.

    A plan does not show everything that moves rows, so this looks at what Spark is going to run: what a task reads is
    known by its type and its offsets. Two tasks with rows of one partition would be a loss: the first moves the offset,
    and the other one finds its range applied already.
    """
    rdd = rows._jdf.queryExecution().toRdd().toJavaRDD()  # noqa: SLF001
    # As text, which is one call to the JVM and not five for each part.
    text = rdd.partitions().toString()
    read = [
        ((topic, int(part)), int(number), int(first), int(end))
        for number, topic, part, first, end in _READ.findall(text)
    ]
    spans = sorted((partition, first, end) for partition, _, first, end in read)
    wanted = sorted((partition, span.start, span.end) for partition, span in ranges.items())
    # Without any task there are no rows: Spark saw that all of them are filtered.
    if rdd.getNumPartitions() not in {0, len(read)} or (rdd.getNumPartitions() and spans != wanted):
        raise JobError(
            "transform: what it gives does not come from one Kafka partition for each of Spark's tasks (it comes from "
            f"{text[:100]}), but each partition is a transaction of its own; do without toPandas, rdd.repartition, "
            f"rdd.coalesce and checkpoint, or {_AS_ONE}"
        )
    return {number: partition for partition, number, _, _ in read}


def require_one_task(rows: DataFrame) -> None:
    """Raise JobError where dead letters that are tried again, in one transaction, would not be in one task."""
    if rows._jdf.queryExecution().toRdd().getNumPartitions() > 1:  # noqa: SLF001
        raise JobError(
            "transform: it spreads dead letters that are tried again over several tasks, but they are one transaction; "
            f"do without toPandas and rdd.repartition, or {_AS_ONE}"
        )


def in_tasks(
    rows: DataFrame, function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """Return what a function makes of the rows of each task, in Python workers that run nothing else.

    Each of them keeps its session in the sink, and Spark gives a task the one that has been idle for longest. Beside a
    transform in Python, which has workers of its own in the same tasks, all would get their turn and have a session in
    the end. Spark keeps workers apart by their environments: of ours there are no more than tasks at a time.
    """
    environment = rows.sparkSession.sparkContext.environment
    with _MAKING:
        environment[_OWN_WORKERS] = "1"
        try:
            return rows.mapInArrow(function, schema)
        finally:
            del environment[_OWN_WORKERS]


def _meta(job: ConsumerJob) -> dict[str, Column]:
    """META's columns over those of Kafka's source; without the id where it is made of what is not decoded yet."""
    from pyspark.sql import functions as F  # noqa: N812

    meta = {
        "message_topic": F.col("topic"),
        "message_part": F.col("partition"),
        "message_offset": F.col("offset"),
        # NUL is no character of Postgres; a binary key is no text anyway.
        "message_key": F.translate(F.col("key").cast("string"), "\0", "\ufffd"),
        "message_type": F.translate(_header("ce_type", "event-type"), "\0", "\ufffd"),
        "message_time": _time(),
        "message_tombstone": F.col("value").isNull(),
    }
    if not (isinstance(job.strategy, Fingerprint) and job.strategy.decoded):
        meta["message_id"] = _message_id(job)
    return meta


def _time() -> Column:
    """Kafka's timestamp, within what Postgres and Python can show: a producer may have meant microseconds."""
    from pyspark.sql import functions as F  # noqa: N812

    low, high = (F.lit(text).cast("timestamp") for text in ("0001-01-02 00:00:00", "9999-12-30 00:00:00"))
    return F.greatest(F.least(F.col("timestamp"), high), low)


def _plain(kind: str) -> str | None:
    """The type in Postgres of what is no nested value; None for those."""
    return kind.replace("decimal", "numeric") if kind.startswith("decimal(") else _PLAIN.get(kind)


def _header(*names: str) -> Column:
    """The value of the first header of the first of these names, as text."""
    from pyspark.sql import functions as F  # noqa: N812

    def value(name: str) -> Column:
        return F.get(F.filter("headers", lambda header: header["key"] == name), F.lit(0))["value"]

    return F.coalesce(*map(value, names)).cast("string")


def _message_id(job: ConsumerJob) -> Column:
    """The id as a UUID: what the headers say; a hash of it when that is no UUID; of the content for Fingerprint; and of
    the place for OffsetsOnly where the headers say nothing.
    """
    from pyspark.sql import functions as F  # noqa: N812

    if isinstance(job.strategy, Fingerprint):
        return job.strategy.message_id()
    said = _said_id()
    if not isinstance(job.strategy, OffsetsOnly):
        return said
    numbers = (F.col("partition"), F.col("offset"), F.unix_micros(_time()))
    place = F.concat_ws("/", "topic", *(one.cast("string") for one in numbers))
    return F.coalesce(said, uuid8(F.sha2(place.cast("binary"), 256)))


def _said_id() -> Column:
    """The id that the headers say, or a hash of it when that is no UUID; NULL when they say nothing."""
    from pyspark.sql import functions as F  # noqa: N812

    given = _header("ce_id", "id")
    # Two sources may use one name (CloudEvents: source and id together are unique); a UUID is unique by itself.
    named = F.concat_ws("\0", F.coalesce(_header("ce_source"), F.lit("")), given)
    return F.when(given.rlike(_UUID), given).when(given != "", uuid8(F.sha2(named.cast("binary"), 256)))


def _by_topic(values: Mapping[Partition, int], *, as_list: bool = False) -> dict[str, object]:
    grouped: dict[str, dict[str, int]] = {}
    for (topic, part), value in sorted(values.items()):
        grouped.setdefault(topic, {})[str(part)] = value
    return {topic: sorted(parts.values()) if as_list else parts for topic, parts in grouped.items()}


def copyable(rows: DataFrame) -> tuple[DataFrame, dict[str, str]]:
    """Return the rows in a form that COPY takes, and the columns of ``batch`` with their types in Postgres.

    Nested values and VARIANT become jsonb. Raises JobError for a type that has no counterpart.
    """
    from pyspark.sql import functions as F  # noqa: N812

    types: dict[str, str] = {}
    picked: list[Column] = []
    for name, kind in rows.dtypes:
        column = F.col(f"`{name}`")
        if name == PROBLEM:
            picked.append(column)
            continue
        if name.startswith(OWN) or name in _SYSTEM:
            raise JobError(f"column {name}: the name is the consumer's or Postgres's own; name yours otherwise")
        if name in META:
            types[name] = META[name]
            if kind == "void":
                column = column.cast(_META_KINDS[name])
            elif kind != _META_KINDS[name]:
                raise JobError(
                    f"transform: column {name} must stay {_META_KINDS[name]}, and is {kind}; name yours otherwise"
                )
        elif (plain := _plain(kind)) is not None:
            types[name] = plain
        elif kind == "variant" or kind.startswith(("struct<", "map<", "array<")):
            types[name] = "jsonb"
            column = F.to_json(column, WHOLE_TIMES)
        else:
            raise JobError(f"column {name}: {kind} has no counterpart in Postgres; cast it in the transform")
        if name == "message_tombstone":
            # A row that a join has added is none; and NULL is neither what is passed over nor what is not.
            column = F.coalesce(column, F.lit(False))
        picked.append(column.alias(name))
    return rows.select(*picked), types


def raw(rows: DataFrame, job: ConsumerJob) -> DataFrame:
    """Return what a dead letter keeps of messages: their place, id, key, value, headers as JSON, and time."""
    from pyspark.sql import functions as F  # noqa: N812

    headers = F.transform(
        F.coalesce(F.col("headers"), F.array()),
        lambda header: F.struct(
            F.translate(header["key"], "\0", "\ufffd").alias("key"), header["value"].alias("value")
        ),
    )
    identity = F.lit(None).cast("string") if isinstance(job.strategy, Fingerprint) else _said_id()
    return rows.select(
        "topic",
        "partition",
        "offset",
        identity.alias("message_id"),
        "key",
        "value",
        F.to_json(headers, {"ignoreNullFields": "false"}).alias("headers"),
        F.unix_micros(_time()).alias("time"),
    )
