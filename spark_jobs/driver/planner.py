"""Which offsets to read next from each partition: a pure function of what is stored and what Kafka has.

| what is found                                  | what follows                                              |
|------------------------------------------------|-----------------------------------------------------------|
| partition not stored, its first offset is 0    | it is read from 0                                         |
| partition not stored, its first offset is not 0| DataLost: messages were removed before the group read any |
| nothing stored, and the job starts at "latest" | each begins at its end; earlier messages are no loss      |
| the same with "earliest-available"             | each begins at its first message that is left             |
| not stored, other partitions of its topic are  | it was added, and keys have moved: see added_partitions   |
| stored offset below Kafka's first              | DataLost: retention was faster than the group             |
| stored offset above Kafka's end                | DataLost: the log was cut, as by an unclean election      |
| the stored leader epoch ended before the       | DataLost: the log was cut, and has grown again since; the |
| stored offset                                  | leaders are asked when a partition's epoch has changed    |
| stored topic_id is not the topic's             | TopicRecreated, whether it is shorter now or longer       |
| stored topic that Kafka does not have          | TopicRecreated                                            |
| stored partition that Kafka does not list      | a broker with old metadata; ignored until the next round  |
| an open transaction at the end                 | Kafka's end is the last stable offset: read up to there   |

An error lists everything that was found in all partitions, as ``Loss``: the driver records these and ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from outbox.consumer.errors import DataLost, TopicRecreated
from outbox.consumer.losses import find_losses
from outbox.consumer.model import Loss, LossKind, OffsetBounds, Partition, Range, StoredOffset

ENOUGH: Final = 5_000
"""This many messages of a partition are worth a task and a transaction of their own."""
FEW: Final = 16
"""Up to this many partitions are all read in every round, however little of each."""

_SHOWN: Final = 3
# A message's share of a round, in thousandths: a large message counts as several, not always a whole number of them.
_UNIT: Final = 1000


def new_partitions(
    stored: Mapping[Partition, StoredOffset],
    bounds: Mapping[Partition, OffsetBounds],
    topic_ids: Mapping[str, str],
    group: str = "GROUP",
    *,
    chosen: bool = False,
) -> list[Partition]:
    """Return the partitions that Kafka has and the group does not know.

    chosen   the job says where they begin, so messages that are already removed are no loss.

    Raises DataLost for one that begins above 0, and like ``plan`` for the others: one error lists everything.
    """
    fresh = sorted(bounds.keys() - stored.keys())
    never_read = [] if chosen else _never_read(fresh, bounds, topic_ids)
    halt(never_read + find_losses(stored, bounds, topic_ids), group)
    return fresh


def unreached(ends: Mapping[Partition, int], stored: Mapping[Partition, StoredOffset]) -> bool:
    """Return whether some partition of the group has not been read to its end of ``ends``."""
    return any(one in stored and stored[one].next_offset < end for one, end in ends.items())


def common_limits(
    noted: Iterable[Mapping[Partition, int]], stored: Mapping[Partition, StoredOffset]
) -> dict[Partition, int]:
    """Return how far partitions may be read: to the lowest of the noted ends that not all of them have reached."""
    limits: dict[Partition, int] = {}
    for ends in noted:
        if unreached(ends, stored):
            limits |= {one: min(end, limits.get(one, end)) for one, end in ends.items()}
    return limits


def limited(
    bounds: Mapping[Partition, OffsetBounds], limits: Mapping[Partition, int], stored: Mapping[Partition, StoredOffset]
) -> dict[Partition, OffsetBounds]:
    """Return the bounds, with no end beyond its limit.

    But not below the group's offset, which may be beyond a limit, because it moves up to the next message: that must
    not look like a truncated log.
    """
    found = dict(bounds)
    for one in limits.keys() & bounds.keys():
        there = bounds[one]
        reached = stored[one].next_offset if one in stored else 0
        found[one] = replace(there, end=max(min(there.end, limits[one]), min(reached, there.end)))
    return found


def plan(
    stored: Mapping[Partition, StoredOffset],
    bounds: Mapping[Partition, OffsetBounds],
    topic_ids: Mapping[str, str],
    max_records: int,
    group: str = "GROUP",
    *,
    turn: Sequence[Partition] = (),
    row_bytes: Mapping[str, int] | None = None,
    max_bytes: int | None = None,
) -> dict[Partition, Range]:
    """Return the ranges to read: of all partitions with unread messages, or of those whose turn it is.

    max_records  how many messages in all. Up to FEW partitions each get a share. With more partitions a share has at
                 least ENOUGH messages, if it has that many; partitions whose turn is later wait for later rounds.
    turn         the partitions in the order in which they were last read, the longest ago first; see next_turn.
                 Partitions that are not in it come before them.
    max_bytes    how many bytes in all, where ``row_bytes`` has the average size of a topic's messages. At least one
                 message is read, however large.

    Raises TopicRecreated or DataLost when the stored offsets do not fit what Kafka has; ``group`` is for their text.
    """
    halt(find_losses(stored, bounds, topic_ids), group)
    waiting = {
        partition: Range(here.topic_id, here.next_offset, bounds[partition].end, bounds[partition].leader_epoch)
        for partition, here in sorted(stored.items())
        if partition in bounds and bounds[partition].end > here.next_offset
    }
    weights = dict.fromkeys((topic for topic, _ in waiting), _UNIT)
    if max_bytes is not None:
        for topic, average in (row_bytes or {}).items():
            weights[topic] = max(_UNIT, -(-_UNIT * max_records * average // max_bytes))
    return _clip(_at_turn(waiting, max_records, turn, weights), max_records, weights)


def next_turn(turn: Sequence[Partition], read: Collection[Partition]) -> list[Partition]:
    """Return the order for the next round, after one that has ``read`` these partitions.

    A new driver gets the same order from ``consumer.offsets.updated_at``. A partition that was read goes behind all
    others, so it waits for each of them at most once, however many messages they get meanwhile.
    """
    waited = [partition for partition in turn if partition not in read]
    return [*waited, *sorted(set(read).difference(turn)), *(partition for partition in turn if partition in read)]


def halt(losses: Sequence[Loss], group: str) -> None:
    """Raise for losses, if there are any: TopicRecreated if one of them is of that kind, else DataLost."""
    if not losses:
        return
    kinds = {loss.kind for loss in losses}
    topics = sorted({loss.topic for loss in losses})
    more = f"; and {len(losses) - _SHOWN} partitions more" if len(losses) > _SHOWN else ""
    text = f"{'; '.join(loss.detail for loss in losses[:_SHOWN])}{more}. {_advice(kinds, topics, group)}"
    raise (TopicRecreated if LossKind.RECREATED in kinds else DataLost)(text, losses)


def _never_read(
    fresh: Sequence[Partition], bounds: Mapping[Partition, OffsetBounds], ids: Mapping[str, str]
) -> list[Loss]:
    return [
        Loss(
            topic,
            part,
            ids[topic],
            0,
            bounds[topic, part].first,
            LossKind.RETENTION,
            f"{topic}-{part}: the group has never read it and its first {bounds[topic, part].first} messages are gone "
            "by retention",
        )
        for topic, part in fresh
        if bounds[topic, part].first > 0
    ]


def _advice(kinds: Collection[LossKind], topics: Sequence[str], group: str) -> str:
    commands = " and ".join(
        f"`outbox offsets reset {group} --topic {topic} --to loss --reason …`" for topic in topics[:_SHOWN]
    )
    if LossKind.RECREATED in kinds:
        return (
            f"When it is accounted for: {commands} accepts it and begins with the topic that is there now; of a topic "
            f"that is gone for good, `outbox offsets forget {group} --topic … --reason …`"
        )
    if LossKind.CUT in kinds:
        return (
            f"Find out what was lost. {commands} accepts it and continues at the log's end of that time; --to TIME, "
            "before the log was cut, reads again from there, and what was applied is known by its id, where ids are "
            "remembered"
        )
    return (
        f"When it is accounted for: {commands} accepts it and continues with the first message that is left. With "
        'start="earliest-available" a new group begins there'
    )


def _at_turn(
    waiting: Mapping[Partition, Range], most: int, turn: Sequence[Partition], weights: Mapping[str, int]
) -> dict[Partition, Range]:
    """Return the partitions of this round: as many as get enough of it, or can be read to their ends."""
    if len(waiting) <= FEW:
        return dict(waiting)
    places = {partition: place for place, partition in enumerate(turn)}
    enough = max(1, min(ENOUGH, most // FEW)) * _UNIT
    left = most * _UNIT
    chosen: dict[Partition, Range] = {}
    for partition in sorted(waiting, key=lambda partition: places.get(partition, -1)):
        whole, weight = waiting[partition], weights[partition[0]]
        needed = min((whole.end - whole.start) * weight, max(enough, weight))
        # Don't skip a partition in favour of a smaller one behind it: it could be skipped in every round.
        if needed > left and chosen:
            break
        chosen[partition] = whole
        left -= needed
    return chosen


def _clip(waiting: Mapping[Partition, Range], most: int, weights: Mapping[str, int]) -> dict[Partition, Range]:
    """Distribute ``most``: short ranges are read whole, and the longer ones share what is left, at least 1 each."""
    clipped: dict[Partition, Range] = {}
    left = most * _UNIT
    by_length = sorted(waiting.items(), key=lambda item: ((item[1].end - item[1].start) * weights[item[0][0]], item[0]))
    for index, (partition, whole) in enumerate(by_length):
        weight = weights[partition[0]]
        share = max(1, left // (len(by_length) - index) // weight)
        taken = min(share, whole.end - whole.start)
        clipped[partition] = replace(whole, end=whole.start + taken)
        left -= taken * weight
    return clipped
