"""Partitions that were added to a topic: they are read once the others are at their ends of that time.

When a topic gets partitions, keys move into them from the others, which still have earlier messages of these keys.

| what happens                              | what follows                                                          |
|-------------------------------------------|-----------------------------------------------------------------------|
| driver ends before the ends are stored    | the next one finds the partition with messages, and stores later ends |
| driver ends after that                    | the next one, or the next run of ``--once``, waits for the same ends  |
| the log of another is cut meanwhile       | it counts as read at the end that it has now                          |
| the topic is created again meanwhile      | its id differs: the stored ends are ignored                           |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.model import OffsetBounds, Partition, StoredOffset
from spark_jobs.driver.options import Report
from spark_jobs.driver.planner import waiting_for_others
from spark_jobs.postgres.group_store import PostgresGroupStore


class AddedPartitions:
    """Decides which of the partitions that are new to a group may be read.

    report  called when some have to wait.
    """

    def __init__(self, kafka: KafkaAdmin, store: PostgresGroupStore, topics: Sequence[str], report: Report) -> None:
        self._kafka = kafka
        self._store = store
        self._topics = topics
        self._report = report
        self._ends_before: dict[Partition, dict[Partition, int]] = {}
        self._waiting: set[Partition] = set()

    def ready(
        self,
        new: Sequence[Partition],
        stored: Mapping[Partition, StoredOffset],
        bounds: Mapping[Partition, OffsetBounds],
        topic_ids: Mapping[str, str],
        generation: int,
    ) -> list[Partition]:
        """Return the new partitions that may be read. Raises Fenced.

        The others have no stored offset. The ends that they wait for are stored: they need not be reached in one run.
        """
        known = {topic for topic, _ in stored}
        # All partitions of a topic that is new to the group. An added partition is skipped until it has messages:
        # producers learn of it minutes later, and until then write its keys to the other partitions.
        candidates = [one for one in new if one[0] not in known or bounds[one].end > 0]
        self._note_ends([one for one in candidates if one[0] in known], stored, topic_ids, generation)
        waiting = waiting_for_others(candidates, stored, self._reachable(bounds))
        if waiting - self._waiting:
            shown = sorted(f"{topic}-{part}" for topic, part in waiting)
            self._report(
                "new partitions wait until the others have been read to where they ended when these had messages",
                {"partitions": shown},
            )
        self._waiting = waiting
        return [partition for partition in candidates if partition not in waiting]

    def _reachable(self, bounds: Mapping[Partition, OffsetBounds]) -> Mapping[Partition, Mapping[Partition, int]]:
        """Return the stored ends, at most those of now: a log that was cut since may never reach its end of then."""
        ends = self._ends_before
        if not any(at in bounds and bounds[at].end < end for others in ends.values() for at, end in others.items()):
            return ends
        # What lies behind an open transaction will be there to be read.
        _, now = self._kafka.look(self._topics, high_watermarks=True)
        tops = {at: there.high_watermark or there.end for at, there in now.items()}
        return {one: {at: min(end, tops.get(at, end)) for at, end in others.items()} for one, others in ends.items()}

    def _note_ends(
        self,
        added: Sequence[Partition],
        stored: Mapping[Partition, StoredOffset],
        topic_ids: Mapping[str, str],
        generation: int,
    ) -> None:
        """Record, for partitions first seen with messages, where the others of their topic end."""
        self._ends_before = {one: ends for one, ends in self._ends_before.items() if one in added}
        if self._ends_before.keys() >= set(added):
            return
        noted = {one: ends for one, ends in self._store.added_ends(topic_ids).items() if one in added}
        if noted.keys() < set(added):
            # The ends after the partitions were seen with messages. High watermarks, because messages of open
            # transactions came before these, too.
            _, later = self._kafka.look(self._topics, high_watermarks=True)
            ends = {at: there.high_watermark or there.end for at, there in later.items() if at in stored}
            for one in added:
                noted.setdefault(one, {at: end for at, end in ends.items() if at[0] == one[0]})
            self._store.note_added(noted, topic_ids, generation)
        self._ends_before = noted
