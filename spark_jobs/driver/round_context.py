"""What rounds of both kinds work with: the group's store, its messages, and the state of the round."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from outbox.consumer import patience
from outbox.consumer.errors import LONGEST_ERROR, ConsumerError, ConsumerUnavailable, EffectFailed, Fenced
from outbox.consumer.letters import DeadLetter, RetryRecord
from outbox.consumer.model import MessageRef, Partition, Range, RejectedRecord, StoredOffset
from spark_jobs.job import ConsumerJob
from spark_jobs.outcomes import RangeOutcome
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.sink import GroupStore, Sinks, Way
from spark_jobs.spark import errors as failures
from spark_jobs.spark import rows as spark
from spark_jobs.task import partition as task
from spark_jobs.task.behind import Behind
from spark_jobs.task.decoder import TaskDecoder
from spark_jobs.task.partition import TaskPlan, TaskResult
from spark_jobs.task.reader import RangeReader, ReaderSettings

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import Accumulator
    from pyspark.sql import DataFrame, SparkSession

    from outbox.consumer.delays import TopicDelays
    from spark_jobs.task.accumulators import Sizes, TimeSample, TraceSample

    OfRange = Callable[[RangeReader, Partition], Iterator[pa.RecordBatch]]

SUSPECT_ROUNDS: Final = 5
"""For how many rounds a partition takes the slower way after it had a repeat, because repeats come in bursts. The same
holds after its rows could not be copied directly into the sink's table, and for all partitions after one transaction
could not have all of a round."""
ENDING: Final[dict[RangeOutcome, type[ConsumerError]]] = {
    RangeOutcome.FENCED: Fenced,
    RangeOutcome.BROKEN: EffectFailed,
    RangeOutcome.MOVED: ConsumerUnavailable,
    **task.FAILURES,
}
"""The outcomes that end a round, and the errors that are raised for them; fencing first."""


@dataclass(frozen=True, slots=True)
class OffsetRanges:
    """The ranges of a round, and for each the end of Kafka's log when the round was planned."""

    ranges: Mapping[Partition, Range]
    log_ends: Mapping[Partition, int]

    def as_one(self, result: TaskResult) -> dict[Partition, TaskResult]:
        """Return one result for all: the first partition reports it, and the others are retried with it."""
        others = dict.fromkeys(self.ranges, TaskResult(RangeOutcome.REJECTED, detail="[]"))
        return others | {min(self.ranges): result}

    def only(self, partitions: Iterable[Partition]) -> OffsetRanges:
        wanted = set(partitions)
        return replace(self, ranges={partition: span for partition, span in self.ranges.items() if partition in wanted})

    def remaining(self, stored: Mapping[Partition, StoredOffset]) -> OffsetRanges:
        """Return the parts of the ranges that are not applied yet."""
        reached = {partition: here.next_offset for partition, here in stored.items()}
        starts = {at: max(span.start, reached.get(at, 0)) for at, span in self.ranges.items()}
        left = {at: replace(span, start=starts[at]) for at, span in self.ranges.items() if starts[at] < span.end}
        return replace(self, ranges=left)

    def first(self, most: int) -> OffsetRanges:
        """Return the beginnings of the ranges, with so many offsets in all."""
        beginnings: dict[Partition, Range] = {}
        by_length = sorted(self.ranges.items(), key=lambda item: (item[1].end - item[1].start, item[0]))
        for number, (partition, span) in enumerate(by_length):
            taken = min(span.end - span.start, -(-most // (len(by_length) - number)))
            if taken:
                beginnings[partition] = replace(span, end=span.start + taken)
            most -= taken
        return replace(self, ranges=beginnings)


@dataclass
class Counts:
    """The figures of a round. read = applied + duplicates + dead, except for ranges that had been applied before.

    passed  by how many offsets the ranges moved, markers included.
    sizes   for each topic, how many offsets were passed, and the bytes of their messages.
    """

    read: int = 0
    applied: int = 0
    duplicates: int = 0
    dead: int = 0
    passed: int = 0
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class RoundState:
    """The state of a round.

    dead       messages that are stored as dead letters with their ranges.
    dead_keys  keys of dead letters of earlier rounds by topic, if the tasks put aside the messages behind them.
    behind     how many messages the tasks have put aside in this way.
    at_fault   how many messages in earlier pieces of the round became dead letters by a fault of their own.
    lenient    partitions with a value that does not fit its column.
    """

    dead: dict[MessageRef, DeadLetter] = field(default_factory=dict)
    dead_keys: Mapping[str, AbstractSet[bytes]] = field(default_factory=dict)
    behind: int = 0
    at_fault: int = 0
    lenient: set[Partition] = field(default_factory=set)
    counts: Counts = field(default_factory=Counts)

    def letters(self, partition: Partition) -> list[DeadLetter]:
        return [letter for place, letter in sorted(self.dead.items()) if place[:2] == partition]

    def dead_offsets(self) -> dict[Partition, list[int]]:
        offsets: dict[Partition, list[int]] = {}
        for topic, part, offset in sorted(self.dead):
            offsets.setdefault((topic, part), []).append(offset)
        return offsets


class RoundContext:
    """What rounds and their attempts share.

    reading    the settings of the tasks' readers.
    few        up to this many offsets, the driver does a round itself: starting Spark's tasks would take longer.
    compacted  returns whether messages of these topics may disappear between two reads.
    delays     where the delays of what is applied are counted, if the driver serves metrics.
    outbox     the outbox's name in spans, if it is given.
    """

    def __init__(
        self,
        session: SparkSession | Callable[[], SparkSession],
        job: ConsumerJob,
        store: GroupStore,
        sinks: Sinks,
        reading: ReaderSettings,
        few: int,
        compacted: Callable[[Sequence[str]], bool] = lambda _: False,
        delays: TopicDelays | None = None,
        outbox: str | None = None,
    ) -> None:
        self._session = session
        self.job = job
        self.store = store
        self.sinks = sinks
        self.reading = reading
        self._few = few
        self.compacted = compacted
        self._delays = delays
        self.outbox = outbox
        self.executors_up_to: Mapping[Partition, int] = {}
        """Before these offsets only executors read: a message there may have killed an earlier driver."""
        self.traces: TraceSample | None = None
        """Where tasks put a sample of the messages' traces, while a round's span is recorded."""
        self._sizes: Accumulator[Sizes] | None = None
        self._times: TimeSample | None = None
        self._suspects: dict[Partition, int] = {}
        self._slow: dict[Partition, int] = {}
        self._apart = 0

    @property
    def session(self) -> SparkSession:
        assert not callable(self._session)
        return self._session

    def start_spark(self) -> bool:
        """Start Spark, if it has not been. Returns whether it has started now."""
        if not callable(self._session):
            return False
        self._session = self._session()
        return True

    @property
    def task_decoder(self) -> TaskDecoder:
        if self._sizes is None:
            # Imported here, because an executor that imports the job's module need not import Spark.
            from spark_jobs.task.accumulators import TimeSample, read_sizes

            self._sizes = read_sizes(self.session.sparkContext)
            self._times = TimeSample.of(self.session.sparkContext) if self._delays is not None else None
        return replace(self._decoder, traces=self.traces, sizes=self._sizes, times=self._times)

    def size_read(self, partition: Partition) -> int:
        """Return how many bytes the tasks of this round have read of a partition."""
        return 0 if self._sizes is None else self._sizes.value.get(partition, 0)

    def forget_times(self) -> None:
        """Forget when the messages of earlier attempts were written."""
        if self._times is not None:
            self._times.found.value = {}

    def note_delays(self, partition: Partition, result: TaskResult) -> None:
        """Count how long the messages of a range took that has been applied, unless all of them were repeats."""
        if self._delays is not None and self._times is not None and result.fresh:
            for written in self._times.batches(partition):
                self._delays.observe(partition[0], written, result.committed)

    @functools.cached_property
    def _decoder(self) -> TaskDecoder:
        return spark.task_decoder(self.job)

    def begin(self) -> None:
        """Begin a round: forget what was suspect or slow some rounds ago, and inspect the sink's table again."""
        self._suspects, self._slow = (
            {partition: left - 1 for partition, left in known.items() if left > 1}
            for known in (self._suspects, self._slow)
        )
        self._apart = max(0, self._apart - 1)
        # Only what takes the straight way is compared with the sink's table by its transaction.
        self.sinks.look_again(checked=bool(self._suspects or self._slow))
        if self._sizes is not None:
            self._sizes.value = {}

    def keep_apart(self) -> None:
        """Apply each range in its own transaction for some rounds: one of them would roll back all others."""
        self._apart = SUSPECT_ROUNDS

    def all_is_well(self, plan: TaskPlan) -> bool:
        """Return whether nothing speaks against one transaction for all ranges of a plan."""
        return not self._apart and all(plan.way(partition) == Way() for partition in plan.ranges)

    @property
    def suspicious(self) -> bool:
        return bool(self._suspects)

    def suspect(self, partition: Partition) -> None:
        self._suspects[partition] = SUSPECT_ROUNDS

    def slow_down(self, partition: Partition) -> None:
        """Send the rows of a partition through ``batch``, and inspect the sink's table again: it may be new."""
        self.sinks.look_again()
        self._slow[partition] = SUSPECT_ROUNDS

    def plan(self, planned: OffsetRanges, state: RoundState, generation: int, columns: Mapping[str, str]) -> TaskPlan:
        return TaskPlan(
            sink=self.sinks.prepared(columns, generation),
            ranges=dict(planned.ranges),
            log_ends=dict(planned.log_ends),
            required=self.job.reducing.required,
            max_dead=self.job.max_dead,
            dead={partition: state.letters(partition) for partition in planned.ranges if state.letters(partition)},
            behind=self._shares(planned, state),
            suspects=frozenset(self._suspects),
            lenient=frozenset(state.lenient),
            slow=frozenset(self._slow),
        )

    def _shares(self, planned: OffsetRanges, state: RoundState) -> Behind | None:
        """Return what each task may put aside by itself: in sum, no more than ``max_dead`` still allows."""
        if not state.dead_keys or not planned.ranges:
            return None
        left = max(0, self.job.max_dead - len(state.dead) - state.behind)
        return Behind(state.dead_keys, left // len(planned.ranges))

    def driver_may_read(self, planned: OffsetRanges) -> bool:
        """Return whether the driver may read the ranges itself: few messages, none that may have killed a driver."""
        if any(one.start < self.executors_up_to.get(partition, 0) for partition, one in planned.ranges.items()):
            return False
        return sum(one.end - one.start for one in planned.ranges.values()) <= self._few

    def source(self, planned: OffsetRanges, without: spark.Offsets) -> spark.Source:
        """Return the ranges' messages as Spark rows, except those at the offsets in ``without``."""
        return spark.of_ranges(self.session, self.job, self.task_decoder, planned.ranges, without, self._patient())

    def letters(self, letters: Sequence[RetryRecord]) -> spark.Source:
        return spark.of_letters(self.session, self.job, self.task_decoder, letters)

    def by_ranges(self, planned: OffsetRanges, do: OfRange, schema: str) -> DataFrame:
        """Return the results of a function for each range, with one task per range."""
        partitions = sorted(planned.ranges)
        run = functools.partial(task.with_reader, do, partitions, self._patient())
        return spark.by_ranges(self.session, len(partitions), run, schema)

    def _patient(self) -> ReaderSettings:
        """Return the tasks' settings, with no more patience than the run has left."""
        return replace(self.reading, patience_seconds=patience.current().longest(self.reading.patience_seconds))

    def undecoded(self, source: spark.Source) -> list[RejectedRecord]:
        from pyspark.sql import functions as F  # noqa: N812

        problem = F.substring(PROBLEM, 1, LONGEST_ERROR)
        found = (
            source.rows.filter(F.col(PROBLEM).isNotNull())
            .select("message_topic", "message_part", "message_offset", problem)
            .limit(self.job.max_dead + 1)
            .collect()
        )
        return [RejectedRecord((row[0], row[1], row[2]), "undecodable", row[3]) for row in found]

    def require_decoded(self, source: spark.Source) -> None:
        """Raise Undecoded if one of these messages does not decode.

        For messages that Spark has not read because it saw that none passes the transform, such as a join with an
        empty table.
        """
        if self.undecoded(source):
            raise failures.Undecoded
