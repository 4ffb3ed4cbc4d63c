"""The inbox's requests to Kafka: topic ids, first and last offsets; and which stored positions Kafka no longer has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from outbox._clients.kafka_rules import cut_logs, require_verification
from outbox.consumer.model import Partition
from outbox.errors import ConfigurationError
from outbox.inbox._group import Loss, Position
from outbox.inbox.errors import KafkaFailed, PositionLost, TopicReplaced

if TYPE_CHECKING:
    from confluent_kafka import Message

    from outbox.inbox._message import KafkaMessage

_SECONDS: Final = 10.0
_EARLIEST: Final = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: Final = OffsetSpec.latest()  # type: ignore[no-untyped-call]

_OURS: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # A position that Kafka does not have is an error, never a jump.
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    # Behind a transaction's marker there may be no message that would move the position.
    "enable.partition.eof": True,
}
_CALLBACKS: Final = frozenset({"error_cb", "stats_cb", "throttle_cb", "on_commit", "logger", "statistics.interval.ms"})

UNREADABLE: Final = frozenset({KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError.INVALID_MSG})  # noqa: SLF001
OUT_OF_RANGE: Final = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class Extent:
    """A partition in Kafka: its topic's id, its first offset, and the end for a read_committed reader."""

    topic_id: str
    first: int
    end: int
    leader_epoch: int | None = None


def consumer_options(given: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the options of the consumer.

    Raises ConfigurationError for one that is the inbox's own business, or that turns off the broker's verification.
    """
    require_verification(given)
    ours = {**_OURS, "group.id": group}
    for name, value in ours.items():
        if name in given and str(given[name]).lower() != str(value).lower():
            raise ConfigurationError(f"kafka option {name}={given[name]}: the inbox needs {value}; leave it out")
    return {**given, **ours}


class Admin:
    """Asks the brokers, with the consumer's options. Raises KafkaFailed when they refuse, or do not answer in time."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        logger = logging.getLogger("outbox.inbox.librdkafka")
        # Of every option that only consumers know, librdkafka would warn.
        logger.setLevel(logging.CRITICAL + 1)
        own = {name: value for name, value in options.items() if name not in _CALLBACKS}
        self._admin = AdminClient(own, logger=logger)
        self._options, self._logger = own, logger

    def extents(self, topics: Iterable[str]) -> dict[Partition, Extent]:
        """Return the extents of all partitions of these topics."""
        try:
            ids: dict[Partition, str] = {}
            for name, future in self.describe(topics).items():
                topic = future.result(_SECONDS)
                ids.update(((name, part.id), str(topic.topic_id)) for part in topic.partitions)
            first, end = self._offsets(ids, _EARLIEST), self._offsets(ids, _LATEST)
            # A broker that ends before it has answered leaves an offset below 0, and no error.
            found = {}
            for place, id_ in ids.items():
                last = end[place].result(_SECONDS)
                found[place] = Extent(id_, first[place].result(_SECONDS).offset, last.offset, last.leader_epoch)
        except (KafkaException, TimeoutError) as error:
            raise KafkaFailed(f"Kafka, asked for topics and offsets: {str(error) or 'no answer in time'}") from error
        if unknown := [place for place, extent in found.items() if min(extent.first, extent.end) < 0]:
            raise KafkaFailed(f"Kafka, asked for topics and offsets: no answer for {unknown[0][0]}-{unknown[0][1]}")
        return found

    def cut(self, positions: Mapping[Partition, Position], extents: Mapping[Partition, Extent]) -> dict[Partition, int]:
        """Return where logs were cut that no longer have what the group has read, however long they are again."""
        doubtful = {
            place: (here.epoch_offset, here.leader_epoch)
            for place, here in positions.items()
            if here.leader_epoch is not None
            and here.epoch_offset is not None
            and (there := extents.get(place)) is not None
            and there.topic_id == here.topic_id
            and there.leader_epoch != here.leader_epoch
            and there.first <= here.epoch_offset <= here.next_offset <= there.end
        }
        if not doubtful:
            return {}
        try:
            return cut_logs(self._options, doubtful, _SECONDS, self._logger)
        except KafkaException as error:
            raise KafkaFailed(f"Kafka, asked whether logs were cut: {error.args[0].str()}") from error

    def describe(self, topics: Iterable[str]) -> Mapping[str, Future[Any]]:
        """Ask for topics, and return at once. An unknown topic's future raises KafkaException."""
        asked: Mapping[str, Future[Any]] = self._admin.describe_topics(
            TopicCollection(sorted(topics)), request_timeout=_SECONDS
        )
        return asked

    def _offsets(self, places: Iterable[Partition], spec: Any) -> dict[Partition, Future[Any]]:
        wanted = {TopicPartition(*place): spec for place in places}
        if not wanted:
            return {}
        asked = self._admin.list_offsets(
            wanted, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=_SECONDS
        )
        return {(at.topic, at.partition): future for at, future in asked.items()}


def epoch_of(message: KafkaMessage) -> int | None:
    """Return the epoch of the leader that a message came from; None from brokers before Kafka 2.1."""
    return cast("Message", message).leader_epoch()


def find_losses(
    positions: Mapping[Partition, Position],
    extents: Mapping[Partition, Extent],
    cut: Mapping[Partition, int] | None = None,
) -> list[Loss]:
    """Return what the group can no longer read of these partitions. ``cut``: see Admin.cut."""
    losses = []
    for place, here in sorted(positions.items()):
        topic, part = place
        there = extents.get(place)
        if there is None:
            # A broker with old metadata. Of a topic that is gone there would be no extents at all.
            continue
        if there.topic_id != here.topic_id:
            text = (
                f"{topic}-{part}: the topic was deleted and created again since the group read it (its id was "
                f"{here.topic_id}, now {there.topic_id}): offset {here.next_offset} means nothing there"
            )
            losses.append(Loss(place, here.topic_id, here.next_offset, None, "recreated", text))
        elif here.next_offset < there.first:
            text = (
                f"{topic}-{part}: retention removed messages {here.next_offset} to {there.first - 1} before the group "
                "applied them"
            )
            losses.append(Loss(place, here.topic_id, here.next_offset, there.first, "retention", text))
        elif here.next_offset > there.end:
            text = (
                f"{topic}-{part}: the group has read up to {here.next_offset}, but Kafka's log ends at {there.end}: it "
                "was cut"
            )
            losses.append(Loss(place, here.topic_id, there.end, here.next_offset, "cut", text))
        elif cut and place in cut:
            text = (
                f"{topic}-{part}: the group has read up to {here.next_offset}, and of what the leader of epoch "
                f"{here.leader_epoch} had, Kafka's log has only the part before {cut[place]}: it was cut, and has "
                "grown again since"
            )
            losses.append(Loss(place, here.topic_id, cut[place], here.next_offset, "cut", text))
    return losses


def lost(losses: Sequence[Loss], positions: Mapping[Partition, Position], group: str) -> PositionLost:
    """Return the error for losses."""
    first = losses[0]
    kind = TopicReplaced if any(loss.kind == "recreated" for loss in losses) else PositionLost
    more = f"; and {len(losses) - 1} partitions more" if len(losses) > 1 else ""
    topic, part = first.place
    return kind(
        topic,
        part,
        positions[first.place].next_offset,
        f"{first.detail}{more}. Nothing was skipped. When it is accounted for: `outbox offsets reset {group} --topic "
        f"{topic} --to loss --reason …`, and start the consumer again",
    )
