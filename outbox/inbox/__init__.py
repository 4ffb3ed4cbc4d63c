"""An inbox: each message applied once, by consumers that are not Spark.

``once`` needs what a service has anyway: SQLAlchemy, psycopg or asyncpg. ``Consumer`` needs confluent-kafka as well
(``pip install outbox-kafka[kafka]``), and is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outbox.errors import MissingExtra
from outbox.inbox._message import KafkaMessage
from outbox.inbox._once import once, once_async
from outbox.inbox.errors import (
    HandlerFailed,
    InboxError,
    KafkaFailed,
    MessageIdMissing,
    MessageTooOld,
    PositionLost,
    Reject,
    TopicReplaced,
)
from outbox.inbox.ids import message_id

if TYPE_CHECKING:
    from outbox.inbox.consumer import ApplyDelays, Consumer

__all__ = [
    "ApplyDelays",
    "Consumer",
    "HandlerFailed",
    "InboxError",
    "KafkaFailed",
    "KafkaMessage",
    "MessageIdMissing",
    "MessageTooOld",
    "PositionLost",
    "Reject",
    "TopicReplaced",
    "message_id",
    "once",
    "once_async",
]


def __getattr__(name: str) -> Any:
    if name not in {"ApplyDelays", "Consumer"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module("outbox.inbox.consumer"), name)
    except ModuleNotFoundError as error:
        if error.name not in {"confluent_kafka", "psycopg"}:
            raise
        raise MissingExtra("kafka", error.name) from error
    globals()[name] = value
    return value
