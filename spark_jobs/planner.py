"""Which offsets each partition reads next. Pure: what is stored and what Kafka has go in, ranges or an error come out.

| what is found                                  | what follows                                              |
|------------------------------------------------|-----------------------------------------------------------|
| partition not stored, its first offset is 0    | it is read from 0                                         |
| partition not stored, its first offset is not 0| DataLost: messages went before anybody read them          |
| stored offset below Kafka's first              | DataLost: retention was faster than the group             |
| stored offset above Kafka's end                | DataLost: the log was cut, as by an unclean election      |
| stored topic_id is not the topic's             | TopicRecreated, whether it is shorter now or longer       |
| stored partition that Kafka does not have      | TopicRecreated                                            |
| an open transaction at the end                 | Kafka's end is the last stable offset: read up to there   |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_jobs.errors import DataLost, TopicRecreated

Partition = tuple[str, int]
"""Topic and partition number."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What Kafka has of a partition: from ``first`` up to, not including, ``end`` (the last stable offset)."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Stored:
    """How far the group is in a partition, and in which incarnation of the topic."""

    topic_id: str
    next_offset: int


@dataclass(frozen=True, slots=True)
class Range:
    """What one task reads: from ``start`` up to, not including, ``end``."""

    topic_id: str
    start: int
    end: int


def new_partitions(stored: Mapping[Partition, Stored], extents: Mapping[Partition, Extent]) -> list[Partition]:
    """Give the partitions that Kafka has and the group does not know. Raises DataLost for one that begins above 0."""
    fresh = sorted(extents.keys() - stored.keys())
    for topic, part in fresh:
        if extents[topic, part].first > 0:
            raise DataLost(
                f"{topic}-{part}: the group has never read it and its first {extents[topic, part].first} messages are "
                "gone by retention. Decide where to begin: insert the row into consumer.offsets by hand"
            )
    return fresh


def plan(
    stored: Mapping[Partition, Stored],
    extents: Mapping[Partition, Extent],
    topic_ids: Mapping[str, str],
    max_records: int | None = None,
) -> dict[Partition, Range]:
    """Give a range for each partition that has something to read; ``max_records`` in all, shared out evenly.

    Raises TopicRecreated or DataLost when the stored offsets do not fit what Kafka has.
    """
    waiting: dict[Partition, Range] = {}
    for (topic, part), here in sorted(stored.items()):
        if topic not in topic_ids or here.topic_id != topic_ids[topic] or (topic, part) not in extents:
            raise TopicRecreated(
                f"{topic}-{part}: the topic was deleted or created again since the group read it (its id was "
                f"{here.topic_id}, now {topic_ids.get(topic, 'there is none')}). Offset {here.next_offset} means "
                "nothing there. If what was lost is accounted for, delete the topic's rows from consumer.offsets"
            )
        there = extents[topic, part]
        if here.next_offset < there.first:
            raise DataLost(
                f"{topic}-{part}: retention removed messages {here.next_offset} to {there.first - 1} before the group "
                "read them. If they are accounted for, set next_offset in consumer.offsets by hand"
            )
        if here.next_offset > there.end:
            raise DataLost(
                f"{topic}-{part}: the group has read up to {here.next_offset}, but Kafka's log ends at {there.end}: it "
                "was cut. Find out what was lost before you set next_offset in consumer.offsets by hand"
            )
        if there.end > here.next_offset:
            waiting[topic, part] = Range(here.topic_id, here.next_offset, there.end)
    return waiting if max_records is None else _clip(waiting, max_records)


def _clip(waiting: Mapping[Partition, Range], most: int) -> dict[Partition, Range]:
    """Share ``most`` out: short partitions whole, what they leave over to the longer ones, at least 1 each."""
    clipped: dict[Partition, Range] = {}
    left = most
    by_length = sorted(waiting.items(), key=lambda item: (item[1].end - item[1].start, item[0]))
    for index, (partition, whole) in enumerate(by_length):
        share = max(1, left // (len(by_length) - index))
        taken = min(share, whole.end - whole.start)
        clipped[partition] = Range(whole.topic_id, whole.start, whole.start + taken)
        left -= taken
    return clipped
