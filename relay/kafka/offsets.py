"""The first and last offsets of partitions, and which partitions end in an undecided transaction.

Offsets of any number of partitions take one request to each broker.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, cast

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec, TopicMetadata  # type: ignore[attr-defined]

from relay.kafka.client import Admin

_SECONDS: Final = 10.0
_ASK_AGAIN_SECONDS: Final = 0.05

# A broker has just come back or handed over a partition: the client's metadata about its leader is stale.
_STALE: Final = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
    }
)


class Partition(NamedTuple):
    """One partition of a topic."""

    topic: str
    number: int


class Undecided(NamedTuple):
    """A partition with a transaction that is neither committed nor aborted.

    Everything before ``stable`` is decided; the transaction's first record is at ``stable``. ``end`` is the high
    watermark.
    """

    partition: Partition
    stable: int
    end: int


class Offsets:
    """Queries offsets. Raises KafkaException when the brokers don't answer."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._admin = Admin(self._options)

    def partitions(self, topics: Collection[str]) -> list[Partition]:
        """Return the partitions of these topics, as far as they exist."""
        return [
            Partition(name, number)
            for name, topic in self._topics().items()
            if name in topics
            for number in topic.partitions
        ]

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        return list(self._topics())

    def low(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the first available offset."""
        return self._ask(partitions, cast("Any", OffsetSpec).earliest(), IsolationLevel.READ_UNCOMMITTED)

    def high(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the high watermark, which is behind open transactions."""
        return self._ask(partitions, cast("Any", OffsetSpec).latest(), IsolationLevel.READ_UNCOMMITTED)

    def stable(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the last stable offset: every transaction before it is committed or aborted."""
        return self._ask(partitions, cast("Any", OffsetSpec).latest(), IsolationLevel.READ_COMMITTED)

    def since(self, partitions: Iterable[Partition], milliseconds: int) -> dict[Partition, int]:
        """Return the first offset with this timestamp or a later one; negative if there is none."""
        spec = cast("Any", OffsetSpec).for_timestamp(milliseconds)
        return self._ask(partitions, spec, IsolationLevel.READ_UNCOMMITTED)

    def await_decided(
        self, ends: Mapping[Partition, int], seconds: float, known: Collection[Partition] = ()
    ) -> list[Undecided]:
        """Wait until all transactions before ``ends`` are decided. Returns the partitions where one is not, after
        ``seconds``.

        Does not wait for partitions in ``known``.
        """
        left = list(ends)
        deadline = time.monotonic() + seconds
        while True:
            stable = self.stable(left)
            left = [partition for partition in left if stable[partition] < ends[partition]]
            if set(left) <= set(known) or time.monotonic() >= deadline:
                return [Undecided(partition, stable[partition], ends[partition]) for partition in sorted(left)]
            time.sleep(_ASK_AGAIN_SECONDS)

    def _topics(self) -> Mapping[str, TopicMetadata]:
        with self._admin.explaining():
            return self._admin.list_topics(timeout=_SECONDS).topics

    def _ask(self, partitions: Iterable[Partition], spec: Any, isolation: IsolationLevel) -> dict[Partition, int]:
        left = set(partitions)
        found: dict[Partition, int] = {}
        deadline = time.monotonic() + _SECONDS
        while left:
            asked = {TopicPartition(partition.topic, partition.number): spec for partition in left}
            stale: KafkaException | None = None
            with self._admin.explaining():
                answers = self._admin.list_offsets(asked, isolation_level=isolation, request_timeout=_SECONDS)
                for asked_partition, answer in answers.items():
                    partition = Partition(asked_partition.topic, asked_partition.partition)
                    try:
                        offset = answer.result().offset
                    except KafkaException as error:
                        if error.args[0].code() not in _STALE:
                            raise
                        stale = error
                        continue
                    if offset == OFFSET_INVALID:
                        # A broker ended before it had answered for this partition, and librdkafka gives no error. Taken
                        # for a number, it would be an end before everything, markers included.
                        text = f"no answer for {partition.topic} partition {partition.number}"
                        stale = KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE, text))
                    else:
                        found[partition] = offset
            left -= found.keys()
            if stale is None:
                continue
            if time.monotonic() >= deadline:
                raise stale
            time.sleep(_ASK_AGAIN_SECONDS)
            # A client refreshes its metadata only when it starts, or after minutes.
            self._admin = Admin(self._options)
        return found
