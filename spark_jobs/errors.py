"""What can end a consumer. Every message says what happened, where, and what to do."""

from __future__ import annotations

from outbox.errors import OutboxError


class ConsumerError(OutboxError):
    """The base of the consumers' errors."""


class JobError(ConsumerError):
    """The job's declaration can't work."""


class Fenced(ConsumerError):
    """Another consumer has taken the group over. Nothing of this one's current batch was applied."""


class BadMessage(ConsumerError):
    """A message can't be decoded, or has no usable id. The group stands before it; nothing was skipped."""


class EffectFailed(ConsumerError):
    """The job's effect failed on a batch. The batch was rolled back, its offsets included."""


class DataLost(ConsumerError):
    """Kafka no longer has messages that the group has not read."""


class TopicRecreated(ConsumerError):
    """The topic was deleted and created again: the stored offsets mean nothing in the new one."""


class ConsumerUnavailable(ConsumerError):
    """Kafka or Postgres stayed away for too long. Nothing is lost; run the job again."""
