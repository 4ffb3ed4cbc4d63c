"""A consumer and a producer of one member: read, transform, and commit records and positions in one transaction."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Self

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox._clients.backoff import pause
from outbox._clients.callbacks import without_callbacks
from outbox._clients.kafka_rules import CLEAN_OFFSETS_SECONDS, clean_seconds
from outbox._clients.threads import within
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.member_clients import MemberClients, subscribe
from outbox.consumer.messages import checked
from outbox.consumer.model import Partition
from outbox.consumer.static_groups import StaticGroup
from outbox.consumer.topic_ids import TopicIds
from outbox.transform._first_records import NotAcknowledged
from outbox.transform._output import Output
from outbox.transform._plan import SECONDS, Plan, Progress, logger
from outbox.transform._positions import (
    answered,
    beginnings,
    committed,
    has_leader,
    moved,
    partition_of,
    place_of,
    positions_after,
    require_same_topics,
    require_whole,
)
from outbox.transform._refusals import OF_A_BATCH, TOO_LARGE, Undelivered, failure
from outbox.transform._topics import MISSING, require_topics
from outbox.transform.errors import InputLost, TransformFailed, is_refused

_BATCH_BYTES: Final = 16 << 20  # as in a turn of the relay
_POLL_SECONDS: Final = 0.1
_APART_SECONDS: Final = 60.0
_REFUSAL_SECONDS: Final = 5.0
_END_SECONDS: Final = 2.0
_LEADER_SECONDS: Final = 3.0
_SILENT_SECONDS: Final = 60.0
# What produce() says once the transaction has failed: it is to be aborted.
_TAKES_NO_MORE: Final = KafkaError._STATE


class Session:
    """A consumer and a producer, until an error that makes a new pair necessary."""

    def __init__(self, plan: Plan, progress: Progress, stop: threading.Event, clients: MemberClients) -> None:
        self._plan = plan
        self._clients = clients
        self._progress = progress
        self._stop = stop
        self._messages: list[Message] = []
        # From the assignment: messages read under it are committed under it, or refused.
        self._membership: Any = None
        self._committed: dict[Partition, TopicPartition] = {}
        self._unchecked: set[Partition] = set()  # had no leader when their positions were checked
        # Have neither a position nor a leader, which would say where they begin.
        self._leaderless: set[Partition] = set()
        self._ask_at = 0.0
        # How far partitions were read where that is beyond the messages.
        self._ends: dict[Partition, int] = {}
        self._aborted = 0
        # The broker refuses a batch of records as a whole. Until this time each record is a batch of its own.
        self._apart_until: float | None = None
        self._clean_seconds = clean_seconds(plan.producer)
        self._stuck = False

    def __enter__(self) -> Self:
        options = self._plan.consumer
        with self._clients.making():
            self._output = Output(self._plan, self._progress, self._clients)
            self._consumer = Consumer({**options, "error_cb": self._clients.hear})
            self._kafka = KafkaAdmin(without_callbacks(options), seconds=SECONDS)
        self._topic_ids = TopicIds(self._kafka.describe)
        self._static = StaticGroup(self._plan.group, options, self._kafka)
        return self

    def __exit__(self, *_: object) -> None:
        # Closing leaves the group. The coordinator aborts a transaction that this could not, after its time.
        self._consumer.close()
        self._output.close()
        # They end now, although callbacks and tracebacks may keep this session.
        del self._consumer, self._kafka, self._topic_ids, self._static

    def run(self) -> None:
        """Transform until ``stop``. Raises KafkaException when a new session is necessary."""
        self._progress.watch.unassigned(self._plan.topics)
        self._until_known(lambda: self._output.producer.init_transactions(SECONDS))
        self._subscribe()
        while not self._stop.is_set():
            if self._static.needs_rebalance(self._plan.topics):
                self._consumer.unsubscribe()
                self._subscribe()
            ids = self._topic_ids.look(topic for topic, _ in self._committed)
            require_same_topics(ids, self._progress.topic_ids, self._plan.group)
            self._read()
            if self._messages or self._ends:
                self._write()
            if self._leaderless and time.monotonic() >= self._ask_at:
                self._begin_others()

    def _subscribe(self) -> None:
        subscribe(self._consumer, self._plan.topics, self._assigned, self._revoked)

    # Reading

    def _read(self) -> None:
        """Read messages for one transaction. A rebalance meanwhile drops those that were read before it."""
        until: float | None = None
        size = 0
        while len(self._messages) < self._progress.batch and size < _BATCH_BYTES and not self._stop.is_set():
            message = self._consumer.poll(_POLL_SECONDS if until is None else max(until - time.monotonic(), 0.0))
            if message is not None and (error := message.error()) is not None:
                self._judge(error, message)
            self._clients.check()
            if self._clients.lost is not None:
                raise KafkaException(self._clients.lost)
            if message is None:
                if until is None or time.monotonic() >= until:
                    return
            elif message.error() is None:
                self._clients.worked()
                self._messages.append(checked(message))
                size += len(message.value() or b"")
                until = until or time.monotonic() + self._plan.batch_seconds

    def _judge(self, error: KafkaError, message: Message) -> None:
        """Note the end of a partition. Raise for an error that does not pass by itself."""
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            self._clients.worked()
            self._ends[partition_of(message)] = message.offset() or 0
        elif code == KafkaError._AUTO_OFFSET_RESET:
            raise InputLost(
                f"group {self._plan.group!r}: {error.str()}; the messages at its position are gone. Nothing was "
                "skipped: see where the log begins, and set the group's offsets by hand"
            )
        elif code in MISSING:
            require_topics(self._consumer, self._plan, self._stop)
        else:
            self._clients.judge(error, message)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._messages.clear()
        self._go_to_committed(partitions)
        self._membership = consumer.consumer_group_metadata()
        self._clients.worked()
        # Here and not when partitions are taken away: behind an error the next session may get the same ones.
        self._progress.watch.assigned({(each.topic, each.partition) for each in partitions})

    def _revoked(self, consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        self._messages.clear()
        self._ends.clear()
        self._leaderless.clear()
        self._membership = None
        self._progress.watch.unassigned(self._plan.topics)
        consumer.unassign()

    def _go_to_committed(self, partitions: Sequence[TopicPartition]) -> None:
        """Read on from what is committed. Waits for positions in an open transaction to be decided (KIP-447)."""
        plan, consumer, now = self._plan, self._consumer, time.time()
        found = committed(consumer, self._kafka, partitions, self._progress, plan.consumer, self._stop)
        if self._stop.is_set():
            # Otherwise the client assigns them by itself, and reads on.
            self._committed = {}
            consumer.assign([])
            return
        new = [position for position in found if position.offset < 0]
        known = self._progress.leaderless
        begun, self._leaderless = beginnings(consumer, self._kafka, new, known, plan.start, plan.group)
        for partition in self._leaderless:
            known.setdefault(partition, now)
        found = [position for position in found if position.offset >= 0] + begun
        if begun:
            # Whoever reads on if this member ends before its first transaction has the same beginning: it neither skips
            # what has come meanwhile, nor takes a log that has been cut for the whole.
            answered(consumer.commit(offsets=begun, asynchronous=False) or [])
        self._unchecked = require_whole(consumer, found, plan.consumer)
        self._committed = {(position.topic, position.partition): position for position in found}
        self._progress.positions |= self._committed
        self._ends.clear()
        consumer.assign(found)
        waited = known.keys() & self._committed.keys()
        self._progress.watch.moved(waited)
        for partition in waited:
            del known[partition]
        for partition in self._leaderless:
            self._progress.watch.waits(partition, None)
        self._progress.watch.failed(self._leaderless, "it has no leader")
        self._ask_at = time.monotonic() + _LEADER_SECONDS

    def _go_back(self) -> None:
        """Read the partitions that this member has again, from what is committed."""
        others = [TopicPartition(*each) for each in self._leaderless]
        self._go_to_committed([*self._consumer.assignment(), *others])

    def _begin_others(self) -> None:
        """Begin the partitions that had no leader, if one of them has."""
        self._ask_at = time.monotonic() + _LEADER_SECONDS
        try:
            found = has_leader(self._kafka, self._leaderless, _END_SECONDS)
        except KafkaException as error:
            logger.info("group %s can't ask for leaders: %s", self._plan.group, error.args[0].str())
            return
        if found:
            self._go_back()

    # Writing

    def _write(self) -> None:
        messages, self._messages = self._messages, []
        self._check({*map(partition_of, messages), *self._ends} & self._unchecked)
        positions = positions_after(messages, self._committed)
        positions |= self._passed_markers(positions)
        if not positions:
            return
        # Of each partition the first message: those behind it wait as well.
        first = {partition_of(message): message.offset() or 0 for message in reversed(messages)}
        for partition, offset in first.items():
            self._progress.watch.waits(partition, offset)
        began = self._output.begin()
        try:
            self._produce_all(messages, list(positions.values()))
            once = self._until_known(lambda: self._send_positions(list(positions.values())), CLEAN_OFFSETS_SECONDS)
            self._await_refusals()
            clean = self._until_known(self._commit, self._clean_seconds) and once
        except KafkaException as error:
            self._recover(messages, error, time.monotonic() - began)
        except BaseException:
            self._abort()
            raise
        else:
            self._aborted = 0
            self._committed |= positions
            self._progress.positions |= positions
            self._progress.watch.moved(first)
            self._progress.messages += len(messages)
            self._progress.too_large.difference_update(map(place_of, messages))
            self._progress.batch = min(2 * self._progress.batch, self._plan.batch)
            together = self._apart_until is not None and time.monotonic() >= self._apart_until
            if together:
                self._apart_until = None
            if together or not clean:
                self._replace_producer()

    def _commit(self) -> None:
        self._output.producer.commit_transaction(SECONDS)

    def _produce_all(self, messages: Sequence[Message], positions: list[TopicPartition]) -> None:
        try:
            for message in messages:
                self._output.produce(message)
        except KafkaException as error:
            if isinstance(error, NotAcknowledged) or error.args[0].code() == _TAKES_NO_MORE:
                # The transaction's own error says more, and shows only in its next step. It is not committed.
                self._until_known(lambda: self._send_positions(positions))
            raise

    def _check(self, partitions: Collection[Partition]) -> None:
        """Check the positions of partitions that have a leader again. Raises KafkaException if they have none."""
        found = [self._committed[each] for each in partitions]
        if require_whole(self._consumer, found, self._plan.consumer):
            raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, "a partition's leader is gone again"))
        self._unchecked.difference_update(partitions)

    def _passed_markers(self, positions: Mapping[Partition, TopicPartition]) -> dict[Partition, TopicPartition]:
        """Return the positions at the ends of what was read, where only transactions' markers are before them.

        Otherwise retention could remove the marker at a position, which then looks like a loss.
        """
        if not self._ends:
            return {}
        ends, self._ends = self._ends, {}
        known = {**self._committed, **positions}
        ends = {at: end for at, end in ends.items() if end > known[at].offset}
        asked = [TopicPartition(*at, OFFSET_END) for at in ends]
        try:
            found = self._consumer.offsets_for_times(asked, _END_SECONDS) if asked else []
        except KafkaException as error:
            # Behind the next messages it is asked again.
            logger.info("group %s can't ask where partitions end: %s", self._plan.group, error.args[0].str())
            return {}
        return {
            at: moved(known[at], ends[at], now.leader_epoch)
            for now in found
            if now.error is None and now.offset >= ends[at := (now.topic, now.partition)]
        }

    def _await_refusals(self) -> None:
        """Wait until the records are delivered. Raises KafkaException if one is refused.

        The commit would wait for those behind it, for as long as it may. Not for long: other errors show only there.
        """
        until = time.monotonic() + _REFUSAL_SECONDS
        while self._output.flush() and not self._output.undelivered and time.monotonic() < until:
            pass
        for one in self._output.undelivered:
            if failure(self._plan.group, one) is not None:
                # Neither fatal nor retriable: it requires an abort.
                raise KafkaException(KafkaError(one.reason.code(), one.reason.str(), False, False, True))

    def _recover(self, messages: Sequence[Message], error: KafkaException, seconds: float) -> None:
        """Abort the transaction, and go back to what is committed.

        Raises TransformFailed or KafkaRefused because of a record, and the error itself where a right is missing, or
        only a new session goes on.
        """
        inner = error.args[0]
        if self._stuck:
            raise error
        if not inner.fatal():
            self._abort()
        undelivered = self._output.undelivered
        refused = [one for one in undelivered if one.reason.code() in OF_A_BATCH]
        if refused and not inner.fatal():
            self._send_apart(refused, error)
        else:
            # The first ones may have failed because of another one.
            for one in undelivered:
                if (failed := failure(self._plan.group, one)) is not None:
                    raise failed from error
            # What has waited for a partition without a leader, or with a silent one, has not taken long by itself.
            codes = {one.reason.code() for one in undelivered}
            away = isinstance(error, NotAcknowledged) or KafkaError._MSG_TIMED_OUT in codes
            if seconds >= self._plan.transaction_seconds and not away:
                self._halve(messages, seconds)
            if inner.fatal() or not inner.txn_requires_abort() or is_refused(inner):
                raise error
            logger.warning("a transaction of group %s was aborted: %s", self._plan.group, inner.str())
            self._progress.watch.failed({partition_of(message) for message in messages}, inner.str())
            pause(self._stop, self._aborted)
            self._aborted += 1
        self._replace_producer()
        # It may still be a member: the next poll shows.
        self._go_back()

    def _send_apart(self, refused: Sequence[Undelivered], error: KafkaException) -> None:
        """Let each record be a batch by itself from now on, as a broker has refused a batch.

        Raises TransformFailed for a record that was one by itself already, unless it is cut.
        """
        if self._apart_until is not None:
            for one in refused:
                if not self._output.cut(one):
                    large = f"make it smaller, or raise max.message.bytes of {one.record.topic}"
                    mend = large if one.reason.code() in TOO_LARGE else "fix it"
                    raise TransformFailed(one.message, KafkaException(one.reason), mend) from error
        self._apart_until = time.monotonic() + _APART_SECONDS
        logger.info("group %s: the records of a batch go on apart: %s", self._plan.group, refused[0].reason.str())

    def _replace_producer(self) -> None:
        """Go on with a new producer, whose epoch fences the former.

        Where records were refused, librdkafka misses them in the next transaction. And where a request may have been
        sent twice, the one that arrives late can take part in the next transaction under the same epoch: EndTxn ends a
        part of it (see relay/kafka/transactional.py), and TxnOffsetCommit sets positions back with it.
        """
        self._output.replace(apart=self._apart_until is not None)
        self._until_known(lambda: self._output.producer.init_transactions(SECONDS))

    def _halve(self, messages: Sequence[Message], seconds: float) -> None:
        # One alone is transformed before its transaction begins on the brokers: it may take as long as it likes.
        self._progress.batch = max(1, len(messages) // 2)
        text = "%d messages of group %s took %.1f s, longer than transaction_seconds: now %d at a time"
        logger.warning(text, len(messages), self._plan.group, seconds, self._progress.batch)

    def _send_positions(self, positions: list[TopicPartition]) -> None:
        """Send the positions into the transaction. Raises KafkaException, also if it has not returned in time.

        librdkafka does not keep to the timeout of this one request: when the group's coordinator was restarted, it can
        wait for good (librdkafka's issues 5456 and 5511). A thread can't be ended: it keeps its producer, and a new
        session goes on with another one.
        """
        try:
            # By then the coordinator is about to abort the transaction.
            within(
                self._plan.transaction_seconds,
                lambda: self._output.producer.send_offsets_to_transaction(positions, self._membership, SECONDS),
            )
        except TimeoutError:
            self._stuck = True
            text = f"send_offsets_to_transaction has not returned in {self._plan.transaction_seconds:g} s"
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, text)) from None

    def _until_known(self, step: Callable[[], object], seconds: float = math.inf) -> bool:
        """Repeat a step of the transaction until Kafka says how it ended, as a time-out does not.

        Gives up at ``stop``, or if the coordinator is silent for long, as librdkafka can fail to find it again: then
        the coordinator decides, and the next member or session reads what it has decided. Returns whether one request
        was sent, and answered in less than ``seconds``.
        """
        once, began = True, time.monotonic()
        longest = max(self._plan.transaction_seconds, _SILENT_SECONDS)
        while True:
            try:
                step()
            except KafkaException as error:
                if not error.args[0].retriable() or self._stop.is_set() or self._clients.certificates_replaced():
                    raise
                if time.monotonic() - began >= longest:
                    self._stuck = True
                    raise
                # The callback hears what this error does not say, as that a password is refused.
                self._output.producer.poll(0)
                self._clients.check()
                logger.info("a step of group %s's transaction is repeated: %s", self._plan.group, error.args[0].str())
                once = False
            else:
                self._clients.worked()
                return once and time.monotonic() - began < seconds

    def _abort(self) -> None:
        # An abort waits, for as long as it may, for reports that are not served. What is in flight is to arrive before
        # the transaction's end.
        self._output.purge(in_flight=False)
        try:
            self._until_known(lambda: self._output.producer.abort_transaction(SECONDS))
        except KafkaException as error:
            # The coordinator ends the transaction after its time.
            logger.info("aborting failed: %s", error.args[0].str())
