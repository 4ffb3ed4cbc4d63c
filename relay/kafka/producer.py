"""Sends the events of a publish with one librdkafka producer, and interprets failures. Both publishers use it.

By idempotence (KIP-98), librdkafka's own retries repeat and reorder nothing. After a failure the producer is discarded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox._app.choices import HeaderSet
from outbox._clients.callbacks import weak_callback
from outbox._clients.kafka import ConnectionErrors, complete, refused_options
from outbox._clients.kafka_client import silent_logger
from relay.core.ports import (
    Batches,
    BatchRefused,
    BrokerUnavailable,
    Claim,
    DeliveryTimeout,
    RecordMetadata,
    Refusal,
    TopicUnusable,
    Unavailable,
    UnsettledBatch,
    kind_of,
)
from relay.failpoints import failpoint
from relay.kafka.client import (
    CONSEQUENCES,
    REFUSALS,
    TOPIC_REFUSALS,
    NewTopics,
    text_of,
    unavailable_on_kafka_error,
)
from relay.kafka.headers import MessageHeaders
from relay.kafka.routing import NoRoute, Router
from relay.kafka.topics import Topics, Unanswered

Outcome = str | TopicUnusable | None
"""Why an event is refused, or why its topic can't be written to; None if it was queued."""
NOT_SENT: Final = "not sent"

_POLL_SECONDS: Final = 0.1
# How long one flush() of librdkafka may take. It checks every 10 ms whether everything is acknowledged, or when its
# time is up: only failures are reported, so no report wakes it. And when a transaction's partitions are registered,
# only the next flush() wakes the sending thread. So it is called repeatedly, at growing intervals.
_FLUSH_SECONDS: Final = 0.001
_LONGEST_FLUSH_SECONDS: Final = 0.01
_FLUSH_GROWTH: Final = 1.2


@dataclass(frozen=True, slots=True)
class Sending:
    """How a worker's events are sent, by whichever publisher.

    ``options`` are librdkafka's, from config.producer_options; ``delivery_seconds``: how long a publish may take. With
    ``record_offsets`` the results have the topic, partition and offset of each event. ``at_most_once``: events are not
    read again, so an event whose topic can't be written to is refused, or it would be lost; it needs options that never
    repeat a request. ``outbox`` is the outbox's name in spans.
    """

    options: Mapping[str, Any]
    router: Router
    topics: Topics
    ce_source: str
    delivery_seconds: float
    headers: HeaderSet = HeaderSet.BOTH
    record_offsets: bool = False
    at_most_once: bool = False
    outbox: str = ""


class BatchProducer:
    """One producer and its current publish. Raises ConfigurationError when librdkafka refuses the options."""

    def __init__(self, sending: Sending, transactional_id: str | None = None) -> None:
        self._router = sending.router
        self._topics = sending.topics
        self._headers = MessageHeaders(sending.ce_source, sending.headers)
        self._at_most_once = sending.at_most_once
        self._transactional = transactional_id is not None
        self._records: dict[int, RecordMetadata] | None = {} if sending.record_offsets else None
        # Never reset: a producer with a failure is discarded.
        self._failed: dict[int, tuple[Claim, KafkaError]] = {}
        self._partitions: dict[int, int | None] = {}
        self._markers: dict[int, KafkaError] = {}
        self.fatal: KafkaError | None = None
        self.broken_off = False
        """Whether librdkafka took no more messages, because the transaction has failed."""
        self._connections = ConnectionErrors()
        self.purged = False
        """Whether what was left at a deadline was purged. Then the producer must not be used again, even if all had
        been acknowledged: librdkafka purges in its own threads, and may drop messages that are sent later.
        """
        self._trial: float | None = None
        self._stalled: list[str] | None = None
        self._used: set[str] = set()
        self._new_topics = NewTopics(0.0) if sending.at_most_once else NewTopics()
        self.sent: dict[int, list[Claim]] = {}
        self.refused: dict[int, list[Refusal]] = {}
        self.left_out: set[int] = set()
        self._ahead: dict[int, Outcome] = {}
        options = {
            **complete(sending.options),
            # Callbacks only for failures: one per message would cost a large part of the time to send it.
            "delivery.report.only.error": not sending.record_offsets,
            "error_cb": weak_callback(self._on_error),
        }
        if transactional_id is not None:
            options["transactional.id"] = transactional_id
        try:
            self.producer = Producer(options, logger=silent_logger())
        except KafkaException as error:
            raise refused_options(error) from error

    @property
    def failed(self) -> bool:
        return bool(self._failed) or bool(self._markers) or self.fatal is not None

    @property
    def dropped(self) -> bool:
        """Return whether librdkafka aborted the transaction without a cause in any message.

        An error of AddPartitionsToTxn does that: librdkafka then purges the messages, and produce() refuses more.
        """
        errors = [*(error for _, error in self._failed.values()), *self._markers.values()]
        return (
            self._transactional
            and not self.purged
            and self.fatal is None
            and (self.broken_off or bool(errors))
            and all(error.code() in CONSEQUENCES for error in errors)
        )

    def send(self, batches: Batches, deadline: float, may_send: Callable[[int], bool] = lambda _lane: True) -> None:
        """Queue events in order, filling ``sent``, ``refused`` and ``left_out``. Raises Unavailable.

        Events of the same key behind a refused one are in neither list. Neither are events whose topic can't be written
        to: their lanes are in ``left_out``. With ``at_most_once`` each event is in one of the lists: an event that is
        not sent now never is, and its key goes on. ``may_send`` is asked before each event: once it returns False for a
        lane, the rest of the lane's events are in neither list.
        """
        self.sent, self.refused, self.left_out = {}, {}, set()
        self._used, self._ahead = set(), {}
        if self._records is not None:
            self._records.clear()
        self._send_ahead(batches, deadline)
        ahead = self._ahead
        half = sum(map(len, batches.values())) // 2
        count = 0
        for lane, claims in batches.items():
            self.sent[lane] = sent = []
            self.refused[lane] = refused = []
            waiting: set[tuple[str, str]] = set()
            for claim in claims:
                if not may_send(lane):
                    break
                position = claim.position
                # What was sent ahead may be behind a refused event of its key that goes to another topic.
                if waiting and claim.key in waiting and ahead.get(position, NOT_SENT) is not None:
                    continue
                outcome = ahead[position] if position in ahead else self._send(claim, deadline)
                if outcome is None:
                    sent.append(claim)
                    count += 1
                    if count == half:
                        failpoint("batch.half_sent")
                    continue
                if self._at_most_once:
                    refused.append((claim, str(outcome)))
                    continue
                waiting.add(claim.key)
                if isinstance(outcome, TopicUnusable):
                    self.left_out.add(lane)
                else:
                    refused.append((claim, outcome))
        failpoint("batch.sent")

    def _send_ahead(self, _batches: Batches, _deadline: float) -> None:
        """Send events that must be acknowledged before the others, with their outcomes in ``_ahead``, by position."""

    def send_marker(self, topic: str, lane: int, value: bytes, deadline: float) -> None:
        """Queue a lane's marker behind its events, to the lane's partition. Raises Unavailable."""
        self._new_topics.fetch(self.producer, topic)
        report = partial(self._on_marker, lane)
        while True:
            try:
                return self.producer.produce(topic, value, b"marker", partition=lane, on_delivery=report)
            except BufferError:
                self._make_room(deadline)

    def drain(self, deadline: float, may_wait: Callable[[], bool] = lambda: True) -> None:
        """Wait for the acknowledgements; at the deadline, or when no more can arrive, drop the rest at once.

        The same once ``may_wait`` returns False. After a fatal error, messages in flight are still acknowledged, and
        need not be sent again. In a transaction a failed message ends all: librdkafka holds back the others until the
        abort. The deadline is ours, not librdkafka's, which drops messages one by one: a later message of a key could
        be delivered after an earlier one was dropped, and would stay before it. A stalled topic is tried for less time
        than a publish has, because everything sent with it waits as long.
        """
        self._trial = self._topics.trial_seconds(self._used)
        if self._trial is not None:
            deadline = min(deadline, time.monotonic() + self._trial)
        # flush() ends the linger time.
        flush_seconds = _FLUSH_SECONDS
        while len(self.producer):
            seconds = deadline - time.monotonic()
            if seconds <= 0 or not may_wait():
                self.purged = True
            if self.purged or (self._transactional and self.failed):
                self.producer.purge()
            elif self.fatal is not None:
                self.producer.purge(in_flight=False)
            elif not self.failed:
                self._flush(min(seconds, flush_seconds))
                flush_seconds = min(flush_seconds * _FLUSH_GROWTH, _LONGEST_FLUSH_SECONDS)
                continue
            self._poll()

    def acknowledged(self, lane: int, number: int | None = None) -> UnsettledBatch:
        """Return the sent events of a lane that did not fail, as its batch of that number; call it after ``drain``."""
        sent, failed, records = self.sent.get(lane, ()), self._failed, self._records
        if records is not None:
            sent = [claim for claim in sent if claim.position in records]
            return UnsettledBatch(sent, [records[claim.position] for claim in sent], number)
        return UnsettledBatch([claim for claim in sent if claim.position not in failed] if failed else sent, (), number)

    def refused_by_broker(self) -> dict[int, list[Refusal]]:
        """Return the events whose report is a refusal; all events of a request may have it."""
        refused: dict[int, list[Refusal]] = {}
        for claim, error in self._failed.values():
            reason = self._refusal(claim, error)
            if reason is not None:
                refused.setdefault(claim.lane, []).append((claim, reason))
        return refused

    def refused_first(self, *, aborted: bool = False) -> dict[int, list[Refusal]]:
        """Return the refused events, except those with a failed event of the same key before them, which comes first.

        If the transaction was ``aborted``, all sent events have failed. With ``at_most_once`` failed events do not come
        again, so all refused ones are returned.
        """
        if self._at_most_once:
            return dict(self.refused)
        sent = (claim for claims in self.sent.values() for claim in claims)
        failed = {claim.key for claim in (sent if aborted else (claim for claim, _ in self._failed.values()))}
        return {lane: [r for r in refused if r[0].key not in failed] for lane, refused in self.refused.items()}

    def refused_alone(self) -> dict[int, list[Refusal]]:
        """Return the events that the broker is proven to refuse, by lane: no other event of their partition was
        refused, and all events of a request get the same answer. Without those behind another sent event of their key.

        Of an aborted transaction: no event that was sent is published.
        """
        alone: dict[int, list[Refusal]] = {}
        for (_, partition), claims in self._refused_of_partitions().items():
            claim = claims[0]
            first = next((each for each in self.sent.get(claim.lane, ()) if each.key == claim.key), None)
            reason = self._refusal(claim, self._failed[claim.position][1])
            if partition >= 0 and len(claims) == 1 and first is claim and reason is not None:
                alone.setdefault(claim.lane, []).append((claim, reason))
        return alone

    def _refused_of_partitions(self) -> dict[tuple[str, int], list[Claim]]:
        """Return the refused events by topic and partition, which is -1 if it is not known."""
        refused: dict[tuple[str, int], list[Claim]] = {}
        for claim, error in self._failed.values():
            if error.code() in REFUSALS:
                partition = self._partitions.get(claim.position)
                refused.setdefault((self._topic(claim), -1 if partition is None else partition), []).append(claim)
        return refused

    def failure(self, seconds: float) -> tuple[Unavailable, Collection[int]]:
        """Return the failure, and the lanes of which the broker refuses something; for those it is BatchRefused."""
        self._topics.forget()
        # The causes, without the messages that failed because of them.
        causes = [(claim, error) for claim, error in self._failed.values() if error.code() not in CONSEQUENCES]
        unusable = self._topics_at_fault(causes)
        if unusable:
            return TopicUnusable(self._topics.reasons()[unusable[0]]), ()
        blamed: dict[int, str] = {}
        for claim, error in causes:
            reason = self._refusal(claim, error)
            if reason is not None:
                blamed.setdefault(claim.lane, reason)
        # A marker's failure is not caused by an event; but the marker of fewer events is smaller.
        for lane, error in self._markers.items():
            if error.code() == KafkaError.MSG_SIZE_TOO_LARGE and len(self.sent.get(lane, ())) > 1:
                blamed.setdefault(lane, f"the lane's marker: {REFUSALS[error.code()]} ({error.str()})")
        if blamed:
            return BatchRefused(next(iter(blamed.values()))), list(blamed)
        if self.purged:
            if self._stalled is None:
                self._stalled = self._topics.stalled(self._unanswered(), seconds, trial=self._trial is not None)
            if self._stalled:
                topic = self._stalled[0]
                return TopicUnusable(self._topics.reasons()[topic] + self._lost()), ()
        return self._unavailable(causes, min(seconds, self._trial or seconds)), ()

    def likeliest(self) -> dict[int, int]:
        """Return the events that are most likely at fault, by lane: the largest that was refused in each partition.

        All events of a request get the same answer.
        """
        likeliest: dict[int, int] = {}
        for claims in self._refused_of_partitions().values():
            largest = max(claims, key=lambda claim: claim.size)
            # The first of a lane; the next one is found after it.
            known = likeliest.setdefault(largest.lane, largest.position)
            likeliest[largest.lane] = min(known, largest.position)
        return likeliest

    def _unanswered(self) -> dict[str, Unanswered]:
        """Return the topics of the publish that have unacknowledged messages."""
        failed: dict[str, set[int]] = {}
        acknowledged: set[str] = set()
        for claims in self.sent.values():
            for claim in claims:
                topic = self._topic(claim)
                if claim.position not in self._failed:
                    acknowledged.add(topic)
                    continue
                partition = self._partitions.get(claim.position)
                # No partition if librdkafka does not know the topic's partitions yet.
                failed.setdefault(topic, set()).update([] if partition is None or partition < 0 else [partition])
        return {
            topic: Unanswered(frozenset(partitions), silent=topic not in acknowledged, alone=not acknowledged - {topic})
            for topic, partitions in failed.items()
        }

    def _unavailable(self, causes: Sequence[tuple[Claim, KafkaError]], seconds: float) -> Unavailable:
        """Return the failure if neither an event nor a topic caused it."""
        if self.purged:
            return DeliveryTimeout(
                f"Kafka: no acknowledgement within {seconds:g} s{self._lost()}{self._connections.reason}"
            )
        failed = [(f"to {self._topic(claim)!r}", error) for claim, error in causes]
        failed += [(f"the marker of lane {lane}", error) for lane, error in self._markers.items()]
        for what, error in failed:
            if error.code() not in CONSEQUENCES:
                text = f"{error.str()}{self._lost()}{self._connections.reason_for(error)}"
                return BrokerUnavailable(f"Kafka, sending {what}: {text}")
        if self.fatal is not None and self.fatal.code() == KafkaError._FENCED:
            return BrokerUnavailable(f"Kafka: another relay has taken a lane over ({self.fatal.str()}){self._lost()}")
        text = self.fatal.str() if self.fatal is not None else "the batch was dropped"
        return BrokerUnavailable(f"Kafka: {text}{self._lost()}")

    def forbidden(self) -> TopicUnusable | None:
        """Return the error for forbidden topics, after an error of AddPartitionsToTxn, which names none."""
        with unavailable_on_kafka_error("asking for rights on topics"):
            topics = ", ".join(map(repr, self._topics.forbidden(self._used)))
        return TopicUnusable(f"the relay may not write to {topics}: grant it WRITE and DESCRIBE") if topics else None

    def note_written(self) -> None:
        self._connections.forget()
        self._topics.written(self._used)

    def explained(self, error: KafkaException) -> KafkaException:
        """Return an exception of the producer, with the reason why its connections fail if that has caused it."""
        # Here, because it is raised only once if the producer has a fatal error.
        self._poll(0)
        return self._connections.explained(error)

    def serve(self) -> None:
        self._poll(0)

    def purge(self) -> None:
        """Drop what is queued and in flight. The producer must not be used again."""
        self.producer.purge()
        with contextlib.suppress(KafkaException):
            self.producer.poll(0)

    def close(self) -> None:
        """Purge, and end librdkafka's threads and connections: a failure's traceback may keep this object for long."""
        self.purge()
        del self.producer

    def _topics_at_fault(self, causes: Sequence[tuple[Claim, KafkaError]]) -> list[str]:
        found = {}
        for claim, error in causes:
            text = TOPIC_REFUSALS.get(error.code())
            if text is not None:
                topic = self._topic(claim)
                found[topic] = f"{text.format(topic=topic)} ({error.str()})"
        for topic, reason in found.items():
            self._topics.refused(topic, reason)
        return list(found)

    def _refusal(self, claim: Claim, error: KafkaError) -> str | None:
        reason = REFUSALS.get(error.code())
        return None if reason is None else f"topic {self._topic(claim)!r}: {reason} ({error.str()})"

    def _lost(self) -> str:
        events, sent = len(self._failed), sum(map(len, self.sent.values()))
        return f" ({events} of {sent} events not acknowledged)" if events else ""

    def _topic(self, claim: Claim) -> str:
        aggregate_type, copy = kind_of(claim)
        return self._router.known_topic(aggregate_type, copy=copy) or "?"

    def _send(self, claim: Claim, deadline: float) -> Outcome:
        try:
            topic = self._router.topic(claim)
        except NoRoute as error:
            return str(error)
        if topic not in self._used and (unusable := self._prepare(claim, topic)):
            return unusable
        headers = self._headers.of(claim)
        report = MethodType(self._on_failure if self._records is None else self._on_answer, claim)
        while True:
            try:
                self.producer.produce(topic, claim.value, claim.aggregate_id, headers=headers, on_delivery=report)
            except BufferError:
                self._make_room(deadline)
            except KafkaException as error:
                code = error.args[0].code()
                if code in REFUSALS:
                    return f"topic {topic!r}: {REFUSALS[code]} ({text_of(error)})"
                if code in TOPIC_REFUSALS:
                    reason = f"{TOPIC_REFUSALS[code].format(topic=topic)} ({text_of(error)})"
                    self._topics.refused(topic, reason)
                    return TopicUnusable(reason)
                self.broken_off = code == KafkaError._STATE
                raise BrokerUnavailable(f"Kafka, sending to {topic!r}: {text_of(error)}") from error
            else:
                return None

    def _prepare(self, claim: Claim, topic: str) -> TopicUnusable | None:
        """Learn what is needed of an event's topic, once a publish. Returns why it can't be written to."""
        if topic in self._used:
            return None
        try:
            self._topics.require_for(kind_of(claim), topic)
        except TopicUnusable as error:
            return error
        self._used.add(topic)
        self._new_topics.fetch(self.producer, topic)
        return None

    def _make_room(self, deadline: float) -> None:
        """Serve acknowledgements until the local queue has room again."""
        self._flush(_POLL_SECONDS)
        if self.failed:
            raise BrokerUnavailable("Kafka: the queue of messages stays full")
        if time.monotonic() >= deadline:
            self.purged = True
            raise DeliveryTimeout("Kafka: the queue of messages stays full")

    def _flush(self, seconds: float) -> None:
        try:
            self.producer.flush(max(seconds, 0.001))
        except KafkaException as error:
            self._on_exception(error)

    def _poll(self, seconds: float = _POLL_SECONDS) -> None:
        try:
            self.producer.poll(seconds)
        except KafkaException as error:
            self._on_exception(error)

    def _on_exception(self, error: KafkaException) -> None:
        # A fatal error is raised as an exception too. Each message's own report has its result.
        if not error.args[0].fatal():
            raise BrokerUnavailable(f"Kafka: {text_of(error)}") from error
        self.fatal = error.args[0]

    def _on_failure(self, claim: Claim, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self._failed[claim.position] = (claim, error)
            if message is not None:
                self._partitions[claim.position] = message.partition()

    def _on_answer(self, claim: Claim, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self._on_failure(claim, error, message)
        else:
            assert self._records is not None
            self._records[claim.position] = RecordMetadata(message.topic(), message.partition(), message.offset())

    def _on_marker(self, lane: int, error: KafkaError | None, _message: Any) -> None:
        if error is not None:
            self._markers[lane] = error

    def _on_error(self, error: KafkaError) -> None:
        self._connections.hear(error)
        # librdkafka handles brokers that come and go; a fatal error ends this producer.
        if error.fatal():
            self.fatal = error
