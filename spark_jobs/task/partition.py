"""Apply ranges of Kafka partitions in transactions of the sink: fence, copy, dedup, move, apply, commit.

| function         | where it runs                          | what it applies                                   |
|------------------|----------------------------------------|---------------------------------------------------|
| apply_rows       | a task                                 | rows that Spark has processed                     |
| read_and_apply   | a task, in with_number and with_reader | a range that it reads itself                      |
| apply_all_in_one | the driver, for few messages           | the ranges of read_in_driver, in one transaction  |
| apply_in_driver  | the driver, if that is not possible    | the same, each in its own                         |
| report_retry     | a task                                 | dead letters that are retried, in one transaction |
| apply_retry      | the driver, if Spark runs no task      | the same                                          |
| step_over        | the driver                             | ranges with nothing to apply, in one transaction  |

read_and_apply and apply_in_driver call apply_range for each range; this and apply_rows call _apply_feed, the
transaction of one range. At-most-once a range has two transactions, see postgres/at_most_once.py.

Offsets, ids and counts are written before the effect runs: if the effect's function commits the transaction, which it
must not do, they are committed with it.

| crash point                                          | result                                                       |
|------------------------------------------------------|--------------------------------------------------------------|
| before COMMIT                                        | rolled back; the retry reads the same range                  |
| COMMIT sent, answer lost; or killed right after it   | the retry finds next_offset at or past the end: applied      |
| two attempts at once (speculation, a lost executor)  | the second waits for the offsets row, then finds it moved    |
| the group was taken over meanwhile                   | the generation differs: nothing is written, Fenced           |
| a zombie after the take-over                         | the same; the take-over itself waits for a running COMMIT    |
| a message can't be applied                           | rolled back and named; the driver runs the range without it  |
| something upstream fails: the rows end too early     | InputCut, rolled back; the retry reads the same range        |

A report names at most ``max_dead`` + 1 rejected messages: with that many, the task reads no further.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from outbox.consumer.errors import (
    ConsumerError,
    ConsumerUnavailable,
    CorruptRecords,
    EffectFailed,
    Fenced,
    Interrupted,
    JobError,
    NotAuthorized,
    OffsetMoved,
    shown,
    storable,
)
from outbox.consumer.letters import DeadLetter
from outbox.consumer.model import MessageRef, Partition, Range, RetryRequest
from spark_jobs.errors import InputCut
from spark_jobs.outcomes import CopyError, EffectError, FallbackToBatch, RangeOutcome, RejectedRecords
from spark_jobs.sink import Move, Sink, Way
from spark_jobs.task.behind import Behind
from spark_jobs.task.decoder import TaskDecoder
from spark_jobs.task.feed import Feed, rejected_text
from spark_jobs.task.input import NO_INPUT, TaskInput, from_spark
from spark_jobs.task.reader import RangeReader, ReaderSettings, kept

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_jobs.task.incoming import Messages

_LOG: Final = logging.getLogger(__name__)

REPORT: Final = (
    "topic string, part int, outcome string, read long, fresh long, detail string, behind long, size long, "
    "committed double"
)
"""The columns of a task's report, as Spark DDL: the partition and its TaskResult."""

DEAD_LETTERS: Final[Partition] = ("", 0)
"""Stands for the partition in the plan and report of retried dead letters."""

FAILURES: Final[Mapping[RangeOutcome, type[ConsumerError]]] = {
    RangeOutcome.DENIED: NotAuthorized,
    RangeOutcome.CORRUPT: CorruptRecords,
    RangeOutcome.CUT: InputCut,
    RangeOutcome.INTERRUPTED: Interrupted,
    RangeOutcome.UNAVAILABLE: ConsumerUnavailable,
}
"""The errors for which a range could not be applied this time, by outcome. A subclass is reported as the class here."""

_STOPPING: Final[Mapping[type[Exception], RangeOutcome]] = {
    CopyError: RangeOutcome.COPY_ERROR,
    FallbackToBatch: RangeOutcome.FALLBACK,
    Fenced: RangeOutcome.FENCED,
    OffsetMoved: RangeOutcome.MOVED,
    EffectFailed: RangeOutcome.BROKEN,
    **{kind: outcome for outcome, kind in FAILURES.items()},
}


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task reports to the driver about one partition.

    read, fresh  the number of rows, and of those that were never applied before.
    detail       the rejected messages (see feed.rejected_text), or the text of the error.
    behind       how many messages were put aside instead of applied; see behind.Behind.
    size         the rows' size in memory, in bytes.
    committed    when, by the sink's clock, in seconds since 1970; None if it is not known.
    """

    outcome: RangeOutcome
    read: int = 0
    fresh: int = 0
    detail: str = ""
    behind: int = 0
    size: int = 0
    committed: float | None = None

    def report(self, partition: Partition) -> pa.RecordBatch:
        import pyarrow as pa

        figures = {name: [value] for name, value in asdict(self).items()}
        # With its type, even if it is None.
        figures["committed"] = pa.array(figures["committed"], pa.float64())
        return pa.RecordBatch.from_pydict(
            {"topic": [partition[0]], "part": pa.array([partition[1]], pa.int32()), **figures}
        )


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Everything a task needs, sent to the executors with the code.

    sink      where the rows go.
    ranges    the offsets to apply of each partition.
    log_ends  where Kafka's log ended when the round was planned; for monitoring.
    required  columns that may not be NULL.
    max_dead  a task that finds more rejected messages than this reads no further.
    dead      messages to store as dead letters with the range; they are not among the rows.
    suspects  partitions that had repeats recently.
    lenient   partitions with a value that does not fit its column.
    slow      partitions whose rows could not be copied directly into the sink's table recently.
    decoder   decodes the messages, for a task that reads Kafka and applies what it reads.
    behind    what such a task puts aside in addition to ``dead``: messages that nothing has read before it.
    tasks     the partition of each Spark task, for rows that Spark has processed.
    in_driver  whether the driver does the task's work, in the session that it has.
    """

    sink: Sink
    ranges: Mapping[Partition, Range]
    log_ends: Mapping[Partition, int]
    required: tuple[str, ...]
    max_dead: int
    dead: Mapping[Partition, Sequence[DeadLetter]] = field(default_factory=dict)
    suspects: frozenset[Partition] = frozenset()
    lenient: frozenset[Partition] = frozenset()
    slow: frozenset[Partition] = frozenset()
    decoder: TaskDecoder | None = None
    behind: Behind | None = None
    tasks: Mapping[int, Partition] = field(default_factory=dict)
    in_driver: bool = False

    def partition(self) -> Partition:
        """Return the partition of the current Spark task; or of the range, if there is only one."""
        if len(self.ranges) == 1:
            (partition,) = self.ranges
            return partition
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        return self.tasks[context.partitionId()]

    def without(self, partition: Partition) -> frozenset[int]:
        return frozenset(letter.record.place[2] for letter in self.dead.get(partition, ()))

    def way(self, partition: Partition) -> Way:
        return Way(partition in self.suspects, partition in self.lenient, partition not in self.slow)


class RangeStopped(Exception):
    """Ends the transaction with a report to the driver instead of a retry by Spark."""

    def __init__(self, outcome: RangeOutcome, detail: str) -> None:
        super().__init__(f"{outcome} {detail}")
        self.outcome = outcome
        self.detail = storable(detail)


@functools.cache
def _keep_what_is_loaded(_pid: int) -> None:
    """Keep modules out of garbage collections, once in a process: a forked worker inherits its parent's cache.

    Spark's worker collects after each task, and would look through everything that is imported each time: 80 ms of
    processor time, where the task of a small round takes 10.
    """
    gc.collect()
    gc.freeze()


def in_worker(
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run a function of ``mapInArrow`` in one of our Python workers, which run nothing else."""
    _keep_what_is_loaded(os.getpid())
    return function(batches)


def apply_rows(plan: TaskPlan, batches: TaskInput[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Apply one partition's rows and report; the function of mapInArrow.

    Known failures are reported instead of raised: an error in Spark would end the tasks of all other partitions, and
    carry less information.
    """
    first = next((batch for batch in batches if batch.num_rows), None)
    partition = plan.partition()
    if first is None:
        # The range has only transaction markers, or the transform has filtered all of its rows.
        yield TaskResult(RangeOutcome.EMPTY).report(partition)
        return
    rows = _of_one(partition, (batch for batch in itertools.chain([first], batches) if batch.num_rows))
    yield _apply_feed(plan, partition, Feed(plan.required, rows, plan.max_dead), batches).report(partition)


def with_number(do: Callable[[int], Iterator[pa.RecordBatch]], batches: Iterable[pa.RecordBatch]) -> Iterator[Any]:
    """Call a function with the task's number, its only input; the function of mapInArrow. Raises InputCut."""
    numbers = [number for batch in from_spark(batches) for number in batch.column(0).to_pylist()]
    if len(numbers) != 1:
        raise InputCut(f"a task got {len(numbers)} numbers of ranges instead of one; nothing was committed")
    yield from do(numbers[0])


def read_range(
    decoder: TaskDecoder,
    ranges: Mapping[Partition, Range],
    without: Mapping[Partition, frozenset[int]],
    reader: RangeReader,
    partition: Partition,
) -> Iterator[pa.RecordBatch]:
    """Return the rows of one partition's range, except the messages at the offsets in ``without``.

    Raises the reader's errors. An end without an error means that the reader has proved the range to be complete.
    """
    messages = reader.range(partition, ranges[partition], without[partition])
    yield from decoder.decoding(messages)
    decoder.note_size(partition, messages.size)


def with_reader(
    do: Callable[[RangeReader, Partition], Iterator[pa.RecordBatch]],
    partitions: Sequence[Partition],
    settings: ReaderSettings,
    number: int,
) -> Iterator[pa.RecordBatch]:
    """Call a function with this process's reader and one partition."""
    with kept(settings) as reader:
        yield from do(reader, partitions[number])


def read_and_apply(plan: TaskPlan, reader: RangeReader, partition: Partition) -> Iterator[pa.RecordBatch]:
    """Read a partition's range from Kafka, apply it, and report."""
    messages = reader.range(partition, plan.ranges[partition], plan.without(partition))
    yield apply_range(plan, partition, messages).report(partition)


def read_in_driver(plan: TaskPlan, settings: ReaderSettings) -> dict[Partition, TaskInput[Messages]]:
    """Read all ranges for apply_in_driver. Raises TooMuch."""
    without = {partition: plan.without(partition) for partition in plan.ranges}
    with kept(settings) as reader:
        return reader.whole(plan.ranges, without)


def apply_in_driver(plan: TaskPlan, read: Mapping[Partition, TaskInput[Messages]]) -> dict[Partition, TaskResult]:
    """Do the tasks' work in this process, one range after the other.

    An error that a task would raise is reported as BROKEN: the other ranges are tried, and counted, all the same.
    """
    plan = replace(plan, in_driver=True)
    results: dict[Partition, TaskResult] = {}
    for partition, messages in read.items():
        try:
            results[partition] = apply_range(plan, partition, messages)
        except Exception as error:  # noqa: BLE001  reported, with its trace in the log
            _LOG.warning("%s: the driver can't run the job", _where(plan, partition), exc_info=True)
            why = storable(f"the driver can't run the job: {shown(error)}")
            results[partition] = TaskResult(RangeOutcome.BROKEN, detail=why)
    return results


def apply_range(plan: TaskPlan, partition: Partition, messages: TaskInput[Messages]) -> TaskResult:
    """Apply a partition's range, which the caller reads from Kafka.

    Unlike ``apply_rows``, it also moves the offset over a range without messages, because here their absence is proved.
    """
    assert plan.decoder is not None
    try:
        with stopping(_where(plan, partition)):
            # Before the transaction: Kafka may be slow, and the partition's offset must not be locked meanwhile.
            first = next(messages, None)
    except RangeStopped as stop:
        return TaskResult(stop.outcome, detail=stop.detail)
    parts = messages if first is None else itertools.chain([first], messages)
    result = _apply_feed(plan, partition, _fed(plan, parts), messages)
    plan.decoder.note_size(partition, messages.size)
    return result


def apply_all_in_one(
    plan: TaskPlan, read: Mapping[Partition, TaskInput[Messages]]
) -> dict[Partition, TaskResult] | None:
    """Do the tasks' work in this process, in one transaction for all ranges.

    None if that does not work, whatever the reason: a repeat, a message that can't be applied, a locked offset. Each
    range is then tried by itself, which finds the reason; or finds its range applied, if COMMIT had no answer.
    """
    assert plan.decoder is not None
    spans = {partition: plan.ranges[partition] for partition in sorted(read)}
    feeds = {partition: _fed(plan, read[partition]) for partition in spans}
    where = f"{len(spans)} ranges at once"
    try:
        with stopping(where), plan.sink.transaction(where, _All(read.values()), most=0, here=True) as into:
            fresh = -1
            if into.fence_all(spans):
                # A direct copy ends with this error at a repeat.
                with suppress(FallbackToBatch):
                    fresh = into.remember(itertools.chain.from_iterable(feed.whole() for feed in feeds.values()), Way())
            if fresh != sum(feed.rows for feed in feeds.values()):
                # An error would close the driver's session, and these two are expected: a moved offset, a repeat.
                into.rollback()
                return None
            with into.at_once():
                for partition, feed in feeds.items():
                    into.move(_moved(plan, partition, feed, feed.rows, read[partition]))
            if fresh:
                into.apply()
    except Exception as error:  # noqa: BLE001  found again, and reported, where each range is tried by itself
        _LOG.info("%s could not be applied, so each is applied by itself: %s", where, shown(error))
        return None
    for partition, messages in read.items():
        plan.decoder.note_size(partition, messages.size)
    return {partition: _applied(feed, feed.rows, into.now()) for partition, feed in feeds.items()}


class _All:
    """The proof that several inputs are complete."""

    def __init__(self, inputs: Iterable[TaskInput[Any]]) -> None:
        self._inputs = inputs

    def require_whole(self) -> None:
        for one in self._inputs:
            one.require_whole()


def _fed(plan: TaskPlan, parts: Iterable[Messages]) -> Feed:
    assert plan.decoder is not None
    behind: list[DeadLetter] = []
    rows = plan.decoder.copyable(_ahead(plan, parts, behind))
    return Feed(plan.required, rows, plan.max_dead, behind, 0 if plan.behind is None else plan.behind.share)


def _ahead(plan: TaskPlan, parts: Iterable[Messages], behind: list[DeadLetter]) -> Iterator[Messages]:
    """Return the messages that are not behind a dead letter; add the others to ``behind``. Raises RejectedRecords."""
    assert plan.decoder is not None
    for messages in parts:
        if plan.behind is None:
            yield messages
            continue
        most = plan.max_dead + 1 - len(behind)
        others, more = plan.behind.divided(plan.decoder.incoming.chosen(messages), most, plan.decoder.incoming)
        behind += more
        if len(behind) > plan.max_dead:
            raise RejectedRecords([letter.record for letter in behind])
        yield others


def _apply_feed(plan: TaskPlan, partition: Partition, feed: Feed, source: TaskInput[Any]) -> TaskResult:
    where, span = _where(plan, partition), plan.ranges[partition]
    try:
        with stopping(where), plan.sink.transaction(where, source, most=plan.max_dead, here=plan.in_driver) as into:
            if not into.fence(partition, span):
                # Rolled back, because COMMIT requires that the input was read to its end.
                into.rollback()
                return TaskResult(RangeOutcome.ALREADY, feed.rows, size=feed.size)
            fresh = into.remember(feed.whole(), plan.way(partition))
            into.move(_moved(plan, partition, feed, fresh, source))
            if fresh:
                into.apply()
    except RangeStopped as stop:
        return TaskResult(stop.outcome, feed.rows, detail=stop.detail, size=feed.size)
    return _applied(feed, fresh, into.now())


def _moved(plan: TaskPlan, partition: Partition, feed: Feed, fresh: int, source: TaskInput[Any]) -> Move:
    dead = (*plan.dead.get(partition, ()), *feed.behind)
    span, log_end = plan.ranges[partition], plan.log_ends.get(partition)
    return Move(partition, span, log_end, feed.rows, fresh, dead, source.reached)


def _applied(feed: Feed, fresh: int, committed: float | None) -> TaskResult:
    behind = len(feed.behind)
    return TaskResult(RangeOutcome.APPLIED, feed.rows, fresh, behind=behind, size=feed.size, committed=committed)


def _of_one(partition: Partition, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the batches. Raises EffectError at a row of another partition: the task of that one would miss it."""
    import pyarrow.compute as pc

    for batch in batches:
        for name, value in zip(("message_topic", "message_part"), partition, strict=True):
            column = batch.column(name)
            if column.null_count or not pc.all(pc.equal(column, value)).as_py():
                raise EffectError(
                    f"a row's {name} is not {value}: the transform mixes partitions, and each is a transaction of its "
                    "own; leave the columns that say which message a row is as they are, or declare atomic='batch'"
                )
        yield batch


def report_retry(
    plan: TaskPlan, retried: Mapping[MessageRef, RetryRequest], batches: TaskInput[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Apply dead letters that are retried, all of them in one transaction; the function of mapInArrow.

    retried  the dead letters by their messages' places. Those without a row were filtered; they are resolved too.
    """
    yield apply_retry(plan, retried, batches).report(DEAD_LETTERS)


def apply_retry(
    plan: TaskPlan, retried: Mapping[MessageRef, RetryRequest], batches: TaskInput[pa.RecordBatch]
) -> TaskResult:
    feed = Feed(plan.required, batches, plan.max_dead)
    where = "dead letters"
    try:
        with stopping(where), plan.sink.transaction(where, batches, most=plan.max_dead) as into:
            if not into.hold(retried):
                into.rollback()
                return TaskResult(RangeOutcome.ALREADY)
            fresh = into.remember(feed.whole(), Way(repeats=True, lenient=DEAD_LETTERS in plan.lenient))
            into.resolve()
            if fresh:
                into.apply()
    except RangeStopped as stop:
        return TaskResult(stop.outcome, feed.rows, detail=stop.detail)
    return TaskResult(RangeOutcome.APPLIED, feed.rows, fresh)


def _where(plan: TaskPlan, partition: Partition) -> str:
    span = plan.ranges[partition]
    return f"{partition[0]}-{partition[1]} offsets {span.start} to {span.end - 1}"


@contextmanager
def stopping(where: str) -> Iterator[None]:
    """Turn the known errors that end a transaction into RangeStopped. ``where`` begins the text of the job's errors."""
    try:
        yield
    except RejectedRecords as error:
        raise RangeStopped(RangeOutcome.REJECTED, rejected_text(error.found)) from error
    except (EffectError, JobError) as error:
        raise RangeStopped(RangeOutcome.BROKEN, f"{where}: {error}") from error
    except tuple(_STOPPING) as error:
        outcome = next(outcome for kind, outcome in _STOPPING.items() if isinstance(error, kind))
        raise RangeStopped(outcome, str(error)) from error


def step_over(plan: TaskPlan, partitions: Sequence[Partition]) -> None:
    """Move the offsets over ranges with nothing to apply, and store their dead letters, in one transaction."""
    where = "stepping over what holds nothing to apply"
    with stopping(where), plan.sink.transaction(where, NO_INPUT, most=0, here=True) as into:
        for partition in sorted(partitions):
            span = plan.ranges[partition]
            if into.fence(partition, span):
                dead = plan.dead.get(partition, ())
                into.move(Move(partition, span, plan.log_ends.get(partition), dead=dead))
