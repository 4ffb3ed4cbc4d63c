"""Helpers for librdkafka clients: readers' options, errors and their texts, the first request to Kafka."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from outbox._clients.kafka import CIRCUMSTANCES, OptionsRefused, complete
from outbox._clients.kafka_client import Admin
from outbox.consumer.messages import UndecodableHeaders
from outbox.consumer.messages import headers_of as safe_headers
from relay.core.ports import BrokerUnavailable

log = structlog.get_logger("relay")

_FETCH_SECONDS: Final = 0.5
_FETCHES_SECONDS: Final = 1.0
_FIRST_CONTACT_SECONDS: Final = 2.0

FORBIDDEN: Final = "the relay may not write to topic {topic!r}: grant it WRITE and DESCRIBE"

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


def text_of(error: KafkaException) -> str:
    inner = error.args[0]
    return inner.str() if isinstance(inner, KafkaError) else str(error)


@contextmanager
def unavailable_on_kafka_error(doing: str) -> Iterator[None]:
    """Turn an error of librdkafka or the broker into BrokerUnavailable."""
    try:
        yield
    except KafkaException as error:
        raise BrokerUnavailable(f"Kafka, {doing}: {text_of(error)}") from error


@contextmanager
def accepted_before() -> Iterator[None]:
    """Turn a refusal of options that the relay began with into BrokerUnavailable: a file that they name is replaced."""
    try:
        yield
    except OptionsRefused as error:
        text = f"{error}; they were accepted when the relay began: is a file being replaced?"
        raise BrokerUnavailable(text) from error


def headers_of(message: Message) -> dict[str, Any]:
    """Return a record's headers; none if a name is not UTF-8: no relay has written it. Call it once for a message."""
    [found] = safe_headers([message])
    return {} if isinstance(found, UndecodableHeaders) else dict(found)


def reader_options(options: Mapping[str, str], group: str, isolation: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a consumer that reads assigned partitions, and always from their leaders.

    It checks records as members of groups do: what is damaged is an error, and neither a marker nor proof of an event.
    """
    return {
        "check.crcs": True,
        **complete(options),
        # A follower in the reader's own rack may lag behind the leader.
        "client.rack": "",
        "group.id": group,
        "enable.auto.commit": False,
        "isolation.level": isolation,
        "allow.auto.create.topics": False,
        **more,
    }


class NewTopics:
    """Fetches the partitions of each topic that a producer has not written to yet.

    By itself librdkafka asks for one new topic, and for the next ones when its timer comes round, once a second: the
    first turn of a producer would take one or two seconds. The turn waits for the answers: after ``seconds`` of that,
    or a failure, it is left to librdkafka. At-most-once always is (0 seconds): the rows are deleted when this is sent,
    and the leases run out meanwhile.
    """

    def __init__(self, seconds: float = _FETCHES_SECONDS) -> None:
        self._known: set[str] = set()
        self._left_seconds = seconds
        self.counts: dict[str, int] = {}
        """The number of partitions of each topic that was fetched."""

    def fetch(self, producer: Producer, topic: str) -> None:
        if self._left_seconds <= 0 or topic in self._known:
            return
        self._known.add(topic)
        began = time.monotonic()
        try:
            found = producer.list_topics(topic, timeout=min(self._left_seconds, _FETCH_SECONDS)).topics
            self.counts[topic] = len(found[topic].partitions)
        except KafkaException:
            self._left_seconds = 0.0
        else:
            self._left_seconds -= time.monotonic() - began


def create_topic(admin: Admin, topic: NewTopic, seconds: float) -> None:
    try:
        # Without an explicit timeout the client waits a minute for a controller that has just died.
        with admin.explaining():
            admin.create_topics([topic], operation_timeout=seconds, request_timeout=seconds)[topic.topic].result()
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise


def partitions_text(numbers: Collection[int]) -> str:
    """Return partitions for error texts: all of a few, the first of many."""
    some = sorted(numbers)
    shown = ", ".join(map(str, some[:10])) + (", …" if len(some) > 10 else "")
    return f"partition{'s' if len(some) > 1 else ''} {shown}"


def log_unreachable(options: Mapping[str, str]) -> None:
    """Log once if no broker answers within two seconds: the addresses, and why the last connection failed.

    A turn waits for longer, because a broker that restarts needs more time; without events there is no turn at all.
    """
    failed: list[str] = []

    def heard(error: KafkaError) -> None:
        # Not the effect of the others.
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            failed.append(CIRCUMSTANCES.sub("", error.str()))

    admin = Admin(options, heard)
    try:
        with admin.explaining():
            admin.list_topics(timeout=_FIRST_CONTACT_SECONDS)
    except KafkaException as error:
        log.warning(
            "Kafka does not answer; this relay waits for it. See OUTBOX_KAFKA__BOOTSTRAP_SERVERS",
            brokers=options["bootstrap.servers"],
            error=failed[-1] if failed else text_of(error),
        )
