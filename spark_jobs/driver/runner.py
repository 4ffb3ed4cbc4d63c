"""The driver's loop: plan, read, apply, report; until the end (``once``) or until stopped (``continuous``).

| what happens                       | what follows                                                                    |
|------------------------------------|---------------------------------------------------------------------------------|
| driver dies in a round             | some partitions have moved, others not; the next run reads the database         |
| driver is killed                   | the next one gives what waits to executors: a message may have been the cause   |
| driver is started twice            | the newer takes the group over; the older is fenced at its next transaction     |
| Kafka or Postgres is away          | retried with backoff (``continuous`` for as long as it takes)                   |
| a range holds only markers         | the driver moves the partition on, by the same compare-and-swap                 |
| a message can't be applied         | it becomes a dead letter in the transaction that moves the offsets; see rounds  |
| the effect itself fails            | its partition is rolled back, and the job ends and names it                     |
| a partition has no leader          | ``continuous`` reads the others, and /readyz shows it; ``once`` fails           |
| Kafka lost unread messages         | recorded, and the job ends                                                      |
| the same messages fail again       | smaller and smaller parts are read, until one is known; see poison_search       |
| one of them runs into a time limit | retried forever, as a lock may be the cause; reported with its partition, which |
| each time                          | /readyz, status and an alert show as standing; the other partitions continue    |
| Kafka refuses the credentials      | retried for some minutes, then the job ends                                     |
| another session locks the sink     | waited for, and reported with that session                                      |
| SIGTERM                            | the running round ends, then the loop; while Spark starts: no round begins      |
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

import psycopg

from outbox.consumer.connections import process_name
from outbox.consumer.errors import (
    ConsumerError,
    ConsumerUnavailable,
    CorruptRecords,
    DataLost,
    Interrupted,
    JobError,
    NotAuthorized,
)
from outbox.consumer.kafka_admin import KafkaAdmin, TopicMissing, of_known_topics
from outbox.consumer.losses import find_losses
from outbox.consumer.model import OffsetBounds, Partition, Range, StoredOffset
from outbox.consumer.patience import NoTimeLeft, Patience
from outbox.consumer.postgres_errors import clear_schema_errors
from outbox.consumer.progress import progress
from spark_jobs.dedup.strategies import OffsetsOnly
from spark_jobs.driver.added_partitions import AddedPartitions
from spark_jobs.driver.batch_attempts import BatchAttempts
from spark_jobs.driver.options import Options, Report, Totals
from spark_jobs.driver.partition_attempts import PartitionAttempts
from spark_jobs.driver.planner import halt, limited, new_partitions, next_turn, plan
from spark_jobs.driver.poison_search import SAME, PoisonSearch
from spark_jobs.driver.round_context import Counts, OffsetRanges, RoundContext
from spark_jobs.driver.rounds import Rounds
from spark_jobs.driver.server_wait import wait_for_servers
from spark_jobs.errors import BadMessage, InputCut, WorkerLost
from spark_jobs.job import ConsumerJob
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.lock_monitor import LockMonitor
from spark_jobs.postgres.sink import PostgresSinks
from spark_jobs.spark.errors import first_line
from spark_jobs.task.reader import ReaderSettings, close_kept, poll_kept

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from outbox.consumer.delays import TopicDelays

_IDLE_SECONDS: Final = 0.05
"""How often ``continuous`` asks Kafka for new messages when there were none."""
_LOOK_SECONDS: Final = 1.0
"""How often an idle driver checks the sink: whether the group is still its own, and for dead letters to retry."""
_OF_MESSAGES: Final = (Interrupted, InputCut, WorkerLost, CorruptRecords)
"""Errors that a message may cause although the servers answer."""
_DEADLY: Final = (InputCut, WorkerLost, CorruptRecords)
"""Those of them that end the job if a single message, tried by itself, keeps failing with them."""


class Runner:
    """Runs one job in one Spark session, after it has taken the group over.

    session    or a function that starts it, for ``once``: called when there is something to apply, and before the group
               is taken over. If Spark can't start, the driver that has the group goes on.
    report     called with what happens.
    caught_up  called by ``continuous`` when there was nothing to do, with the monotonic time at which it began to look.
    lagging    called as a round begins, with the next offset of each partition in which messages wait, and
               the partitions that it reads; among both are those without a leader, in which messages may wait.
    delays     where the delays of what is applied are counted.
    """

    def __init__(
        self,
        session: SparkSession | Callable[[], SparkSession],
        job: ConsumerJob,
        options: Options,
        report: Report,
        caught_up: Callable[[float], None] | None = None,
        lagging: Callable[[Mapping[Partition, int], Collection[Partition]], None] | None = None,
        delays: TopicDelays | None = None,
    ) -> None:
        if not job.topics:
            raise JobError(f"topics: the job {job.group} names none; only a job for exactly_once may have none")
        self._session = session
        self._job = job
        self._options = options
        self._report = report
        self._kafka = KafkaAdmin(options.kafka)
        self._store = PostgresGroupStore(options.url, options.schema, job.group, process_name())
        self._generation: int | None = None
        self._turn: list[Partition] | None = None
        self._search = PoisonSearch(options.verdict_seconds)
        self._narrowed = False
        self._refused_since: float | None = None
        self._shown: dict[Partition, int] = {}
        self._row_bytes: dict[str, int] = {}
        self._added = AddedPartitions(self._kafka, self._store, job.topics, report)
        reading = ReaderSettings(dict(options.kafka), job.group)
        sinks = PostgresSinks(job, self._store)
        few, compacted = options.driver_records, self._kafka.compacted
        self._context = RoundContext(session, job, self._store, sinks, reading, few, compacted, delays, options.outbox)
        as_one = job.atomic == "batch"
        attempts = BatchAttempts(self._context, self._store, sinks) if as_one else PartitionAttempts(self._context)
        self._rounds = Rounds(self._context, attempts)
        self._ends: Mapping[Partition, int] = {}
        self._leaderless: set[Partition] = set()
        self._totals = Totals(job.group)
        self._started, self._ended = time.monotonic(), 0.0
        self._patience = Patience(None)
        self._caught_up = caught_up or (lambda _: None)
        self._lagging = lagging or (lambda *_: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = time.monotonic()
        if self._generation is not None:
            # Only a hint: without it the next driver is more careful. A run that has given up does not wait for this.
            with suppress(psycopg.Error, NoTimeLeft), self._patience.attempt():
                self._store.end(self._generation)
        self._store.close()

    @property
    def totals(self) -> Totals:
        seconds = (self._ended or time.monotonic()) - self._started
        return replace(self._totals, seconds=seconds)

    def once(self, stop: threading.Event) -> Totals:
        """Apply everything that is committed in Kafka now. Raises a ConsumerError when that is not possible."""
        targets: Mapping[Partition, OffsetBounds] | None = None

        def step() -> bool:
            nonlocal targets
            if targets is None:
                if callable(self._session) and self._something_waits() and self._start_spark():
                    # That took a while: look again, and whether to stop.
                    return True
                targets = self._look(self._begin())[1]
                self._announce(targets)
            return self._round(targets)

        more = True
        with self._running():
            while more and not stop.is_set():
                more = self._waiting_for_servers(step, stop, self._options.patience)
        return self.totals

    def continuous(self, stop: threading.Event, every: float = 0.0) -> Totals:
        """Apply what comes, until stopped. Waits for servers that are away for as long as it takes.

        every  a round begins no sooner than this many seconds after the one before.
        """
        with self._running():
            while not stop.is_set():
                began = time.monotonic()
                more = self._waiting_for_servers(lambda: self._round(None), stop, None)
                if not more and not (self._leaderless or self._added.waiting) and not stop.is_set():
                    self._caught_up(began)
                if every:
                    self._pause(began + every, stop)
                elif not more:
                    self._idle(stop)
        return self.totals

    def _pause(self, until: float, stop: threading.Event) -> None:
        while (left := until - time.monotonic()) > 0 and not stop.wait(min(left, _LOOK_SECONDS)):
            poll_kept(self._job.group)

    def _idle(self, stop: threading.Event) -> None:
        """Wait for new messages. Returns after a second without any, because there may be dead letters to retry."""
        deadline = time.monotonic() + _LOOK_SECONDS
        while time.monotonic() < deadline and not stop.wait(_IDLE_SECONDS):
            try:
                if self._kafka.ends(self._ends) != self._ends:
                    return
            except (ConsumerUnavailable, NotAuthorized):
                # The next round meets the same error and waits.
                return

    def _begin(self) -> int:
        """Take the group over, once for the life of this runner."""
        if self._generation is None:
            self._store.require_utf8()
            self._store.setup(self._job.setup)
            with clear_schema_errors("taking the group over"):
                self._generation = self._store.take_over(self._job.shown_strategy, self._job.atomic)
            self._report("group taken over", {"group": self._job.group, "generation": self._generation})
            if isinstance(self._job.strategy, OffsetsOnly):
                self._report(
                    "no ids are remembered: what the source repeats is applied again, and so is what is read again "
                    "after `outbox offsets`",
                    {"strategy": "OffsetsOnly"},
                )
        self._store.maintain_days(self._options.keep_days, self._report)
        return self._generation

    def _something_waits(self) -> bool:
        """Return whether there is something to apply, from a look before the group is taken over.

        Also returns False if an error will end the run: it is found again, and recorded, after the take-over.
        """
        try:
            stored, retry_waits = self._store.state(self._job.topics, None, keep_order=self._job.keep_order)
            ids, bounds = self._kafka.look(self._job.topics)
            halt(self._kafka.regrown(stored, bounds), self._job.group)
            chosen = self._chosen_starts(stored, bounds)
            new = new_partitions(stored, bounds, ids, self._job.group, chosen=chosen is not None)
        except (TopicMissing, DataLost, psycopg.ProgrammingError):
            return False
        begins = dict.fromkeys(new, 0) if chosen is None else chosen
        begins |= {partition: here.next_offset for partition, here in stored.items() if partition in bounds}
        return retry_waits or any(bounds[partition].end > offset for partition, offset in begins.items())

    def _start_spark(self) -> bool:
        """Start Spark, if it has not been; the time is no part of the figures. Returns whether it has started now."""
        began = time.monotonic()
        if started := self._context.start_spark():
            self._started += time.monotonic() - began
        return started

    def _announce(self, targets: Mapping[Partition, OffsetBounds]) -> None:
        """Report how many offsets there are to read, transaction markers included."""
        stored = self._store.stored(self._job.topics)
        begins = {partition: there.first for partition, there in targets.items()}
        begins |= self._chosen_starts(stored, targets) or {}
        begins |= {partition: here.next_offset for partition, here in stored.items()}
        waiting = [max(0, there.end - begins[partition]) for partition, there in targets.items()]
        self._report("planned", {"messages": sum(waiting), "partitions": len(waiting)})

    def _round(self, targets: Mapping[Partition, OffsetBounds] | None) -> bool:
        """Apply one round, up to ``targets`` if given. Returns whether there may be more to do."""
        poll_kept(self._job.group)
        generation = self._begin()
        # Read before Kafka's ends, which are then at or beyond the stored offsets.
        stored, retry_waits = self._store.state(self._job.topics, generation, keep_order=self._job.keep_order)
        ids, known = self._look(generation, stored if targets is None else ())
        if self._store.predecessor_did_not_end and not self._context.executors_up_to:
            # Only executors read up to the present log ends: a message there may have crashed that driver.
            ends = {partition: there.end for partition, there in known.items()}
            self._context.executors_up_to = ends | dict.fromkeys(self._leaderless, 2**63)
        stored, ranges = self._plan(generation, stored, ids, known, targets)
        if (ranges or retry_waits) and self._start_spark():
            # This came after the look before the take-over.
            return True
        began = time.monotonic()
        more = False
        if retry_waits:
            try:
                more = self._rounds.retry(generation)
            finally:
                if self._rounds.counts.read:
                    self._count(self._rounds.counts, began)
        if not ranges:
            # Beyond the ends of rounds: a partition may have moved up to the next message, or the log's end.
            reached = {partition: here.next_offset for partition, here in stored.items()}
            further = {one: offset for one, offset in reached.items() if self._shown.get(one, offset) < offset}
            if further:
                self._show_position(further)
            return more
        ranges = self._search.narrowed(ranges)
        # Set before the round, so that a partition that fails does not block those after it.
        self._turn = next_turn(self._turn or (), ranges)
        self._apply(OffsetRanges(ranges, {partition: known[partition].end for partition in ranges}), generation)
        return True

    def _plan(
        self,
        generation: int,
        stored: dict[Partition, StoredOffset],
        ids: Mapping[str, str],
        known: Mapping[Partition, OffsetBounds],
        targets: Mapping[Partition, OffsetBounds] | None,
    ) -> tuple[dict[Partition, StoredOffset], dict[Partition, Range]]:
        """Return the stored offsets, with those of new partitions, which it adds, and the ranges to read."""
        bounds = known
        if targets is not None:
            listed = {partition: there for partition, there in known.items() if partition in targets}
            bounds = limited(listed, {partition: there.end for partition, there in targets.items()}, stored)
        with self._recorded(generation):
            halt(self._kafka.regrown(stored, known), self._job.group)
            chosen = self._chosen_starts(stored, bounds)
            new = new_partitions(stored, bounds, ids, self._job.group, chosen=chosen is not None)
            fresh, limits = self._added.ready(new, stored, bounds, ids, generation, self._leaderless)
            if fresh:
                self._store.add(fresh, ids, generation, chosen)
                if chosen:
                    shown = {f"{topic}-{part}": chosen[topic, part] for topic, part in sorted(fresh)}
                    self._report("the group begins", {"start": self._job.start, "offsets": shown})
                # The others as they were before Kafka was asked: a task that was given up may still move one.
                stored = {**self._store.stored(self._job.topics), **stored}
            if targets is not None:
                # A partition added while ``once`` runs is left to the next run; the ends of this one are fixed.
                stored = {partition: here for partition, here in stored.items() if partition in bounds or fresh}
            self._turn = self._last_read() if self._turn is None else self._turn
            ranges = plan(
                stored,
                limited(bounds, limits, stored),
                ids,
                self._options.max_records,
                self._job.group,
                turn=self._turn,
                row_bytes=self._row_bytes,
                max_bytes=self._options.max_bytes,
            )
            lagging = {
                partition: here.next_offset
                for partition, here in stored.items()
                if partition in self._leaderless or (partition in known and here.next_offset < known[partition].end)
            }
            lagging |= dict.fromkeys((self._leaderless | self._added.waiting) - stored.keys(), 0)
            self._lagging(lagging, ranges.keys() | self._leaderless)
        return stored, ranges

    def _apply(self, planned: OffsetRanges, generation: int) -> None:
        """Apply the ranges of a round, and record the result."""
        began = time.monotonic()
        try:
            counts = self._rounds.apply(planned, generation)
        except BaseException as error:
            # What other partitions have committed stays applied.
            if self._rounds.counts.passed:
                self._note_sizes(self._rounds.counts)
                self._count(self._rounds.counts, began)
            if isinstance(error, ConsumerError):
                self._record_failure(planned.ranges, error)
            raise
        self._search.passed(planned.ranges)
        self._note_sizes(counts)
        self._count(counts, began)
        self._show_position({partition: one.end for partition, one in planned.ranges.items()})

    def _show_position(self, ends: Mapping[Partition, int]) -> None:
        """Show the group's position to Kafka's own tools, without waiting for the answer: nothing reads it back."""
        self._shown |= ends
        self._report_shown(self._kafka.show_lag(self._job.group, ends, seconds=0))

    def _report_shown(self, problem: str | None) -> None:
        """Report why a position could not be shown, which comes with a later call."""
        if problem is not None:
            self._report("the group's position could not be shown to Kafka", {"error": problem})

    def _note_sizes(self, counts: Counts) -> None:
        """Record the average message size of each topic. A large size is remembered for some rounds: more may come."""
        for topic, (offsets, size) in counts.sizes.items():
            if offsets:
                self._row_bytes[topic] = max(size // offsets, self._row_bytes.get(topic, 0) // 2)

    def _record_failure(self, ranges: Mapping[Partition, Range], error: ConsumerError) -> None:
        """Record which ranges failed. Raises BadMessage once a single message is known to be the cause."""
        by_partition = error.by_partition or dict.fromkeys(ranges, error)
        certain = bool(error.by_partition) or len(ranges) == 1
        for partition, why in by_partition.items():
            if not isinstance(why, _OF_MESSAGES) or partition not in ranges:
                continue
            # Without numbers, such as offsets and task ids, which differ each time.
            same = re.sub(r"\d+", "#", f"{type(why).__name__} {first_line(why)}")
            self._narrowed |= self._search.failed({partition: ranges[partition]}, same, certain=certain)
            offset = self._search.found(partition)
            if offset is None:
                continue
            topic, part = partition
            by_itself = (
                f"by itself it failed {SAME} times or more, in {self._options.verdict_seconds:g} s at least, the last "
                f"time with: {first_line(why)}. The group stopped before it; nothing was skipped. `outbox offsets set "
                f"{self._job.group} {topic} {part} {offset + 1} --skip --reason …` skips it"
            )
            if isinstance(why, _DEADLY):
                raise BadMessage(f"{topic}-{part} offset {offset} can't be applied: {by_itself}") from error
            figures = {"topic": topic, "partition": part, "offset": offset, "error": by_itself}
            self._report("a partition stands still", figures)

    def _chosen_starts(
        self, stored: Mapping[Partition, StoredOffset], bounds: Mapping[Partition, OffsetBounds]
    ) -> dict[Partition, int] | None:
        """Return where the partitions of a new group begin, if the job says it; None: at 0, as all later ones do."""
        if self._job.start == "earliest" or stored or not self._store.is_new():
            return None
        latest = self._job.start == "latest"
        return {partition: there.end if latest else there.first for partition, there in bounds.items()}

    def _last_read(self) -> list[Partition]:
        """Return the partitions in the order in which the group's drivers have moved them, the longest ago first.

        Read once; from then on this driver tracks the order itself, whatever the database's clock does.
        """
        with self._store.transaction() as connection:
            rows = progress(connection, self._options.schema, self._job.group)
        moved = {(row["topic"], row["part"]): row["updated_at"] for row in rows if row["topic"] in self._job.topics}
        return sorted(moved, key=lambda partition: (moved[partition], partition))

    def _look(
        self, generation: int, known: Collection[Partition] = ()
    ) -> tuple[Mapping[str, str], Mapping[Partition, OffsetBounds]]:
        """Ask Kafka for the job's topics. A missing topic is a loss if the group has read it.

        known  the group's partitions: those of their topics are left out while they have no leader.
        """
        try:
            found = self._kafka.snapshot(self._job.topics, optional=of_known_topics(known)).require_topics()
        except TopicMissing as error:
            with self._recorded(generation):
                halt(find_losses(self._store.stored(error.topics), {}, {}), self._job.group)
            raise
        self._ends = {partition: there.end for partition, there in found.bounds.items()}
        leaderless = (set(known) - found.bounds.keys()) | found.leaderless
        if leaderless - self._leaderless:
            shown = sorted(f"{topic}-{part}" for topic, part in leaderless)
            self._report("Kafka names no leader of these partitions: they are not read", {"partitions": shown})
        self._leaderless = leaderless
        return found.ids, found.bounds

    @contextmanager
    def _recorded(self, generation: int) -> Iterator[None]:
        try:
            yield
        except DataLost as lost:
            self._store.record_losses(lost.losses, generation)
            raise

    def _count(self, counts: Counts, began: float) -> None:
        """Add a round to the totals and report it."""
        totals = self._totals
        totals.rounds += 1
        totals.read += counts.read
        totals.applied += counts.applied
        totals.duplicates += counts.duplicates
        totals.dead += counts.dead
        seconds = round(time.monotonic() - began, 3)
        self._report("round", {**self.totals.as_dict(), "passed": counts.passed, "round_seconds": seconds})

    def _waiting_for_servers(self, step: Callable[[], bool], stop: threading.Event, patience: float | None) -> bool:
        """Return what a step returns, repeating it while servers are away; False if it was stopped meanwhile."""
        self._patience = Patience(patience)
        self._refused_since = None
        more = wait_for_servers(
            step,
            self._patience,
            self._report,
            then="run the job again",
            stop=stop,
            longest=self._options.max_backoff_seconds,
            progressed=self._progressed,
        )
        return bool(more)

    def _progressed(self, error: Exception) -> bool:
        """Return whether the next round reads less than the one that failed. Raises an error that lasts too long."""
        now = time.monotonic()
        self._refused_since = (self._refused_since or now) if isinstance(error, NotAuthorized) else None
        if self._refused_since is not None and now - self._refused_since > self._options.refused_seconds:
            raise error
        narrowed, self._narrowed = self._narrowed, False
        return narrowed

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Report what blocks the group inside the block; close its readers at the end."""
        with LockMonitor(self._options.url, self._job.group, self._report):
            try:
                yield
            finally:
                close_kept(self._job.group)
        self._report_shown(self._kafka.lag_shown(self._job.group))
