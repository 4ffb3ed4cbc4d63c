"""Which topics can be written to. What concerns a whole topic is the topic's state, and no event's fault.

| topic                                  | what follows                                                               |
|----------------------------------------|----------------------------------------------------------------------------|
| exists                                 | its events are sent                                                        |
| missing, may be created                | it is created                                                              |
| missing; WRITE is not granted; refused | unusable: its events stay in the outbox, are left out of the next reads,   |
|                                        | no attempt of theirs is counted, other topics go on. It is tried again     |
|                                        | after a wait that doubles up to a minute                                   |
| usable again                           | its events are read from the lowest id                                     |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from outbox.errors import ConfigurationError
from relay.kafka.client import silent, text_of
from relay.ports import BrokerUnavailable, TopicUnusable

log = structlog.get_logger("relay")

_METADATA_SECONDS: Final = 10.0
_FIRST_WAIT_SECONDS: Final = 1.0
_LONGEST_WAIT_SECONDS: Final = 60.0


@dataclass(slots=True)
class _Unusable:
    reason: str
    wait_seconds: float
    again_at: float


class Topics:
    """The topics that events go to. Safe to use from threads.

    ``create``: make a topic that is missing, with ``partitions`` and ``replication``; -1 leaves them to the broker.
    ``clock`` returns seconds, and decides when an unusable topic is tried again.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        *,
        create: bool,
        partitions: int = -1,
        replication: int = -1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            self._admin = AdminClient(dict(options), logger=silent())
        except KafkaException as error:
            raise ConfigurationError(f"Kafka options: {text_of(error)}") from error
        self._create = create
        self._clock = clock
        self._partitions = partitions
        self._replication = replication
        self._known: frozenset[str] = frozenset()
        self._unusable: dict[str, _Unusable] = {}
        self._lock = threading.Lock()

    def require(self, topic: str) -> None:
        """Return when the topic can be written to, as far as is known.

        Raise TopicUnusable, without asking the broker each time, or Unavailable when no broker answers.
        """
        if topic in self._known and not self._unusable:
            return
        with self._lock:
            state = self._unusable.get(topic)
            if state is not None and self._clock() < state.again_at:
                raise TopicUnusable(topic, state.reason)
            if topic in self._known:
                return
            try:
                # All topics and not this one: asking for one by name could make the broker create it.
                names = set(self._admin.list_topics(timeout=_METADATA_SECONDS).topics)
            except KafkaException as error:
                raise BrokerUnavailable(f"Kafka, asking for its topics: {text_of(error)}") from error
            self._known = frozenset(names)
            if topic not in names:
                if not self._create:
                    raise self._refuse(
                        topic,
                        f"topic {topic!r} does not exist, or the relay may not DESCRIBE it; create it, grant it, or "
                        "set OUTBOX_CREATE_TOPICS=true",
                    )
                self._create_topic(topic)
                self._known |= {topic}

    def paused(self) -> frozenset[str]:
        """Return the topics that are not to be tried now."""
        if not self._unusable:
            return frozenset()
        now = self._clock()
        with self._lock:
            return frozenset(topic for topic, state in self._unusable.items() if now < state.again_at)

    def reasons(self) -> Mapping[str, str]:
        """Return why topics can't be written to."""
        with self._lock:
            return {topic: state.reason for topic, state in self._unusable.items()}

    def refused(self, topic: str, reason: str) -> None:
        """Record that the broker takes nothing for the topic."""
        with self._lock:
            self._refuse(topic, reason)

    def written(self, topics: Collection[str]) -> None:
        """Record that these topics could be written to."""
        if not self._unusable:
            return
        with self._lock:
            for topic in topics:
                if self._unusable.pop(topic, None) is not None:
                    log.info("topic can be written to again", topic=topic)

    def forbidden(self, topics: Collection[str]) -> list[str]:
        """Return those of the topics to which this user may not write, as far as the broker says.

        They are unusable from now on. For errors that do not name the topic, as those of AddPartitionsToTxn.
        """
        if not topics:
            return []
        described = self._admin.describe_topics(
            TopicCollection(sorted(topics)), include_authorized_operations=True, request_timeout=_METADATA_SECONDS
        )
        found = []
        for topic, future in described.items():
            try:
                operations = future.result().authorized_operations
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    continue
                operations = []
            if operations is not None and AclOperation.WRITE not in operations:
                found.append(topic)
        for topic in found:
            self.refused(topic, FORBIDDEN.format(topic=topic))
        return found

    def forget(self) -> None:
        """Ask the broker again next time: after a failure, a topic may have gone."""
        with self._lock:
            self._known = frozenset()

    def _refuse(self, topic: str, reason: str) -> TopicUnusable:
        state = self._unusable.get(topic)
        wait = _FIRST_WAIT_SECONDS if state is None else min(state.wait_seconds * 2, _LONGEST_WAIT_SECONDS)
        if state is None or state.reason != reason:
            log.error("topic can't be written to; its events wait", topic=topic, reason=reason)
        self._unusable[topic] = _Unusable(reason, wait, self._clock() + wait)
        return TopicUnusable(topic, reason)

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
                raise self._refuse(
                    topic,
                    f"topic {topic!r} does not exist and the relay may not create it; create it, or grant CREATE",
                ) from error
            if code in {KafkaError.POLICY_VIOLATION, KafkaError.TOPIC_EXCEPTION, KafkaError.INVALID_CONFIG}:
                raise self._refuse(
                    topic, f"topic {topic!r} can't be created: {text_of(error)}; create it by hand"
                ) from error
            raise BrokerUnavailable(f"Kafka, creating topic {topic!r}: {text_of(error)}") from error


FORBIDDEN: Final = "the relay may not write to topic {topic!r}: grant it WRITE and DESCRIBE"
