"""Streaming queries with state whose checkpoints name their state's files: stateStore.checkpointFormatVersion 2.

Spark commits a batch of such a query with what its tasks have reported of the state they wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from pyspark.sql import functions as F  # noqa: N812

CONF: Final = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
    "spark.sql.shuffle.partitions": "2",
}
KEYS: Final = 7
SIZE: Final = 70
"""Of a batch, in which all keys change."""


def counted(rows: Any) -> Any:
    return rows.groupBy((F.col("n") % KEYS).alias("k")).agg(F.count("*").alias("number"))


def of_batches(batches: int) -> list[tuple[int, int]]:
    """What the sink has after so many batches: for each batch each key, with its number of rows so far."""
    return sorted((k, batch * SIZE // KEYS) for batch in range(1, batches + 1) for k in range(KEYS))


@pytest.fixture
def stateful(spark: Any) -> Iterator[Any]:
    """The session, whose queries keep such state."""
    before = {name: spark.conf.get(name, None) for name in CONF}
    for name, value in CONF.items():
        spark.conf.set(name, value)
    yield spark
    for name, value in before.items():
        spark.conf.unset(name) if value is None else spark.conf.set(name, value)
