"""What a user declares: which topics, how to read a payload, and what to do with it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from spark_jobs.errors import JobError

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa
    from pyspark.sql import DataFrame

    Transform = Callable[[DataFrame], DataFrame]
    PythonEffect = Callable[[psycopg.Cursor[Any], pa.Table], None]

META: Final = {
    "message_id": "uuid",
    "message_topic": "text",
    "message_part": "integer",
    "message_offset": "bigint",
    "message_key": "text",
    "message_type": "text",
    "message_time": "timestamptz",
}
"""Columns of ``batch`` beside the payload's, with their types in Postgres. ``message_time`` is Kafka's timestamp."""

_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True, slots=True)
class ConsumerJob:
    """One consumer group and its effect.

    group      names the consumer in ``consumer.offsets`` and to Kafka's tools.
    topics     to read. Together they are one group.
    effect     what to do with a batch, in the transaction that also moves the offsets and remembers the ids. Either
               SQL over the temporary table ``batch`` (one statement or several), which holds a row for each fresh
               message: the payload's columns and those of META; or a function of a psycopg cursor and a pyarrow Table
               with the same rows. A function must not commit, and must do everything through that cursor.
    schema     of the JSON payload, as Spark DDL: ``"order_id string, amount_cents long"``. None: the payload stays
               bytes, in a column ``payload``.
    transform  a function from DataFrame to DataFrame, applied before the effect: select, filter, withColumn. It has to
               keep the META columns message_id, message_topic, message_part and message_offset. Nothing that moves
               rows between partitions (no join, no aggregation): a partition is one transaction.
    setup      SQL that makes the sink's tables when they are not there; run by the driver, under a lock.

    Raises JobError for a declaration that can't work.
    """

    group: str
    topics: Sequence[str]
    effect: str | PythonEffect
    schema: str | None = None
    transform: Transform | None = None
    setup: str | None = None

    def __post_init__(self) -> None:
        if not self.group or len(self.group) > 200 or "\0" in self.group:
            raise JobError("group: must be 1 to 200 characters")
        if not self.topics or isinstance(self.topics, str):
            raise JobError(f"topics: must be a list of topic names, not {self.topics!r}")
        for topic in self.topics:
            if not _TOPIC.fullmatch(topic):
                raise JobError(f"topics: {topic!r} is no name of a topic")
        if len(set(self.topics)) != len(self.topics):
            raise JobError("topics: one is named twice")
        usable = bool(self.effect.strip()) if isinstance(self.effect, str) else callable(self.effect)
        if not usable:
            raise JobError("effect: must be SQL or a function of a cursor and a pyarrow Table")
        if self.schema is not None and not self.schema.strip():
            raise JobError("schema: must be Spark DDL, or None for bytes")

    def with_topics(self, topics: Sequence[str]) -> ConsumerJob:
        """The same job over other topics."""
        return replace(self, topics=tuple(topics))


def find_job(spec: str) -> ConsumerJob:
    """Import ``MODULE:NAME`` and give the ConsumerJob there. Raises JobError saying what is missing."""
    module_name, separator, name = spec.partition(":")
    if not separator or not module_name or not name:
        raise JobError(f"{spec!r}: name the job as MODULE:NAME, as in spark_jobs.order_totals:job")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise JobError(f"{spec!r}: there is no module {error.name}; run from its folder or set PYTHONPATH") from error
    job = getattr(module, name, None)
    if not isinstance(job, ConsumerJob):
        raise JobError(f"{spec!r}: {name} in {module_name} is {type(job).__name__}, not a ConsumerJob")
    return job
