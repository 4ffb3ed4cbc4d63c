"""A partition's rows on their way to the transaction: counted, and without those that can't be applied."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from outbox.consumer.errors import LONGEST_ERROR, storable
from outbox.consumer.letters import DeadLetter
from outbox.consumer.model import MessageRef, RejectedRecord, refs_of
from spark_jobs.outcomes import RejectedRecords
from spark_jobs.payloads.decoding import PROBLEM

if TYPE_CHECKING:
    import pyarrow as pa


class Feed:
    """Iterates over a partition's batches: counts the rows, and takes out and names those that can't be applied.

    max_dead  RejectedRecords is raised as soon as there are more of them than this: the rest need not be read.
    behind    messages that are not among the rows, added during the iteration; see Behind. ``share`` of them may be
              put aside without asking the driver.
    """

    def __init__(
        self,
        required: Sequence[str],
        batches: Iterable[pa.RecordBatch],
        max_dead: int,
        behind: Sequence[DeadLetter] = (),
        share: int = 0,
    ) -> None:
        self._required = required
        self._max_dead = max_dead
        self._share = share
        self._batches = batches
        self._found: dict[MessageRef, RejectedRecord] = {}
        self.behind = behind
        self.rows = self.size = 0

    @property
    def found(self) -> list[RejectedRecord]:
        return list(self._found.values())

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            if batch.num_rows:
                yield self._checked(batch)

    def whole(self) -> Iterator[pa.RecordBatch]:
        """Return the batches. Raises RejectedRecords at the end if there are any."""
        yield from self
        more = [letter.record for letter in self.behind] if len(self.behind) > self._share else []
        if found := [*self.found, *more]:
            raise RejectedRecords(found[: self._max_dead + 1])

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
        for row, place in enumerate(refs_of(wrong)):
            if place not in self._found:
                self._found[place] = _at_fault(wrong, row, place, column)
            if len(self._found) > self._max_dead:
                raise RejectedRecords(self.found)


def _at_fault(batch: pa.RecordBatch, row: int, place: MessageRef, name: str) -> RejectedRecord:
    reason, error = "rejected", f"column {name}, which the job's strategy needs, is NULL"
    if name == PROBLEM:
        reason, error = "undecodable", batch.column(PROBLEM)[row].as_py()
    elif name == "message_id":
        reason, error = "no-id", "there is no id: neither a header ce_id nor a header id"
    return RejectedRecord(place, reason, error)


def rejected_text(found: Sequence[RejectedRecord]) -> str:
    """Return rejected messages as the JSON of a report."""
    return json.dumps([[*one.place, one.reason, storable(one.error)[:LONGEST_ERROR], one.sqlstate] for one in found])


def rejected_from(text: str) -> list[RejectedRecord]:
    return [
        RejectedRecord((topic, part, offset), reason, error, sqlstate)
        for topic, part, offset, reason, error, sqlstate in json.loads(text)
    ]
