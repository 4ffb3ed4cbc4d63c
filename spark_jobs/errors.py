"""The errors that can end a consumer. Every message says what happened, where, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from outbox.errors import ConfigurationError, OutboxError

if TYPE_CHECKING:
    from spark_jobs.model import Loss, Partition


class ConsumerError(OutboxError):
    """The base of the consumers' errors.

    by_partition  the error of each partition's range, where it is known.
    """

    by_partition: Mapping[Partition, ConsumerError] = {}


class JobError(ConsumerError):
    """The job's declaration can't work."""


class NoSuchJob(JobError, ConfigurationError):
    """A command names no job: there is no such module, or nothing of that name and kind in it."""


class Fenced(ConsumerError):
    """Another consumer has taken the group over. Nothing of this one's current batch was applied."""


class BadMessage(ConsumerError):
    """A message can't be decoded, or has no usable id. The group stopped before it; nothing was skipped."""


class EffectFailed(ConsumerError):
    """The job's effect failed on a batch. The batch was rolled back, its offsets included."""


class Reject(Exception):
    """Raised by an effect that is a function: these messages can't be applied. The others are applied without them.

    why          shown with the dead letter.
    message_ids  one or more, from the table that the effect was given.
    """

    def __init__(self, why: str, *message_ids: str) -> None:
        if not message_ids:
            raise TypeError("Reject: name the message_id of at least one message")
        super().__init__(why)
        self.why = why
        self.message_ids = message_ids


class CheckpointConflict(ConsumerError):
    """A stream's batch does not follow the one that the sink has: applying it might duplicate or lose rows.

    state  what the sink has, as ``exactly_once(job, accept=…)`` takes it.
    """

    def __init__(self, text: str, state: str = "") -> None:
        super().__init__(text)
        self.state = state


class InputCut(ConsumerError):
    """A task's rows ended before all of them had come: something upstream failed. None of them was committed."""


class Interrupted(ConsumerError):
    """Postgres ended the transaction of a range: a time limit, a lock, a deadlock. Another try may succeed."""


class WorkerLost(ConsumerError):
    """A Python worker or an executor of Spark ended in the middle of a range. Nothing of the range was committed."""


class CorruptRecords(ConsumerError):
    """Kafka has records that can't be read, such as ones whose checksum does not match. Nothing was skipped."""


class NotAuthorized(ConsumerError):
    """Kafka refuses the consumer's credentials, or an operation that they do not allow."""


class InputUnproven(ConsumerError):
    """Nothing proves, where a task runs, that it got all of its rows. None of them was committed."""


class DataLost(ConsumerError):
    """Kafka no longer has messages that the group has not read; ``losses`` says which."""

    def __init__(self, text: str, losses: Sequence[Loss] = ()) -> None:
        super().__init__(text)
        self.losses = tuple(losses)


class TopicRecreated(DataLost):
    """The topic was deleted, and perhaps created again: the stored offsets no longer apply to it."""


class ConsumerUnavailable(ConsumerError):
    """Kafka or Postgres was unavailable for too long. Nothing is lost; run the job again."""


class SparkLost(ConsumerError):
    """The JVM of the Spark session has ended. What was not committed is rolled back; run the job again."""


def storable(text: str) -> str:
    """Return text that Postgres accepts: NUL characters and lone surrogates, which it refuses, are replaced."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def shown(error: BaseException) -> str:
    """Return an error's class name and its first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
