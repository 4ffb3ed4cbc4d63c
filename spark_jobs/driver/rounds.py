"""One round: ranges of messages into the sink, whatever is wrong with some of them.

An attempt is one Spark action. It applies what it can, or names what it can't; then the messages that were named are
read once more, whole, and the next attempt of those ranges puts them aside in the transaction that moves the offsets.

| an attempt says   | then                                                                                      |
|-------------------|-------------------------------------------------------------------------------------------|
| applied, already  | the range is done                                                                         |
| nothing           | it held markers only, or all was filtered: the driver steps over it, dead letters and all |
| (no word)         | Spark has dropped the plan, whose rows a transform filters: the same, unless a row of     |
|                   | these ranges does not decode                                                              |
| culprits          | they become dead letters; with keep_order the later messages of their keys do too         |
| roundabout        | again, through ``batch`` instead of straight into the sink's table                        |
| uncopyable        | again, the lenient way, which names culprits                                              |
| fenced, broken    | the job ends, after the others have been counted                                          |
| moved             | a task that the driver had given up on committed after all: the round is planned anew     |
| one of FAILURES   | nothing of the range was applied: the others are counted, then the runner tries again     |
| (Undecoded)       | a row that does not decode stood before a transform: the rows that don't are looked for   |
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from spark_jobs.effects.mapped import Insert, Upsert
from spark_jobs.errors import (
    BadMessage,
    ConsumerError,
    ConsumerUnavailable,
    CorruptRecords,
    EffectFailed,
    Fenced,
    InputCut,
    Interrupted,
    WorkerLost,
    shown,
)
from spark_jobs.job import ConsumerJob
from spark_jobs.letters import LONGEST_ERROR, Letter, Retried, behind
from spark_jobs.model import Partition, Place, Range
from spark_jobs.outcomes import Culprit
from spark_jobs.patience import at_most
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.sink import GroupStore, Sinks
from spark_jobs.spark import errors as failures
from spark_jobs.spark import job_groups
from spark_jobs.spark import rows as spark
from spark_jobs.task import input as task_input
from spark_jobs.task import partition as task
from spark_jobs.task.partition import Late, TaskPlan
from spark_jobs.task.reader import RangeReader, ReaderSettings, TooMuch, kept

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, Row, SparkSession

    from spark_jobs.task.incoming import Incoming, Messages
    from spark_jobs.task.input import TaskInput

    OfRange = Callable[[RangeReader, Partition], Iterator[pa.RecordBatch]]

SUSPECT_ROUNDS: Final = 5
"""Repeats come in bursts: a partition that had one goes the slower way for that many rounds. So does one whose rows
could not go straight into the sink's table."""
RETRIED_AT_ONCE: Final = 100
"""Dead letters in one transaction; the driver holds them whole, so not too many."""
FAILED_ALONE: Final = 3
"""So many dead letters may end the effect in one round, each tried alone: then new messages come first."""
_PLACES: Final = "topic string, partition int, offset long"
_AGAIN: Final = frozenset({"roundabout", "uncopyable", "culprits"})
_ERRORS: Final[dict[str, type[ConsumerError]]] = {
    "fenced": Fenced,
    "broken": EffectFailed,
    "moved": ConsumerUnavailable,
    **task.FAILURES,
}


@dataclass(frozen=True, slots=True)
class Reading:
    """How Kafka is read.

    compacted  says whether messages of these topics may go away between two reads.
    tasks      the settings of the tasks' readers.
    few        up to so many offsets, the driver does a round itself: starting Spark's tasks takes longer than that.
    """

    compacted: Callable[[Sequence[str]], bool]
    tasks: ReaderSettings
    few: int


@dataclass(frozen=True, slots=True)
class Span:
    """The ranges of a round, and for each where Kafka's log ended when it was planned."""

    ranges: Mapping[Partition, Range]
    log_ends: Mapping[Partition, int]

    def only(self, partitions: Iterable[Partition]) -> Span:
        """The same for some of the partitions."""
        wanted = set(partitions)
        return replace(self, ranges={partition: span for partition, span in self.ranges.items() if partition in wanted})


@dataclass(frozen=True, slots=True)
class Told:
    """What an attempt says of a partition; see task.REPORT."""

    outcome: str
    read: int = 0
    fresh: int = 0
    detail: str = ""
    behind: int = 0
    size: int = 0


@dataclass
class Counts:
    """What a round did. read = applied + duplicates + dead, but for what another attempt had applied before.

    left   there may be more dead letters to try again.
    sizes  of each topic the rows that were read, and the bytes that they took.
    """

    read: int = 0
    applied: int = 0
    duplicates: int = 0
    dead: int = 0
    left: bool = False
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class State:
    """What a round knows so far.

    dead      messages that are put aside with their ranges.
    standing  keys of dead letters of earlier rounds, where the tasks themselves put aside what is behind them.
    behind    how many messages they have put aside so.
    lenient   partitions with a value that does not fit its column.
    """

    dead: dict[Place, Letter] = field(default_factory=dict)
    standing: frozenset[tuple[str, bytes]] = frozenset()
    behind: int = 0
    lenient: set[Partition] = field(default_factory=set)
    counts: Counts = field(default_factory=Counts)

    def letters(self, partition: Partition) -> list[Letter]:
        return [letter for place, letter in sorted(self.dead.items()) if place[:2] == partition]

    def put_aside(self) -> dict[Partition, list[int]]:
        """Return the offsets of ``dead``, by partition."""
        offsets: dict[Partition, list[int]] = {}
        for topic, part, offset in sorted(self.dead):
            offsets.setdefault((topic, part), []).append(offset)
        return offsets


class Rounds:
    """Applies rounds, each partition in a transaction of its own, run by an executor."""

    each_alone = True
    """What an attempt says of a partition is true of that one, and not of the whole round."""

    def __init__(
        self, session: SparkSession, job: ConsumerJob, reading: Reading, store: GroupStore, sinks: Sinks
    ) -> None:
        self._session = session
        self._job = job
        self._reading = reading
        self._store = store
        self._sinks = sinks
        self._suspects: dict[Partition, int] = {}
        self._slow: dict[Partition, int] = {}
        self._most_retried = RETRIED_AT_ONCE
        self.not_here: Mapping[Partition, int] = {}
        """Up to these offsets the driver reads nothing itself: a message there may have ended the one before."""

    def apply(self, span: Span, generation: int) -> Counts:
        """Apply the ranges.

        Raises Fenced, EffectFailed, BadMessage and SparkLost, which end the job. Whatever else it raises may pass: the
        classes of task.FAILURES, WorkerLost, and psycopg's errors where the driver's own session fails.
        """
        with failures.understood():
            job_groups.show(self._session, self._job.group, job_groups.described(span.ranges))
            return self._applied(span, generation)

    def _applied(self, span: Span, generation: int) -> Counts:
        state = State()
        self._suspects, self._slow = (
            {partition: left - 1 for partition, left in known.items() if left > 1}
            for known in (self._suspects, self._slow)
        )
        self._sinks.look_again()
        if self._job.keep_order:
            self._stand_behind(state, span, self._store.dead_keys(self._job.topics))
        left = span
        while left.ranges:
            told, culprits = self._try(left, state, generation)
            again = self._settle(left, told, state, culprits, generation)
            if culprits:
                self._put_aside(state, left, culprits)
            left = left.only(again)
        return state.counts

    def retry(self, generation: int) -> Counts:
        """Apply the dead letters that somebody asked to have tried again, in their order, in one transaction.

        Where that ends the effect without a word about which it was, in ever fewer at once. What was dead already must
        not keep the group from its new messages: after a few such letters the others are for the next round.
        """
        with failures.understood():
            job_groups.show(self._session, self._job.group, "dead letters that are tried again")
            return self._retried(generation)

    def _retried(self, generation: int) -> Counts:
        counts = Counts()
        self._sinks.look_again()
        alone = 0
        while True:
            letters = self._store.retried(self._job.topics, self._most_retried, keep_order=self._job.keep_order)
            if not letters:
                self._most_retried = RETRIED_AT_ONCE
                break
            if alone == FAILED_ALONE:
                counts.left = True
                break
            blocked = [
                (one, Culprit(one.place, "behind", "an earlier dead letter of its key still waits"))
                for one in letters
                if one.behind
            ]
            try:
                culprits = blocked or self._retry(letters, generation, counts)
                self._most_retried = min(2 * self._most_retried, RETRIED_AT_ONCE)
            except (EffectFailed, WorkerLost, Interrupted, InputCut) as error:
                if len(letters) > 1:
                    self._most_retried = len(letters) // 2
                    continue
                culprits = [(letters[0], Culprit(letters[0].place, "failed", str(error)))]
                alone += 1
            self._store.failed_again([(one.id, culprit) for one, culprit in culprits], generation)
        return counts

    def _retry(self, letters: Sequence[Retried], generation: int, counts: Counts) -> list[tuple[Retried, Culprit]]:
        """Try dead letters once. Returns those that failed again; when there are none, all of them are settled.

        Raises EffectFailed when nobody knows which it is: then nothing was applied.
        """
        at = {one.place: one for one in letters}
        try:
            with failures.understood():
                told = self._attempt_retry(letters, State(), generation)
                if told.outcome == "uncopyable":
                    told = self._attempt_retry(letters, State(lenient={("", 0)}), generation)
        except failures.Undecoded as error:
            found = self._undecoded(self._letters(letters))
            if not found:
                raise _not_deterministic() from error
        else:
            if told.outcome in _ERRORS:
                raise _ERRORS[told.outcome](told.detail)
            found = task.culprits_from(told.detail) if told.outcome == "culprits" else []
            counts.applied += told.fresh
            counts.duplicates += told.read - told.fresh if not found else 0
            counts.read += told.read if not found else 0
        if self._job.keep_order:
            found = found + _behind(letters, found)
        return [(at[culprit.place], culprit) for culprit in found]

    # What one attempt does.

    @functools.cached_property
    def _late(self) -> Late:
        return spark.late(self._job)

    def _attempt(self, span: Span, state: State, generation: int) -> dict[Partition, Told]:
        if self._late.columns is not None:
            return self._attempt_reading(self._late.columns, span, state, generation)
        source = self._source(span, state.put_aside())
        rows = spark.shaped(source.rows, self._job)
        tasks = source.tasks(rows)
        rows, columns = spark.copyable(rows)
        plan = replace(self._plan(span, state, generation, columns), tasks=tasks)
        applied = spark.in_tasks(rows, lambda batches: task.run(plan, task_input.from_spark(batches)), task.REPORT)
        told = reported(applied.collect())
        dropped = span.only(span.ranges.keys() - told.keys())
        if dropped.ranges:
            self._require_decoded(self._source(dropped, state.put_aside()).rows)
            told |= dict.fromkeys(dropped.ranges, Told("nothing"))
        return told

    def _attempt_reading(
        self, columns: Mapping[str, str], span: Span, state: State, generation: int
    ) -> dict[Partition, Told]:
        """Let each task read its range itself; or, of few messages, do here what the tasks would do.

        Raises ConsumerUnavailable where a task has not reported: nothing else says what became of its range.
        """
        from pyspark.sql import Row

        plan = replace(self._plan(span, state, generation, columns), late=self._late)
        if self._few(span) and (read := self._read_here(plan)) is not None:
            return reported(Row(**row) for row in self._run_here(plan, read))
        told = reported(self._by_ranges(span, functools.partial(task.run_with, plan), task.REPORT).collect())
        silent = sorted(span.ranges.keys() - told.keys())
        if silent and not any(one.outcome in _ERRORS for one in told.values()):
            raise ConsumerUnavailable(f"a task did not report what became of {silent[0]}; the range is read again")
        return told

    def _read_here(self, plan: TaskPlan) -> Mapping[Partition, TaskInput[Messages]] | None:
        """Read the ranges. None where tasks should: the messages are large, or one of several ranges can't be read."""
        try:
            return task.read_here(plan, self._reading.tasks)
        except TooMuch:
            return None
        except (ConsumerUnavailable, CorruptRecords, InputCut):
            if len(plan.ranges) == 1:
                raise
            return None

    @staticmethod
    def _run_here(plan: TaskPlan, read: Mapping[Partition, TaskInput[Messages]]) -> list[dict[str, Any]]:
        """Do what tasks would do. Raises what Spark's errors would be taken for."""
        try:
            return task.run_here(plan, read)
        except Exception as error:
            raise EffectFailed(f"the driver can't run the job: {shown(error)}") from error

    def _few(self, span: Span) -> bool:
        """Return whether a Spark job would cost more than what it does. Functions of the job's own run in executors."""
        return isinstance(self._job.effect, str | Insert | Upsert) and self._short(span)

    def _short(self, span: Span) -> bool:
        """Return whether the driver may read the ranges: few messages, of which none may have ended it before."""
        if any(one.start < self.not_here.get(partition, 0) for partition, one in span.ranges.items()):
            return False
        return sum(one.end - one.start for one in span.ranges.values()) <= self._reading.few

    def _by_ranges(self, span: Span, do: OfRange, schema: str) -> DataFrame:
        """Return what a function makes of each range, one task for each."""
        partitions = sorted(span.ranges)
        run = functools.partial(task.with_reader, do, partitions, self._patient())
        return spark.by_ranges(self._session, len(partitions), run, schema)

    def _patient(self) -> ReaderSettings:
        """Return the tasks' settings, with no more patience than the run has left."""
        settings = self._reading.tasks
        return replace(settings, patience_seconds=at_most(settings.patience_seconds))

    def _letters(self, letters: Sequence[Retried]) -> DataFrame:
        return spark.of_letters(self._session, self._job, self._late, letters).rows

    def _attempt_retry(self, letters: Sequence[Retried], state: State, generation: int) -> Told:
        from pyspark.sql import Row

        rows = spark.shaped(self._letters(letters), self._job)
        spark.require_one_task(rows)
        rows, columns = spark.copyable(rows)
        plan = replace(self._plan(Span({}, {}), state, generation, columns), max_dead=len(letters))
        ids = {one.place: (one.id, one.reason) for one in letters}
        reports = spark.in_tasks(
            rows, lambda batches: task.run_retry(plan, ids, task_input.from_spark(batches)), task.REPORT
        ).collect()
        if not reports:
            # Spark saw that there are no rows: all were filtered, and are settled all the same.
            self._require_decoded(self._letters(letters))
            (made,) = task.run_retry(plan, ids, task_input.in_memory(()))
            reports = [Row(**made.to_pylist()[0])]
        (row,) = reports
        return Told(row.outcome, row.read, row.fresh, row.detail)

    # What all ways of applying share.

    def _plan(self, span: Span, state: State, generation: int, columns: Mapping[str, str]) -> TaskPlan:
        return TaskPlan(
            sink=self._sinks.prepared(columns, generation),
            ranges=dict(span.ranges),
            log_ends=dict(span.log_ends),
            required=self._job.reducing.required,
            max_dead=self._job.max_dead,
            dead={partition: state.letters(partition) for partition in span.ranges if state.letters(partition)},
            behind=self._shares(span, state),
            suspects=frozenset(self._suspects),
            lenient=frozenset(state.lenient),
            slow=frozenset(self._slow),
        )

    def _source(self, span: Span, without: spark.Offsets) -> spark.Source:
        return spark.of_ranges(self._session, self._job, self._late, span.ranges, without, self._patient())

    def _try(self, span: Span, state: State, generation: int) -> tuple[dict[Partition, Told] | None, list[Culprit]]:
        """Return what was told, and the culprits. Nothing is told when a row that does not decode ended the attempt."""
        try:
            with failures.understood():
                told = self._attempt(span, state, generation)
        except failures.Undecoded as error:
            culprits = self._undecoded(self._source(span, state.put_aside()).rows)
            self._raise({}, culprits)
            if not culprits:
                raise _not_deterministic() from error
            return None, culprits
        culprits = []
        for one in told.values():
            if one.outcome == "culprits":
                culprits += task.culprits_from(one.detail)
        return told, culprits

    def _settle(
        self,
        span: Span,
        told: Mapping[Partition, Told] | None,
        state: State,
        culprits: Sequence[Culprit],
        generation: int,
    ) -> list[Partition]:
        """Count what is done; give the partitions that have to be tried again. Raises what ends the job."""
        if told is None:
            return list(span.ranges)
        for partition, one in told.items():
            if one.outcome == "applied":
                self._count(state, partition, one)
        straying = {partition: SUSPECT_ROUNDS for partition, one in told.items() if one.outcome == "roundabout"}
        if straying:
            # Perhaps because the table is another one now.
            self._sinks.look_again()
            self._slow |= straying
        state.lenient |= {partition for partition, one in told.items() if one.outcome == "uncopyable"}
        again = [partition for partition, one in told.items() if one.outcome in _AGAIN]
        empty = [partition for partition, one in told.items() if one.outcome == "nothing"]
        if empty and not any(one.outcome in _ERRORS for one in told.values()):
            self._step_over(span.only(empty), state, generation)
        self._raise(told, culprits)
        return again

    def _raise(self, told: Mapping[Partition, Told], culprits: Sequence[Culprit]) -> None:
        """Raise what an attempt says, fencing first."""
        for outcome, kind in _ERRORS.items():
            for one in told.values():
                if one.outcome == outcome:
                    error = kind(one.detail)
                    if self.each_alone:
                        error.by_partition = {
                            partition: task.FAILURES[each.outcome](each.detail)
                            for partition, each in told.items()
                            if each.outcome in task.FAILURES
                        }
                    raise error
        if culprits and self._job.on_bad == "halt":
            first = min(culprits, key=lambda culprit: culprit.place)
            topic, part, offset = first.place
            raise BadMessage(f"{topic}-{part} offset {offset}: {first.error}")

    def _count(self, state: State, partition: Partition, one: Told) -> None:
        rows, size = state.counts.sizes.get(partition[0], (0, 0))
        state.counts.sizes[partition[0]] = (rows + one.read, size + one.size)
        state.counts.read += one.read + one.behind
        state.counts.dead += one.behind
        state.behind += one.behind
        state.counts.applied += one.fresh
        if one.fresh < one.read:
            state.counts.duplicates += one.read - one.fresh
            self._suspects[partition] = SUSPECT_ROUNDS
        self._count_dead(state, partition)

    def _count_dead(self, state: State, partition: Partition) -> None:
        dead = len(state.letters(partition))
        state.counts.read += dead
        state.counts.dead += dead

    def _step_over(self, span: Span, state: State, generation: int) -> None:
        try:
            task.step_over(self._plan(span, state, generation, {}), list(span.ranges))
        except task.Stop as stop:
            raise _ERRORS[stop.outcome](stop.detail) from stop
        for partition in span.ranges:
            self._count_dead(state, partition)

    # Messages that can't be applied.

    def _undecoded(self, rows: DataFrame) -> list[Culprit]:
        """Find the decoded rows that say why they are none."""
        from pyspark.sql import functions as F  # noqa: N812

        problem = F.substring(PROBLEM, 1, LONGEST_ERROR)
        found = (
            rows.filter(F.col(PROBLEM).isNotNull())
            .select("message_topic", "message_part", "message_offset", problem)
            .limit(self._job.max_dead + 1)
            .collect()
        )
        return [Culprit((row[0], row[1], row[2]), "undecodable", row[3]) for row in found]

    def _require_decoded(self, rows: DataFrame) -> None:
        """Raise Undecoded where rows do not decode that nobody has read, because Spark saw that none gets through.

        With an empty table on the other side of a join, for example, there is nothing left to run.
        """
        if self._undecoded(rows):
            raise failures.Undecoded

    def _put_aside(self, state: State, span: Span, culprits: Sequence[Culprit]) -> None:
        """Read the culprits whole, and with keep_order what comes after them."""
        if any(culprit.place in state.dead for culprit in culprits):
            raise EffectFailed(f"{culprits[0].place} was named again after it had been taken out: {culprits[0].error}")
        self._check_number(state, len(culprits), culprits[0].error)
        letters = self._read_whole(span, {culprit.place: culprit for culprit in culprits})
        state.dead |= letters
        if self._job.keep_order:
            keys: dict[tuple[str, bytes], Place | None] = {}
            for place, letter in sorted(letters.items(), reverse=True):
                # What is behind a standing one its task has named already.
                if letter.key is not None and (place[0], letter.key) not in state.standing:
                    keys[place[0], letter.key] = place
            self._put_behind(state, span, keys)

    def _stand_behind(self, state: State, span: Span, keys: Mapping[tuple[str, bytes], None]) -> None:
        """Put aside what is behind dead letters of earlier rounds; or leave that to tasks that see Kafka's messages."""
        if self._late.columns is None:
            # Spark reads, and a transform must not see these messages: they are looked for beforehand.
            self._put_behind(state, span, keys)
        else:
            state.standing = frozenset(keys)

    def _shares(self, span: Span, state: State) -> task.Behind | None:
        """Return what tasks put aside themselves, and no more over all of them than the round may have."""
        if not state.standing or not span.ranges:
            return None
        by_topic: dict[str, set[bytes]] = {}
        for topic, key in state.standing:
            by_topic.setdefault(topic, set()).add(key)
        left = max(0, self._job.max_dead - len(state.dead) - state.behind)
        return task.Behind(by_topic, left // len(span.ranges))

    def _put_behind(self, state: State, span: Span, keys: Mapping[tuple[str, bytes], Place | None]) -> None:
        """Find the messages of these keys; of one with a place those that come after it."""
        if not keys:
            return
        most = self._job.max_dead + 1
        places: Iterable[Any]
        without = state.put_aside()
        find = functools.partial(_behind_in, self._late.incoming, keys, dict(span.ranges), without)
        if self._short(span):
            with kept(self._reading.tasks) as reader:
                found_here = [
                    zip(*batch.to_pydict().values(), strict=True)
                    for part in span.ranges
                    for batch in find(reader, part)
                ]
            places = itertools.chain.from_iterable(found_here)
        else:
            # Not before: messages in front of the dead letter must not use the limit up.
            places = self._by_ranges(span, find, _PLACES).limit(most).collect()
        found = {place: Culprit(place, "behind", task.BEHIND) for place in map(tuple, places)}
        if found:
            self._check_number(state, len(found), "behind other dead letters")
            state.dead |= self._read_whole(span, found)

    def _read_whole(self, span: Span, culprits: Mapping[Place, Culprit]) -> dict[Place, Letter]:
        """Read messages from Kafka once more, with everything that they consist of."""
        narrow: dict[Partition, Range] = {}
        for topic, part in {place[:2] for place in culprits}:
            offsets = [place[2] for place in culprits if place[:2] == (topic, part)]
            narrow[topic, part] = replace(span.ranges[topic, part], start=min(offsets), end=max(offsets) + 1)
        found: dict[Place, Letter] = {}
        with kept(self._reading.tasks) as reader:
            for partition, range_ in narrow.items():
                for messages in reader.range(partition, range_):
                    numbers = [n for n, at in enumerate(messages.offsets) if (*partition, at) in culprits]
                    for raw in self._late.incoming.raw(messages.only(numbers)):
                        place = (*partition, raw.offset)
                        found[place] = Letter(
                            culprits[place], raw.message_id, raw.key, raw.value, raw.headers, raw.time
                        )
        missing = culprits.keys() - found.keys()
        if missing:
            raise EffectFailed(f"{min(missing)} could be read a moment ago and is gone now")
        return found

    def _check_number(self, state: State, more: int, error: str) -> None:
        if len(state.dead) + state.behind + more > self._job.max_dead:
            raise EffectFailed(
                f"more than {self._job.max_dead} messages of one round can't be applied (max_dead), the last: {error}. "
                "Nothing of their partitions was applied; if these messages are to become dead letters, raise max_dead"
            )


def reported(reports: Iterable[Row]) -> dict[Partition, Told]:
    """Return what an attempt's tasks reported, by partition. Raises EffectFailed when two name one partition."""
    told: dict[Partition, Told] = {}
    for row in reports:
        partition = (row.topic, row.part)
        if partition in told:
            raise EffectFailed(
                f"{row.topic}-{row.part}: two tasks had rows of it, so one of them may have moved its offset over rows "
                "of the other: compare the sink with the topic, and set the group back with `outbox offsets` if need be"
            )
        told[partition] = Told(row.outcome, row.read, row.fresh, row.detail, row.behind, row.size)
    return told


def _behind_in(
    incoming: Incoming,
    keys: Mapping[tuple[str, bytes], Place | None],
    ranges: Mapping[Partition, Range],
    without: spark.Offsets,
    reader: RangeReader,
    partition: Partition,
) -> Iterator[pa.RecordBatch]:
    """Return the places of a range's messages that come after a dead letter of their key."""
    parts = reader.range(partition, ranges[partition], without.get(partition, ()))
    return behind(keys, (incoming.chosen(messages).places() for messages in parts))


def _not_deterministic() -> EffectFailed:
    return EffectFailed(
        "a message that does not decode the first time decodes the second time: the job's decoder is not deterministic"
    )


def _behind(letters: Sequence[Retried], failed: Sequence[Culprit]) -> list[Culprit]:
    """Return the letters that come after one of their key which failed."""
    at = {one.place: one for one in letters}
    first = {culprit.place: at[culprit.place] for culprit in failed}
    found = []
    for one in letters:
        earlier = [other.id for place, other in first.items() if place < one.place and other.same_key(one)]
        if earlier and one.place not in first:
            found.append(Culprit(one.place, "behind", f"behind the dead letter {earlier[0]} of its key"))
    return found
