"""Apply the ranges of one round to the sink, and make dead letters of the messages that can't be applied.

An attempt is one Spark action, or if there are few messages the tasks' work done in the driver. For each range, it
applies it or names the messages that can't be applied. The driver reads these again in full, and the next attempt at
their ranges stores them in the transaction that moves the offsets.

What follows from each outcome is in ``outcomes.RangeOutcome``. Beside them:

| what happens                         | what follows                                                             |
|--------------------------------------|--------------------------------------------------------------------------|
| Spark runs no task, because it sees  | as for EMPTY, unless a row of these ranges does not decode               |
| that the transform filters all rows  |                                                                          |
| messages are rejected                | they become dead letters; with keep_order the later ones of their keys   |
|                                      | do too; if there are more of these than max_dead, in pieces of the round |
| a row that does not decode reaches a | Undecoded: the driver looks for all such rows                            |
| transform                            |                                                                          |
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, assert_never

from outbox.consumer.errors import EffectFailed, Interrupted
from outbox.consumer.letters import BEHIND, DeadLetter, RetryRecord
from outbox.consumer.model import MessageRef, Partition, Range, RejectedRecord
from spark_jobs.driver.round_context import ENDING, Counts, OffsetRanges, RoundContext, RoundState
from spark_jobs.driver.round_spans import RoundSpans
from spark_jobs.errors import BadMessage, InputCut, WorkerLost
from spark_jobs.outcomes import RangeOutcome
from spark_jobs.sink import GroupStore
from spark_jobs.spark import errors as failures
from spark_jobs.spark import job_groups
from spark_jobs.spark import rows as spark
from spark_jobs.task import partition as task
from spark_jobs.task.behind import KeysToLetters, offsets_behind
from spark_jobs.task.feed import rejected_from, rejected_text
from spark_jobs.task.partition import TaskResult
from spark_jobs.task.reader import RangeReader, kept

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_jobs.driver.batch_attempts import BatchAttempts
    from spark_jobs.driver.partition_attempts import PartitionAttempts
    from spark_jobs.task.incoming import Incoming

RETRIED_AT_ONCE: Final = 100
"""How many dead letters are retried in one transaction. Limited, because the driver holds them in memory in full."""
FAILED_ALONE: Final = 3
"""How many dead letters may fail in one round when each is tried alone. After that, new messages come first."""
_PLACES: Final = "topic string, partition int, offset long"


class _DeadKeyCache:
    """The keys of a group's dead letters, kept between rounds: reading 100,000 of them takes 100 ms.

    | what happens                       | what follows                                                                |
    |------------------------------------|-----------------------------------------------------------------------------|
    | a round stores dead letters        | it adds their keys                                                          |
    | a round fails, or a task that was  | the keys are read again: there may be dead letters that the driver does not |
    | abandoned has applied a range      | know                                                                        |
    | dead letters are retried           | the keys are read again                                                     |
    | the last one of a key is discarded | the key is kept: its next message is put behind nothing, which the next     |
    |                                    | ``PostgresGroupStore.state`` finds; it is retried; the keys are read again  |

    So there may be too many keys, which costs a detour, and never too few, which would cost the order.
    """

    def __init__(self, store: GroupStore, topics: Sequence[str]) -> None:
        self._store = store
        self._topics = topics
        self._keys: dict[str, set[bytes]] | None = None

    def by_topic(self) -> Mapping[str, AbstractSet[bytes]]:
        if self._keys is None:
            self._keys = {}
            for topic, key in self._store.dead_keys(self._topics):
                self._keys.setdefault(topic, set()).add(key)
        return self._keys

    def add(self, letters: Iterable[DeadLetter]) -> None:
        if self._keys is not None:
            for letter in letters:
                if letter.key is not None:
                    self._keys.setdefault(letter.record.place[0], set()).add(letter.key)

    def forget(self) -> None:
        self._keys = None


class _TooManyBehind(Exception):
    """Too many messages wait behind dead letters; in a smaller piece there are fewer."""


class Rounds:
    def __init__(self, context: RoundContext, attempts: PartitionAttempts | BatchAttempts) -> None:
        self._context = context
        self._attempts = attempts
        self._job = context.job
        self._store = context.store
        self._most_retried = RETRIED_AT_ONCE
        self._spans = RoundSpans(context)
        self._dead_keys = _DeadKeyCache(context.store, context.job.topics)
        self.counts = Counts()
        """The figures of the last round or retry: of what it has applied, also if it raised after that."""

    def apply(self, planned: OffsetRanges, generation: int) -> Counts:
        """Apply the ranges. What has been applied when it raises is in ``counts``.

        Raises Fenced, EffectFailed, BadMessage and, when the JVM has ended, ConsumerError itself, which end the job.
        All other errors may be temporary: the classes of task.FAILURES, WorkerLost, and psycopg's errors if the
        driver's own session fails.
        """
        with self._round(job_groups.described(planned.ranges), planned.ranges) as counts:
            try:
                self._apply(planned, counts, generation)
            except _TooManyBehind:
                self._apply_in_pieces(planned, counts, generation)
        return counts

    def _apply(self, planned: OffsetRanges, counts: Counts, generation: int, at_fault: int = 0) -> int:
        """Apply ranges. ``at_fault``: messages at fault in earlier pieces. Returns the new total."""
        state = RoundState(counts=counts, at_fault=at_fault)
        self._context.begin()
        try:
            if self._job.keep_order:
                self._handle_dead_keys(state, planned)
            left = planned
            while left.ranges:
                results = self._attempt(left, state, generation)
                left = left.only(self._handle_outcomes(left, results, state, generation))
        except BaseException:
            self._dead_keys.forget()
            raise
        self._dead_keys.add(state.dead.values())
        return at_fault + _number_at_fault(letter.record for letter in state.dead.values())

    def _apply_in_pieces(self, planned: OffsetRanges, counts: Counts, generation: int) -> None:
        """Apply ranges in pieces, because more messages wait behind dead letters than ``max_dead``."""
        most, at_fault = self._job.max_dead, 0
        while (left := planned.remaining(self._store.stored(self._job.topics))).ranges:
            try:
                at_fault = self._apply(left.first(most), counts, generation, at_fault)
                most *= 2
            except _TooManyBehind:
                # A piece of max_dead offsets has no more messages than max_dead.
                assert most > self._job.max_dead
                most = self._job.max_dead

    @contextmanager
    def _round(self, shown: str, partitions: Collection[Partition]) -> Iterator[Counts]:
        """Begin the figures, the tracing span and the Spark jobs of a round, with this description."""
        self.counts = Counts()
        with failures.understood():
            job_groups.show(self._context.session, self._job.group, shown)
            # Translated inside the span, so that it shows the error's own type.
            with self._spans.traced(partitions, self.counts), failures.understood():
                yield self.counts

    def retry(self, generation: int) -> bool:
        """Apply the dead letters for which a retry was requested, in order.

        Each group of up to RETRIED_AT_ONCE is one transaction. If the effect fails without naming a message, smaller
        groups are tried. Dead letters must not keep the group from its new messages: after a few that fail alone, the
        others are left to the next round.

        Returns whether there may be more of them.
        """
        with self._round("dead letters that are retried", ()) as counts:
            return self._retry_all(generation, counts)

    def _retry_all(self, generation: int, counts: Counts) -> bool:
        self._context.sinks.look_again()
        self._dead_keys.forget()
        alone = 0
        while True:
            letters = self._store.retried(self._job.topics, self._most_retried, keep_order=self._job.keep_order)
            if not letters:
                self._most_retried = RETRIED_AT_ONCE
                return False
            if alone == FAILED_ALONE:
                return True
            blocked = [
                (one, RejectedRecord(one.place, "behind", "an earlier dead letter of its key still waits"))
                for one in letters
                if one.behind
            ]
            try:
                rejected = blocked or self._retry(letters, generation, counts)
                self._most_retried = min(2 * self._most_retried, RETRIED_AT_ONCE)
            except (EffectFailed, WorkerLost, Interrupted, InputCut) as error:
                if len(letters) > 1:
                    self._most_retried = len(letters) // 2
                    continue
                rejected = [(letters[0], RejectedRecord(letters[0].place, "failed", str(error)))]
                alone += 1
            self._store.failed_again([(one.id, record) for one, record in rejected], generation)

    def _retry(
        self, letters: Sequence[RetryRecord], generation: int, counts: Counts
    ) -> list[tuple[RetryRecord, RejectedRecord]]:
        """Try dead letters once. Returns those that failed again.

        If there are none, all of them are resolved, or none if one no longer exists.

        Raises EffectFailed if the failing message is not known: then nothing was applied.
        """
        at = {one.place: one for one in letters}
        try:
            with failures.understood():
                results = self._attempts.attempt_retry(letters, RoundState(), generation)
                if results.outcome is RangeOutcome.COPY_ERROR:
                    results = self._attempts.attempt_retry(letters, RoundState(lenient={task.DEAD_LETTERS}), generation)
        except failures.Undecoded as error:
            found = self._context.undecoded(self._context.letters(letters))
            if not found:
                raise _not_deterministic() from error
        else:
            if results.outcome in ENDING:
                raise ENDING[results.outcome](results.detail)
            found = rejected_from(results.detail) if results.outcome is RangeOutcome.REJECTED else []
            counts.applied += results.fresh
            counts.duplicates += results.read - results.fresh if not found else 0
            counts.read += results.read if not found else 0
        if self._job.keep_order:
            found = found + _behind_failed(letters, found)
        return [(at[record.place], record) for record in found]

    def _attempt(self, planned: OffsetRanges, state: RoundState, generation: int) -> Mapping[Partition, TaskResult]:
        """Return the results of one attempt. A row that does not decode ends it for all of its ranges."""
        self._context.forget_times()
        try:
            with failures.understood():
                return self._attempts.attempt(planned, state, generation)
        except failures.Undecoded as error:
            rejected = self._context.undecoded(self._context.source(planned, state.dead_offsets()))
            if not rejected:
                raise _not_deterministic() from error
            return planned.as_one(TaskResult(RangeOutcome.REJECTED, detail=rejected_text(rejected)))

    def _handle_outcomes(  # noqa: C901  one case for each outcome
        self, planned: OffsetRanges, results: Mapping[Partition, TaskResult], state: RoundState, generation: int
    ) -> list[Partition]:
        """Count the ranges that are done, and return the partitions to retry. Raises errors that end the round."""
        again: list[Partition] = []
        empty: list[Partition] = []
        rejected: list[RejectedRecord] = []
        ends = False
        for partition, one in results.items():
            match one.outcome:
                case RangeOutcome.APPLIED:
                    self._context.note_delays(partition, one)
                    self._count(state, partition, one)
                    self._note_size(state, partition, planned.ranges[partition], one.size)
                case RangeOutcome.ALREADY:
                    self._dead_keys.forget()
                    self._note_size(state, partition, planned.ranges[partition], one.size)
                case RangeOutcome.EMPTY:
                    empty.append(partition)
                case RangeOutcome.REJECTED:
                    rejected += rejected_from(one.detail)
                    again.append(partition)
                case RangeOutcome.COPY_ERROR:
                    state.lenient.add(partition)
                    again.append(partition)
                case RangeOutcome.FALLBACK:
                    self._context.slow_down(partition)
                    again.append(partition)
                case (
                    RangeOutcome.FENCED
                    | RangeOutcome.BROKEN
                    | RangeOutcome.MOVED
                    | RangeOutcome.DENIED
                    | RangeOutcome.CORRUPT
                    | RangeOutcome.CUT
                    | RangeOutcome.INTERRUPTED
                    | RangeOutcome.UNAVAILABLE
                ):
                    ends = True
                case _:
                    assert_never(one.outcome)
        if empty and not ends:
            self._step_over(planned.only(empty), state, generation)
        self._raise_if_ending(results, rejected)
        if rejected:
            self._make_dead_letters(state, planned.only(again), rejected)
        return again

    def _raise_if_ending(self, results: Mapping[Partition, TaskResult], rejected: Sequence[RejectedRecord]) -> None:
        """Raise the error of an attempt, fencing first; or BadMessage if the job halts at rejected messages."""
        for outcome, kind in ENDING.items():
            for one in results.values():
                if one.outcome == outcome:
                    error = kind(one.detail)
                    if self._attempts.each_alone:
                        error.by_partition = {
                            partition: task.FAILURES[each.outcome](each.detail)
                            for partition, each in results.items()
                            if each.outcome in task.FAILURES
                        }
                    raise error
        if rejected and self._job.on_bad == "halt":
            first = min(rejected, key=lambda record: record.place)
            raise BadMessage(f"{_text(first.place)}: {first.error}")

    def _count(self, state: RoundState, partition: Partition, one: TaskResult) -> None:
        state.counts.read += one.read + one.behind
        state.counts.dead += one.behind
        state.behind += one.behind
        state.counts.applied += one.fresh
        if one.fresh < one.read:
            state.counts.duplicates += one.read - one.fresh
            self._context.suspect(partition)
        self._count_dead(state, partition)

    def _note_size(self, state: RoundState, partition: Partition, range_: Range, rows_size: int = 0) -> None:
        """Record what a range takes in memory: as messages, whatever becomes of them, or as rows if these take more."""
        passed = range_.end - range_.start
        offsets, size = state.counts.sizes.get(partition[0], (0, 0))
        here = max(rows_size, self._context.size_read(partition))
        state.counts.sizes[partition[0]] = (offsets + passed, size + here)
        state.counts.passed += passed

    def _count_dead(self, state: RoundState, partition: Partition) -> None:
        dead = len(state.letters(partition))
        state.counts.read += dead
        state.counts.dead += dead

    def _step_over(self, planned: OffsetRanges, state: RoundState, generation: int) -> None:
        try:
            task.step_over(self._context.plan(planned, state, generation, {}), list(planned.ranges))
        except task.RangeStopped as stop:
            raise ENDING[stop.outcome](stop.detail) from stop
        for partition, range_ in planned.ranges.items():
            self._count_dead(state, partition)
            self._note_size(state, partition, range_)

    def _make_dead_letters(self, state: RoundState, planned: OffsetRanges, rejected: Sequence[RejectedRecord]) -> None:
        """Make dead letters of rejected messages and, with keep_order, of the later messages of their keys."""
        for record in rejected:
            if record.place in state.dead:
                raise EffectFailed(f"{_text(record.place)} was named again after it had been taken out: {record.error}")
        self._check_number(state, rejected)
        letters = self._read_whole(planned, {record.place: record for record in rejected})
        state.dead |= letters
        if self._job.keep_order:
            keys: dict[str, dict[bytes, MessageRef | None]] = {}
            for place, letter in sorted(letters.items(), reverse=True):
                # The tasks put aside the messages of keys in ``dead_keys``.
                if letter.key is not None and letter.key not in state.dead_keys.get(place[0], ()):
                    keys.setdefault(place[0], {})[letter.key] = place
            self._add_behind(state, planned, keys)

    def _handle_dead_keys(self, state: RoundState, planned: OffsetRanges) -> None:
        """Make dead letters of what is behind those of earlier rounds, or have the tasks put it aside, if they can."""
        keys = self._dead_keys.by_topic()
        if self._attempts.finds_behind:
            state.dead_keys = keys
        else:
            # A transform must not see these messages, so they are looked for beforehand.
            self._add_behind(state, planned, {topic: dict.fromkeys(some) for topic, some in keys.items()})

    def _add_behind(self, state: RoundState, planned: OffsetRanges, keys: KeysToLetters) -> None:
        """Make dead letters of the messages that are behind dead letters of these keys."""
        if not keys:
            return
        without = state.dead_offsets()
        find = functools.partial(_behind_in, self._context.task_decoder.incoming, keys, dict(planned.ranges), without)
        if self._context.driver_may_read(planned):
            with kept(self._context.reading) as reader:
                rows = [row for part in planned.ranges for batch in find(reader, part) for row in batch.to_pylist()]
            places = [(row["topic"], row["partition"], row["offset"]) for row in rows]
        else:
            # Limited only after filtering: messages before the dead letter must not use up the limit.
            most = self._job.max_dead + 1
            places = [tuple(row) for row in self._context.by_ranges(planned, find, _PLACES).limit(most).collect()]
        found = {place: RejectedRecord(place, "behind", BEHIND) for place in places}
        if found:
            self._check_number(state, list(found.values()))
            state.dead |= self._read_whole(planned, found)

    def _read_whole(
        self, planned: OffsetRanges, rejected: Mapping[MessageRef, RejectedRecord]
    ) -> dict[MessageRef, DeadLetter]:
        """Read messages in full. Raises EffectFailed if one is no longer there."""
        narrow: dict[Partition, Range] = {}
        for topic, part in {place[:2] for place in rejected}:
            offsets = [place[2] for place in rejected if place[:2] == (topic, part)]
            narrow[topic, part] = replace(planned.ranges[topic, part], start=min(offsets), end=max(offsets) + 1)
        found: dict[MessageRef, DeadLetter] = {}
        with kept(self._context.reading) as reader:
            for partition, range_ in narrow.items():
                for messages in reader.range(partition, range_):
                    numbers = [n for n, at in enumerate(messages.offsets) if (*partition, at) in rejected]
                    letters = self._context.task_decoder.incoming.letters(messages.only(numbers), rejected.__getitem__)
                    found |= {letter.record.place: letter for letter in letters}
        missing = rejected.keys() - found.keys()
        if missing:
            raise EffectFailed(
                f"{_text(min(missing))} is no longer in Kafka: retention or compaction removed it during the round; "
                "run the job again"
            )
        return found

    def _check_number(self, state: RoundState, more: Sequence[RejectedRecord]) -> None:
        """Raise EffectFailed if too many messages are at fault, and _TooManyBehind if too many wait behind these."""
        most = self._job.max_dead
        records = [*(letter.record for letter in state.dead.values()), *more]
        text = (
            f"more than {most} messages of one round can't be applied (max_dead), for example: {more[0].error}. "
            "Nothing of their partitions was applied; if these messages are to become dead letters, raise max_dead"
        )
        if state.at_fault + _number_at_fault(records) > most or not most:
            raise EffectFailed(text)
        if len(records) + state.behind > most:
            raise _TooManyBehind


def _number_at_fault(records: Iterable[RejectedRecord]) -> int:
    return sum(record.reason != "behind" for record in records)


def _behind_in(
    incoming: Incoming,
    keys: KeysToLetters,
    ranges: Mapping[Partition, Range],
    without: spark.Offsets,
    reader: RangeReader,
    partition: Partition,
) -> Iterator[pa.RecordBatch]:
    """Return the places of a range's messages that come after a dead letter of their key."""
    import pyarrow as pa

    topic, part = partition
    for messages in reader.range(partition, ranges[partition], without.get(partition, ())):
        found = offsets_behind(keys, incoming.chosen(messages))
        parts = pa.array([part] * len(found), pa.int32())
        offsets = pa.array(found, pa.int64())
        yield pa.RecordBatch.from_pydict({"topic": [topic] * len(found), "partition": parts, "offset": offsets})


def _text(place: MessageRef) -> str:
    topic, part, offset = place
    return f"{topic}-{part} offset {offset}"


def _not_deterministic() -> EffectFailed:
    return EffectFailed(
        "a message that does not decode the first time decodes the second time: the job's decoder is not deterministic"
    )


def _behind_failed(letters: Sequence[RetryRecord], failed: Sequence[RejectedRecord]) -> list[RejectedRecord]:
    """Return the letters that come after a failed one of the same key."""
    at = {one.place: one for one in letters}
    first = {record.place: at[record.place] for record in failed}
    found = []
    for one in letters:
        earlier = [other.id for place, other in first.items() if place < one.place and other.same_key(one)]
        if earlier and one.place not in first:
            found.append(RejectedRecord(one.place, "behind", f"behind the dead letter {earlier[0]} of its key"))
    return found
