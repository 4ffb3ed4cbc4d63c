"""What a member asks for topics: what it reads may not be there, or hidden from it; and who leads partitions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.transform._plan import MISSING_TOPIC_SECONDS, SECONDS, Plan, logger
from outbox.transform.errors import KafkaRefused

MISSING: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})
_ABSENT: Final = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
_HIDDEN: Final = "does not exist, or the client may not DESCRIBE it; create it, or grant that"


def require_topics(consumer: Consumer, plan: Plan, stop: threading.Event) -> None:
    """Raise KafkaRefused if a topic is missing or hidden, also after a while, and KafkaException without an answer."""
    until = time.monotonic() + MISSING_TOPIC_SECONDS
    while True:
        known = consumer.list_topics(timeout=SECONDS).topics
        # The names that begin with ^ are patterns.
        topics = [topic for topic in plan.topics if not topic.startswith("^")]
        problems = [
            f"topic {topic} " + (_HIDDEN if error.code() in MISSING else f"can't be read: {error.str()}")
            for topic in topics
            if (error := known[topic].error if topic in known else _ABSENT) is not None
        ]
        if not problems or stop.is_set():
            return
        if time.monotonic() >= until:
            raise KafkaRefused(f"group {plan.group!r}: {problems[0]}")
        logger.info("group %s waits: %s", plan.group, problems[0])
        stop.wait(0.5)


def described(kafka: KafkaAdmin, topics: Iterable[str], seconds: float = SECONDS) -> dict[str, Any]:
    """Return descriptions of topics of the input that are there. Raises KafkaException without an answer.

    A producer's request for metadata would create a topic that is gone. And in a callback of the consumer's ``poll``,
    its ``list_topics`` would leave nothing for the next callback of that ``poll`` to find its thread by: the process
    would abort.
    """
    found: dict[str, Any] = {}
    for topic, future in (kafka.describe(wanted, seconds) if (wanted := set(topics)) else {}).items():
        try:
            found[topic] = future.result()
        except KafkaException as error:
            if error.args[0].code() not in MISSING:
                raise
    return found


def output_partitions(producer: Producer, topic: str) -> tuple[int, list[int]]:
    """Return how many partitions a topic has, 0 if that is not known, and which of them have a leader."""
    if topic is None:
        raise TypeError("the record has no topic")
    try:
        found = producer.list_topics(topic, SECONDS).topics[topic]
    except RuntimeError as error:
        raise ValueError(f"no name of a topic: {error}") from error
    if found.error is not None and found.error.code() == KafkaError.TOPIC_EXCEPTION:
        raise ValueError(f"no name of a topic: {topic!r}: {found.error.str()}")
    return len(found.partitions), [number for number, one in found.partitions.items() if one.leader >= 0]
