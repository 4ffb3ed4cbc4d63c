"""What a member does, with the options of its clients, and what outlives its sessions."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from confluent_kafka import TopicPartition

from outbox._clients.kafka import complete
from outbox.consumer.member_clients import READING
from outbox.consumer.model import Partition
from outbox.consumer.stalled import Watch
from outbox.errors import ConfigurationError
from outbox.transform.records import Transform

MISSING_TOPIC_SECONDS: Final = 10.0
"""Brokers that have just started may not know a topic yet."""
SECONDS: Final = 30.0
"""How long a request to Kafka may take."""
logger: Final = logging.getLogger("outbox.transform")
# The most that librdkafka takes.
_MESSAGE_MAX_BYTES: Final = 1_000_000_000
# The promise depends on them, too.
_IMPLIED: Final = frozenset({"enable.idempotence", "acks", "group.protocol"})


@dataclass(frozen=True, slots=True)
class Plan:
    """``producer`` has the member's transactional id, to which ``of_this_process`` adds."""

    transform: Transform
    topics: Sequence[str]
    group: str
    start: str
    dead_letter_topic: str | None
    batch: int
    batch_seconds: float
    transaction_seconds: float
    consumer: Mapping[str, Any]
    producer: Mapping[str, Any]

    def of_this_process(self) -> Plan:
        """Return the plan with an id of this process: one that was forked would fence the others."""
        id_ = f"{self.producer['transactional.id']}.{os.getpid()}"
        return replace(self, producer={**self.producer, "transactional.id": id_})


@dataclass(slots=True)
class Progress:
    """What outlives a session.

    batch      the most messages in a transaction now.
    messages   how many are committed.
    too_large  places of messages whose copies the dead-letter topic has refused: they get ones without the value.
    positions  of each partition that this run has had, as it last knew it.
    former     the same of earlier runs.
    topic_ids  of the topics that it reads.
    leaderless since when partitions were seen to have neither a position nor a leader.
    """

    batch: int
    messages: int = 0
    too_large: set[tuple[Partition, int]] = field(default_factory=set)
    positions: dict[Partition, TopicPartition] = field(default_factory=dict)
    former: dict[Partition, TopicPartition] = field(default_factory=dict)
    topic_ids: dict[str, str] = field(default_factory=dict)
    leaderless: dict[Partition, float] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)

    def begin_run(self) -> None:
        self.former |= self.positions
        self.positions = {}


def client_options(
    kafka: Mapping[str, Any], group: str, transaction_seconds: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the consumer and of the producer.

    Raises ConfigurationError for one on which the promise depends, or that turns off the broker's verification.
    """
    reading = {**READING, "group.id": group, "partition.assignment.strategy": "range"}
    writing = {
        "transactional.id": f"{group}.{uuid.uuid4()}",
        "transaction.timeout.ms": int(transaction_seconds * 1000),
        # What is acknowledged is told, too.
        "delivery.report.only.error": False,
    }
    if taken := sorted((reading.keys() | writing.keys() | _IMPLIED) & kafka.keys()):
        raise ConfigurationError(f"kafka option {taken[0]} is set by the transformer itself: remove it")
    completed = complete(kafka)
    tuned = {
        "partitioner": "murmur2_random",
        # The topics decide: what one has taken, another may take, too.
        "message.max.bytes": _MESSAGE_MAX_BYTES,
        # librdkafka takes a topic for missing after 30 s by default: the transaction is over by then.
        "topic.metadata.propagation.max.ms": int(min(MISSING_TOPIC_SECONDS, transaction_seconds / 2) * 1000),
    }
    # librdkafka's default compares no checksums.
    return {"check.crcs": True, **completed, **reading}, {**tuned, **completed, **writing}
