"""The first and last offsets of partitions, and which partitions end in an undecided transaction.

Offsets of any number of partitions take one request to each broker.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, cast

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import OffsetSpec, TopicMetadata  # type: ignore[attr-defined]

from outbox._clients.kafka_client import EARLIEST, LATEST, STALE, Admin, answered
from relay.core.ports import UndecidedTransaction

_SECONDS: Final = 10.0
_ASK_AGAIN_SECONDS: Final = 0.05


class Partition(NamedTuple):
    topic: str
    number: int


class Undecided(NamedTuple):
    """A partition with an undecided transaction, whose first record is at ``stable``. ``end`` is the high watermark."""

    partition: Partition
    stable: int
    end: int

    def error(self, seconds: float) -> UndecidedTransaction:
        """Return the error after so many seconds, with the likely causes and what to do."""
        topic, number = self.partition
        return UndecidedTransaction(
            f"Kafka: {topic!r} partition {number} is decided up to offset {self.stable} only and ends at {self.end}, "
            f"for {seconds:g} s now: a transaction there is neither committed nor aborted. Either another program has "
            "one open, or a broker that restarted has lost a transaction's markers (KAFKA-20734). Nothing is published "
            "before it is decided. Run `outbox relay reconcile`: it names the transaction and what ends it"
        )


class Offsets:
    """Queries offsets. Raises KafkaException when the brokers don't answer."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._admin = Admin(self._options)

    def partitions(self, topics: Collection[str]) -> list[Partition]:
        return [
            Partition(name, number)
            for name, topic in self._topics().items()
            if name in topics
            for number in topic.partitions
        ]

    def topics(self) -> list[str]:
        return list(self._topics())

    def forbidden(self, topics: Collection[str]) -> list[str]:
        """Return those that may not be described with these credentials: ``topics`` leaves them out, as if gone."""
        found: list[str] = []
        if not topics:
            return found
        with self._admin.explaining():
            asked = self._admin.describe_topics(TopicCollection(sorted(topics)), request_timeout=_SECONDS)
            for topic, answer in asked.items():
                try:
                    answer.result()
                except KafkaException as error:
                    code = error.args[0].code()
                    if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                        found.append(topic)
                    elif code != KafkaError.UNKNOWN_TOPIC_OR_PART:
                        raise
        return found

    def low(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return self._ask(partitions, EARLIEST, IsolationLevel.READ_UNCOMMITTED)

    def high(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the high watermark, which is behind open transactions."""
        return self._ask(partitions, LATEST, IsolationLevel.READ_UNCOMMITTED)

    def stable(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the last stable offset: every transaction before it is committed or aborted."""
        return self._ask(partitions, LATEST, IsolationLevel.READ_COMMITTED)

    def since(self, partitions: Iterable[Partition], milliseconds: int) -> dict[Partition, int]:
        """Return the first offset with this timestamp or a later one; negative if there is none."""
        spec = cast("Any", OffsetSpec).for_timestamp(milliseconds)
        return self._ask(partitions, spec, IsolationLevel.READ_UNCOMMITTED)

    def await_decided(
        self, ends: Mapping[Partition, int], seconds: float, known: Collection[Partition] = ()
    ) -> list[Undecided]:
        """Wait until all transactions before ``ends`` are decided, but not for partitions in ``known``.

        Returns the partitions where one is undecided after ``seconds``.
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
            stale: KafkaException | None = None
            with self._admin.explaining():
                for at, answer in self._admin.ask_offsets(left, spec, isolation, _SECONDS).items():
                    try:
                        found[Partition(at.topic, at.partition)] = answered(at, answer).offset
                    except KafkaException as error:
                        if error.args[0].code() not in STALE:
                            raise
                        stale = error
            left -= found.keys()
            if stale is None:
                continue
            if time.monotonic() >= deadline:
                raise stale
            time.sleep(_ASK_AGAIN_SECONDS)
            # A client refreshes its metadata only when it starts, or after minutes.
            self._admin = Admin(self._options)
        return found
