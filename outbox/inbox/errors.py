"""The errors of the inbox. Every message says what happened, where, and what to do."""

from __future__ import annotations

from outbox.errors import OutboxError


class InboxError(OutboxError):
    """The base of the inbox's errors."""


class MessageIdMissing(InboxError):
    """A message has neither a header ``ce_id`` nor a header ``id``. Nothing was applied."""


class MessageTooOld(InboxError):
    """The consumer has forgotten ids of the message's day, so the message may have been applied before.

    Roll back the transaction, which has the message's id.
    """


class HandlerFailed(InboxError):
    """A message could not be applied, and the consumer stopped before it. ``__cause__`` says why.

    ``topic``, ``partition``, ``offset`` and ``attempts`` are the message's. At-most-once, and after a handler that
    has committed the transaction, the consumer stopped behind it, and the loss is in ``consumer.losses``: ``given_up``.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        attempts: int,
        why: str,
        *,
        given_up: bool = False,
        recorded: bool = True,
    ) -> None:
        left = "What failed is recorded in consumer.losses, and not tried again" if given_up else "Nothing was skipped"
        if not recorded:
            left = "What may be lost is not recorded in consumer.losses"
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
    """The topic was deleted and created again: the stored offsets no longer apply."""


class KafkaFailed(InboxError):
    """Kafka refuses the consumer, does not answer, or returns messages that can't be read. Nothing was skipped."""


class Reject(Exception):
    """Raised by a handler: this message can't be applied, and retrying will not help."""
