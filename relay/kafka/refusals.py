"""The errors of librdkafka and the broker that an event or its topic causes, with what to do about them."""

from __future__ import annotations

from typing import Final

from confluent_kafka import KafkaError

from relay.kafka.topics import FORBIDDEN

# Errors caused by the event: sending it again unchanged would fail again.
REFUSALS: Final = {
    KafkaError.MSG_SIZE_TOO_LARGE: "the broker takes no message of this size; raise max.message.bytes of the topic "
    "(and OUTBOX_KAFKA__MESSAGE_MAX_BYTES), or remove the event",
    KafkaError.RECORD_LIST_TOO_LARGE: "the broker takes no batch of this size; raise segment.bytes of the topic",
    KafkaError.INVALID_RECORD: "the broker calls the record invalid; a compacted topic takes no event without a key",
    KafkaError.POLICY_VIOLATION: "the broker's policy refuses it",
}

# Errors caused by the topic: they concern every event that goes there.
TOPIC_REFUSALS: Final = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: FORBIDDEN,
    KafkaError.TOPIC_EXCEPTION: "Kafka calls the name of topic {topic!r} invalid; give the aggregate type a route",
}

# Errors of the messages behind the one that failed.
CONSEQUENCES: Final = {
    KafkaError._PURGE_QUEUE,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._FATAL,
    KafkaError._GAPLESS_GUARANTEE,
}
