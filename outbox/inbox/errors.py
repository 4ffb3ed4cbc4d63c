"""The errors of the inbox. Every message says what happened, where, and what to do."""

from __future__ import annotations

from outbox.errors import OutboxError


class InboxError(OutboxError):
    """The base of the inbox's errors."""


class MessageIdMissing(InboxError):
    """A message names no event: it has neither a header ``ce_id`` nor a header ``id``. Nothing was applied."""


class MessageTooOld(InboxError):
    """The consumer no longer remembers all ids of the message's day, so the message may have been applied before.

    Roll the transaction back: the message's id is in it.
    """


class HandlerFailed(InboxError):
    """A message could not be applied, and the consumer stopped before it; nothing was skipped. ``__cause__`` says why.

    ``topic``, ``partition`` and ``offset`` are the message's, ``attempts`` is how often it was tried. At-most-once the
    consumer stopped behind it, and ``consumer.losses`` has it: ``given_up``.
    """

    def __init__(
        self, topic: str, partition: int, offset: int, attempts: int, why: str, *, given_up: bool = False
    ) -> None:
        left = "What failed is recorded in consumer.losses, and not tried again" if given_up else "Nothing was skipped"
        super().__init__(
            f"{topic}-{partition} offset {offset} could not be applied, attempts: {attempts}: {why}. {left}; start the "
            "consumer again when the cause is gone"
        )
        self.given_up = given_up
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.attempts = attempts


class PositionLost(InboxError):
    """Kafka no longer has messages that the group has not applied. The loss is recorded in ``consumer.losses``.

    ``topic``, ``partition`` and ``position`` are where the group was.
    """

    def __init__(self, topic: str, partition: int, position: int, text: str) -> None:
        super().__init__(text)
        self.topic = topic
        self.partition = partition
        self.position = position


class TopicReplaced(PositionLost):
    """The topic was deleted and created again: the stored offsets mean nothing in it."""


class KafkaFailed(InboxError):
    """Kafka refuses the consumer, does not answer, or returns messages that can't be read. Nothing was skipped."""


class Reject(Exception):
    """Raised by a handler: this message can't be applied, and trying again won't help."""
