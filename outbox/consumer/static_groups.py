"""Partitions of a static group that no member has, and when to have them assigned.

A member with a ``group.instance.id`` that is started again gets its former assignment without a rebalance (KIP-345).
If it was the group's leader, its new client does not know that, and computes no assignment; nor has it seen the topics
change. Partitions that were added meanwhile are then assigned to no member. Kafka's own clients avoid that with version
9 of JoinGroup (KIP-814), which librdkafka does not send.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import ConsumerGroupState

from outbox._clients.backoff import doubled
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.model import Partition

_logger: Final = logging.getLogger("outbox.consumer")

_SECONDS: Final = 10.0
_LONGEST_SECONDS: Final = 600.0


class StaticGroup:
    """Compares what the members have with what there is. Does not wait for Kafka.

    group    its name.
    options  of the consumer; without a ``group.instance.id``, and with KIP-848, there is nothing to compare.
    """

    def __init__(self, group: str, options: Mapping[str, Any], kafka: KafkaAdmin) -> None:
        classic = str(options.get("group.protocol", "classic")).lower() == "classic"
        self._group = group
        self._name = options.get("group.instance.id") if classic else None
        self._kafka = kafka
        self._asked: Future[Any] | None = None
        self._topics: Mapping[str, Future[Any]] = {}
        self._assigned: set[Partition] = set()
        self._missing: set[Partition] = set()
        self._attempts = 0
        self._due = time.monotonic()

    def needs_rebalance(self, topics: Iterable[str]) -> bool:
        """Return whether this member is to leave the group, and to join it again, for partitions that no member has.

        That is the task of the member whose name is the first, once two comparisons have found them.

        topics  that the member subscribes to. A pattern, which begins with ^, stands for those that some member has.
        """
        if self._asked is not None:
            if self._asked.done():
                asked, self._asked = self._asked, None
                self._ask_topics(asked, topics)
        elif self._topics:
            if all(future.done() for future in self._topics.values()):
                described, self._topics = self._topics, {}
                return self._compare(described)
        elif self._name is not None and time.monotonic() >= self._due:
            self._asked = self._kafka.describe_group(self._group)
            self._due = time.monotonic() + _SECONDS
        return False

    def _ask_topics(self, asked: Future[Any], topics: Iterable[str]) -> None:
        if asked.exception() is not None:
            return
        group = asked.result()
        first = min((one.group_instance_id for one in group.members if one.group_instance_id), default=None)
        if group.state != ConsumerGroupState.STABLE or first != self._name:
            self._missing = set()
            return
        parts = [part for one in group.members for part in one.assignment.topic_partitions]
        self._assigned = {(part.topic, part.partition) for part in parts}
        named = {topic for topic in topics if not topic.startswith("^")}
        self._topics = self._kafka.describe(named | {topic for topic, _ in self._assigned})

    def _compare(self, described: Mapping[str, Future[Any]]) -> bool:
        found = {name: future.result().partitions for name, future in described.items() if not future.exception()}
        missing = {(name, part.id) for name, parts in found.items() for part in parts} - self._assigned
        lasting, self._missing = self._missing & missing, missing
        if not missing:
            self._attempts = 0
        if lasting:
            # What a rebalance does not assign must not cause many.
            self._attempts += 1
            self._due = time.monotonic() + doubled(self._attempts, _SECONDS, _LONGEST_SECONDS)
            self._missing = set()
            topic, part = min(lasting)
            more = f" and {len(lasting) - 1} more" if len(lasting) > 1 else ""
            _logger.warning("group %s: no member has %s-%s%s; this one joins again", self._group, topic, part, more)
        return bool(lasting)
