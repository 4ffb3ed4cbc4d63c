"""Partitions that were added to a topic: each is read only as far as the messages of a key stay in order.

When a topic gets partitions, keys move: into these, and between the others unless the count is multiplied. Where a key
was before, there may be earlier messages of it, so the ends of the others are noted twice: when an added partition is
first seen, and when it first has messages. While some partition has not been read to such an end, no other is read
beyond its own, and an added one is not read at all. Each note is at least the earlier ones, or partitions would wait
for each other.

| what happens                              | what follows                                                          |
|-------------------------------------------|-----------------------------------------------------------------------|
| driver ends before the ends are stored    | the next one stores later ends                                        |
| driver ends after that                    | the next one, or the next run of ``--once``, waits for the same ends  |
| a key moves between two looks             | what both its partitions got since the first of them is read at once  |
| no driver looks while the topic grows     | the same for all that is unread; only an added partition waits        |
| the log of another is cut meanwhile       | it counts as read at the end that it has now                          |
| another has no leader, and so no end      | an added one with messages waits for that, and the rest is read up to |
|                                           | the ends that were last seen                                          |
| an added one has no leader when it is     | what the others have by then is read at once, and then they are read  |
|   first seen                              | on; once it has messages, they are read to their ends of that time    |
| the topic is created again meanwhile      | its id differs: the stored ends are ignored                           |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from outbox.consumer.kafka_admin import KafkaAdmin, of_known_topics
from outbox.consumer.model import OffsetBounds, Partition, StoredOffset
from spark_jobs.driver.options import Report
from spark_jobs.driver.planner import common_limits, unreached
from spark_jobs.postgres.group_store import AddedEnds, PostgresGroupStore


class AddedPartitions:
    """Decides which of the partitions that are new to a group may be read, and how far the others.

    report  called when some have to wait.
    """

    def __init__(self, kafka: KafkaAdmin, store: PostgresGroupStore, topics: Sequence[str], report: Report) -> None:
        self._kafka = kafka
        self._store = store
        self._topics = topics
        self._report = report
        self._noted: dict[Partition, AddedEnds] = {}
        self._last_seen: Mapping[Partition, int] = {}
        self.waiting: AbstractSet[Partition] = frozenset()
        """The partitions whose messages wait for others: added ones, and those that are at their limits."""

    def ready(
        self,
        new: Sequence[Partition],
        stored: Mapping[Partition, StoredOffset],
        bounds: Mapping[Partition, OffsetBounds],
        topic_ids: Mapping[str, str],
        generation: int,
        leaderless: AbstractSet[Partition] = frozenset(),
    ) -> tuple[list[Partition], dict[Partition, int]]:
        """Return the new partitions that may be read, and how far some of the others may be. Raises Fenced.

        leaderless  those that Kafka lists and ``bounds`` lacks: an added one is noted as if it had no messages.

        The other new ones have no stored offset. The ends that are waited for are stored: they need not be reached in
        one run.
        """
        known = {topic for topic, _ in stored}
        added = [one for one in new if one[0] in known]
        self._note_ends([*added, *sorted(leaderless - stored.keys())], stored, bounds, topic_ids, generation)
        # All partitions of a topic that is new to the group. An added partition is skipped until it has messages:
        # producers learn of it minutes later, and until then write its keys to the other partitions.
        candidates = [one for one in new if one[0] not in known or bounds[one].end > 0]
        noted = self._reachable(bounds, stored)
        limits = common_limits([ends for one in noted.values() for ends in (one.before, one.ends)], stored)
        held = {
            one
            for one in limits.keys() & stored.keys() & bounds.keys()
            if limits[one] <= stored[one].next_offset < bounds[one].end
        }
        # Others still have earlier messages of their keys, from before these partitions were seen with messages.
        waiting = {one for one in candidates if one in noted and unreached(noted[one].ends, stored)}
        waiting |= {one for one in added if bounds[one].end > 0 and not (one in noted and noted[one].ends)}
        if (waiting | held) - self.waiting:
            shown = sorted(f"{topic}-{part}" for topic, part in waiting | held)
            self._report(
                "partitions wait until the others have been read to where they ended when their topic got more",
                {"partitions": shown},
            )
        self.waiting = waiting | held
        # Including partitions that have no leader now.
        self._last_seen = {**self._last_seen, **{one: there.end for one, there in bounds.items()}}
        return [partition for partition in candidates if partition not in waiting], limits

    def _reachable(
        self, bounds: Mapping[Partition, OffsetBounds], stored: Mapping[Partition, StoredOffset]
    ) -> Mapping[Partition, AddedEnds]:
        """Return the noted ends, but none beyond the end of now: a log that was cut may never reach an earlier end."""
        noted = self._noted
        # Where ``before`` is beyond the log's end, so is ``ends``, if it is known.
        last = [one.ends or one.before for one in noted.values()]
        if not any(at in bounds and bounds[at].end < end for ends in last for at, end in ends.items()):
            return noted
        # What lies behind an open transaction will be there to be read.
        _, now = self._kafka.look(self._topics, high_watermarks=True, optional=of_known_topics(stored))
        tops = {at: there.high_watermark or there.end for at, there in now.items()}

        def lowered(ends: Mapping[Partition, int]) -> dict[Partition, int]:
            return {at: min(end, tops.get(at, end)) for at, end in ends.items()}

        return {one: AddedEnds(lowered(there.before), lowered(there.ends)) for one, there in noted.items()}

    def _note_ends(
        self,
        added: Sequence[Partition],
        stored: Mapping[Partition, StoredOffset],
        bounds: Mapping[Partition, OffsetBounds],
        topic_ids: Mapping[str, str],
        generation: int,
    ) -> None:
        """Record where the others of its topic end: for each partition that is first seen, or first has messages."""
        # Partitions that a broker with old metadata does not list are kept.
        self._noted = {one: ends for one, ends in self._noted.items() if one not in stored}
        if not self._noted.keys() >= set(added):
            found = self._store.added_ends(topic_ids)
            self._noted = _in_order({one: ends for one, ends in found.items() if one not in stored} | self._noted)
        changed: dict[Partition, AddedEnds] = {}
        later: Mapping[Partition, int] | None = None
        for one in added:
            of_others = [at for at in stored if at[0] == one[0]]
            here = self._noted.get(one, AddedEnds({}, {}))
            end = bounds[one].end if one in bounds else 0
            if end == 0 and one not in self._noted:
                # One without a leader has no end now.
                if bounds.keys() >= set(of_others):
                    changed[one] = AddedEnds(self._at_least_noted({at: bounds[at].end for at in of_others}), {})
            elif end > 0 and not here.ends:
                if later is None:
                    # The ends after the partition was seen with messages. High watermarks, because messages of open
                    # transactions came before these, too.
                    _, looked = self._kafka.look(self._topics, high_watermarks=True, optional=of_known_topics(stored))
                    later = {at: there.high_watermark or there.end for at, there in looked.items()}
                before = here.before
                if not unreached(before, stored):
                    seen = {at: self._last_seen[at] for at in of_others if at in self._last_seen}
                    before = self._at_least_noted(seen)
                ends = {at: later[at] for at in of_others} if later.keys() >= set(of_others) else {}
                noted = AddedEnds(before, self._at_least_noted(ends))
                if noted != here:
                    changed[one] = noted
        if changed:
            self._noted |= changed
            self._store.note_added(self._noted, topic_ids, generation)

    def _at_least_noted(self, ends: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return ends, none below an earlier one, which may have what a transaction hides, or a log that was cut."""
        noted = [end for one in self._noted.values() for end in (one.before, one.ends)]
        return _highest(ends, [*noted, self._last_seen])


def _highest(ends: Mapping[Partition, int], others: Sequence[Mapping[Partition, int]]) -> dict[Partition, int]:
    """Return the highest end of each partition of ``ends``."""
    return {at: max([end, *(one.get(at, 0) for one in others)]) for at, end in ends.items()}


def _in_order(noted: Mapping[Partition, AddedEnds]) -> dict[Partition, AddedEnds]:
    """Return stored ends, each at least the earlier ones: drivers used to store others, and their groups stand still.

    They noted ``before`` without what open transactions hide, and ``ends`` with it. So where neither is at least the
    other, ``ends`` is the earlier one.
    """

    def ordered(before: Mapping[Partition, int]) -> dict[Partition, int]:
        lower = [one.ends for one in noted.values() if any(before.get(at, 0) > end for at, end in one.ends.items())]
        return _highest(before, lower)

    return {one: AddedEnds(ordered(there.before), there.ends) for one, there in noted.items()}
