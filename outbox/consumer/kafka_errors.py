"""Translate errors of librdkafka into the consumer's errors."""

from __future__ import annotations

from confluent_kafka import KafkaError

from outbox._clients.kafka_rules import is_refusal, refuses_credentials
from outbox.consumer.errors import ConsumerError, ConsumerUnavailable, CorruptRecords, NotAuthorized


def of_kafka(error: KafkaError, doing: str) -> ConsumerError:
    """Return the ConsumerError for an error of librdkafka, with a text that begins with ``doing``."""
    text = f"{doing}: {error.str()}"
    if is_refusal(error):
        look_at = {
            KafkaError.INVALID_SESSION_TIMEOUT: "session.timeout.ms, and the brokers' group.max.session.timeout.ms",
            KafkaError.INCONSISTENT_GROUP_PROTOCOL: (
                "partition.assignment.strategy, here and of the group's other members"
            ),
        }.get(error.code(), "the credentials and the ACLs")
        refused = NotAuthorized(f"{text}; look at {look_at}. Nothing was skipped")
        refused.credentials = error if refuses_credentials(error) else None
        return refused
    if error.code() in {KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError.INVALID_MSG}:
        mend = "if another replica has the records whole, make it the leader"
        return CorruptRecords(f"{text}; {mend}. Nothing was skipped")
    return ConsumerUnavailable(text)
