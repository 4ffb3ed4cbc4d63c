"""What the driver asks Kafka: topic ids, first and last stable offsets; and the group's lag for Kafka's own tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from spark_jobs.errors import ConsumerError, ConsumerUnavailable
from spark_jobs.planner import Extent, Partition

_SECONDS: Final = 20.0
_EARLIEST: Final = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: Final = OffsetSpec.latest()  # type: ignore[no-untyped-call]


class TopicMissing(ConsumerError):
    """A topic of the job does not exist."""


class KafkaView:
    """Kafka as the planner sees it. ``options`` are librdkafka's: addresses and credentials."""

    def __init__(self, options: Mapping[str, str]) -> None:
        import logging

        logger = logging.getLogger("spark_jobs.librdkafka")
        logger.setLevel(logging.CRITICAL + 1)
        self._admin = AdminClient(dict(options), logger=logger)

    def look(self, topics: Sequence[str]) -> tuple[dict[str, str], dict[Partition, Extent]]:
        """Give each topic's id and each partition's extent for a read_committed reader.

        Raises TopicMissing, or ConsumerUnavailable when the brokers do not answer.
        """
        from confluent_kafka import IsolationLevel, TopicCollection

        try:
            found = self._admin.describe_topics(TopicCollection(list(topics)), request_timeout=_SECONDS)
            described = {name: future.result() for name, future in found.items()}
            ids = {name: str(topic.topic_id) for name, topic in described.items()}
            partitions = [
                TopicPartition(name, part.id) for name, topic in described.items() for part in topic.partitions
            ]
            extents: list[dict[Partition, int]] = []
            for spec in (_EARLIEST, _LATEST):
                answers = self._admin.list_offsets(
                    dict.fromkeys(partitions, spec),
                    isolation_level=IsolationLevel.READ_COMMITTED,
                    request_timeout=_SECONDS,
                )
                extents.append({(at.topic, at.partition): answer.result().offset for at, answer in answers.items()})
        except KafkaException as error:
            raise _typed(error, topics) from error
        first, end = extents
        return ids, {partition: Extent(first[partition], end[partition]) for partition in end}

    def show_lag(self, group: str, offsets: Mapping[Partition, int]) -> str | None:
        """Tell Kafka how far the group is. Nobody here reads it back, so a failure is only reported, as text."""
        from confluent_kafka import ConsumerGroupTopicPartitions

        positions = [TopicPartition(topic, part, offset) for (topic, part), offset in sorted(offsets.items())]
        request: Any = ConsumerGroupTopicPartitions(group, positions)
        try:
            futures = self._admin.alter_consumer_group_offsets([request], request_timeout=_SECONDS)
            for future in futures.values():
                future.result()
        except KafkaException as error:
            return str(error)
        return None


def _typed(error: KafkaException, topics: Sequence[str]) -> ConsumerError:
    inner = error.args[0]
    if isinstance(inner, KafkaError) and inner.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
        return TopicMissing(f"there is no topic {' or '.join(topics)}; create it, or name another with --topic")
    return ConsumerUnavailable(f"Kafka does not answer: {inner}")
