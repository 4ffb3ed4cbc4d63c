"""Notices partitions that are added to a topic of events: keys move, and Kafka orders only what is in one partition.

A producer puts a key into the partition ``murmur2(key) mod count``, so most keys go to another partition from then on.
What a key has in its old one may be read after what it has in the new one, whatever the relay's delivery; Spark's
consumers wait for it, others do not. Nothing is stopped: the events behind the change are on Kafka by the time it can
be noticed, and stopping would not bring their order back.

| what happens                         | what follows                                                                |
|--------------------------------------|-----------------------------------------------------------------------------|
| partitions are added                 | an error in the log, a line in ``/readyz?verbose`` and a metric, for a day  |
| more are added                       | the same; the line counts from the first                                    |
| the topic is deleted and made anew   | its count is the known one from then on                                     |
| they are added while no relay runs,  | not noticed: a relay compares with what it saw first                        |
| or it restarts within the minute     |                                                                             |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from relay.kafka.client import unavailable_on_kafka_error
from relay.kafka.metadata import SharedMetadata

log = structlog.get_logger("relay")

_METADATA_SECONDS: Final = 10.0
_SHOWN_SECONDS: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Grown:
    """A topic whose partitions became more: how many there were before, and are now; ``at`` is when that was seen."""

    before: int
    now: int
    at: float

    def __str__(self) -> str:
        return (
            f"partitions were added ({self.before}, now {self.now}): keys are in other partitions than before, and a "
            "consumer that reads partitions side by side may apply a key's new events before its old ones"
        )


class PartitionCounts:
    """The number of partitions of each topic of events. Call ``look`` from one thread; the rest from any."""

    def __init__(
        self,
        options: Mapping[str, Any],
        may_write: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metadata = SharedMetadata(options, clock)
        self._may_write = may_write
        self._clock = clock
        self._known: dict[str, int] = {}
        self._grown: dict[str, Grown] = {}

    def look(self) -> None:
        """Compare the topics' partitions with those of the look before. Raises BrokerUnavailable."""
        self._metadata.forget()
        with unavailable_on_kafka_error("counting partitions"):
            found = self._metadata.topics(_METADATA_SECONDS).topics
        # A topic that is gone may be created again, with any number.
        self._known = {topic: count for topic, count in self._known.items() if topic in found}
        grown = {topic: change for topic, change in self._grown.items() if topic in found}
        for topic, metadata in found.items():
            count = len(metadata.partitions)
            # No partitions: its metadata is being made.
            if metadata.error is not None or not count or not self._may_write(topic):
                continue
            known = self._known.get(topic, count)
            self._known[topic] = count
            if count > known:
                first = grown[topic].before if topic in grown else known
                grown[topic] = Grown(first, count, self._clock())
                log.error("the partitions of a topic have changed", topic=topic, problem=str(grown[topic]))
            elif count < known:
                grown.pop(topic, None)
        self._grown = grown

    def grown(self) -> Mapping[str, str]:
        """Return the topics whose partitions became more within a day, each with a sentence about it."""
        now = self._clock()
        return {topic: str(grown) for topic, grown in self._grown.items() if now - grown.at < _SHOWN_SECONDS}
