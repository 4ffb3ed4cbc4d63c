"""A consumer group in Postgres, for whoever reads Kafka: inbox, transformers, effects outside the database, Spark jobs.

groups      claims, positions, ids        letters     dead letters          losses       what Kafka lost
messages    what a message of Kafka says  ids         the day in an id      tables       with SQLAlchemy
statements  over these tables             retention   which ids are kept    stalled      partitions that do not move
admin       what operators see and do     kafka_admin requests to Kafka     connections  sessions of Postgres

Knows neither Spark nor pydantic, and only ``tables`` imports SQLAlchemy: Spark's executors import it too. What is named
here needs no driver either; GroupStore, which needs psycopg, is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.consumer.errors import ConsumerError, ConsumerUnavailable, DataLost, Fenced, JobError, NotAuthorized
from outbox.consumer.model import Loss, MessageRef, Partition, Range, RejectedRecord

if TYPE_CHECKING:
    from outbox.consumer.groups import GroupStore

__all__ = [
    "ConsumerError",
    "ConsumerUnavailable",
    "DataLost",
    "Fenced",
    "GroupStore",
    "JobError",
    "Loss",
    "MessageRef",
    "NotAuthorized",
    "Partition",
    "Range",
    "RejectedRecord",
]


def __getattr__(name: str) -> Any:
    if name != "GroupStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outbox.consumer.groups import GroupStore

    return GroupStore
