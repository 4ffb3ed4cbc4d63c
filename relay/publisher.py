"""The idempotent Publisher: acks=all, in order, and nothing is said to be published before Kafka said so.

Idempotence (KIP-98) keeps librdkafka's own retries from doubling or reordering within one producer. After any
failure the producer is thrown away: what it had in flight may or may not stand in the log, so the lane is read again
and sent again by a new one. Both producers send the lane's events in the same order, and what arrives of either is a
prefix, so the first time each event stands in the log is in order; a reader that drops repeats by event id sees order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from outbox.errors import ConfigurationError, OutboxError
from outbox.event import (
    AGGREGATE_TYPE,
    CE_ID,
    CE_SOURCE,
    CE_SPECVERSION,
    CE_SUBJECT,
    CE_TIME,
    CE_TRACEPARENT,
    CE_TRACESTATE,
    CE_TYPE,
    CONTENT_TYPE,
    EVENT_TYPE,
    ID,
    IDEMPOTENCY_KEY,
    JSON_CONTENT_TYPE,
    TRACEPARENT,
    TRACESTATE,
)
from relay.ports import PUBLISHED, Claim, Receipt, Refused, Result, Unavailable
from relay.routing import NoRoute, Router

# The event (or its topic) is at fault: sending it again unchanged would fail again.
_REFUSALS: Final = {
    KafkaError.MSG_SIZE_TOO_LARGE: "the broker takes no message of this size; raise max.message.bytes of the topic "
    "(and message.max.bytes here), or remove the event",
    KafkaError.INVALID_RECORD: "the broker calls the record invalid; a compacted topic takes no event without a key",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the relay may not write to the topic; grant it WRITE and DESCRIBE",
    KafkaError.TOPIC_EXCEPTION: "Kafka calls the topic's name invalid; give the aggregate type a route",
    KafkaError.POLICY_VIOLATION: "the broker's policy refuses it",
}

# What happens to messages behind the one that failed.
_CONSEQUENCES: Final = {
    KafkaError._PURGE_QUEUE,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._FATAL,
    KafkaError._GAPLESS_GUARANTEE,
}

_POLL_SECONDS: Final = 0.1
_METADATA_SECONDS: Final = 10.0

Headers = list[tuple[str, str | bytes | None]]


class TopicMissing(OutboxError):
    """The topic does not exist and the relay was not asked to create topics."""


class Topics:
    """Knows which topics exist, and creates missing ones if asked to. Shared by all lanes; safe to use from threads.

    partitions and replication are for topics created here; -1 leaves them to the broker's defaults.
    """

    def __init__(
        self, options: Mapping[str, str], *, create: bool, partitions: int = -1, replication: int = -1
    ) -> None:
        self._admin = AdminClient(dict(options), logger=_silent())
        self._create = create
        self._partitions = partitions
        self._replication = replication
        self._known: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def require(self, topic: str) -> None:
        """Return when the topic exists. Raises TopicMissing, or Unavailable when no broker answers."""
        if topic in self._known:
            return
        with self._lock:
            if topic in self._known:
                return
            try:
                # All topics and not this one: asking for one by name could make the broker create it.
                names = set(self._admin.list_topics(timeout=_METADATA_SECONDS).topics)
            except KafkaException as error:
                raise Unavailable(f"Kafka, asking for its topics: {_text(error)}") from error
            if topic not in names:
                if not self._create:
                    raise TopicMissing(f"topic {topic!r} does not exist; create it, or set OUTBOX_CREATE_TOPICS=true")
                self._create_topic(topic)
                names.add(topic)
            self._known = frozenset(names)

    def forget(self) -> None:
        """Ask the broker again next time: after a failure, a topic may have gone."""
        with self._lock:
            self._known = frozenset()

    def _create_topic(self, topic: str) -> None:
        new = NewTopic(topic, num_partitions=self._partitions, replication_factor=self._replication)
        try:
            self._admin.create_topics([new], operation_timeout=_METADATA_SECONDS)[topic].result()
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.TOPIC_ALREADY_EXISTS:
                return
            if code in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}:
                raise TopicMissing(
                    f"topic {topic!r} does not exist and the relay may not create it; create it, or grant CREATE"
                ) from error
            raise Unavailable(f"Kafka, creating topic {topic!r}: {_text(error)}") from error


def message_headers(claim: Claim, ce_source: str) -> Headers:
    """Give the Kafka headers of one event: CloudEvents in binary mode, Debezium's plain names, then the event's own."""
    event_id = claim.event_id
    headers: Headers = [
        (CE_SPECVERSION, "1.0"),
        (CE_ID, event_id),
        (CE_SOURCE, ce_source),
        (CE_TYPE, claim.event_type),
        (CE_SUBJECT, claim.aggregate_id),
        (CE_TIME, claim.time),
        (ID, event_id),
        (EVENT_TYPE, claim.event_type),
        (AGGREGATE_TYPE, claim.aggregate_type),
        (IDEMPOTENCY_KEY, event_id),
    ]
    own = claim.headers
    if own is None:
        if claim.value is not None:
            headers.append((CONTENT_TYPE, JSON_CONTENT_TYPE))
        return headers
    if claim.value is not None:
        headers.append((CONTENT_TYPE, own.get(CONTENT_TYPE, JSON_CONTENT_TYPE)))
    if TRACEPARENT in own:
        headers.append((CE_TRACEPARENT, own[TRACEPARENT]))
        if TRACESTATE in own:
            headers.append((CE_TRACESTATE, own[TRACESTATE]))
    headers.extend((name, value) for name, value in own.items() if name != CONTENT_TYPE)
    return headers


class IdempotentPublisher:
    """One lane's producer. See ports.Publisher for the contract.

    options are librdkafka's, from config.producer_options; delivery_seconds is how long a batch may take. Raises
    ConfigurationError when librdkafka refuses the options.
    """

    def __init__(
        self, options: Mapping[str, str], router: Router, topics: Topics, ce_source: str, delivery_seconds: float
    ) -> None:
        self._delivery_seconds = delivery_seconds
        self._router = router
        self._topics = topics
        self._ce_source = ce_source
        self._failed: list[tuple[Claim, KafkaError]] = []
        self._fatal: KafkaError | None = None
        self._late = False
        try:
            # Python is called for failures only: a call per message would cost a good part of sending it.
            self._producer: Producer | None = Producer(
                {**options, "delivery.report.only.error": True, "error_cb": self._on_error}, logger=_silent()
            )
        except KafkaException as error:
            raise ConfigurationError(f"Kafka options: {_text(error)}") from error

    def publish(self, claims: Sequence[Claim]) -> Receipt:
        """Send in order, wait for every acknowledgement."""
        producer = self._producer
        if producer is None:
            return Receipt((), Unavailable("this publisher is closed"))
        deadline = time.monotonic() + self._delivery_seconds
        sent: list[Claim] = []
        refused: Result | None = None
        failure: Unavailable | None = None
        try:
            for claim in claims:
                refusal = self._send(producer, claim, deadline)
                if refusal is not None:
                    refused = (claim, refusal)
                    break
                sent.append(claim)
        except Unavailable as error:
            failure = error
        self._drain(producer, deadline)
        if self._failed or self._fatal is not None:
            return self._failure_receipt(sent)
        results: list[Result] = [(claim, PUBLISHED) for claim in sent]
        if refused is not None:
            results.append(refused)
        return Receipt(results, failure)

    def close(self) -> None:
        """Forget what is queued and in flight; the lane will be read again."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            with contextlib.suppress(KafkaException):
                producer.poll(0)

    def _send(self, producer: Producer, claim: Claim, deadline: float) -> Refused | None:
        try:
            topic = self._router.topic(claim.aggregate_type)
            self._topics.require(topic)
        except (NoRoute, TopicMissing) as error:
            return Refused(str(error))
        headers = message_headers(claim, self._ce_source)
        on_failure = partial(self._on_failure, claim)
        while True:
            try:
                producer.produce(topic, claim.value, claim.aggregate_id, headers=headers, on_delivery=on_failure)
            except BufferError:
                # The local queue is full: serving acknowledgements makes room.
                self._poll(producer)
                if self._failed or self._fatal is not None or time.monotonic() >= deadline:
                    raise Unavailable("Kafka: the queue of messages stays full") from None
            except KafkaException as error:
                code = error.args[0].code()
                if code in _REFUSALS:
                    return Refused(f"topic {topic!r}: {_REFUSALS[code]} ({_text(error)})")
                raise Unavailable(f"Kafka, sending to {topic!r}: {_text(error)}") from error
            else:
                return None

    def _drain(self, producer: Producer, deadline: float) -> None:
        """Wait for the acknowledgements; past the deadline, or when the producer is dead, drop the rest at once.

        The deadline is ours and not librdkafka's: that one lets go of messages one by one, so a later message of the
        same key could still be delivered after an earlier one was given up, and would stand before it for good.
        """
        # Not flush(): it looks at its queue in steps of 100 ms, poll() returns with the acknowledgement.
        while len(producer):
            if time.monotonic() >= deadline:
                self._late = True
            if self._late or self._fatal is not None:
                producer.purge()
            self._poll(producer)

    def _poll(self, producer: Producer) -> None:
        try:
            producer.poll(_POLL_SECONDS)
        except KafkaException as error:
            # A fatal error comes as an exception too. What it means for each message, its own report says.
            if not error.args[0].fatal():
                raise Unavailable(f"Kafka: {_text(error)}") from error
            self._fatal = error.args[0]

    def _failure_receipt(self, sent: Sequence[Claim]) -> Receipt:
        """Settle what Kafka acknowledged all the same: sending it again with every try would double it without end."""
        self._topics.forget()
        failed = {claim.position for claim, _ in self._failed}
        results: list[Result] = [(claim, PUBLISHED) for claim in sent if claim.position not in failed]
        # The cause comes first; the messages behind it fail because it did.
        causes = [(claim, error) for claim, error in self._failed if error.code() not in _CONSEQUENCES]
        if causes:
            claim, error = causes[0]
            topic = self._router.topic(claim.aggregate_type)
            if error.code() in _REFUSALS:
                results.append((claim, Refused(f"topic {topic!r}: {_REFUSALS[error.code()]} ({error.str()})")))
            text = f"Kafka, sending to {topic!r}: {error.str()}"
        else:
            text = f"Kafka: {self._fatal.str() if self._fatal is not None else 'the batch was dropped'}"
        if self._late:
            text = f"Kafka: no acknowledgement within {self._delivery_seconds:g} s"
        return Receipt(results, Unavailable(f"{text} ({len(failed)} of {len(sent)} events not acknowledged)"))

    def _on_failure(self, claim: Claim, error: KafkaError | None, _message: Any) -> None:
        if error is not None:
            self._failed.append((claim, error))

    def _on_error(self, error: KafkaError) -> None:
        # Brokers that come and go are librdkafka's own business; a fatal error ends this producer.
        if error.fatal():
            self._fatal = error


def _text(error: KafkaException) -> str:
    inner = error.args[0]
    return inner.str() if isinstance(inner, KafkaError) else str(error)


def _silent() -> Any:
    """Give librdkafka a logger of its own, so that its lines do not go to stderr past the structured log."""
    import logging

    logger = logging.getLogger("relay.librdkafka")
    logger.setLevel(logging.CRITICAL + 1)
    return logger


def wait_for_broker(options: Mapping[str, str], seconds: float) -> None:
    """Return when a broker answers. Raises Unavailable after ``seconds``."""
    try:
        AdminClient(dict(options), logger=_silent()).list_topics(timeout=seconds)
    except KafkaException as error:
        raise Unavailable(f"Kafka at {options['bootstrap.servers']}: {_text(error)}") from error
