"""Positions in partitions, and those behind messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from confluent_kafka import KafkaException, Message, TopicPartition

from outbox.consumer.model import Partition


def answered(positions: list[TopicPartition]) -> list[TopicPartition]:
    """Return the positions of an answer. Raises KafkaException if one has an error instead."""
    for position in positions:
        if position.error is not None:
            raise KafkaException(position.error)
    return positions


def partition_of(message: Message) -> Partition:
    return message.topic() or "", message.partition() or 0


def place_of(message: Message) -> tuple[Partition, int]:
    return partition_of(message), message.offset() or 0


def behind(
    messages: Sequence[Message], committed: Mapping[Partition, TopicPartition]
) -> dict[Partition, TopicPartition]:
    """Return the positions behind these messages, with their leader's epoch and the partitions' metadata."""
    return {
        partition: moved(committed[partition], (message.offset() or 0) + 1, message.leader_epoch())
        for partition, message in {partition_of(message): message for message in messages}.items()
    }


def moved(position: TopicPartition, offset: int, leader_epoch: int | None) -> TopicPartition:
    """Return a position further on, with its metadata.

    leader_epoch  of a leader that had the log up to there: where the log was cut since, Kafka refuses the position.
    """
    return TopicPartition(
        position.topic,
        position.partition,
        offset,
        position.metadata or "",
        -1 if leader_epoch is None else leader_epoch,
    )
