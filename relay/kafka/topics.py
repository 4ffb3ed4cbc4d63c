"""Tracks which topics can be written to. A problem of a whole topic does not count as a failure of its events.

| topic                                  | what follows                                                               |
|----------------------------------------|----------------------------------------------------------------------------|
| exists                                 | its events are sent                                                        |
| missing, may be created                | it is created                                                              |
| missing; WRITE is not granted; refused | unusable: its events stay in the outbox, are left out of the next reads,   |
|                                        | no attempt of theirs is counted, other topics go on. It is retried         |
|                                        | after a wait that doubles up to a minute                                   |
| a partition has no leader or not       | stalled: the same, and it is retried with events only when the             |
| enough replicas, so that messages stay | metadata shows no reason why it should fail; then in a turn that ends      |
| without an answer                      | early, or it would take its whole time from other topics each time         |
| usable again                           | its events are read from the lowest id                                     |
| paused by an operator                  | its events are left out as those of an unusable one, but it counts as      |
|                                        | none, is not logged, and is tried as soon as the pause ends                |

Unacknowledged messages alone prove nothing: the turn may be too large, or the brokers slow or unavailable. A topic is
stalled if the metadata shows why, or if none of its messages was acknowledged while others' were. If some were, the
topic is late, and a smaller turn helps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclOperation,
    ClusterMetadata,
)
from confluent_kafka.cimpl import NewTopic

from relay.core.ports import BrokerUnavailable, Kind, TopicUnusable
from relay.kafka.client import FORBIDDEN, create_topic, partitions_text, text_of
from relay.kafka.metadata import SharedMetadata

log = structlog.get_logger("relay")

_METADATA_SECONDS: Final = 10.0
_FIRST_WAIT_SECONDS: Final = 1.0
_LONGEST_WAIT_SECONDS: Final = 60.0
_UNTRIED_SECONDS: Final = 120.0
# Reading the metadata costs the other topics next to nothing.
_LONGEST_LOOK_SECONDS: Final = 5.0
# The time limit of a turn with a stalled topic: this part of the time that the topic has waited, and at least one
# second.
_TRIAL_PART: Final = 1 / 6
_TRIAL_SECONDS: Final = 1.0
# Other topics wait while the metadata about one is requested.
_LOOK_SECONDS: Final = 2.0

# What a broker answers that could create another topic, with what to do.
_NOT_CREATED: Final = {
    KafkaError.POLICY_VIOLATION: "create it by hand",
    KafkaError.TOPIC_EXCEPTION: "create it by hand",
    KafkaError.INVALID_CONFIG: "create it by hand",
    KafkaError.INVALID_PARTITIONS: "create it by hand, or change OUTBOX_TOPIC_PARTITIONS",
    # Also while brokers are away.
    KafkaError.INVALID_REPLICATION_FACTOR: "start more brokers, create it by hand, or change OUTBOX_TOPIC_REPLICATION",
    KafkaError.THROTTLING_QUOTA_EXCEEDED: "it is tried again",
}


@dataclass(slots=True)
class _Unusable:
    """Why a topic can't be written to, and when it is retried.

    ``stalled``: its messages are not acknowledged. Then its metadata is checked first, after ``look_seconds``;
    ``cleared``: the check found no problem, and the next turn tries the topic.
    """

    reason: str
    wait_seconds: float
    again_at: float
    stalled: bool = False
    look_seconds: float = _FIRST_WAIT_SECONDS
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A topic's unacknowledged messages in a turn that ran out of time.

    ``partitions`` are those of unacknowledged messages, as far as known; ``silent``: none of the topic's messages was
    acknowledged; ``alone``: nor was any message of another topic.
    """

    partitions: frozenset[int] = frozenset()
    silent: bool = True
    alone: bool = True


class Topics:
    """The topics that events go to. Thread-safe.

    ``create``: create missing topics, with ``partitions`` and ``replication``; -1 leaves them to the broker.
    ``clock`` returns seconds, and decides when an unusable topic is retried. ``held`` returns the topics that
    operators have paused.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        *,
        create: bool,
        partitions: int = -1,
        replication: int = -1,
        clock: Callable[[], float] = time.monotonic,
        held: Callable[[], AbstractSet[str]] = frozenset,
    ) -> None:
        self._metadata = SharedMetadata(options, clock)
        self._create = create
        self._clock = clock
        self._held = held
        self._partitions = partitions
        self._replication = replication
        self._known: frozenset[str] = frozenset()
        self._topic_of: dict[Kind, str] = {}
        self._unusable: dict[str, _Unusable] = {}
        self._lock = threading.Lock()

    def require_for(self, kind: Kind, topic: str) -> None:
        """Do what ``require`` does, and remember that events of this kind go to the topic."""
        self._topic_of[kind] = topic
        self.require(topic)

    def require(self, topic: str) -> None:
        """Check that the topic can be written to, as far as is known.

        Raises TopicUnusable, without a request to the broker each time, or Unavailable when no broker answers.
        """
        if topic in self._held():
            raise TopicUnusable(f"topic {topic!r} is paused")
        if topic in self._known and not self._unusable:
            return
        with self._lock:
            state = self._unusable.get(topic)
            if state is not None and self._waits(topic, state):
                raise TopicUnusable(state.reason)
            if topic in self._known:
                return
            try:
                # An answer from before the end of the wait does not count for a topic that is retried.
                since = float("-inf") if state is None else state.again_at
                names = set(self._metadata.topics(_METADATA_SECONDS, since).topics)
            except KafkaException as error:
                self._metadata.forget()
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
        """Return the topics that must not be tried now: unusable ones, and those that operators have paused."""
        held = frozenset(self._held())
        if not self._unusable:
            return held
        with self._lock:
            return held.union(topic for topic, state in self._unusable.items() if self._waits(topic, state))

    def unpublishable_kinds(self) -> frozenset[Kind]:
        """Return the kinds of events whose topics must not be tried now, as far as their topics are known.

        Known for as long as the process runs: a publisher that replaces another must not read them all to find out.
        """
        paused = self.paused()
        return frozenset(kind for kind, topic in self._topic_of.items() if topic in paused) if paused else frozenset()

    def reasons(self) -> Mapping[str, str]:
        """Return the topics that can't be written to, with the reasons. Does not wait for a request to the brokers.

        Without those that no event was tried for lately: other relays may have theirs, or they are gone.
        """
        lately = self._clock() - _UNTRIED_SECONDS
        # A copy: the lock is held while brokers are asked.
        return {topic: state.reason for topic, state in self._unusable.copy().items() if state.again_at > lately}

    def refused(self, topic: str, reason: str) -> None:
        with self._lock:
            self._refuse(topic, reason)

    def stalled(self, unanswered: Mapping[str, Unanswered], seconds: float, *, trial: bool = False) -> list[str]:
        """Return the topics that delay the turn by themselves, and mark them unusable.

        The others are late because the turn was too large, or the brokers are slow or unavailable. ``seconds`` is how
        long the turn could wait; the check takes at most a part of that. ``trial``: the turn had less time because it
        tried stalled topics, so only those are judged.
        """
        with self._lock:
            if trial:
                tried = {topic for topic, state in self._unusable.items() if state.stalled}
                unanswered = {topic: what for topic, what in unanswered.items() if topic in tried}
            if not unanswered:
                return []
            reasons = self._blocked(unanswered, min(seconds / 8, _LOOK_SECONDS))
            if reasons is None:
                return []
            for topic, what in unanswered.items():
                if topic in reasons:
                    continue
                state = self._unusable.get(topic)
                known = state if state is not None and state.stalled else None
                if what.silent and known is not None:
                    reasons[topic] = known.reason
                elif what.silent and not what.alone:
                    reasons[topic] = _SILENT.format(topic=topic)
                elif known is not None:
                    # It takes messages, and gets as much time as others again.
                    self._usable(topic)
            for topic, reason in reasons.items():
                self._refuse(topic, reason, stalled=True)
            return list(reasons)

    def trial_seconds(self, topics: Collection[str]) -> float | None:
        """Return how long a turn with these topics may wait for acknowledgements; None for no special limit."""
        if not self._unusable:
            return None
        with self._lock:
            states = [state for topic in topics if (state := self._unusable.get(topic)) is not None and state.stalled]
        return max((max(state.wait_seconds * _TRIAL_PART, _TRIAL_SECONDS) for state in states), default=None)

    def written(self, topics: Collection[str]) -> None:
        if not self._unusable:
            return
        with self._lock:
            for topic in topics:
                self._usable(topic)

    def forbidden(self, topics: Collection[str]) -> list[str]:
        """Return what ``unwritable`` returns, and mark these topics unusable."""
        found = self.unwritable(topics)
        for topic in found:
            self.refused(topic, FORBIDDEN.format(topic=topic))
        return found

    def unwritable(self, topics: Collection[str]) -> list[str]:
        """Return the topics to which this user may not write, as far as the broker says.

        For errors that do not name the topic, such as those of AddPartitionsToTxn.
        """
        if not topics:
            return []
        described = self._metadata.admin.describe_topics(
            TopicCollection(sorted(topics)), include_authorized_operations=True, request_timeout=_METADATA_SECONDS
        )
        found, failed = [], []
        for topic, future in described.items():
            try:
                operations = future.result().authorized_operations
            except KafkaException as error:
                failed.append(error)
                if error.args[0].code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    continue
                operations = []
            if operations is not None and AclOperation.WRITE not in operations:
                found.append(topic)
        self._metadata.note(failed)
        return found

    def forget(self) -> None:
        """Make the next ``require`` ask the broker: after a failure, a topic may be gone."""
        with self._lock:
            self._known = frozenset()
            self._metadata.forget()

    def _waits(self, topic: str, state: _Unusable) -> bool:
        """Return whether it is too early, or useless, to try the topic."""
        now = self._clock()
        if now < state.again_at:
            return True
        if not state.stalled or state.cleared:
            return False
        reasons = self._blocked({topic: Unanswered()}, _LOOK_SECONDS)
        state.cleared = reasons is not None and topic not in reasons
        if state.cleared:
            return False
        state.look_seconds = min(state.look_seconds * 2, _LONGEST_LOOK_SECONDS)
        state.again_at = now + state.look_seconds
        return True

    def _blocked(self, unanswered: Mapping[str, Unanswered], seconds: float) -> dict[str, str] | None:
        """Return why topics take no messages, as far as the metadata shows; None when no broker answers."""
        try:
            found = self._metadata.topics(seconds)
        except KafkaException:
            return None
        reasons = {}
        for topic, what in unanswered.items():
            if topic in found.topics:
                reason = self._lack(topic, found, what, seconds)
                if reason is not None:
                    reasons[topic] = reason
        return reasons

    def _lack(self, topic: str, metadata: ClusterMetadata, what: Unanswered, seconds: float) -> str | None:
        """Return what partitions of the topic lack: those of unacknowledged messages, or all if these are not known."""
        topics = metadata.topics
        found = topics[topic]
        partitions = [found.partitions[n] for n in what.partitions if n in found.partitions]
        partitions = partitions or list(found.partitions.values())
        leaderless = [partition.id for partition in partitions if partition.leader not in metadata.brokers]
        if leaderless:
            return f"topic {topic!r} has no leader for {partitions_text(leaderless)}: a broker is away"
        under_replicated = [partition for partition in partitions if len(partition.isrs) < len(partition.replicas)]
        if not under_replicated:
            return None
        stalled = [name for name, state in self._unusable.items() if state.stalled and name in topics]
        needed = self._metadata.min_in_sync(topic, stalled, seconds)
        if needed is not None:
            under_min_isr = [partition.id for partition in under_replicated if len(partition.isrs) < needed]
        else:
            # No right to read the topic's settings. If messages to these partitions alone are unacknowledged, they are
            # the cause.
            under_min_isr = [partition.id for partition in under_replicated]
            if what.alone or not what.partitions or len(under_min_isr) < len(partitions):
                return None
        if not under_min_isr:
            return None
        return f"topic {topic!r} has too few replicas in sync for {partitions_text(under_min_isr)}: a broker is away"

    def _usable(self, topic: str) -> None:
        if self._unusable.pop(topic, None) is not None:
            log.info("topic can be written to again", topic=topic)

    def _refuse(self, topic: str, reason: str, *, stalled: bool = False) -> TopicUnusable:
        state = self._unusable.get(topic)
        wait = _FIRST_WAIT_SECONDS if state is None else min(state.wait_seconds * 2, _LONGEST_WAIT_SECONDS)
        # A stalled topic's reason may change while it waits: it is not logged again.
        if state is None or (state.reason != reason and not (state.stalled and stalled)):
            log.error("topic can't be written to; its events wait", topic=topic, reason=reason)
        self._unusable[topic] = _Unusable(reason, wait, self._clock() + wait, stalled)
        return TopicUnusable(reason)

    def _create_topic(self, topic: str) -> None:
        new = NewTopic(topic, num_partitions=self._partitions, replication_factor=self._replication)
        try:
            create_topic(self._metadata.admin, new, _METADATA_SECONDS)
        except KafkaException as error:
            code = error.args[0].code()
            if code in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}:
                raise self._refuse(
                    topic,
                    f"topic {topic!r} does not exist and the relay may not create it; create it, or grant CREATE",
                ) from error
            if code in _NOT_CREATED:
                raise self._refuse(
                    topic, f"topic {topic!r} can't be created: {text_of(error)}; {_NOT_CREATED[code]}"
                ) from error
            self._metadata.note([error])
            raise BrokerUnavailable(f"Kafka, creating topic {topic!r}: {text_of(error)}") from error


_SILENT: Final = (
    "no message to topic {topic!r} is acknowledged, while others are: see whether its partitions have leaders, and "
    "enough replicas in sync"
)
