"""Where a move of offsets leads, partition by partition. Pure: ``offsets`` reads and writes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from outbox.consumer.model import LossKind, OffsetBounds, StoredOffset
from outbox.errors import OperationRefused

Wanted = int | dt.datetime | Literal["earliest", "latest", "loss"]
"""The target: an offset; the first message at or after a time (with a zone); Kafka's first or last offset; or the
nearest offset from which a group with open losses can continue."""


@dataclass(frozen=True, slots=True)
class Move:
    """The move of one partition: ``before`` → ``after``, each None if there is no row.

    skipped   the first offset that the group will never read, and the end of these offsets, not included.
    again     how many offsets are read again.
    """

    part: int
    before: int | None
    after: int | None
    topic_id_before: str | None
    topic_id: str | None
    skipped: tuple[int, int] | None
    again: int

    @property
    def changes(self) -> bool:
        return (self.before, self.topic_id_before) != (self.after, self.topic_id)


def move(part: int, stored: StoredOffset | None, there: OffsetBounds, topic_id: str, after: int) -> Move:
    """Return the move of a partition. Messages that Kafka no longer has are not skipped but lost."""
    same = stored is not None and stored.topic_id == topic_id
    begin = max(stored.next_offset, there.first) if stored is not None and same else there.first
    return Move(
        part=part,
        before=None if stored is None else stored.next_offset,
        after=after,
        topic_id_before=None if stored is None else stored.topic_id,
        topic_id=topic_id,
        skipped=(begin, after) if after > begin else None,
        again=max(stored.next_offset - after, 0) if stored is not None and same else 0,
    )


def after_losses(
    stored: StoredOffset | None, there: OffsetBounds, topic_id: str, losses: Sequence[tuple[str, int]]
) -> int | None:
    """Return the nearest offset from which a partition can continue, given its open losses as (kind, first_offset).

    Also finds losses that were not recorded. None: there is no row, and none is needed.
    """
    if stored is None:
        return there.first if losses or there.first > 0 else None
    if stored.topic_id != topic_id:
        return there.first
    ends = [first for kind, first in losses if kind == LossKind.CUT]
    return min(max(min([stored.next_offset, *ends]), there.first), there.end)


def refuse_outside(topic: str, bounds: Mapping[int, OffsetBounds], to: int) -> None:
    for part, there in bounds.items():
        if not there.first <= to <= there.end:
            raise OperationRefused(
                f"{topic}-{part}: {to} is outside of what Kafka has, offsets {there.first} to {there.end} (where what "
                "is committed ends). Nothing was changed"
            )


def refuse_some(group: str, topic: str, ended: Collection[int]) -> None:
    """Refuse to move a single partition while the group has offsets of some that the topic had before.

    Their dead letters would wait for a consumer of these partitions.
    """
    if ended:
        raise OperationRefused(
            f"{topic} was created again with fewer partitions, and the group still has offsets of partition "
            f"{', '.join(map(str, sorted(ended)))}. Nothing was changed; begin with all of it: `outbox offsets reset "
            f"{group} --topic {topic} --to loss --reason '…'`"
        )


def target(to: int | dt.datetime | Literal["earliest", "latest"], there: OffsetBounds, found: int | None) -> int:
    if isinstance(to, int):
        return to
    if isinstance(to, dt.datetime):
        return there.end if found is None else min(max(found, there.first), there.end)
    return there.first if to == "earliest" else there.end


def gone(stored: Mapping[int, StoredOffset]) -> list[Move]:
    return [Move(part, here.next_offset, None, here.topic_id, None, None, 0) for part, here in sorted(stored.items())]
