"""Topics that a member reads and that are not there, or hidden from it."""

from __future__ import annotations

import threading
import time
from typing import Final

from confluent_kafka import Consumer, KafkaError

from outbox.transform._plan import MISSING_TOPIC_SECONDS, SECONDS, Plan, logger
from outbox.transform.errors import KafkaRefused

MISSING: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})  # noqa: SLF001
"""Documented names, in spite of the underscore."""
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
