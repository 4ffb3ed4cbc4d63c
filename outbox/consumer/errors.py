"""The errors of consumer groups. Every message says what happened, where, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from outbox.errors import OutboxError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

    from outbox.consumer.model import Loss, Partition

LONGEST_ERROR: Final = 2000
"""In characters; longer error texts are truncated where they are stored."""


class ConsumerError(OutboxError):
    """The base of the consumers' errors.

    by_partition  the error of each partition's range, where it is known.
    """

    by_partition: Mapping[Partition, ConsumerError] = {}


class JobError(ConsumerError):
    """The job's declaration can't work."""


class Fenced(ConsumerError):
    """Another consumer took over the group or partition. Nothing of the current batch was applied."""


class OffsetMoved(Exception):
    """Ends a transaction: the stored offset is not where it begins, and no other claim has moved it.

    The answer to an earlier COMMIT was lost, or a task that its driver had given up has committed.
    """

    def __init__(self, partition: Partition, next_offset: int) -> None:
        super().__init__(f"{partition[0]}-{partition[1]} has moved to offset {next_offset}")
        self.next_offset = next_offset


class EffectFailed(ConsumerError):
    """The job's effect failed on a batch, which was rolled back with its offsets."""


class Interrupted(ConsumerError):
    """Postgres ended the transaction of a range: a time limit, a lock, a deadlock. A retry may succeed."""


class CorruptRecords(ConsumerError):
    """Kafka has records that can't be read, such as with a wrong checksum. Nothing was skipped."""


class NotAuthorized(ConsumerError):
    """Kafka refuses the consumer's credentials, or an operation that they do not allow."""

    credentials: KafkaError | None = None
    """Its error if it refuses these."""


class DataLost(ConsumerError):
    """Kafka no longer has messages that the group has not read; ``losses`` says which."""

    def __init__(self, text: str, losses: Sequence[Loss] = ()) -> None:
        super().__init__(text)
        self.losses = tuple(losses)


class TopicRecreated(DataLost):
    """The topic was deleted, and perhaps created again: the stored offsets no longer apply."""


class ConsumerUnavailable(ConsumerError):
    """Kafka or Postgres was unavailable for too long. Nothing is lost; run the job again."""


def storable(text: str) -> str:
    """Return text that Postgres accepts: NUL characters and lone surrogates, which it refuses, are replaced."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def shown(error: BaseException) -> str:
    """Return an error's class name and its first line, if it has a text."""
    name, text = type(error).__name__, str(error).strip().partition("\n")[0]
    return f"{name}: {text}" if text else name
