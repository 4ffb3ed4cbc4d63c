"""What Kafka lost before a group read it: found by comparing stored offsets with Kafka's, and recorded for operators.

What a group gives up at-most-once is recorded beside it: ``given_up``, GroupRows.lose_unconfirmed. It halts nothing.

| what is found                                                | kind      |
|--------------------------------------------------------------|-----------|
| stored offset below Kafka's first                            | retention |
| stored offset above Kafka's end                              | cut       |
| the stored leader epoch ended before the stored offset       | cut       |
| the topic has another id, or is gone                         | recreated |
| a partition that Kafka does not list: a broker with old data | none      |
"""

from __future__ import annotations

from collections.abc import Mapping

from outbox.consumer.errors import LONGEST_ERROR, storable
from outbox.consumer.model import Loss, LossKind, OffsetBounds, Partition, RejectedRecord, StoredOffset


def kind_of(here: StoredOffset, there: OffsetBounds | None, topic_id: str | None) -> LossKind | None:
    """Return what a group has lost behind a position; None for nothing. ``topic_id``: None if the topic is gone."""
    if here.topic_id != topic_id:
        return LossKind.RECREATED
    if there is None:
        return None
    if here.next_offset < there.first:
        return LossKind.RETENTION
    return LossKind.CUT if here.next_offset > there.end else None


def find_losses(
    stored: Mapping[Partition, StoredOffset], bounds: Mapping[Partition, OffsetBounds], topic_ids: Mapping[str, str]
) -> list[Loss]:
    """Return what the group can no longer read of its known partitions, sorted by partition."""
    losses = []
    for (topic, part), here in sorted(stored.items()):
        there, topic_id = bounds.get((topic, part)), topic_ids.get(topic)
        kind = kind_of(here, there, topic_id)
        first, end = here.next_offset, None
        if kind is None:
            continue
        if topic_id is None:
            text = f"the topic is gone from Kafka; what it held from offset {first} on can't be read now"
        elif kind == LossKind.RECREATED or there is None:
            text = (
                f"the topic was deleted or created again since the group read it (its id was {here.topic_id}, now "
                f"{topic_id}): offset {first} means nothing there, and what else the old one held is unknown"
            )
        elif kind == LossKind.RETENTION:
            end = there.first
            text = f"retention removed messages {first} to {end - 1} before the group read them"
        else:
            first, end = there.end, here.next_offset
            text = f"the group has read up to {end}, but Kafka's log ends at {first}: it was cut"
        losses.append(Loss(topic, part, here.topic_id, first, end, kind, f"{topic}-{part}: {text}"))
    return losses


def given_up(record: RejectedRecord, topic_id: str) -> Loss:
    """Return the loss of a message whose effect has failed, at-most-once."""
    topic, part, offset = record.place
    text = f"{topic}-{part}: message {offset} was given up (at-most-once), {record.reason}: {storable(record.error)}"
    return Loss(topic, part, topic_id, offset, offset + 1, LossKind.GIVEN_UP, text[:LONGEST_ERROR])
