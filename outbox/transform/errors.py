"""The errors of transformers. Every message says what happened, where, and what to do."""

from __future__ import annotations

from typing import Final

from confluent_kafka import KafkaError, Message

from outbox._clients.kafka_rules import is_refusal, refuses_credentials
from outbox.errors import OutboxError

# In addition to those of credentials and rights: they last until rights, settings or topics are changed.
_REFUSALS: Final = frozenset(
    {
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError._UNKNOWN_TOPIC,
    }
)


class TransformFailed(OutboxError):
    """A message could not be transformed, or its records not produced. Its transaction was aborted.

    topic, partition, offset   the message's place.
    """

    def __init__(self, message: Message, error: Exception, mend: str = "fix it") -> None:
        self.topic, self.partition, self.offset = message.topic(), message.partition(), message.offset()
        super().__init__(
            f"{self.topic} partition {self.partition} offset {self.offset} can't be transformed: "
            f"{type(error).__name__}: {error}; {mend}, and run again"
        )


class InputLost(OutboxError):
    """Messages were deleted before they were read, also with their topic; or ``start`` is "none" without a position."""


class KafkaRefused(OutboxError):
    """Kafka refuses an operation until rights, settings or topics change, or has records that can't be read."""


def is_refused(error: KafkaError) -> bool:
    """Return whether Kafka refuses an operation until rights, settings or topics are changed; not for credentials."""
    return error.code() in _REFUSALS or (is_refusal(error) and not refuses_credentials(error))
