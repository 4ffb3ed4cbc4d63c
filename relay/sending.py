"""Sending a lane's events with one librdkafka producer, and what each failure means. Used by both kinds of publisher.

Idempotence (KIP-98) keeps librdkafka's own retries from doubling or reordering within one producer. After any
failure the producer is thrown away.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
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
from relay.failpoints import failpoint
from relay.ports import PUBLISHED, BatchRefused, Claim, Published, Refused, Result, Unavailable
from relay.routing import NoRoute, Router

# The event (or its topic) is at fault: sending it again unchanged would fail again.
REFUSALS: Final = {
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

# No event has this position: rows count from 1, events without a row are negative.
_MARKER: Final = Claim(0, "", "the marker", "", "", "", None, None)

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
        try:
            self._admin = AdminClient(dict(options), logger=silent())
        except KafkaException as error:
            raise ConfigurationError(f"Kafka options: {text_of(error)}") from error
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
                raise Unavailable(f"Kafka, asking for its topics: {text_of(error)}") from error
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
            # Without a limit of its own the client waits a minute for a controller that has just died.
            created = self._admin.create_topics(
                [new], operation_timeout=_METADATA_SECONDS, request_timeout=_METADATA_SECONDS
            )
            created[topic].result()
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.TOPIC_ALREADY_EXISTS:
                return
            if code in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}:
                raise TopicMissing(
                    f"topic {topic!r} does not exist and the relay may not create it; create it, or grant CREATE"
                ) from error
            if code in {KafkaError.POLICY_VIOLATION, KafkaError.TOPIC_EXCEPTION, KafkaError.INVALID_CONFIG}:
                raise TopicMissing(f"topic {topic!r} can't be created: {text_of(error)}; create it by hand") from error
            raise Unavailable(f"Kafka, creating topic {topic!r}: {text_of(error)}") from error


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


class Sender:
    """One producer and the batch that is under way in it.

    options are librdkafka's, from config; with ``places`` Kafka's answer is kept for every event, and not for the
    failed ones only. Raises ConfigurationError when librdkafka refuses the options.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        router: Router,
        topics: Topics,
        ce_source: str,
        *,
        places: bool = False,
    ) -> None:
        self._router = router
        self._topics = topics
        self._ce_source = ce_source
        self._transactional = "transactional.id" in options
        self._places: dict[int, Published] | None = {} if places else None
        self._failed: dict[int, tuple[Claim, KafkaError]] = {}
        self._fatal: KafkaError | None = None
        self._late = False
        self._marker_topic = ""
        self.sent: list[Claim] = []
        self.refused: list[Result] = []
        try:
            # Python is called for failures only: a call per message would cost a good part of sending it.
            self.producer = Producer(
                {**options, "delivery.report.only.error": not places, "error_cb": weakly(self._on_error)},
                logger=silent(),
            )
        except KafkaException as error:
            raise ConfigurationError(f"Kafka options: {text_of(error)}") from error

    @property
    def failed(self) -> bool:
        """Whether anything of the batch failed, or the producer itself did."""
        return bool(self._failed) or self._fatal is not None

    def send(self, claims: Sequence[Claim], deadline: float) -> None:
        """Queue events in order: ``sent`` are those queued, ``refused`` those that were not. Raises Unavailable.

        A refused event takes those of its key that follow with it: they are in neither list.
        """
        sent: list[Claim] = []
        refused: list[Result] = []
        self.sent, self.refused = sent, refused
        waiting: set[tuple[str, str]] = set()
        half = len(claims) // 2
        if self._places is not None:
            self._places.clear()
        for number, claim in enumerate(claims):
            if waiting and (claim.aggregate_type, claim.aggregate_id) in waiting:
                continue
            refusal = self._send(claim, deadline)
            if refusal is not None:
                refused.append((claim, refusal))
                waiting.add((claim.aggregate_type, claim.aggregate_id))
                continue
            sent.append(claim)
            if number == half:
                failpoint("batch.half_sent")
        failpoint("batch.sent")

    def send_marker(self, topic: str, partition: int, value: bytes, deadline: float) -> None:
        """Queue a batch's marker behind its events. Raises Unavailable."""
        self._marker_topic = topic
        report = partial(self._on_failure, _MARKER)
        while True:
            try:
                return self.producer.produce(topic, value, b"marker", partition=partition, on_delivery=report)
            except BufferError:
                self._poll()
                if self.failed or time.monotonic() >= deadline:
                    raise Unavailable("Kafka: the queue of messages stays full") from None

    def drain(self, deadline: float) -> None:
        """Wait for the acknowledgements; past the deadline, or when nothing more can come, drop the rest at once.

        When the producer is dead, what is in flight is still answered, and need not be sent again if it has arrived.
        In a transaction one failed message ends them all: librdkafka holds the others back until it is aborted.

        The deadline is ours and not librdkafka's: that one lets go of messages one by one, so a later message of the
        same key could still be delivered after an earlier one was given up, and would stand before it for good.
        """
        # Not flush(): it looks at its queue in steps of 100 ms, poll() returns with the acknowledgement.
        while len(self.producer):
            if time.monotonic() >= deadline:
                self._late = True
            if self._late or (self._transactional and self.failed):
                self.producer.purge()
            elif self._fatal is not None:
                self.producer.purge(in_flight=False)
            self._poll()

    def acknowledged(self) -> list[Result]:
        """Give the results of those sent that did not fail; call it after ``drain``."""
        failed, places = self._failed, self._places
        if places is not None:
            return [(claim, places[claim.position]) for claim in self.sent if claim.position in places]
        if not failed:
            return [(claim, PUBLISHED) for claim in self.sent]
        return [(claim, PUBLISHED) for claim in self.sent if claim.position not in failed]

    def refused_by_broker(self) -> list[Result]:
        """Give the events whose own report is a refusal; others of the same request may have it too."""
        return [
            (claim, Refused(f"topic {self._topic(claim)!r}: {REFUSALS[error.code()]} ({error.str()})"))
            for claim, error in self._failed.values()
            if error.code() in REFUSALS
        ]

    def refused_first(self, *, aborted: bool = False) -> list[Result]:
        """Give the refused, without those that have a failed event of their key before them: that one comes first.

        In a transaction that was ``aborted`` all that was sent has failed.
        """
        claims = self.sent if aborted else [claim for claim, _ in self._failed.values()]
        failed = {(claim.aggregate_type, claim.aggregate_id) for claim in claims}
        return [r for r in self.refused if (r[0].aggregate_type, r[0].aggregate_id) not in failed]

    def failure(self, seconds: float) -> Unavailable:
        """Say what failed: BatchRefused when the broker refuses something that is in the batch."""
        self._topics.forget()
        # The cause comes first; the messages behind it fail because it did.
        causes = [(claim, error) for claim, error in self._failed.values() if error.code() not in _CONSEQUENCES]
        for claim, error in causes:
            # No event is at fault for a marker; but the marker of fewer events is smaller.
            smaller = error.code() == KafkaError.MSG_SIZE_TOO_LARGE and len(self.sent) > 1
            if error.code() in REFUSALS and (claim is not _MARKER or smaller):
                return BatchRefused(f"topic {self._topic(claim)!r}: {REFUSALS[error.code()]} ({error.str()})")
        if self._late:
            return Unavailable(f"Kafka: no acknowledgement within {seconds:g} s{self._lost()}")
        for claim, error in causes:
            what = "the batch's marker " if claim is _MARKER else ""
            return Unavailable(f"Kafka, sending {what}to {self._topic(claim)!r}: {error.str()}{self._lost()}")
        text = self._fatal.str() if self._fatal is not None else "the batch was dropped"
        return Unavailable(f"Kafka: {text}{self._lost()}")

    def close(self) -> None:
        """Forget what is queued and in flight."""
        self.producer.purge()
        with contextlib.suppress(KafkaException):
            self.producer.poll(0)

    def _lost(self) -> str:
        events = len(self._failed.keys() - {_MARKER.position})
        return f" ({events} of {len(self.sent)} events not acknowledged)" if events else ""

    def _topic(self, claim: Claim) -> str:
        if claim is _MARKER:
            return self._marker_topic
        try:
            return self._router.topic(claim)
        except NoRoute:
            return "?"

    def _send(self, claim: Claim, deadline: float) -> Refused | None:
        try:
            topic = self._router.topic(claim)
            self._topics.require(topic)
        except (NoRoute, TopicMissing) as error:
            return Refused(str(error))
        headers = message_headers(claim, self._ce_source)
        report = partial(self._on_failure if self._places is None else self._on_answer, claim)
        while True:
            try:
                self.producer.produce(topic, claim.value, claim.aggregate_id, headers=headers, on_delivery=report)
            except BufferError:
                # The local queue is full: serving acknowledgements makes room.
                self._poll()
                if self.failed or time.monotonic() >= deadline:
                    raise Unavailable("Kafka: the queue of messages stays full") from None
            except KafkaException as error:
                code = error.args[0].code()
                if code in REFUSALS:
                    return Refused(f"topic {topic!r}: {REFUSALS[code]} ({text_of(error)})")
                raise Unavailable(f"Kafka, sending to {topic!r}: {text_of(error)}") from error
            else:
                return None

    def _poll(self) -> None:
        try:
            self.producer.poll(_POLL_SECONDS)
        except KafkaException as error:
            # A fatal error comes as an exception too. What it means for each message, its own report says.
            if not error.args[0].fatal():
                raise Unavailable(f"Kafka: {text_of(error)}") from error
            self._fatal = error.args[0]

    def _on_failure(self, claim: Claim, error: KafkaError | None, _message: Any) -> None:
        if error is not None:
            self._failed[claim.position] = (claim, error)

    def _on_answer(self, claim: Claim, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self._failed[claim.position] = (claim, error)
        else:
            assert self._places is not None
            self._places[claim.position] = Published(message.topic(), message.partition(), message.offset())

    def _on_error(self, error: KafkaError) -> None:
        # Brokers that come and go are librdkafka's own business; a fatal error ends this producer.
        if error.fatal():
            self._fatal = error


def text_of(error: KafkaException) -> str:
    inner = error.args[0]
    return inner.str() if isinstance(inner, KafkaError) else str(error)


def silent() -> Any:
    """Give librdkafka a logger of its own, so that its lines do not go to stderr past the structured log."""
    import logging

    logger = logging.getLogger("relay.librdkafka")
    logger.setLevel(logging.CRITICAL + 1)
    return logger


def weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Give a callback for librdkafka that does not keep its object alive.

    The producer holds its callbacks and the object holds the producer: such a ring would go only when Python looks for
    rings, and with it librdkafka's threads and connections.
    """
    reference = weakref.WeakMethod(method)

    def call(value: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(value)

    return call
