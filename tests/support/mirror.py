"""A mirror of topics on another cluster, as MirrorMaker makes one: the records, with offsets of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from confluent_kafka import Producer


class Mirror:
    """Copies committed records from one cluster to the other, each partition in its order, as often as it is asked."""

    def __init__(self, source: Any, target: Any) -> None:
        self._source, self._target = source, target
        self._copied: dict[tuple[str, int], int] = {}

    def copy(self, topic: str, partitions: Collection[int], *, repeated: int = 0) -> None:
        """Copy what was not yet copied; the first ``repeated`` records twice, as after a restart of the mirror."""
        producer = Producer({"bootstrap.servers": self._target.bootstrap_servers, "enable.idempotence": True})
        for number in partitions:
            done = self._copied.get((topic, number), 0)
            found = [one for one in self._source.consume(topic) if one.partition() == number][done:]
            for record in found[:repeated] + found:
                producer.produce(
                    topic,
                    record.value(),
                    record.key(),
                    number,
                    timestamp=record.timestamp()[1],
                    headers=record.headers(),
                )
            self._copied[topic, number] = done + len(found)
        assert producer.flush(60) == 0
