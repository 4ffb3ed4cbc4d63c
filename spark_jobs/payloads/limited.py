"""A size limit around any decoder: a larger payload is a problem and is not decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from spark_jobs.payloads.decoding import PROBLEM, Decoder, Plan, TaskReadable
from spark_jobs.payloads.reading import ManyReader, Problem, Reader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_TOO_LARGE: Final = "outbox_batch_too_large"


@dataclass(frozen=True, slots=True)
class Limited:
    """A decoder for payloads of at most ``most`` bytes."""

    decoder: Decoder
    most: int

    def names(self) -> tuple[str, ...]:
        """Return the decoder's names."""
        return self.decoder.names()

    def decode(self, rows: DataFrame) -> DataFrame:
        """Add the decoder's columns. A payload that is too large is passed to it as a tombstone."""
        from pyspark.sql import functions as F  # noqa: N812  the name everybody knows it by

        size = F.octet_length("value")
        before, after = _problem_text(self.most)
        text = F.concat(F.lit(before), size.cast("string"), F.lit(after))
        rows = rows.withColumns(
            {_TOO_LARGE: F.when(size > self.most, text), "value": F.when(size <= self.most, F.col("value"))}
        )
        decoded = self.decoder.decode(rows)
        return decoded.withColumn(PROBLEM, F.coalesce(F.col(_TOO_LARGE), F.col(PROBLEM))).drop(_TOO_LARGE)

    def task_plan(self) -> tuple[StructType, Plan] | None:
        """Return the decoder's fields and plan; see TaskReadable."""
        found = self.decoder.task_plan() if isinstance(self.decoder, TaskReadable) else None
        return None if found is None else (found[0], _LimitedPlan(found[1], self.most))


@dataclass(frozen=True, slots=True)
class _LimitedPlan:
    plan: Plan
    most: int

    def __call__(self) -> Reader:
        reader = self.plan()
        if isinstance(reader, ManyReader):
            return _LimitedMany(reader, self.most)
        return _LimitedReader(reader, self.most)


class _LimitedReader:
    def __init__(self, reader: Reader, most: int) -> None:
        self._read = reader
        self._most = most

    def __call__(self, value: bytes, header: bytes | None) -> Sequence[Any]:
        if len(value) > self._most:
            before, after = _problem_text(self._most)
            raise Problem(f"{before}{len(value)}{after}")
        return self._read(value, header)


class _LimitedMany(_LimitedReader):
    def __init__(self, reader: ManyReader, most: int) -> None:
        super().__init__(reader, most)
        self._many = reader.many

    def many(self, payloads: pa.Array) -> tuple[Sequence[list[Any] | pa.Array], set[int]]:
        import pyarrow as pa
        import pyarrow.compute as pc

        large = pc.fill_null(pc.greater(pc.binary_length(payloads), self._most), False)
        if not pc.any(large).as_py():
            return self._many(payloads)
        # Large ones are read as tombstones here, and then one by one, which raises their problem.
        found, alone = self._many(pc.if_else(large, pa.scalar(None, payloads.type), payloads))
        return found, alone | set(pc.indices_nonzero(large).to_pylist())


def _problem_text(most: int) -> tuple[str, str]:
    """Return the text of the problem, before and after the payload's size."""
    return "the payload has ", f" bytes, and the job takes {most} at most (max_payload_bytes)"
