"""Payloads that are sent to a topic, and what of them is in a table and among the dead letters after a round."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from bench import ided
from pyspark.sql.types import StringType, StructType

from spark_jobs.job import ConsumerJob
from spark_jobs.payloads import avro as avro_payload
from spark_jobs.payloads import json_whole
from spark_jobs.payloads.decoding import PROBLEM, Decoder, arrow_type, as_read
from spark_jobs.payloads.reading import Policy, Reader, columns
from spark_jobs.payloads.registry import Schema


def send(bench: Any, value: bytes | None, headers: list[tuple[str, bytes]] | None = None) -> None:
    """All into one partition: the number of the message is its offset."""
    bench.send_raw(value, [*ided(), *(headers or [])], "k", partition=0)


def run(bench: Any, decoder: Any, table: str, columns: str, group: str = "decoding", **options: Any) -> Any:
    """Apply what is there; ``columns`` as in CREATE TABLE, all of them columns of ``batch``."""
    names = ", ".join(f'"{column.split()[0]}"' for column in columns.split(", "))
    job = ConsumerJob(
        group,
        [bench.topic],
        f"INSERT INTO {table} SELECT message_offset, message_tombstone, {names} FROM batch",
        schema=decoder,
        setup=f"CREATE TABLE IF NOT EXISTS {table} (number bigint PRIMARY KEY, tombstone boolean, {columns})",
    )
    return bench.once(job, **options)


def dead(bench: Any) -> dict[int, str]:
    return dict(bench.rows("SELECT message_offset, error FROM consumer.dead_letters"))


def check(bench: Any, table: str, expected: list[Any]) -> None:
    """``expected``, by offset: a tuple of the row, None for a tombstone, or a part of what the dead letter says."""
    rows = {row[0]: row[1:] for row in bench.rows(f"SELECT * FROM {table}")}
    letters = dead(bench)
    for number, wanted in enumerate(expected):
        if isinstance(wanted, str):
            assert wanted in letters.pop(number, "no dead letter"), number
            assert number not in rows
        else:
            row = rows.pop(number, None)
            assert row is not None, letters.get(number)
            assert row == ((True, *[None] * (len(row) - 1)) if wanted is None else (False, *wanted)), number
    assert (rows, letters) == ({}, {})


def order(*fields: dict[str, Any]) -> str:
    return json.dumps({"type": "record", "name": "Order", "namespace": "shop", "fields": list(fields)})


ID = {"name": "id", "type": "string"}


def read_with(reader: Reader, fields: StructType, values: Sequence[bytes | None]) -> list[dict[str, Any]]:
    """Read a batch of payloads as a task does."""
    kind = arrow_type(StructType([*as_read(fields).fields]).add(PROBLEM, StringType()))
    payloads, headers = pa.array(values, pa.binary()), pa.nulls(len(values), pa.binary())
    rows: list[dict[str, Any]] = columns(reader, payloads, headers, kind).to_pylist()
    return rows


def avro(reader: dict, writer: dict | None = None, **policy: str) -> avro_payload.Plan:
    """Return the plan for bare Avro, by default written with the reader's schema."""
    return avro_payload.Plan(
        Schema("AVRO", json.dumps(reader)), Schema("AVRO", json.dumps(writer or reader)), None, Policy(**policy)
    )


def read(decoder: Decoder, *values: bytes | None) -> list[dict[str, Any]]:
    """Read a batch of payloads with a job's decoder."""
    fields, plan = decoder.task_plan()
    return read_with(plan(), fields, values)


@pytest.fixture(autouse=True, scope="module")
def of_any_size() -> Iterator[None]:
    """Batches of any size are read as many are, in each module that has this among its names."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(json_whole, "_FEW", 0)
        yield
