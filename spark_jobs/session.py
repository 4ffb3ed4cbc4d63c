"""The Spark session of a consumer, and the batch of one round as a DataFrame."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from spark_jobs.errors import JobError
from spark_jobs.job import META, ConsumerJob
from spark_jobs.planner import Partition, Range
from spark_jobs.task import CORRUPT

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

DEFAULT_MASTER: Final = "local[2,4]"
"""Two cores, and four tries for a task: plain ``local[2]`` gives a task no second try."""

REQUIRED_CONF: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.adaptive.enabled": "false",
}
"""What the consumer counts on in every Spark, wherever it runs."""

# Measured: with these the reader is about twice as fast as with the Java client's defaults.
READER_OPTIONS: Final = {
    "max.poll.records": "10000",
    "max.partition.fetch.bytes": str(8 * 1024 * 1024),
    "fetch.min.bytes": str(1024 * 1024),
    "fetch.max.wait.ms": "50",
}
_OURS: Final = frozenset({"isolation.level", "group.id", "enable.auto.commit", "auto.offset.reset"})
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
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    settings = {**REQUIRED_CONF, "spark.ui.showConsoleProgress": "false"}
    if master is not None:
        builder = builder.master(master)
        settings |= {
            "spark.ui.enabled": "false",
            "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / "outbox-spark-warehouse"),
        }
        if master.startswith("local"):
            settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
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


def submitted() -> bool:
    """Whether spark-submit started this process: then Spark's JVM is there already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def read(
    session: SparkSession,
    job: ConsumerJob,
    ranges: Mapping[Partition, Range],
    bootstrap_servers: str,
    kafka: Mapping[str, str],
) -> DataFrame:
    """Give the rows of the ranges, decoded and transformed, one Spark partition for each Kafka partition.

    Both ends are pinned: ``latest`` would be looked up anew by every action. Raises JobError for options or a
    transform that would break the promise.
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
    rows = reader.load()
    decoded = _decode(rows, job)
    shaped = decoded if job.transform is None else job.transform(decoded)
    missing = [
        name for name in ("message_id", "message_topic", "message_part", "message_offset") if name not in shaped.columns
    ]
    if missing:
        raise JobError(f"transform: the result has no column {missing[0]}; keep the message_ columns")
    plan = shaped._jdf.queryExecution().executedPlan().toString()  # noqa: SLF001  the only way to see it
    if "Exchange" in plan:
        raise JobError(
            "transform: it moves rows between partitions (a join, an aggregation, distinct, repartition or sort), but "
            "each partition is a transaction of its own; aggregate in the effect's SQL instead"
        )
    return shaped


def _header(name: str) -> Column:
    """The value of the first header of that name, as bytes."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.get(F.filter("headers", lambda header: header["key"] == name), F.lit(0))["value"]


def _by_topic(values: Mapping[Partition, int], *, as_list: bool = False) -> dict[str, object]:
    grouped: dict[str, dict[str, int]] = {}
    for (topic, part), value in sorted(values.items()):
        grouped.setdefault(topic, {})[str(part)] = value
    return {topic: sorted(parts.values()) if as_list else parts for topic, parts in grouped.items()}


def _decode(rows: DataFrame, job: ConsumerJob) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812  the name everybody knows it by
    from pyspark.sql.types import StringType, StructType

    def header(*names: str) -> Column:
        return F.coalesce(*(_header(name) for name in names)).cast("string")

    meta = {
        "message_id": header("ce_id", "id"),
        "message_topic": F.col("topic"),
        "message_part": F.col("partition"),
        "message_offset": F.col("offset"),
        "message_key": F.col("key").cast("string"),
        "message_type": header("ce_type", "event-type"),
        "message_time": F.col("timestamp"),
    }
    columns = [column.alias(name) for name, column in meta.items()]
    if job.schema is None:
        return rows.select(F.col("value").alias("payload"), *columns)
    declared = cast("StructType", StructType.fromDDL(job.schema))
    clash = sorted(set(declared.fieldNames()) & {*META, CORRUPT})
    if clash:
        raise JobError(f"schema: the name {clash[0]} is the consumer's own")
    with_corrupt = StructType(declared.fields).add(CORRUPT, StringType())
    parsed = F.from_json(
        F.col("value").cast("string"), with_corrupt, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
    )
    return rows.select(parsed.alias("parsed"), *columns).select("parsed.*", *meta)


def copyable(shaped: DataFrame) -> tuple[DataFrame, dict[str, str]]:
    """Give the rows in a form that COPY takes, and the columns of ``batch`` with their types in Postgres.

    Nested values become jsonb. Raises JobError for a type that has no counterpart.
    """
    from pyspark.sql import functions as F  # noqa: N812

    types: dict[str, str] = {}
    chosen: list[Column] = []
    for name, kind in shaped.dtypes:
        column = F.col(f"`{name}`")
        if name == CORRUPT:
            chosen.append(column)
            continue
        if name in META:
            types[name] = META[name]
        elif kind in _PLAIN:
            types[name] = _PLAIN[kind]
            if kind == "binary":
                column = F.concat(F.lit("\\x"), F.hex(column))
        elif kind.startswith("decimal("):
            types[name] = kind.replace("decimal", "numeric")
        elif kind.startswith(("struct<", "map<", "array<")):
            types[name] = "jsonb"
            column = F.to_json(column)
        else:
            raise JobError(f"column {name}: {kind} has no counterpart in Postgres; cast it in the transform")
        chosen.append(column.alias(name))
    return shaped.select(*chosen), types
