"""What Kafka answers of records that it does not take, and which of them are at fault."""

from __future__ import annotations

from typing import Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message

from outbox.transform._topics import MISSING
from outbox.transform.errors import KafkaRefused, TransformFailed, is_refused
from outbox.transform.records import Record

TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
OF_A_BATCH: Final = TOO_LARGE | frozenset({KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION})
"""What a broker says of a batch: one of its records is at fault, and others may get the same answer."""
_UNFIT: Final = OF_A_BATCH | frozenset({KafkaError._UNKNOWN_PARTITION, KafkaError.TOPIC_EXCEPTION})


class Undelivered(NamedTuple):
    """A record that was not delivered, the message that it was made of, and why."""

    message: Message
    record: Record
    reason: KafkaError


def failure(group: str, undelivered: Undelivered) -> TransformFailed | KafkaRefused | None:
    """Return the error for a record that Kafka would refuse each time; None if it may take it the next time.

    TransformFailed if the record itself is at fault, KafkaRefused if its topic or the rights on it are.
    """
    message, record, reason = undelivered
    if reason.code() in _UNFIT:
        return TransformFailed(message, KafkaException(reason))
    if is_refused(reason) or reason.code() in MISSING:
        return KafkaRefused(
            f"group {group!r} can't produce to {record.topic} (from {message.topic()}-{message.partition()} offset "
            f"{message.offset()}): {reason.str()}; create the topic, or grant WRITE and DESCRIBE"
        )
    return None
