"""What a database has to do to be a sink: the protocol between rounds, tasks and the database.

A task applies one range of a partition in one transaction, and calls in this order:

    with sink.transaction(where, rows, most=…) as into:
        if not into.move(partition, span, log_end):   # fence, and move the offset
            into.rollback()                           # applied before: nothing is read
        new = into.remember(rows, way)                # take the rows in, without those that were applied before
        into.count(partition, span, …)                # dead letters and figures
        if new:
            into.apply()                              # the effect
                                                      # COMMIT, where the rows were proved to be all of them

Dead letters that are tried again go the same way, with ``hold`` in the place of ``move`` and ``resolve`` in that of
``count``. ``postgres_sink`` implements this for Postgres; tests/integration/test_sink_contract.py is the contract that
every implementation has to pass. What rounds need of the driver's side is ``GroupStore``.

| the sink promises                                 | because otherwise                                               |
|---------------------------------------------------|-----------------------------------------------------------------|
| all of a transaction is committed, or nothing     | an offset without its effect is a loss, the reverse a repeat    |
| no COMMIT without ``rows.require_whole()``        | a part of the range would be committed as the whole             |
| ``move`` compares generation, start and topic id  | a zombie, or a topic that was made anew, would be applied       |
| two transactions that move one offset are serial  | both would apply the range                                      |
| an error means that nothing was committed,        | the driver plans anew from the stored offset, so an unknown     |
| or that the offset says that all of it was        | outcome is read, not guessed                                    |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_jobs.letters import Letter, Retried
    from spark_jobs.model import Partition, Place, Range
    from spark_jobs.outcomes import Culprit, Wish


@dataclass(frozen=True, slots=True)
class Way:
    """How rows are taken in: what earlier attempts have found. A sink with one way only may pass it over.

    repeats   some rows were applied before, probably: a partition that had some lately, or dead letters.
    lenient   an attempt has raised Uncopyable.
    straight  no attempt has raised Roundabout lately.
    """

    repeats: bool = False
    lenient: bool = False
    straight: bool = True


class Whole(Protocol):
    """What a transaction applies, as far as its COMMIT has to know it; see task_input."""

    def require_whole(self) -> None:
        """Raise InputCut unless all of the rows were read."""


class Transaction(Protocol):
    """One transaction of the sink."""

    def move(self, partition: Partition, span: Range, log_end: int | None) -> bool:
        """Move the group's offset from the range's start to its end.

        False when it is at the end or behind it: this generation has applied the range before. Raises Fenced when
        another generation has the group, or the topic is another; Moved when the offset is within the range.

        log_end  where Kafka's log ended when the round was planned; for those who watch.
        """

    def remember(self, rows: Iterable[pa.RecordBatch], way: Way) -> int:
        """Take rows in, leave out what was applied before, and return how many are left.

        What the iterator raises passes through. Raises Culprits for messages that can't be taken in, Broken where no
        message is at fault, Uncopyable and Roundabout for another way.
        """

    def count(
        self, partition: Partition, span: Range, *, read: int, fresh: int, dead: Sequence[Letter], reached: int | None
    ) -> None:
        """Put the partition's dead letters aside, and add to its figures.

        reached  there is no message between the range's end and this offset: the group goes on from there.
        """

    def apply(self) -> None:
        """Run the effect over what was remembered. Raises Culprits or Broken."""

    def rollback(self) -> None:
        """Roll back: nothing is committed, and the end of the transaction asks for no proof."""

    def hold(self, wishes: Mapping[Place, Wish]) -> bool:
        """Lock dead letters that are to be tried again. Raises Fenced.

        False when one is not there any more: it was discarded, or this is a retry of a task after its COMMIT.
        """

    def resolve(self) -> None:
        """Delete the dead letters that were held, with a note of those that are not among the rows any more."""


class Sink(Protocol):
    """What is sent to the tasks of a round: it must be picklable."""

    def transaction(
        self, where: str, rows: Whole, *, most: int, here: bool = False
    ) -> AbstractContextManager[Transaction]:
        """Begin a transaction; COMMIT at the end, ROLLBACK on an error. Errors of the database are ConsumerErrors.

        where  what people read in its errors.
        rows   the proof that COMMIT needs.
        most   more culprits than this, and one more, need not be named.
        here   the driver does it, and not a task.
        """


class Sinks(Protocol):
    """Makes the sink of a round, for one job."""

    def prepared(self, columns: Mapping[str, str], generation: int) -> Sink:
        """Return the sink for rows of these columns, with their types in Postgres; of none, to move offsets only.

        Raises JobError for columns that the job's effect can't take.
        """

    def look_again(self) -> None:
        """Forget what the sink's tables were: somebody may have altered them."""


class GroupStore(Protocol):
    """The driver's side, as far as rounds need it: each call is a transaction of its own."""

    def dead_keys(self, topics: Iterable[str]) -> dict[tuple[str, bytes], None]:
        """Return the keys of the group's dead letters, with their topics."""

    def retried(self, topics: Iterable[str], most: int, *, keep_order: bool) -> list[Retried]:
        """Return dead letters that are to be tried again: those of one partition, in their messages' order."""

    def failed_again(self, failed: Iterable[tuple[int, Culprit]], generation: int) -> None:
        """Count another attempt of dead letters. Raises Fenced."""
