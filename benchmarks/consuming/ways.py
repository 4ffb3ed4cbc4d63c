"""The ways from a topic into a table: our consumer with its strategies and effects, and the alternatives to it."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
import psycopg
from confluent_kafka import Consumer, TopicPartition
from psycopg import sql

from benchmarks.consuming import debezium
from benchmarks.consuming.stage import DOCUMENTS, FLAT, LOG, NAMES, NESTED, ORDERS, PARTITIONS, TOTALS, Sink, Stage
from spark_jobs.dedup.strategies import Dedup, OffsetsOnly
from spark_jobs.driver.options import Options
from spark_jobs.driver.runner import Runner
from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.job import ConsumerJob

Run = Callable[[Stage, str, str, int], float]
"""Takes a topic, an empty table and how many events there are; returns the seconds until all of them are there."""


@dataclass(frozen=True)
class Way:
    """One row of the table. ``once``: each event has its effect once, whatever is killed."""

    name: str
    run: Run
    about: str
    sink: Sink = LOG
    once: bool = True

    @property
    def nested(self) -> bool:
        """Return whether it reads the topic with nested payloads."""
        return self.sink is DOCUMENTS


def ours(**declared: Any) -> Run:
    """Return a run of our consumer: Insert into the table, unless the job says otherwise."""

    def run(stage: Stage, topic: str, table: str, _: int) -> float:
        given = {"schema": FLAT, "effect": Insert(table)} | {
            name: value(table) if name == "effect" else value for name, value in declared.items()
        }
        job = ConsumerJob(group=table, topics=[topic], **given)
        options = Options(stage.url, {"bootstrap.servers": stage.kafka})
        with Runner(stage.spark, job, options, lambda *_: None) as runner:
            started = time.perf_counter()
            runner.once(threading.Event())
            return time.perf_counter() - started

    return run


def _totals(table: str) -> str:
    return f"""
        INSERT INTO {table} AS t SELECT order_id, count(*), sum(amount_cents) FROM batch GROUP BY order_id
        ORDER BY order_id
        ON CONFLICT (order_id) DO UPDATE SET events = t.events + excluded.events, cents = t.cents + excluded.cents"""


def _upsert(table: str) -> Upsert:
    return Upsert(table, ["order_id"], version="seq")


def _transform(rows: Any) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    return rows.filter("message_tombstone OR amount_cents >= 0").withColumn("status", F.upper("status"))


def append(reader: Mapping[str, str], *, documents: bool = False) -> Run:
    """Return a run of Spark's own stream, foreachBatch and JDBC, until all is there."""

    def run(stage: Stage, topic: str, table: str, _: int) -> float:
        from pyspark.sql import functions as F  # noqa: N812

        def write(rows: Any, _: int) -> None:
            rows.write.format("jdbc").options(
                # So that a text may be jsonb.
                url=stage.jdbc + ("&stringtype=unspecified" if documents else ""),
                dbtable=table,
                driver="org.postgresql.Driver",
                batchsize=10_000,
            ).mode("append").save()

        folder = tempfile.mkdtemp()
        started = time.perf_counter()
        rows = (
            stage.spark.readStream.format("kafka")
            .options(
                **{f"kafka.{name}": value for name, value in reader.items()},
                **{
                    "kafka.bootstrap.servers": stage.kafka,
                    "kafka.isolation.level": "read_committed",
                    "subscribe": topic,
                    "startingOffsets": "earliest",
                    "maxOffsetsPerTrigger": 200_000,
                },
            )
            .load()
            .select(F.from_json(F.col("value").cast("string"), NESTED if documents else FLAT).alias("parsed"))
            .select("parsed.*")
        )
        if documents:
            rows = rows.withColumns({name: F.to_json(name) for name in ("customer", "lines")})
        stream = rows.writeStream.foreachBatch(write).option("checkpointLocation", folder)
        stream.trigger(availableNow=True).start().awaitTermination()
        seconds = time.perf_counter() - started
        shutil.rmtree(folder, ignore_errors=True)
        return seconds

    return run


def loop(stage: Stage, topic: str, table: str, events: int) -> float:
    """Read, COPY, commit; then commit the offsets to Kafka."""
    consumer = Consumer(
        {
            "bootstrap.servers": stage.kafka,
            "group.id": table,
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "fetch.min.bytes": 100_000,
        }
    )
    listed = sql.SQL(", ").join(map(sql.Identifier, NAMES))
    copy_into = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(table), listed)
    started = time.perf_counter()
    consumer.assign([TopicPartition(topic, part, 0) for part in range(PARTITIONS)])
    done = 0
    with psycopg.connect(stage.url) as connection:
        while done < events:
            messages = consumer.consume(10_000, timeout=1)
            with connection.cursor().copy(copy_into) as copy:
                for message in messages:
                    assert message.error() is None
                    event = orjson.loads(message.value() or b"")
                    copy.write_row([event[name] for name in NAMES])
            connection.commit()
            if messages:
                consumer.commit(asynchronous=False)
            done += len(messages)
    seconds = time.perf_counter() - started
    consumer.close()
    return seconds


# With these Spark's Kafka source is about twice as fast as with the Java client's defaults; larger ones are no faster.
_TUNED: Final = {
    "max.poll.records": "2000",
    "max.partition.fetch.bytes": str(2 * 1024 * 1024),
    "fetch.min.bytes": str(1024 * 1024),
    "fetch.max.wait.ms": "50",
}

ALL: Final = (
    Way("dedup", ours(strategy=Dedup()), "our consumer with its defaults: row, id and offset in one transaction"),
    Way("offsets only", ours(strategy=OffsetsOnly()), "the same with OffsetsOnly: no ids are remembered"),
    Way("append", append({}), "Spark's foreachBatch and JDBC append, rewritten batches of 10,000", once=False),
    Way("append, tuned", append(_TUNED), "the same with a tuned Kafka source", once=False),
    Way("loop", loop, "confluent-kafka and psycopg in one process: COPY, a commit each 10,000 messages", once=False),
    Way(
        "debezium",
        debezium.sink(debezium.DEFAULT),
        "Debezium's JDBC sink connector with its defaults, insert.mode=insert; its settings contain the schema "
        "(schema.content), so it reads the same messages and converts nothing more",
        once=False,
    ),
    Way("debezium, tuned", debezium.sink(debezium.TUNED), "the same, 4 tasks, batches of 5,000 by UNNEST", once=False),
    Way("sql", ours(effect=_totals), "Dedup and hand-written SQL: totals of 5,000 orders", TOTALS),
    Way("upsert", ours(effect=_upsert), "Dedup and Upsert with a version: the last state of 5,000 orders", ORDERS),
    Way(
        "debezium, upsert",
        debezium.sink(debezium.UPSERT),
        "Debezium's tuned sink with insert.mode=upsert: may go back to an older state for a moment after a crash",
        ORDERS,
        once=False,
    ),
    Way("transform", ours(transform=_transform), "Dedup and Insert after a filter and a computed column"),
    Way("nested", ours(schema=NESTED), "Dedup and Insert, a struct and an array as jsonb", DOCUMENTS),
    Way(
        "append, nested",
        append(_TUNED, documents=True),
        "the tuned append of the same, with to_json",
        DOCUMENTS,
        once=False,
    ),
)
BASE: Final = "dedup"
"""The way that the ratios compare the others with."""

GOALS: Final = (
    ("dedup", "loop", 1.2),
    ("offsets only", "loop", 1.4),
    ("dedup", "append", 2.0),
    ("dedup", "append, tuned", 1.5),
    ("transform", "append, tuned", 1.3),
    ("nested", "append, nested", 1.3),
)
"""A way, another one, and how many times as fast as that it is to be."""
