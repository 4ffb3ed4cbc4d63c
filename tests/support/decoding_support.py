"""Payloads that are sent to a topic, and what of them is in a table and among the dead letters after a round."""

from __future__ import annotations

import json
from typing import Any

from bench import ided

from spark_jobs.job import ConsumerJob


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


def source(spark: Any, *values: bytes | None) -> Any:
    """Rows as Spark's Kafka source has them."""
    return spark.createDataFrame(
        [(b"k", value, "t", 0, number, None, None) for number, value in enumerate(values)],
        "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
        "headers array<struct<key: string, value: binary>>",
    ).coalesce(1)
