"""What Kafka answers of records that it does not take, and which of them are at fault."""

from __future__ import annotations

from typing import Final

from confluent_kafka import KafkaError, Message

from outbox.transform._topics import MISSING
from outbox.transform.errors import KafkaRefused, is_refused
from outbox.transform.records import Record

TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
OF_A_BATCH: Final = TOO_LARGE | frozenset({KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION})
"""What a broker says of a batch: one of its records is at fault, and others may get the same answer."""
UNFIT: Final = OF_A_BATCH | frozenset(
    # Documented names, in spite of the underscore.
    {KafkaError._UNKNOWN_PARTITION, KafkaError.TOPIC_EXCEPTION}  # noqa: SLF001
)
"""The record itself is at fault: it would be refused each time."""


def is_final(error: KafkaError) -> bool:
    """Return whether Kafka refuses a record until its topic, or the rights on it, change."""
    return is_refused(error) or error.code() in MISSING


def is_late(error: KafkaError) -> bool:
    """Return whether a record was not acknowledged in time: its partition has no leader, or a silent one."""
    return error.code() == KafkaError._MSG_TIMED_OUT  # noqa: SLF001  a documented name, in spite of the underscore


def refused(group: str, message: Message, record: Record, reason: KafkaError) -> KafkaRefused:
    """Return the error for a record that Kafka refuses for such a reason, with the message that it was made of."""
    return KafkaRefused(
        f"group {group!r} can't produce to {record.topic} (from {message.topic()}-{message.partition()} offset "
        f"{message.offset()}): {reason.str()}; create the topic, or grant WRITE and DESCRIBE"
    )
