"""Requests to Kafka for a consumer group: topic ids, first and last stable offsets, positions for its tools."""

from __future__ import annotations

import datetime as dt
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import ConfigResource, OffsetSpec  # type: ignore[attr-defined]

from outbox._clients.kafka import Certificates, complete
from outbox._clients.kafka_client import EARLIEST, LATEST, STALE, Admin, answered, silent_logger
from outbox._clients.kafka_rules import cut_logs, is_refusal, is_silence
from outbox.consumer import patience
from outbox.consumer.errors import ConsumerError
from outbox.consumer.kafka_errors import of_kafka
from outbox.consumer.model import Loss, LossKind, OffsetBounds, Partition, StoredOffset
from outbox.errors import ConfigurationError

_T = TypeVar("_T")

_COMMITTED: Final = IsolationLevel.READ_COMMITTED
_SECONDS: Final = 20.0
_REFUSAL_SECONDS: Final = 0.5
_LAG_SECONDS: Final = 5.0
# A broker that has just started, a topic that was just created, a leader that moves: not every broker knows it at once.
# For these errors librdkafka's consumer refreshes its metadata and repeats a request for offsets; its admin client
# repeats nothing.
_UNHEARD_SECONDS: Final = 3.0
_UNHEARD: Final = STALE | {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
    # None of the partitions has a leader.
    KafkaError._NOENT,
}


class TopicMissing(ConsumerError):
    """A topic of the job does not exist."""

    def __init__(self, text: str, topics: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.topics = tuple(topics)


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """The current state of topics in Kafka.

    missing      the topics that do not exist.
    leaderless   the partitions that were left out, because they have no leader.
    """

    ids: Mapping[str, str]
    bounds: Mapping[Partition, OffsetBounds]
    missing: tuple[str, ...]
    leaderless: AbstractSet[Partition]

    def require_topics(self) -> Self:
        """Return the snapshot itself. Raises TopicMissing if topics are missing."""
        if self.missing:
            names = " or ".join(self.missing)
            raise TopicMissing(f"there is no topic {names}; create it, or name another with --topic", self.missing)
        return self


def of_known_topics(partitions: Iterable[Partition]) -> Callable[[Partition], bool]:
    """Return which partitions are ``optional`` to a group that knows these: all of their topics, and added ones too.

    All partitions of a topic that is new to the group must have leaders: any that it finds later counts as added.
    """
    topics = {topic for topic, _ in partitions}
    return lambda partition: partition[0] in topics


class KafkaAdmin:
    """What a consumer group asks Kafka.

    options   librdkafka's: addresses and credentials.
    seconds   how long a request may take; less, where a run's patience ends sooner.

    Raises ConfigurationError when librdkafka refuses the options.
    """

    def __init__(self, options: Mapping[str, Any], *, seconds: float = _SECONDS) -> None:
        self._options = dict(options)
        self._seconds = seconds
        # Refusals arrive by callback: a request that no broker authorizes only times out.
        self._refusals: deque[KafkaError] = deque(maxlen=1)
        # Set when the next request needs another client.
        self._useless = threading.Event()
        self._admin = self._connected()
        # Closed with requests in flight, a client may leave them without an end.
        self._former: list[tuple[Admin, float]] = []
        self._committers: dict[str, _PositionCommitter] = {}
        self._verified: dict[Partition, tuple[int, int, int | None]] = {}

    def _connected(self) -> Admin:
        return Admin(self._options, functools.partial(_hear, self._refusals))

    def _client(self) -> Admin:
        """Return the client: another one after a request that failed, or was not answered in time.

        A client without topics asks for no metadata by itself. If its controller is gone, or a broker that had just
        started named no brokers, its requests time out however long the brokers have been back. So do those of a client
        whose certificates are no longer accepted.
        """
        if self._useless.is_set():
            now = time.monotonic()
            former = [(admin, until) for admin, until in self._former if until > now]
            # Certificates that are just being replaced may be refused: the next request tries again.
            with suppress(ConfigurationError):
                self._admin, self._former = self._connected(), [*former, (self._admin, now + self._seconds)]
                self._useless.clear()
        return self._admin

    def look(
        self,
        topics: Sequence[str],
        *,
        high_watermarks: bool = False,
        optional: Callable[[Partition], bool] = ().__contains__,
    ) -> tuple[dict[str, str], dict[Partition, OffsetBounds]]:
        """Return each topic's id and each partition's bounds for a read_committed reader.

        high_watermarks   fetch these too: one more request to each broker, so not on every round.
        optional          says which partitions are left out while they have no leader.

        Raises TopicMissing, NotAuthorized, or ConsumerUnavailable when the brokers do not answer.
        """
        found = self.snapshot(topics, high_watermarks=high_watermarks, optional=optional).require_topics()
        return dict(found.ids), dict(found.bounds)

    def snapshot(
        self,
        topics: Sequence[str],
        *,
        high_watermarks: bool = False,
        optional: Callable[[Partition], bool] = ().__contains__,
    ) -> TopicSnapshot:
        """Do the same as ``look`` for topics that need not exist.

        If a topic is missing, or has no leader at the moment, the request is repeated for a few seconds.
        """
        # Not shortened by a run's patience: a topic that is reported missing is taken for lost.
        deadline = time.monotonic() + _UNHEARD_SECONDS
        while True:
            try:
                snapshot = self._snapshot(topics, high_watermarks, optional)
                if not snapshot.missing or time.monotonic() > deadline:
                    return snapshot
            except KafkaException as error:
                if _code(error) not in _UNHEARD or time.monotonic() > deadline:
                    raise self._failure(error) from error
            time.sleep(0.2)

    def ends(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the current end of each partition's committed messages. Raises ConsumerUnavailable."""
        with self._asking() as seconds:
            return _offsets(self._client().ask_offsets(partitions, LATEST, _COMMITTED, seconds))

    def at_time(self, partitions: Iterable[Partition], when: dt.datetime) -> dict[Partition, int | None]:
        """Return the offset of each partition's first message at or after a time; None where all are older.

        Raises ConsumerUnavailable when the brokers do not answer.
        """
        spec = OffsetSpec.for_timestamp(int(when.timestamp() * 1000))
        with self._asking() as seconds:
            found = _offsets(self._client().ask_offsets(partitions, spec, _COMMITTED, seconds))
        return {partition: None if offset < 0 else offset for partition, offset in found.items()}

    def regrown(self, stored: Mapping[Partition, StoredOffset], bounds: Mapping[Partition, OffsetBounds]) -> list[Loss]:
        """Return the losses of logs that were cut before the group's offset, however long they are again.

        Asks the leaders of those partitions whose epoch is not the stored one, once for each epoch. Raises
        ConsumerUnavailable when they do not answer.
        """
        doubtful = {
            partition: (here.epoch_offset, here.leader_epoch, there.leader_epoch)
            for partition, here in stored.items()
            if here.leader_epoch is not None
            and here.epoch_offset is not None
            and (there := bounds.get(partition)) is not None
            and there.leader_epoch not in {None, here.leader_epoch}
            and there.first <= here.epoch_offset <= here.next_offset <= there.end
        }
        new = {partition: one for partition, one in doubtful.items() if self._verified.get(partition) != one}
        if not new:
            return []
        with self._asking() as seconds:
            found = cut_logs(
                {"group.id": "outbox-epochs", **complete(self._options)},
                {partition: (offset, epoch) for partition, (offset, epoch, _) in new.items()},
                seconds,
                silent_logger(),
            )
        self._verified |= {partition: one for partition, one in new.items() if partition not in found}
        return [_regrown(at, cut, stored[at]) for at, cut in sorted(found.items())]

    def describe(self, topics: Iterable[str], seconds: float | None = None) -> Mapping[str, Future[Any]]:
        """Ask for topics, and return at once. An unknown topic's future raises KafkaException."""
        seconds = self._seconds if seconds is None else seconds
        return self._watched(self._client().describe_topics(TopicCollection(sorted(topics)), request_timeout=seconds))

    def describe_group(self, group: str) -> Future[Any]:
        """Ask for a group's state and its members with their partitions, and return at once."""
        return self._watched(self._client().describe_consumer_groups([group], request_timeout=self._seconds))[group]

    def _watched(self, asked: Mapping[_T, Future[Any]]) -> Mapping[_T, Future[Any]]:
        for future in asked.values():
            # Called in the client's own thread, which must not hold the last reference to the client.
            future.add_done_callback(functools.partial(_note_silence, self._useless))
        return asked

    def _result(self, future: Future[Any]) -> Any:
        """Return a request's result. Raises NotAuthorized as soon as a broker refuses it, instead of waiting."""
        while True:
            try:
                return future.result(_REFUSAL_SECONDS)
            except TimeoutError:
                if not future.done():
                    self._admin.poll(0)
                    if self._refusals:
                        raise of_kafka(self._refusals.pop(), "Kafka") from None

    def _ask(self) -> AbstractContextManager[float]:
        """Yield how many seconds a request may take."""
        return patience.current().ask(self._seconds)

    @contextmanager
    def _asking(self) -> Iterator[float]:
        """Do the same, and raise the consumers' errors for Kafka's."""
        try:
            with self._ask() as seconds:
                yield seconds
        except KafkaException as error:
            raise self._failure(error) from error

    def _failure(self, error: KafkaException) -> ConsumerError:
        """Return the error for a failed request, such as one for a topic that was deleted between two requests."""
        explained = self._admin.errors.explained(error, self._admin)
        refused = self._refusals.pop() if self._refusals else explained.args[0]
        self._useless.set()
        servers = self._options.get("bootstrap.servers")
        return of_kafka(
            refused, f"Kafka at {servers}" if is_refusal(refused) else f"Kafka does not answer at {servers}"
        )

    def compacted(self, topics: Iterable[str]) -> bool:
        """Return whether Kafka may compact one of the topics. True too if the client has no right to read that."""
        try:
            return any(map(_is_compacted, self._configurations(topics)))
        except KafkaException:
            return True

    def may_compact(self, topic: str) -> bool:
        """Do the same for a topic, of which nothing is compacted if it is not there.

        Raises KafkaException when Kafka does not answer.
        """
        try:
            return any(map(_is_compacted, self._configurations([topic])))
        except KafkaException as error:
            if _code(error) == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return False
            if is_refusal(error.args[0]):
                return True
            raise

    def retention_seconds(self, topic: str) -> float | None:
        """Return the age from which on Kafka deletes a topic's messages; infinity if it never does.

        None if it may delete younger ones, because their size is limited, or the client has no right to read that.
        Raises KafkaException when Kafka does not answer.
        """
        found = self._configuration(topic)
        if found is None or int(found["retention.bytes"].value) >= 0:
            return None
        milliseconds = int(found["retention.ms"].value)
        return milliseconds / 1000 if milliseconds >= 0 else math.inf

    def tombstone_seconds(self, topic: str) -> float | None:
        """Return how long a compacted topic keeps tombstones.

        None if it is not compacted, or is not there, or the client has no right to read that.
        Raises KafkaException when Kafka does not answer.
        """
        found = self._configuration(topic)
        return None if found is None or not _is_compacted(found) else int(found["delete.retention.ms"].value) / 1000

    def _configuration(self, topic: str) -> Mapping[str, Any] | None:
        try:
            [found] = self._configurations([topic])
        except KafkaException as error:
            if _code(error) == KafkaError.UNKNOWN_TOPIC_OR_PART or is_refusal(error.args[0]):
                return None
            raise
        return found

    def _configurations(self, topics: Iterable[str]) -> list[Mapping[str, Any]]:
        wanted = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in topics]
        with self._ask() as seconds:
            asked = self._watched(self._client().describe_configs(wanted, request_timeout=seconds))
            return [one.result() for one in asked.values()]

    def _snapshot(
        self, topics: Sequence[str], high_watermarks: bool, optional: Callable[[Partition], bool]
    ) -> TopicSnapshot:
        described, missing = {}, []
        with self._ask() as seconds:
            for name, future in self.describe(topics, seconds).items():
                try:
                    described[name] = self._result(future)
                except KafkaException as error:
                    if _code(error) != KafkaError.UNKNOWN_TOPIC_OR_PART:
                        raise
                    missing.append(name)
        leaders = {(name, part.id): part.leader for name, topic in described.items() for part in topic.partitions}
        leaderless = {at for at, leader in leaders.items() if leader is None and optional(at)}
        partitions = [at for at in leaders if at not in leaderless]
        # The client is connected and authorized by now, whatever was reported before.
        self._admin.poll(0)
        self._refusals.clear()
        self._admin.errors.forget()
        with self._ask() as seconds:
            # All requests are sent before the first answer is awaited.
            asked = [self._client().ask_offsets(partitions, spec, _COMMITTED, seconds) for spec in (EARLIEST, LATEST)]
            if high_watermarks:
                asked.append(self._client().ask_offsets(partitions, LATEST, IsolationLevel.READ_UNCOMMITTED, seconds))
            first, end, *high = map(_offsets, asked)
            epochs = _epochs(asked[1])
        return TopicSnapshot(
            {name: str(topic.topic_id) for name, topic in described.items()},
            {
                partition: OffsetBounds(
                    first[partition], end[partition], high[0][partition] if high else None, epochs.get(partition)
                )
                for partition in partitions
            },
            tuple(sorted(missing)),
            leaderless,
        )

    def show_lag(self, group: str, offsets: Mapping[Partition, int], seconds: float = _LAG_SECONDS) -> str | None:
        """Commit the group's position to Kafka, for its tools. Returns a failure as text; nothing reads it back.

        Waits at most ``seconds`` for the answer, and not at all while an earlier answer is outstanding. With 0 the
        answers to earlier commits are returned, and ``lag_shown`` waits for the last.
        """
        known = self._committers.get(group)
        if known is None or known.is_outdated():
            try:
                self._committers[group] = _PositionCommitter(self._options, group, silent_logger())
            except KafkaException as error:
                # Its certificates may just be being replaced.
                return str(error)
        return self._committers[group].show(offsets, seconds)

    def lag_shown(self, group: str) -> str | None:
        """Wait for the answer to the last position that was sent, if any. Returns a failure as text."""
        return self._committers[group].wait(_LAG_SECONDS) if group in self._committers else None


_NO_ANSWER: Final = "no answer yet"


def _is_compacted(configuration: Mapping[str, Any]) -> bool:
    return "compact" in str(configuration["cleanup.policy"].value)


class _PositionCommitter:
    """Commits a group's position to Kafka, with a consumer that joins no group.

    Not with the admin client: once the broker has restarted, its requests to a group's coordinator keep timing out, and
    librdkafka may then end the whole process (a failed assertion, ``eonce->refcnt > 0``).
    """

    def __init__(self, options: Mapping[str, str], group: str, logger: logging.Logger) -> None:
        self._unanswered = 0
        self._problem: str | None = None
        self._certificates = Certificates(options)
        own: dict[str, Any] = {
            "group.id": group,
            "enable.auto.commit": False,
            # The shortest that brokers accept: the client waits this long for a coordinator, also when it is closed.
            "session.timeout.ms": 6000,
            "on_commit": self._answered,
        }
        # With the newer protocol brokers choose that time, and librdkafka refuses it, as it does beside a short poll
        # interval. Without a member neither has a use.
        unused = {"group.protocol", "max.poll.interval.ms"}
        given = {name: value for name, value in complete(options).items() if name not in unused}
        self._consumer = Consumer({**given, **own}, logger=logger)

    def is_outdated(self) -> bool:
        """Return whether it fails, and its certificates were replaced: only another one connects."""
        return bool(self._unanswered or self._problem) and self._certificates.replaced()

    def show(self, offsets: Mapping[Partition, int], seconds: float) -> str | None:
        positions = [TopicPartition(topic, part, offset) for (topic, part), offset in sorted(offsets.items())]
        # Handles the answers that came since the last round, without waiting for others.
        self._consumer.poll(0)
        late = self._unanswered > 0
        try:
            self._consumer.commit(offsets=positions, asynchronous=True)
        except KafkaException as error:
            return str(error)
        self._unanswered += 1
        if seconds and not late:
            return self.wait(seconds)
        return _NO_ANSWER if late else self._problem

    def wait(self, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while self._unanswered and time.monotonic() < deadline:
            self._consumer.poll(0.05)
        return _NO_ANSWER if self._unanswered else self._problem

    def _answered(self, error: KafkaError | None, positions: Sequence[TopicPartition]) -> None:
        self._unanswered -= 1
        problems = [error, *(position.error for position in positions)]
        self._problem = next((str(problem) for problem in problems if problem is not None), None)


def _regrown(partition: Partition, cut: int, here: StoredOffset) -> Loss:
    text = (
        f"{partition[0]}-{partition[1]}: the group has read up to {here.next_offset}, and of what the leader of epoch "
        f"{here.leader_epoch} had, Kafka's log has only the part before {cut}: it was cut, and has grown again since"
    )
    return Loss(*partition, here.topic_id, cut, here.next_offset, LossKind.CUT, text)


def _hear(refusals: deque[KafkaError], error: KafkaError) -> None:
    if is_refusal(error):
        refusals.append(error)


def _note_silence(useless: threading.Event, future: Future[Any]) -> None:
    error = future.exception()
    if isinstance(error, KafkaException) and is_silence(error.args[0]):
        useless.set()


def _offsets(answers: Mapping[Any, Future[Any]]) -> dict[Partition, int]:
    return {(at.topic, at.partition): answered(at, answer).offset for at, answer in answers.items()}


def _epochs(answers: Mapping[Any, Future[Any]]) -> dict[Partition, int]:
    """Return the epochs of the leaders that have answered; brokers before Kafka 2.1 do not say them."""
    epochs = {(at.topic, at.partition): answer.result().leader_epoch for at, answer in answers.items()}
    return {partition: epoch for partition, epoch in epochs.items() if epoch is not None and epoch >= 0}


def _code(error: KafkaException) -> int | None:
    inner = error.args[0]
    return inner.code() if isinstance(inner, KafkaError) else None
