"""Which records wait until the first one of their partition is acknowledged: see outbox/_clients/first_messages.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from outbox._clients.first_messages import FirstMessages
from outbox.transform.records import Record

_INCONSISTENT: Final = KafkaError._INCONSISTENT


class NotAcknowledged(KafkaException):
    """The first record of a partition is not acknowledged: the transaction must be aborted."""

    def __init__(self) -> None:
        text = "the first record of a partition is not acknowledged"
        super().__init__(KafkaError(_INCONSISTENT, text, False, False, True))


class FirstRecords:
    """The first records of one producer in their partitions.

    partitions  returns how many partitions a topic has, 0 if that is not known, and which of them have a leader.
    flush       waits a moment for acknowledgements, and returns how many records have none.
    seconds     how long an acknowledgement may take.
    """

    def __init__(
        self,
        partitioner: str,
        partitions: Callable[[str], tuple[int, Sequence[int]]],
        flush: Callable[[], int],
        seconds: float,
    ) -> None:
        self._first = first = FirstMessages(partitioner)
        self.arrived, self.sent = first.arrived, first.sent
        self._partitions = partitions
        self._flush = flush
        self._seconds = seconds
        self._turns: dict[str, Iterator[int | None]] = {}

    def begin(self) -> float:
        """Begin a transaction. Returns the time, which stands still: what is on its way in it is not forgotten."""
        self._first.now = time.monotonic()
        return self._first.now

    def place(self, record: Record) -> tuple[int | None, int | None]:
        """Return the partition to produce a record to, None if librdkafka chooses; and the one that it is the first of.

        Waits while another record is the first there. Raises NotAcknowledged if that one fails, or takes too long.
        """
        topic, partition = record.topic, record.partition
        while self._first.may_come(topic):
            if not self._first.is_known(topic):
                self._learn(topic)
            if record.partition is None and self._first.is_random(record.key):
                # In turns, all partitions have their first records after one wait.
                partition = next(self._turns[topic])
            cold = self._first.cold(topic, (record.key or b"") if partition is None else partition)
            if cold is None or self._first.is_first(topic, cold):
                return partition, cold
            self._await(topic, cold)
        return partition, None

    def _await(self, topic: str, partition: int) -> None:
        until = time.monotonic() + self._seconds
        while self._first.is_on_its_way(topic, partition):
            left = self._flush()
            # Of none left, the callbacks were called.
            if self._first.is_on_its_way(topic, partition) and (not left or time.monotonic() >= until):
                raise NotAcknowledged

    def _learn(self, topic: str) -> None:
        count, led = self._partitions(topic)
        self._first.learn(topic, count)
        self._turns[topic] = cycle(led or range(count) or [None])
