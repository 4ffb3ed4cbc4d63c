"""The vocabulary of rounds, tasks and the sink: partitions, ranges, messages, losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_SCHEMA: Final = "consumer"
"""Of the consumers' tables."""

AT_MOST_ONCE: Final = "AtMostOnce"
"""The strategy of a group that commits its positions before their effects, as its row shows it."""
DEDUP: Final = "Dedup"
"""The strategy of a group that remembers each event's id."""
DEDUP_BY_KEY: Final = "DedupByKey"
"""The strategy of a group that remembers ids made of messages' keys, by which no event is found again."""
DEDUP_BY_OFFSET: Final = "DedupByOffset"
"""The strategy of a group that remembers each event's id, and the offset of a message without one."""

MessageRef = tuple[str, int, int]
"""Topic, partition and offset of a message."""

Partition = tuple[str, int]
"""Topic and partition number."""


@dataclass(frozen=True, slots=True)
class StoredOffset:
    """How far the group is in a partition, and in which incarnation of the topic.

    leader_epoch  a leader of this epoch had the log up to ``epoch_offset``, which is not beyond ``next_offset``; both
                  None if that is not known.
    """

    topic_id: str
    next_offset: int
    leader_epoch: int | None = None
    epoch_offset: int | None = None


@dataclass(frozen=True, slots=True)
class ClaimedOffset(StoredOffset):
    """How far the group is in a partition, and the generation of the claim that holds it."""

    generation: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Range:
    """The offsets that one task reads: from ``start`` up to, not including, ``end``.

    leader_epoch  a leader of this epoch had the log up to ``end`` when the round was planned; None if not known.
    """

    topic_id: str
    start: int
    end: int
    leader_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class OffsetBounds:
    """The offsets that Kafka has of a partition: ``first`` up to, not including, ``end`` (the last stable offset).

    ``high_watermark`` is where a read_uncommitted reader would stop; None when it was not requested. ``leader_epoch``
    is that of the leader that had the log up to ``end``; None if it did not say.
    """

    first: int
    end: int
    high_watermark: int | None = None
    leader_epoch: int | None = None

    @property
    def uncommitted(self) -> int | None:
        """How many offsets wait behind an open transaction; None without ``high_watermark``."""
        return None if self.high_watermark is None else max(self.high_watermark - self.end, 0)


class LossKind(StrEnum):
    """How messages were lost, as ``consumer.losses`` spells it."""

    RETENTION = "retention"
    CUT = "cut"
    RECREATED = "recreated"
    GIVEN_UP = "given-up"


@dataclass(frozen=True, slots=True)
class Loss:
    """The messages of one partition that a group can no longer read, or does not apply any more.

    kind           retention: the messages went before the group read them. cut: the log ends before the group's
                   position. recreated: the topic, or the partition, is not the one that the group has read. given-up:
                   at-most-once, the group has passed them, and their effect failed or is not known to have ended.
    topic_id       of the incarnation of the topic that lost them.
    first_offset   the first lost offset; after a cut: where Kafka's log ended when the loss was found.
    end_offset     not included; None when it can't be known.
    detail         the same as a sentence.
    """

    topic: str
    part: int
    topic_id: str
    first_offset: int
    end_offset: int | None
    kind: LossKind
    detail: str


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A message that can't be applied, and why. ``reason`` is one of those of ``dead_letters``."""

    place: MessageRef
    reason: str
    error: str
    sqlstate: str | None = None


RetryRequest = tuple[int, str]
"""A dead letter to be retried: its id, and the reason why it failed."""

META_PLACE: Final = {"message_topic": "text", "message_part": "integer", "message_offset": "bigint"}
"""The columns that identify a row's message, with their types."""


def refs_of(rows: pa.RecordBatch | pa.Table) -> Iterator[MessageRef]:
    """Return the places of messages, row by row."""
    return zip(*(rows.column(name).to_pylist() for name in META_PLACE), strict=True)
