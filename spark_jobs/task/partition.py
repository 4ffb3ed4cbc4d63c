"""One Kafka partition, one Postgres transaction: fence, copy, dedup, count, apply, commit.

The books are written before the effect: a function that ends the transaction, which it must not, commits them with it.

| crash point                                          | result                                                       |
|------------------------------------------------------|--------------------------------------------------------------|
| before COMMIT                                        | rolled back; the retry reads the same range                  |
| COMMIT sent, answer lost; or killed right after it   | the retry finds next_offset at or behind end: applied        |
| two attempts at once (speculation, a lost executor)  | the second waits for the offsets row, then finds it moved    |
| the group was taken over meanwhile                   | the generation differs: nothing is written, Fenced           |
| a zombie past the take-over                          | the same; the take-over itself waits for a running COMMIT    |
| a message is at fault                                | rolled back and named; the driver runs the range without it  |
| something upstream fails: the rows end too early     | InputCut, rolled back; the retry reads the same range        |

What a report names is bounded: a partition that has more culprits than ``max_dead`` names one more than that, and reads
no further.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, LiteralString

import psycopg
from psycopg import sql

from spark_jobs import letters
from spark_jobs.dedup.strategies import Book, Place, Strategy
from spark_jobs.driver.planner import Partition, Range
from spark_jobs.errors import (
    ConsumerError,
    ConsumerUnavailable,
    CorruptRecords,
    EffectFailed,
    InputCut,
    Interrupted,
    JobError,
    NotAuthorized,
    storable,
)
from spark_jobs.letters import Letter
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.postgres import connections
from spark_jobs.postgres import lock_monitor as blockers
from spark_jobs.postgres.batch_table import Applying, Broken, Culprit, Culprits, Uncopyable, places_of
from spark_jobs.postgres.direct_copy import Direct, Roundabout
from spark_jobs.spark.errors import of_postgres
from spark_jobs.task.input import NO_INPUT, NoInput, TaskInput
from spark_jobs.task.reader import RangeReader, ReaderSettings, kept

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_jobs.job import PythonEffect
    from spark_jobs.payloads.reading import Reader
    from spark_jobs.task.incoming import Incoming, Messages

REPORT: Final = "topic string, part int, outcome string, read long, size long, fresh long, behind long, detail string"
"""What a task tells the driver, as Spark DDL. ``behind`` are messages that were not applied but put aside (see Behind);
``size`` is what the rows took in memory, in bytes.

outcome: applied, already; fenced, broken (both end the job); moved (plan again); and what makes the driver run the
range once more: roundabout (not straight into the sink's table), uncopyable (needs the lenient way), culprits (detail
names them, as JSON). The others are of FAILURES: another try may work, and the driver decides when."""

FAILURES: Final[Mapping[str, type[ConsumerError]]] = {
    "denied": NotAuthorized,
    "corrupt": CorruptRecords,
    "cut": InputCut,
    "interrupted": Interrupted,
    "unavailable": ConsumerUnavailable,
}
"""Why a range could not be applied this time, by outcome. A subclass is reported as the class that is named here."""

_MOVE: Final = """
UPDATE {offsets} SET next_offset = %(end)s, log_end = %(log_end)s, updated_at = now()
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s
   AND topic_id = %(topic_id)s AND next_offset = %(start)s AND generation = %(generation)s"""
_LOOK: Final = """
SELECT next_offset, generation, topic_id FROM {offsets}
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s"""
_COUNT: Final = """
UPDATE {offsets} SET applied = applied + %(applied)s, duplicates = duplicates + %(duplicates)s, dead = dead + %(dead)s,
       next_offset = greatest(next_offset, %(reached)s), log_end = greatest(log_end, %(reached)s)
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s"""

_KEEPALIVES: Final = (
    "SELECT set_config('tcp_keepalives_idle', '30', true), set_config('tcp_keepalives_interval', '10', true), "
    "set_config('tcp_keepalives_count', '3', true)"
)
_MINE: Final = "SELECT 1 FROM {groups} WHERE grp = %(grp)s AND generation = %(generation)s FOR SHARE"
_HOLD: Final = """
SELECT id FROM {dead_letters} WHERE grp = %(grp)s AND id = ANY(%(ids)s) AND state = 'retry' ORDER BY id FOR UPDATE"""
_RESOLVED: Final = "DELETE FROM {dead_letters} WHERE grp = %(grp)s AND id = ANY(%(ids)s)"


BEHIND: Final = "an earlier message of its key is a dead letter"
"""Why a message is put aside that nothing is the matter with."""

Wish = tuple[int, str]
"""A dead letter that somebody wants tried again: its id, and for which reason it died."""


@dataclass(frozen=True, slots=True)
class Late:
    """How a task makes rows of ``batch`` from messages that it has read itself.

    columns   of ``batch``, with their types in Postgres.
    kind      the payload's fields and PROBLEM, as an Arrow struct.
    plan      gives the reader of payloads.
    incoming  what is taken, and as what.
    """

    columns: Mapping[str, str]
    kind: pa.StructType
    plan: Callable[[], Reader]
    incoming: Incoming

    def decoding(self, parts: Iterable[Messages]) -> Iterator[pa.RecordBatch]:
        """Return the messages' rows, as Spark would have decoded them."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from spark_jobs.payloads.reading import columns

        reader = self.plan()
        for messages in parts:
            found, payloads, headers, problems = self.incoming.taken(messages)
            fields = columns(reader, payloads, headers, self.kind).flatten()
            found |= dict(zip((kind.name for kind in self.kind), fields, strict=True))
            if problems.null_count < len(problems):
                found[PROBLEM] = pc.coalesce(problems, found[PROBLEM])
            yield pa.RecordBatch.from_pydict(found)


@dataclass(frozen=True, slots=True)
class Behind:
    """Which messages go behind a dead letter that stands since an earlier round, with ``keep_order``.

    The task finds them as it reads, and puts them aside in the transaction that applies the others: so the range is
    read once. Its share is what it may put aside by itself; all tasks' shares together are what ``max_dead`` leaves.
    A range with more of them is not applied: they are culprits, and the driver counts them over all partitions.

    keys   of the dead letters, by their topics.
    share  of each range.
    """

    keys: Mapping[str, AbstractSet[bytes]]
    share: int

    def divided(self, messages: Messages, most: int, incoming: Incoming) -> tuple[Messages, list[Letter]]:
        """Return the messages that are not behind, and those that are: at most so many."""
        keys = self.keys.get(messages.topic, frozenset())
        behind = [number for number, key in enumerate(messages.keys) if key in keys]
        if not behind:
            return messages, []
        others = [number for number, key in enumerate(messages.keys) if key not in keys]
        named = [
            Letter(
                Culprit((messages.topic, messages.part, raw.offset), "behind", BEHIND),
                raw.message_id,
                raw.key,
                raw.value,
                raw.headers,
                raw.time,
            )
            for raw in incoming.raw(messages.only(behind[:most]))
        ]
        return messages.only(others), named


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Everything a task needs, sent to the executors with the code.

    columns   of ``batch``, with their types in Postgres.
    required  columns that may not be NULL.
    dead      messages to put aside with the range; they are not among the rows.
    suspects  partitions that had repeats lately: there the fast path would only fail again.
    lenient   partitions with a value that does not fit its column.
    direct    where rows can go straight to; not those of ``suspects``, ``lenient`` and ``slow``.
    slow      partitions that found something the matter on the way straight to it.
    late      how to decode, for a task that reads Kafka itself.
    behind    what such a task puts aside, beside ``dead``: it sees these messages for the first time.
    tasks     which of Spark's tasks has which partition, where a transform could have changed that.
    here      the driver does it itself, on the session that it has.
    """

    url: str = field(repr=False)
    schema: str
    group: str
    generation: int
    ranges: Mapping[Partition, Range]
    log_ends: Mapping[Partition, int]
    columns: Mapping[str, str]
    effect: str | PythonEffect
    strategy: Strategy
    bisect: bool
    max_dead: int
    dead: Mapping[Partition, Sequence[Letter]] = field(default_factory=dict)
    suspects: frozenset[Partition] = frozenset()
    lenient: frozenset[Partition] = frozenset()
    late: Late | None = None
    behind: Behind | None = None
    direct: Direct | None = None
    slow: frozenset[Partition] = frozenset()
    tasks: Mapping[int, Partition] = field(default_factory=dict)
    here: bool = False

    @property
    def session(self) -> str:
        """The name of the session in which the plan is carried out."""
        driver, consumer = blockers.names(self.group)
        return driver if self.here else consumer

    @property
    def required(self) -> tuple[str, ...]:
        """Columns that may not be NULL."""
        return self.strategy.required

    @property
    def book(self) -> Book:
        """Where the group's ids are remembered."""
        return Book(self.schema, self.group)

    def without(self, partition: Partition) -> frozenset[int]:
        """Return the offsets of the messages that are put aside."""
        return frozenset(letter.culprit.place[2] for letter in self.dead.get(partition, ()))

    def direct_for(self, partition: Partition) -> Direct | None:
        """Return where a partition's rows can go straight to."""
        return None if partition in self.suspects | self.lenient | self.slow else self.direct

    def applying(self, cursor: psycopg.Cursor[Any]) -> Applying:
        """Begin with an empty ``batch``."""
        return Applying(
            cursor,
            self.book,
            self.columns,
            self.strategy,
            self.effect,
            bisect=self.bisect,
            max_dead=self.max_dead,
        )


class Stop(Exception):
    """Ends the transaction with a report to the driver instead of a retry by Spark."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = storable(detail)


def run(plan: TaskPlan, batches: TaskInput[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Be the function of mapInArrow: take one partition's rows, apply them, report.

    Failures are reported and not raised, as far as they are understood here: an error of Spark's would end the tasks of
    all other partitions, and say less.
    """
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        # No rows: the partition's range held only transaction markers, or all was filtered. The driver moves it on.
        return
    named = ("message_topic", "message_part")
    topic, part = (first.column(name)[0].as_py() for name in named)
    partition = _mine(plan) or (topic, part)
    rows = _of_one(partition, named, (batch for batch in itertools.chain([first], batches) if batch.num_rows))
    yield _run(plan, partition, Feed(plan.required, rows, plan.max_dead), batches)


def run_with(plan: TaskPlan, reader: RangeReader, partition: Partition) -> Iterator[pa.RecordBatch]:
    """Read a partition's range from Kafka, apply it, report."""
    yield run_range(plan, partition, reader.range(partition, plan.ranges[partition], plan.without(partition)))


def read_here(plan: TaskPlan, settings: ReaderSettings) -> dict[Partition, TaskInput[Messages]]:
    """Read all ranges, for run_here. Raises TooMuch."""
    without = {partition: plan.without(partition) for partition in plan.ranges}
    with kept(settings) as reader:
        return reader.whole(plan.ranges, without)


def run_here(plan: TaskPlan, read: Mapping[Partition, TaskInput[Messages]]) -> list[dict[str, Any]]:
    """Do what tasks would do, one range after the other, and return the rows of REPORT.

    Raises the first error when all have been tried: one range must not hold the others up.
    """
    plan = replace(plan, here=True)
    rows: list[dict[str, Any]] = []
    errors: list[Exception] = []
    for partition, messages in read.items():
        try:
            rows += run_range(plan, partition, messages).to_pylist()
        except Exception as error:  # noqa: BLE001  raised below
            errors.append(error)
    if errors:
        raise errors[0]
    return rows


def run_range(plan: TaskPlan, partition: Partition, messages: TaskInput[Messages]) -> pa.RecordBatch:
    """Apply a partition's range, read from Kafka by the caller, and return the report.

    Unlike ``run`` it moves the offset over a range without any message too: that there is none is proved here.
    """
    assert plan.late is not None
    try:
        with stopping(_where(plan, partition)):
            # Before the transaction: Kafka may make it wait, and the partition's offset must not be locked meanwhile.
            first = next(messages, None)
    except Stop as stop:
        return report(partition, stop.outcome, 0, 0, stop.detail)
    parts = messages if first is None else itertools.chain([first], messages)
    aside: list[Letter] = []
    rows = plan.late.decoding(_ahead(plan, parts, aside))
    share = 0 if plan.behind is None else plan.behind.share
    return _run(plan, partition, Feed(plan.required, rows, plan.max_dead, aside, share), messages)


def _ahead(plan: TaskPlan, parts: Iterable[Messages], aside: list[Letter]) -> Iterator[Messages]:
    """Return the messages that no dead letter stands before, and add the others to ``aside``. Raises Culprits."""
    assert plan.late is not None
    for messages in parts:
        if plan.behind is None:
            yield messages
            continue
        most = plan.max_dead + 1 - len(aside)
        taken, behind = plan.behind.divided(plan.late.incoming.chosen(messages), most, plan.late.incoming)
        aside += behind
        if len(aside) > plan.max_dead:
            raise Culprits([letter.culprit for letter in aside])
        yield taken


def _run(plan: TaskPlan, partition: Partition, feed: Feed, source: TaskInput[Any]) -> pa.RecordBatch:
    outcome, fresh, detail = "applied", 0, ""
    try:
        applied = _apply(plan, partition, feed, source)
        if applied is None:
            outcome = "already"
        else:
            fresh = applied
    except Stop as stop:
        outcome, detail = stop.outcome, stop.detail
    behind = len(feed.aside) if outcome == "applied" else 0
    return report(partition, outcome, feed.rows, fresh, detail, behind=behind, size=feed.size)


def _mine(plan: TaskPlan) -> Partition | None:
    """Return the partition that this task of Spark's reads; None where it is certain without."""
    if not plan.tasks:
        return None
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return plan.tasks[context.partitionId()]


def _of_one(partition: Partition, names: Sequence[str], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the batches. Raises Broken at a row of another partition, whose own task would find itself without it."""
    import pyarrow.compute as pc

    for batch in batches:
        for name, value in zip(names, partition, strict=True):
            column = batch.column(name)
            if column.null_count or not pc.all(pc.equal(column, value)).as_py():
                raise Broken(
                    f"a row's {name} is not {value}: the transform mixes partitions, and each is a transaction of its "
                    "own; leave the columns that say which message a row is as they are, or declare atomic='batch'"
                )
        yield batch


def run_retry(
    plan: TaskPlan, retried: Mapping[Place, Wish], batches: TaskInput[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Be the function of mapInArrow for dead letters that are tried again: all of them in one transaction.

    retried  the dead letters by their messages' places. Those without a row were filtered: they are settled too.
    """
    feed = Feed(plan.required, batches, plan.max_dead)
    outcome, fresh, detail = "applied", 0, ""
    try:
        fresh = _apply_retried(plan, retried, feed, batches)
    except Stop as stop:
        outcome, detail = stop.outcome, stop.detail
    yield report(("", 0), outcome, feed.rows, fresh, detail)


def report(
    partition: Partition, outcome: str, read: int, fresh: int, detail: str, *, behind: int = 0, size: int = 0
) -> pa.RecordBatch:
    """Return a row of REPORT."""
    import pyarrow as pa

    return pa.RecordBatch.from_pydict(
        {
            "topic": [partition[0]],
            "part": pa.array([partition[1]], pa.int32()),
            "outcome": [outcome],
            "read": pa.array([read], pa.int64()),
            "size": pa.array([size], pa.int64()),
            "fresh": pa.array([fresh], pa.int64()),
            "behind": pa.array([behind], pa.int64()),
            "detail": [detail],
        }
    )


class Feed:
    """The partition's batches as they go by: counted, and without the rows that can't be applied; those are named.

    max_dead  as soon as there are more of these than that, Culprits is raised: what follows need not be read.
    aside     messages that are not among the rows, filled as the batches go by; see Behind. ``share`` of them may be
              put aside without asking.
    """

    def __init__(
        self,
        required: Sequence[str],
        batches: Iterable[pa.RecordBatch],
        max_dead: int,
        aside: Sequence[Letter] = (),
        share: int = 0,
    ) -> None:
        self._required = required
        self._max_dead = max_dead
        self._share = share
        self._batches = batches
        self._found: dict[Place, Culprit] = {}
        self.aside = aside
        self.rows = self.size = 0

    @property
    def found(self) -> list[Culprit]:
        """The messages that can't be applied."""
        return list(self._found.values())

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            if batch.num_rows:
                yield self._checked(batch)

    def close(self) -> None:
        """Raise Culprits when there are any."""
        more = [letter.culprit for letter in self.aside] if len(self.aside) > self._share else []
        if found := [*self.found, *more]:
            raise Culprits(found[: self._max_dead + 1])

    def _checked(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow as pa
        import pyarrow.compute as pc

        self.rows += batch.num_rows
        self.size += batch.nbytes
        for name in (PROBLEM, *self._required):
            if name not in batch.schema.names:
                continue
            column = batch.column(name)
            wrong = column.is_valid() if name == PROBLEM else column.is_null()
            if name not in {PROBLEM, "message_id"}:
                # A tombstone has no payload to take a key or a version from.
                wrong = pc.and_not(wrong, batch.column("message_tombstone"))
            if not wrong.true_count:
                continue
            self._name(batch.filter(wrong), name)
            batch = batch.filter(pc.invert(wrong))
        assert isinstance(batch, pa.RecordBatch)
        return batch

    def _name(self, wrong: pa.RecordBatch, column: str) -> None:
        for row, place in enumerate(places_of(wrong)):
            if place not in self._found:
                self._found[place] = _at_fault(wrong, row, place, column)
            if len(self._found) > self._max_dead:
                raise Culprits(self.found)


def _at_fault(batch: pa.RecordBatch, row: int, place: Place, name: str) -> Culprit:
    reason, error = "rejected", f"column {name}, which the job's strategy needs, is NULL"
    if name == PROBLEM:
        reason, error = "undecodable", batch.column(PROBLEM)[row].as_py()
    elif name == "message_id":
        reason, error = "no-id", "there is no id: neither a header ce_id nor a header id"
    return Culprit(place, reason, error)


def culprits_text(found: Sequence[Culprit]) -> str:
    """Return culprits as the JSON of a report."""
    return json.dumps(
        [[*one.place, one.reason, storable(one.error)[: letters.LONGEST_ERROR], one.sqlstate] for one in found]
    )


def culprits_from(text: str) -> list[Culprit]:
    """Read what ``culprits_text`` wrote."""
    return [
        Culprit((topic, part, offset), reason, error, sqlstate)
        for topic, part, offset, reason, error, sqlstate in json.loads(text)
    ]


def _where(plan: TaskPlan, partition: Partition) -> str:
    span = plan.ranges[partition]
    return f"{partition[0]}-{partition[1]} offsets {span.start} to {span.end - 1}"


def _apply(plan: TaskPlan, partition: Partition, feed: Feed, batches: TaskInput[Any]) -> int | None:
    """Apply a partition's rows. Gives the number of fresh ones, None when the range was applied before."""
    with stopping(_where(plan, partition)), transaction(plan.url, plan.session, batches) as cursor:
        if not move(cursor, plan, partition):
            # Not committed, because the input is not read.
            cursor.connection.rollback()
            return None
        direct = plan.direct_for(partition)
        if direct is None:
            return _apply_batch(cursor, plan, partition, feed, batches)
        fresh = direct.apply(cursor, plan.book, plan.strategy, feed)
        feed.close()
        settle(cursor, plan, partition, read=feed.rows, fresh=fresh, aside=feed.aside, reached=batches.reached)
    return fresh


def _apply_batch(
    cursor: psycopg.Cursor[Any], plan: TaskPlan, partition: Partition, feed: Feed, batches: TaskInput[Any]
) -> int:
    """Apply rows through ``batch``, and count them. Gives the number of fresh ones."""
    applying = plan.applying(cursor)
    if partition in plan.lenient:
        applying.copy_leniently(feed)
    else:
        applying.copy(feed)
    feed.close()
    applying.reduce(suspect=partition in plan.suspects)
    fresh = applying.count()
    settle(cursor, plan, partition, read=feed.rows, fresh=fresh, aside=feed.aside, reached=batches.reached)
    if fresh:
        applying.apply()
    return fresh


def _apply_retried(plan: TaskPlan, retried: Mapping[Place, Wish], feed: Feed, batches: TaskInput[Any]) -> int:
    """Apply dead letters. Gives the number of fresh rows; the rest had been applied before."""
    with stopping("dead letters"), transaction(plan.url, plan.session, batches) as cursor:
        if not hold(cursor, plan, retried):
            cursor.connection.rollback()
            return 0
        applying = plan.applying(cursor)
        if plan.lenient:
            applying.copy_leniently(feed)
        else:
            applying.copy(feed)
        feed.close()
        taken = applying.places()
        applying.reduce(suspect=True, forgiven=forgiven(retried))
        fresh = applying.per_partition()
        resolve(cursor, plan, retried, fresh, taken)
        if fresh:
            applying.apply()
    return sum(fresh.values())


def forgiven(retried: Mapping[Place, Wish]) -> frozenset[Place]:
    """Return the messages that were too old, and that a person wants applied all the same."""
    return frozenset(place for place, (_, reason) in retried.items() if reason == "too-old")


def hold(cursor: psycopg.Cursor[Any], plan: TaskPlan, retried: Mapping[Place, Wish]) -> bool:
    """Lock dead letters that are to be tried again. False when one is not there any more; Stop when fenced.

    It was discarded meanwhile, or this is a retry of a task after its COMMIT: the driver looks again.
    """
    if not _on_letters(cursor, plan, _MINE, retried).fetchone():
        raise Stop("fenced", f"group {plan.group} was taken over from generation {plan.generation}")
    return _on_letters(cursor, plan, _HOLD, retried).rowcount == len(retried)


def resolve(
    cursor: psycopg.Cursor[Any],
    plan: TaskPlan,
    retried: Mapping[Place, Wish],
    fresh: Mapping[Partition, int],
    taken: AbstractSet[Place],
) -> None:
    """Delete dead letters whose effect goes into the sink with this transaction, and count them.

    taken  those that the job has not left out. For the others there is no effect, and a note in ``audit``.
    """
    if left_out := [number for place, (number, _) in retried.items() if place not in taken]:
        letters.leave_out(cursor, plan.schema, plan.group, left_out)
    _on_letters(cursor, plan, _RESOLVED, retried)
    for (topic, part), applied in sorted(fresh.items()):
        counts = {"grp": plan.group, "topic": topic, "part": part, "applied": applied, "duplicates": 0, "dead": 0}
        counts["reached"] = None
        _on_offsets(cursor, plan, _COUNT, counts)


def _on_letters(
    cursor: psycopg.Cursor[Any], plan: TaskPlan, query: LiteralString, retried: Mapping[Place, Wish]
) -> psycopg.Cursor[Any]:
    names = {name: sql.Identifier(plan.schema, name) for name in ("groups", "dead_letters")}
    values = {"grp": plan.group, "generation": plan.generation, "ids": sorted(number for number, _ in retried.values())}
    return cursor.execute(sql.SQL(query).format(**names), values)


@contextmanager
def transaction(url: str, name: str, batches: TaskInput[Any] | NoInput) -> Iterator[psycopg.Cursor[Any]]:
    """Begin a transaction and give a cursor; COMMIT at the end, ROLLBACK on an error.

    The session stays open for this process's next transaction, without anything that an effect may have left in it.

    batches  what the transaction applies. Raises InputCut instead of COMMIT where nothing proves that they were all of
             the task's rows. A transaction that was rolled back by the caller needs no proof.

    Where this machine vanishes, the server ends the transaction within a minute instead of after its default of two
    hours: until then the offsets' rows would stay locked, and a take-over would wait for them.
    """
    with connections.transaction(url, name, reset=True) as connection:
        cursor = connection.cursor()
        cursor.execute(_KEEPALIVES)
        yield cursor
        if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            batches.require_whole()


class stopping:  # noqa: N801  reads as what it does
    """Turns what ends a transaction into a Stop, where it is understood. ``where`` begins what people read."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Culprits):
            raise Stop("culprits", culprits_text(error.found)) from error
        if isinstance(error, Uncopyable):
            raise Stop("uncopyable", "") from error
        if isinstance(error, Roundabout):
            raise Stop("roundabout", "") from error
        if isinstance(error, Broken | JobError):
            raise Stop("broken", f"{self._where}: {error}") from error
        failure: BaseException | None = error
        if isinstance(error, psycopg.Error):
            failure = of_postgres(error, self._where)
            if isinstance(failure, EffectFailed):
                raise Stop("broken", str(failure)) from error
        for outcome, failing in FAILURES.items():
            if isinstance(failure, failing):
                raise Stop(outcome, str(failure)) from error


def move(cursor: psycopg.Cursor[Any], plan: TaskPlan, partition: Partition) -> bool:
    """Move the group's offset over the range. False when this generation has done so before; Stop when fenced."""
    span = plan.ranges[partition]
    values = {
        "grp": plan.group,
        "topic": partition[0],
        "part": partition[1],
        "topic_id": span.topic_id,
        "start": span.start,
        "end": span.end,
        "log_end": plan.log_ends.get(partition),
        "generation": plan.generation,
    }
    if _on_offsets(cursor, plan, _MOVE, values).rowcount:
        return True
    row = _on_offsets(cursor, plan, _LOOK, values).fetchone()
    if row is not None and row[0] >= span.end and row[1:] == (plan.generation, span.topic_id):
        # At its end, or where the next message is; or a task that the driver had given up on had more to read.
        return False
    if row is not None and row[0] > span.start and row[1:] == (plan.generation, span.topic_id):
        # A task that the driver had given up on, because another one failed, has committed a shorter range meanwhile.
        raise Stop("moved", f"{partition[0]}-{partition[1]} has moved to offset {row[0]} since the round was planned")
    now = "its row is gone" if row is None else f"it stands at offset {row[0]} in generation {row[1]}"
    raise Stop(
        "fenced",
        f"group {plan.group} was taken over from generation {plan.generation}: {partition[0]}-{partition[1]} offsets "
        f"{span.start} to {span.end - 1}, {now}",
    )


def settle(
    cursor: psycopg.Cursor[Any],
    plan: TaskPlan,
    partition: Partition,
    *,
    read: int,
    fresh: int,
    aside: Sequence[Letter] = (),
    reached: int | None = None,
) -> None:
    """Put the partition's dead letters aside, the plan's and those ``aside``, and count.

    reached  there is no message between the range's end and this offset: the group goes on from there.
    """
    span = plan.ranges[partition]
    put = (*plan.dead.get(partition, ()), *aside)
    dead = letters.write(cursor, plan.schema, plan.group, span.topic_id, put)
    values = {"grp": plan.group, "topic": partition[0], "part": partition[1]}
    counts = {"applied": fresh, "duplicates": read - fresh, "dead": dead, "reached": reached}
    _on_offsets(cursor, plan, _COUNT, values | counts)


def step_over(plan: TaskPlan, partitions: Sequence[Partition]) -> None:
    """Move over ranges in which there was nothing to apply, in one transaction; their dead letters go aside with it."""
    with transaction(plan.url, f"outbox driver {plan.group}", NO_INPUT) as cursor:
        for partition in sorted(partitions):
            if move(cursor, plan, partition):
                settle(cursor, plan, partition, read=0, fresh=0)


def _on_offsets(
    cursor: psycopg.Cursor[Any], plan: TaskPlan, query: LiteralString, values: Mapping[str, Any]
) -> psycopg.Cursor[Any]:
    return cursor.execute(sql.SQL(query).format(offsets=sql.Identifier(plan.schema, "offsets")), values)
