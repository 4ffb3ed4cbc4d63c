"""The protocol between rounds, tasks and the database: what a sink must implement.

A task applies one range of a partition in one transaction, with these calls in this order:

    with sink.transaction(where, rows, most=…) as into:
        if not into.fence(partition, span):           # lock the offset
            into.rollback()                           # applied before: nothing is read
        new = into.remember(rows, way)                # load the rows, without those that were applied before
        into.move(Move(partition, span, …))           # the offset and its figures, and dead letters
        if new:
            into.apply()                              # the effect
                                                      # COMMIT, once the rows are proved complete

In a small round the driver may apply several ranges so, with rows of all of them: ``fence_all`` takes the place of
``fence``, and ``move`` is called for each inside ``at_once``. After any error each range is applied by itself.

For dead letters that are retried ``hold`` takes the place of ``fence``, and ``resolve`` that of ``move``.
``postgres.sink`` implements this for Postgres; tests/integration/spark_jobs/test_sink_contract.py is the contract that
every implementation must pass. ``GroupStore`` is what rounds need in the driver.

| the sink promises                                 | because otherwise                                               |
|---------------------------------------------------|-----------------------------------------------------------------|
| a transaction commits all or nothing              | an offset without its effect is a loss, the reverse a repeat    |
| no COMMIT without ``rows.require_whole()``        | a part of the range would be committed as the whole             |
| ``fence`` compares generation, start and topic id | a zombie, or a recreated topic, would be applied                |
| two transactions with one offset are serial       | both would apply the range                                      |
| after an error either nothing was committed, or   | the driver plans again from the stored offset, so an unknown    |
| the offset shows that all of it was               | outcome is read, not guessed                                    |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from outbox.consumer.letters import DeadLetter, RetryRecord
    from outbox.consumer.model import MessageRef, Partition, Range, RejectedRecord, RetryRequest, StoredOffset


@dataclass(frozen=True, slots=True)
class Way:
    """How to load rows, from what earlier attempts have found. A sink with only one way may ignore it.

    repeats   some rows were probably applied before: the partition had repeats lately, or these are dead letters.
    lenient   an attempt has raised CopyError.
    straight  no attempt has raised FallbackToBatch lately.
    """

    repeats: bool = False
    lenient: bool = False
    straight: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    """A range that a transaction applies, and its figures.

    log_end  where Kafka's log ended when the round was planned; for monitoring.
    read     how many rows there were, of which ``fresh`` were never applied before.
    dead     the range's messages that become dead letters.
    reached  there is no message between the range's end and this offset: the group continues from there.
    """

    partition: Partition
    span: Range
    log_end: int | None = None
    read: int = 0
    fresh: int = 0
    dead: Sequence[DeadLetter] = ()
    reached: int | None = None


class Whole(Protocol):
    """The proof that a transaction's COMMIT needs; see task.input."""

    def require_whole(self) -> None:
        """Raise InputCut unless all of the rows were read."""


class Transaction(Protocol):
    """One transaction of the sink."""

    def fence(self, partition: Partition, span: Range) -> bool:
        """Lock the group's offset, which must be at the range's start, until the transaction ends.

        Return False if it is already at the end or beyond: this generation has applied the range before. Raises Fenced
        when another generation has the group or the topic is another; OffsetMoved when the offset is within the range.
        """

    def fence_all(self, spans: Mapping[Partition, Range]) -> bool:
        """Lock the group's offsets of several ranges, for one transaction over all of them.

        Return whether each is at its range's start; ``fence`` tells what is the matter with a single one.
        """

    def at_once(self) -> AbstractContextManager[object]:
        """Return a block in which ``move`` is called several times: the sink may send all statements at its end."""

    def remember(self, rows: Iterable[pa.RecordBatch], way: Way) -> int:
        """Load rows, drop those that were applied before, and return how many are left.

        Errors of the iterator pass through. Raises RejectedRecords for messages that can't be loaded, EffectError where
        no message is at fault, CopyError and FallbackToBatch to be called again in another ``way``.
        """

    def move(self, moved: Move) -> None:
        """Move the fenced offset to the range's end, add to its figures, and store the partition's dead letters."""

    def apply(self) -> None:
        """Run the effect over what was remembered. Raises RejectedRecords or EffectError."""

    def rollback(self) -> None:
        """Roll back: nothing is committed, and the end of the transaction needs no proof."""

    def now(self) -> float | None:
        """Return what the sink's clock shows, in seconds since 1970, without asking it; also after the transaction.

        None: not known.
        """

    def hold(self, requests: Mapping[MessageRef, RetryRequest]) -> bool:
        """Lock dead letters to be retried. Raises Fenced.

        Return False when one no longer exists: it was discarded, or this is a retry of a task after its COMMIT.
        """

    def resolve(self) -> None:
        """Delete the dead letters that were held, and record those that are no longer among the rows."""


class Sink(Protocol):
    """The sink as the tasks of a round get it: it must be picklable."""

    def transaction(
        self, where: str, rows: Whole, *, most: int, here: bool = False
    ) -> AbstractContextManager[Transaction]:
        """Begin a transaction; COMMIT at the end, ROLLBACK on an error. Database errors become ConsumerErrors.

        where  what its error texts name.
        rows   the proof that COMMIT needs.
        most   no more than this many rejected messages, and one more, need be found.
        here   the driver runs it, not a task.
        """


class Sinks(Protocol):
    """Creates the sinks of one job's rounds."""

    def prepared(self, columns: Mapping[str, str], generation: int) -> Sink:
        """Return the sink for rows with these columns and Postgres types; without columns it only moves offsets.

        Raises JobError for columns that the job's effect can't use.
        """

    def look_again(self, *, checked: bool = True) -> None:
        """Forget what is known of the sink's tables: they may have been altered.

        checked  also what each transaction compares with the table by itself.
        """


class GroupStore(Protocol):
    """What rounds need in the driver; each call is a transaction of its own."""

    def stored(self, topics: Iterable[str]) -> Mapping[Partition, StoredOffset]:
        """Return the group's offsets in these topics."""

    def dead_keys(self, topics: Iterable[str]) -> dict[tuple[str, bytes], None]:
        """Return the keys of the group's dead letters, with their topics."""

    def retried(self, topics: Iterable[str], most: int, *, keep_order: bool) -> list[RetryRecord]:
        """Return dead letters to be retried: those of one partition, in the order of their messages."""

    def failed_again(self, failed: Iterable[tuple[int, RejectedRecord]], generation: int) -> None:
        """Count another attempt of dead letters. Raises Fenced."""
