"""Ranges of a topic for a task to read itself: what the tests of the reader share."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pyarrow as pa
from confluent_kafka import Producer
from consumer_group import TOPIC_ID
from pyspark.sql.types import IntegerType, StructField, StructType

from outbox.consumer.model import Range
from spark_jobs.job import META
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.payloads.json_whole import JsonReader
from spark_jobs.payloads.reading import Policy
from spark_jobs.task.decoder import TaskDecoder
from spark_jobs.task.incoming import Incoming, Messages
from spark_jobs.task.input import TaskInput
from spark_jobs.task.reader import RangeReader, ReaderSettings

MESSAGES = 25_000
PART = 0


def span(start: int, end: int) -> Range:
    return Range(TOPIC_ID, start, end)


def settings(servers: str, **changed: Any) -> ReaderSettings:
    return ReaderSettings({"bootstrap.servers": servers}, "g", **changed)


def opened_at(servers: str, **changed: Any) -> closing[RangeReader]:
    """Return a reader, which is closed behind its block."""
    return closing(RangeReader(settings(servers, **changed)))


def offsets(parts: TaskInput[Messages]) -> list[int]:
    """Read to the end, which must be proved, and return the offsets."""
    found = [offset for part in parts for offset in part.offsets]
    parts.require_whole()
    return found


def send(servers: str, topic: str, values: list[bytes | None], **options: Any) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5, **options})
    for number, value in enumerate(values):
        producer.produce(topic, value, b"%d" % (number % 100), partition=PART, headers=[("ce_id", b"%d" % number)])
        if number % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(60) == 0


def task_decoder(types: tuple[str, ...] | None = None, ids: Any = "headers") -> TaskDecoder:
    """Return how one field is read, as rows.task_decoder() would; that asks Spark for what the schema means."""
    kinds = {
        "integer": pa.int32(),
        "bigint": pa.int64(),
        "boolean": pa.bool_(),
        "timestamptz": pa.timestamp("us", "UTC"),
    }
    meta = [(name, kinds.get(kind, pa.string())) for name, kind in META.items()]
    kind = pa.struct([*meta, ("n", pa.int32()), (PROBLEM, pa.string())])
    declared = StructType([StructField("n", IntegerType())])
    columns = {"n": "integer"} | META
    return TaskDecoder(kind, lambda: JsonReader(declared, Policy()), Incoming(types, ids), columns, 16 * 2**20)
