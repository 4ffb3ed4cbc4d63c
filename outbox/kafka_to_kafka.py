"""Consume, transform and produce in Kafka's own transactions: from topic to topic exactly once, without a database.

    def totals(message):
        order = json.loads(message.value())
        yield Record("totals", message.key(), json.dumps({"total": order["total"]}).encode())

    Transformer(totals, topics=["order-events"], group="totals", kafka={"bootstrap.servers": …}).run()

The records and the positions in the input are committed in one transaction (KIP-98); readers in ``read_committed`` see
both or neither. What was read by a member that has lost its partitions meanwhile is refused by the group's generation,
which goes with the positions (KIP-447), so any number of members may share the work. The order of a key is kept: each
partition is read by one member, in transactions one after the other.

Where a database takes part, this is not enough: its changes are in no transaction of Kafka's. Then write the results
through the outbox; see docs/guides/kafka-to-kafka.md.

| what happens                               | what follows                                                            |
|--------------------------------------------|-------------------------------------------------------------------------|
| killed before the commit                   | the coordinator aborts after transaction_seconds; until then readers    |
|                                            | wait there, and the next owner waits for the positions to be decided    |
| killed during the commit                   | it is decided by the coordinator; the next owner reads what was decided |
| COMMIT times out                           | it is asked for again until its outcome is known; never assumed         |
| partitions are taken away while it polls   | what was read and not committed is dropped; the next owner reads it     |
| it sleeps past the session or the poll     | the broker refuses its positions, the transaction is aborted, it joins  |
| interval, and wakes in a transaction       | again and reads from what is committed                                  |
| sending the positions never returns        | a new session, with another producer; the coordinator ends the old one's|
|                                            | transaction after transaction_seconds                                   |
| brokers are away                           | it waits; a transaction that was open is aborted, and done again        |
| a batch takes longer than                  | the coordinator has aborted the transaction: half as many messages in   |
| transaction_seconds                        | the next one                                                            |
| a record can't be produced: too large, no  | the transaction is aborted and ``run`` raises TransformFailed           |
| such partition                             |                                                                         |
| a topic does not exist, a right is missing | the transaction is aborted and ``run`` raises KafkaRefused              |
| the transform raises                       | the transaction is aborted and ``run`` raises; or the message goes to   |
|                                            | ``dead_letter_topic``, in the same transaction as its neighbours        |
| the name of a header is not UTF-8          | the same; such names are escaped in the copy                            |
| the input was deleted before it was read   | InputLost: it does not jump to where the log begins now                 |
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from outbox._clients.kafka_rules import is_refusal, require_verification
from outbox.consumer.messages import NOT_UTF8, UndecodableHeaders, checked
from outbox.consumer.standing import Place, Standing, Watch
from outbox.errors import ConfigurationError, MissingExtra, OutboxError

try:
    from confluent_kafka import (
        Consumer,
        KafkaError,
        KafkaException,
        Message,
        Producer,
        TopicPartition,
    )
except ModuleNotFoundError as missing:
    raise MissingExtra("kafka", "confluent_kafka") from missing

log = logging.getLogger("outbox")

DEAD_LETTER: Final = "outbox-dead-letter"
"""On a copy in the dead-letter topic: why the message could not be transformed."""
PLACE: Final = "outbox-dead-letter-place"
"""On such a copy: ``topic-partition@offset`` of the message."""

_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.1
_PARTITIONS: Final = "partitions="
"""In a position's metadata, before how many partitions the topic had when the group came to it."""
_LONGEST_PAUSE: Final = 10.0
_MISSING_TOPIC_SECONDS: Final = 10.0
"""Brokers that have just started may not know a topic yet."""
# Set here, because the promise depends on them.
_OURS: Final = frozenset(
    {
        "group.id",
        "group.protocol",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "isolation.level",
        "auto.offset.reset",
        "partition.assignment.strategy",
        "transactional.id",
        "transaction.timeout.ms",
        "enable.idempotence",
        "acks",
    }
)
# Beside those of credentials and rights; only somebody who changes rights, settings or topics ends these.
_REFUSALS: Final = frozenset(
    {
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001  a documented name, in spite of the underscore
    }
)
# The record itself is at fault: it would be refused each time.
_UNFIT: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.POLICY_VIOLATION,
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)
_PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001
_MISSING: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class Record:
    """A record to be produced. Without ``partition`` the key decides, by Java's partitioner (murmur2)."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]] = ()
    partition: int | None = None


Transform = Callable[[Message], Iterable[Record]]


class TransformFailed(OutboxError):
    """A message could not be transformed, or its records not be produced. Nothing of its transaction was committed.

    topic, partition, offset   the message's place.
    """

    def __init__(self, message: Message, error: Exception) -> None:
        self.topic, self.partition, self.offset = message.topic(), message.partition(), message.offset()
        super().__init__(
            f"{self.topic} partition {self.partition} offset {self.offset} can't be transformed: "
            f"{type(error).__name__}: {error}; mend it and run again, or name a dead_letter_topic"
        )


class InputLost(OutboxError):
    """Messages were deleted before they were read, or there is no position and ``start`` is "none"."""


class KafkaRefused(OutboxError):
    """Kafka refuses what only somebody who changes rights, settings or topics can mend."""


class Transformer:
    """One member of a group that transforms topics. ``run`` it; several processes share the partitions.

    transform            called with each message, in the order of its partition; returns the records that it becomes,
                         none or several. It is called again for messages whose transaction was aborted.
    topics, group        what is read, and under which name.
    kafka                options of librdkafka, for the consumer and the producer. Set ``max.poll.interval.ms`` above
                         the time that ``batch`` messages take.
    start                where a partition without a committed position begins: "earliest", "latest", or "none": an
                         error. A partition that is added later begins at its first message, also with "latest".
    dead_letter_topic    where messages go that the transform raises for; None: ``run`` raises.
    batch, batch_seconds the most messages in a transaction, and for how long it waits for them.
    transaction_seconds  after which the coordinator aborts a transaction whose member is gone. Readers wait there for
                         as long, so it is short; a batch has to be done within it.
    """

    def __init__(
        self,
        transform: Transform,
        *,
        topics: Sequence[str],
        group: str,
        kafka: Mapping[str, Any],
        start: Literal["earliest", "latest", "none"] = "earliest",
        dead_letter_topic: str | None = None,
        batch: int = 500,
        batch_seconds: float = 0.05,
        transaction_seconds: float = 30.0,
    ) -> None:
        """Check the arguments. Raises ConfigurationError."""
        if isinstance(topics, str) or not topics or not all(topics):
            raise ConfigurationError(f"topics: {topics!r} must be a list of at least one topic")
        if not group:
            raise ConfigurationError("group must not be empty")
        if start not in {"earliest", "latest", "none"}:
            raise ConfigurationError(f"start must be earliest, latest or none, not {start!r}")
        if batch < 1 or batch_seconds < 0 or transaction_seconds <= 0:
            raise ConfigurationError("batch must be 1 or more, batch_seconds 0 or more, transaction_seconds above 0")
        if taken := sorted(_OURS & set(kafka)):
            raise ConfigurationError(f"kafka option {taken[0]} is set here, as the promise depends on it: remove it")
        require_verification(kafka)
        self._plan = _Plan(
            transform=transform,
            topics=tuple(topics),
            group=group,
            start=start,
            dead_letter_topic=dead_letter_topic,
            batch=batch,
            batch_seconds=batch_seconds,
            transaction_seconds=transaction_seconds,
            consumer={
                **kafka,
                "group.id": group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                # Positions of an open transaction are waited for, too.
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                "partition.assignment.strategy": "range",
            },
            producer={
                "partitioner": "murmur2_random",
                # librdkafka takes a topic for missing after 30 s by default: the transaction is over by then.
                "topic.metadata.propagation.max.ms": int(min(_MISSING_TOPIC_SECONDS, transaction_seconds / 2) * 1000),
                **kafka,
                "transactional.id": f"{group}.{uuid.uuid4()}",
                "transaction.timeout.ms": int(transaction_seconds * 1000),
            },
        )
        self._progress = _Progress(batch)

    @property
    def committed(self) -> int:
        """Return how many messages this member has committed."""
        return self._progress.messages

    def stalled(self, seconds: float = 300.0) -> list[Standing]:
        """Return this member's partitions in which messages wait and that have not moved for so long. No I/O.

        For a readiness probe, from any thread: ready is who runs and has none. Each one says since when, and why.
        """
        return self._progress.watch.stalled(seconds)

    def run(self, stop: threading.Event | None = None) -> None:
        """Transform until ``stop``, which ends it after the transaction under way. Waits while brokers are away.

        Raises TransformFailed, InputLost or KafkaRefused; nothing of the transaction under way is committed then. And
        ConfigurationError for an option that librdkafka does not take.
        """
        stop = stop or threading.Event()
        failures = 0
        while not stop.is_set():
            before = self.committed
            try:
                with _Session(self._plan, self._progress, stop) as session:
                    session.run()
            except KafkaException as error:
                inner = error.args[0]
                if _is_refused(inner):
                    raise KafkaRefused(f"Kafka refuses group {self._plan.group!r}: {inner.str()}") from error
                failures = 0 if self.committed > before else failures + 1
                log.warning("group %s begins anew: %s", self._plan.group, inner.str())
                self._progress.watch.failed(None, inner.str())
                _pause(stop, failures)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a member does, and the options of its clients."""

    transform: Transform
    topics: Sequence[str]
    group: str
    start: str
    dead_letter_topic: str | None
    batch: int
    batch_seconds: float
    transaction_seconds: float
    consumer: Mapping[str, Any]
    producer: Mapping[str, Any]


@dataclass(slots=True)
class _Progress:
    """What outlives a session. ``batch``: the most messages in a transaction now; ``messages``: the committed ones."""

    batch: int
    messages: int = 0
    watch: Watch = field(default_factory=Watch)


class _Session:
    """A consumer and a producer, until an error that makes a new pair necessary."""

    def __init__(self, plan: _Plan, progress: _Progress, stop: threading.Event) -> None:
        self._plan = plan
        self._progress = progress
        self._stop = stop
        self._messages: list[Message] = []
        # Of the moment of the assignment: what was read under it is committed under it, or refused.
        self._membership: Any = None
        self._metadata: dict[tuple[str, int], str | None] = {}
        self._aborted = 0
        self._undelivered: tuple[Message, KafkaError] | None = None
        self._stuck = False

    def __enter__(self) -> Self:
        try:
            self._producer = Producer(dict(self._plan.producer))
            self._consumer = Consumer(dict(self._plan.consumer))
        except KafkaException as error:
            raise ConfigurationError(f"kafka: {error.args[0].str()}") from error
        return self

    def __exit__(self, *_: object) -> None:
        # Closing leaves the group. A transaction that could not be aborted is by the coordinator, after its time.
        self._consumer.close()
        # A record that is neither delivered nor given up keeps its callback, which keeps this session and its clients.
        self._producer.purge()
        with suppress(KafkaException):
            self._producer.flush(_POLL_SECONDS)
        # Callbacks and tracebacks lead to this session: its clients end now, and not with them.
        del self._consumer, self._producer

    def run(self) -> None:
        """Transform until ``stop``. Raises KafkaException when a new session is necessary."""
        self._until_known(lambda: self._producer.init_transactions(_SECONDS))
        self._consumer.subscribe(
            list(self._plan.topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )
        while not self._stop.is_set():
            self._read()
            if self._messages:
                self._write()

    # Reading

    def _read(self) -> None:
        """Read messages for one transaction. A rebalance meanwhile drops those that were read before it."""
        until: float | None = None
        while len(self._messages) < self._progress.batch and not self._stop.is_set():
            message = self._consumer.poll(_POLL_SECONDS if until is None else max(until - time.monotonic(), 0.0))
            if message is not None and (error := message.error()) is not None:
                self._refuse(error)
            elif message is not None:
                self._messages.append(checked(message))
                until = until or time.monotonic() + self._plan.batch_seconds
            elif until is None or time.monotonic() >= until:
                return

    def _refuse(self, error: KafkaError) -> None:
        """Raise for an error of the consumer that does not pass by itself."""
        code = error.code()
        if code == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001
            raise InputLost(
                f"group {self._plan.group!r}: {error.str()}; the messages at its position are gone. Nothing was "
                "skipped: see where the log begins, and set the group's offsets by hand"
            )
        if code in _MISSING:
            self._require_topics()
        elif error.fatal() or _is_refused(error):
            raise KafkaException(error)
        else:
            # librdkafka goes on by itself, as behind a connection that broke, or joins the group again.
            log.info("group %s: %s", self._plan.group, error.str())

    def _require_topics(self) -> None:
        """Raise KafkaRefused if a topic is missing, and still is after a while."""
        until = time.monotonic() + _MISSING_TOPIC_SECONDS
        while True:
            known = self._consumer.list_topics(timeout=_SECONDS).topics
            # The names that begin with ^ are patterns.
            missing = [
                topic
                for topic in self._plan.topics
                if not topic.startswith("^") and (topic not in known or known[topic].error is not None)
            ]
            if not missing or self._stop.is_set():
                return
            if time.monotonic() >= until:
                raise KafkaRefused(f"group {self._plan.group!r}: topic {missing[0]} does not exist; create it")
            log.info("group %s waits for topic %s, which does not exist", self._plan.group, missing[0])
            self._stop.wait(0.5)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._messages.clear()
        # Here and not when partitions are taken away: behind an error the next session may get the same ones.
        self._progress.watch.keep({(each.topic, each.partition) for each in partitions})
        self._go_to_committed(partitions)
        self._membership = consumer.consumer_group_metadata()

    def _revoked(self, consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        self._messages.clear()
        self._membership = None
        consumer.unassign()

    def _go_to_committed(self, partitions: Sequence[TopicPartition]) -> None:
        """Read on from what is committed. Waits for positions in an open transaction to be decided (KIP-447)."""
        places = [TopicPartition(each.topic, each.partition) for each in partitions]
        found = self._consumer.committed(places, _SECONDS) if places else []
        for place in found:
            if place.error is not None:
                raise KafkaException(place.error)
        if begun := [self._beginning(place) for place in found if place.offset < 0]:
            found = [place for place in found if place.offset >= 0] + begun
            # Whoever reads on if this member ends before its first transaction has the same beginning: it neither skips
            # what has come meanwhile, nor takes a log that has been cut for the whole.
            for place in self._consumer.commit(offsets=begun, asynchronous=False) or []:
                if place.error is not None:
                    raise KafkaException(place.error)
        self._metadata = {(place.topic, place.partition): place.metadata for place in found}
        self._consumer.assign(found)

    def _beginning(self, place: TopicPartition) -> TopicPartition:
        """Return where a partition without a position begins. Raises InputLost if there is to be one.

        With "latest" that is the end for the partitions that the topic had when the group came to it. One that was
        added later is read from its beginning, whenever it is discovered: its messages are later ones, too. How many
        there were stands in the metadata of each of the group's positions in the topic.
        """
        if self._plan.start == "none":
            raise InputLost(f"group {self._plan.group!r} has no position in {place.topic}-{place.partition}")
        first, end = self._consumer.get_watermark_offsets(place, _SECONDS, cached=False)
        if self._plan.start == "earliest":
            return TopicPartition(place.topic, place.partition, first)
        count = self._first_partitions(place.topic)
        offset = end if place.partition < count else first
        return TopicPartition(place.topic, place.partition, offset, f"{_PARTITIONS}{count}")

    def _first_partitions(self, topic: str) -> int:
        """Return how many partitions a topic had when the group came to it."""
        count = len(self._consumer.list_topics(topic, _SECONDS).topics[topic].partitions)
        places = self._consumer.committed([TopicPartition(topic, number) for number in range(count)], _SECONDS)
        for place in places:
            if place.error is not None:
                raise KafkaException(place.error)
        known = [place.metadata or "" for place in places if place.offset >= 0]
        counts = [int(text.removeprefix(_PARTITIONS)) for text in known if re.fullmatch(_PARTITIONS + r"\d+", text)]
        # Positions that other tools have set say nothing of it; but the group has been in the topic.
        return min(counts, default=0 if known else count)

    # Writing

    def _write(self) -> None:
        messages, self._messages = self._messages, []
        # Of each partition the first message: those behind it wait as well.
        first = {_place(message): message.offset() or 0 for message in reversed(messages)}
        for place, offset in first.items():
            self._progress.watch.waits(place, offset)
        self._undelivered = None
        began = time.monotonic()
        self._producer.begin_transaction()
        try:
            for message in messages:
                self._produce(message)
            positions = _behind(messages, self._metadata)
            self._until_known(lambda: self._send_positions(positions))
            self._until_known(lambda: self._producer.commit_transaction(_SECONDS))
        except KafkaException as error:
            self._give_up(messages, error, time.monotonic() - began)
        except BaseException:
            self._abort()
            raise
        else:
            self._aborted = 0
            self._progress.watch.moved(first)
            self._progress.messages += len(messages)
            self._progress.batch = min(2 * self._progress.batch, self._plan.batch)

    def _give_up(self, messages: Sequence[Message], error: KafkaException, seconds: float) -> None:
        """Abort the transaction and go back, or raise: because of a record, of a right, or for a new session."""
        inner = error.args[0]
        if self._stuck:
            raise error
        if not inner.fatal():
            self._abort()
        if self._undelivered is not None:
            message, reason = self._undelivered
            if reason.code() in _UNFIT:
                raise TransformFailed(message, KafkaException(reason)) from error
            if _is_refused(reason) or reason.code() in _MISSING:
                raise KafkaRefused(f"group {self._plan.group!r} can't produce: {reason.str()}") from error
        if seconds >= self._plan.transaction_seconds:
            self._halve(messages, seconds)
        if inner.fatal() or not inner.txn_requires_abort() or _is_refused(inner):
            raise error
        log.warning("a transaction of group %s was aborted: %s", self._plan.group, inner.str())
        self._progress.watch.failed({_place(message) for message in messages}, inner.str())
        _pause(self._stop, self._aborted)
        self._aborted += 1
        # Still a member, perhaps: the next poll tells.
        self._go_to_committed(self._consumer.assignment())

    def _halve(self, messages: Sequence[Message], seconds: float) -> None:
        # One alone is transformed before its transaction begins on the brokers: it may take as long as it likes.
        self._progress.batch = max(1, len(messages) // 2)
        log.warning(
            "%d messages of group %s took %.1f s, longer than transaction_seconds: now %d at a time",
            len(messages),
            self._plan.group,
            seconds,
            self._progress.batch,
        )

    def _produce(self, message: Message) -> None:
        """Produce what a message becomes, or its copy for the dead-letter topic."""
        try:
            if isinstance(message.headers(), UndecodableHeaders):
                raise UnicodeError(NOT_UTF8)
            records = list(self._plan.transform(message))
            for record in records:
                if not isinstance(record, Record):
                    raise TypeError(f"the transform returned a {type(record).__name__}, not a Record")
        except Exception as error:
            if self._plan.dead_letter_topic is None:
                raise TransformFailed(message, error) from error
            records = [_dead_letter(self._plan.dead_letter_topic, message, error)]
        for record in records:
            self._send_record(message, record)

    def _send_record(self, message: Message, record: Record) -> None:
        def delivered(error: KafkaError | None, _record: Message) -> None:
            # What is purged was aborted with another one, whose error is the reason.
            if error is not None and error.code() not in _PURGED and self._undelivered is None:
                self._undelivered = message, error

        more: dict[str, Any] = {} if record.partition is None else {"partition": record.partition}
        while True:
            try:
                self._producer.produce(
                    record.topic,
                    record.value,
                    record.key,
                    headers=list(record.headers),
                    on_delivery=delivered,
                    **more,
                )
            except BufferError:
                self._producer.poll(_POLL_SECONDS)
            except (TypeError, ValueError) as error:
                raise TransformFailed(message, error) from error
            except KafkaException as error:
                if error.args[0].code() in _UNFIT:
                    raise TransformFailed(message, error) from error
                raise
            else:
                self._producer.poll(0)
                return

    def _send_positions(self, positions: list[TopicPartition]) -> None:
        """Send the positions into the transaction. Raises KafkaException, also if it has not returned in time.

        librdkafka does not keep to the timeout of this one request: when the group's coordinator was restarted, it can
        wait for good (librdkafka's issues 5456 and 5511). A thread can't be ended: it keeps its producer, and a new
        session goes on with another one.
        """
        outcome: list[Exception | None] = []

        def send() -> None:
            try:
                self._producer.send_offsets_to_transaction(positions, self._membership, _SECONDS)
            except Exception as error:  # noqa: BLE001  raised below
                outcome.append(error)
            else:
                outcome.append(None)

        thread = threading.Thread(target=send, name="send_offsets_to_transaction", daemon=True)
        thread.start()
        # By then the coordinator is about to abort the transaction.
        thread.join(self._plan.transaction_seconds)
        if not outcome:
            self._stuck = True
            text = f"send_offsets_to_transaction has not returned in {self._plan.transaction_seconds:g} s"
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, text))  # noqa: SLF001
        if outcome[0] is not None:
            raise outcome[0]

    def _until_known(self, step: Callable[[], object]) -> None:
        """Take a step of the transaction. A time-out says nothing of its outcome: it is taken again until that is
        known, or until ``stop``; then the coordinator decides, and the next member reads what it has decided.
        """
        while True:
            try:
                step()
            except KafkaException as error:
                if not error.args[0].retriable() or self._stop.is_set():
                    raise
                log.info("a step of group %s's transaction is repeated: %s", self._plan.group, error.args[0].str())
            else:
                return

    def _abort(self) -> None:
        try:
            self._until_known(lambda: self._producer.abort_transaction(_SECONDS))
        except KafkaException as error:
            # The coordinator ends the transaction after its time.
            log.info("aborting failed: %s", error.args[0].str())


def _is_refused(error: KafkaError) -> bool:
    return is_refusal(error) or error.code() in _REFUSALS


def _pause(stop: threading.Event, failures: int) -> None:
    stop.wait(min(0.1 * 2.0**failures, _LONGEST_PAUSE) * random.uniform(0.5, 1.0))  # noqa: S311  jitter


def _place(message: Message) -> Place:
    return message.topic() or "", message.partition() or 0


def _behind(messages: Sequence[Message], metadata: Mapping[tuple[str, int], str | None]) -> list[TopicPartition]:
    """Return the positions behind these messages, with the partitions' metadata."""
    last = {_place(message): message.offset() or 0 for message in messages}
    return [
        TopicPartition(topic, partition, offset + 1, metadata.get((topic, partition)) or "")
        for (topic, partition), offset in last.items()
    ]


def _dead_letter(topic: str, message: Message, error: Exception) -> Record:
    why = f"{type(error).__name__}: {error}"[:1000].encode(errors="replace")
    place = f"{message.topic()}-{message.partition()}@{message.offset()}".encode()
    return Record(
        topic,
        message.key(),
        message.value(),
        [*(message.headers() or ()), (DEAD_LETTER, why), (PLACE, place)],
    )
