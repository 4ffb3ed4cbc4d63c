"""The inbox's options for Kafka, and its requests as ``consumer.kafka_admin`` makes them, with the inbox's errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from confluent_kafka import KafkaError

from outbox._clients.callbacks import without_callbacks
from outbox._clients.kafka import complete
from outbox.consumer.errors import ConsumerError, NotAuthorized
from outbox.consumer.kafka_admin import KafkaAdmin, TopicMissing
from outbox.consumer.losses import find_losses
from outbox.consumer.member_clients import READING
from outbox.consumer.model import Loss, LossKind, OffsetBounds, Partition, StoredOffset
from outbox.errors import ConfigurationError
from outbox.inbox.errors import KafkaFailed, PositionLost, TopicReplaced

_SECONDS: Final = 10.0

OUT_OF_RANGE: Final = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})


def consumer_options(given: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the options of the consumer.

    Raises ConfigurationError for one that is the inbox's own business, or that turns off the broker's verification.
    """
    completed = complete(given)
    ours = {**READING, "group.id": group}
    for name, value in ours.items():
        if name in given and str(given[name]).lower() != str(value).lower():
            raise ConfigurationError(f"kafka option {name}={given[name]}: the inbox needs {value}; leave it out")
    # librdkafka's default compares no checksums.
    return {"check.crcs": True, **completed, **ours}


class Admin:
    """Asks the brokers, with the consumer's options. Raises KafkaFailed when they refuse, or do not answer in time.

    kafka  for requests that return at once.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.kafka = KafkaAdmin(without_callbacks(options), seconds=_SECONDS)

    def look(
        self, topics: Iterable[str], optional: Callable[[Partition], bool] = ().__contains__
    ) -> tuple[Mapping[str, str], Mapping[Partition, OffsetBounds]]:
        """Return the id of each topic, and the bounds of all their partitions.

        optional  says which partitions are left out while they have no leader.
        """
        with _failing("asked for topics and offsets"):
            return self.kafka.look(sorted(topics), optional=optional)

    def find_losses(self, positions: Mapping[Partition, StoredOffset]) -> list[Loss]:
        """Return what Kafka no longer has after these positions. Other partitions need no leader."""
        ids, bounds = self.look({topic for topic, _ in positions}, lambda partition: partition not in positions)
        if found := find_losses(positions, bounds, ids):
            return found
        with _failing("asked whether logs were cut"):
            return self.kafka.regrown(positions, bounds)


@contextmanager
def _failing(doing: str) -> Iterator[None]:
    try:
        yield
    except TopicMissing as error:
        raise KafkaFailed(f"Kafka has no topic {' or '.join(error.topics)}; create it") from error
    except ConsumerError as error:
        raise KafkaFailed(f"Kafka, {doing}: {error}") from error


def refused_credentials(error: BaseException) -> KafkaError | None:
    """Return Kafka's error if a request has failed because it refuses the credentials."""
    cause = error.__cause__
    return cause.credentials if isinstance(cause, NotAuthorized) else None


def lost(losses: Sequence[Loss], positions: Mapping[Partition, StoredOffset], group: str) -> PositionLost:
    first = losses[0]
    kind = TopicReplaced if any(loss.kind == LossKind.RECREATED for loss in losses) else PositionLost
    more = f"; and {len(losses) - 1} partitions more" if len(losses) > 1 else ""
    return kind(
        first.topic,
        first.part,
        positions[first.topic, first.part].next_offset,
        f"{first.detail}{more}. Nothing was skipped. When it is accounted for: `outbox offsets reset {group} --topic "
        f"{first.topic} --to loss --reason …`, and start the consumer again",
    )
