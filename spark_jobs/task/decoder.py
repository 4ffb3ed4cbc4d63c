"""The messages that a task has read itself, as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.accumulators import Accumulator

    from outbox.consumer.model import Partition
    from spark_jobs.payloads.reading import Reader
    from spark_jobs.task.accumulators import Sizes, TimeSample, TraceSample
    from spark_jobs.task.incoming import Incoming, Messages


@dataclass(frozen=True, slots=True)
class TaskDecoder:
    """Turns messages that a task has read itself into rows.

    kind      the rows' columns, as an Arrow struct: those of META, of the trace, of the payload, and PROBLEM.
    plan      returns the reader of payloads.
    incoming  selects the messages and makes their columns of META.
    columns   the columns of ``batch`` with their Postgres types, with nested values as JSON text; None if Spark has to
              process the rows first.
    most      the limit of a payload, in bytes: a larger one is not decoded.
    traces    takes a sample of the messages' traces; None if the driver records no span.
    sizes     takes how much is read of each range.
    times     takes when the messages' events were written; None if the driver serves no metrics.
    """

    kind: pa.StructType
    plan: Callable[[], Reader]
    incoming: Incoming
    columns: Mapping[str, str] | None
    most: int
    traces: TraceSample | None = None
    sizes: Accumulator[Sizes] | None = None
    times: TimeSample | None = None

    def note_size(self, partition: Partition, size: int) -> None:
        if self.sizes is not None:
            self.sizes.add({partition: size})

    def copyable(self, parts: Iterable[Messages]) -> Iterator[pa.RecordBatch]:
        """Return the messages' rows in the form that COPY accepts."""
        import pyarrow as pa

        from spark_jobs.payloads.json_output import json_text

        for batch in self.decoding(parts):
            fields = [json_text(one) if pa.types.is_nested(one.type) else one for one in batch.columns]
            yield pa.RecordBatch.from_arrays(fields, names=batch.schema.names)

    def decoding(self, parts: Iterable[Messages]) -> Iterator[pa.RecordBatch]:
        """Return the messages' rows in the form that Spark accepts."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from spark_jobs.payloads.reading import columns, limited

        reader = self.plan()
        names = [kind.name for kind in self.kind]
        for messages in parts:
            if self.traces is not None:
                self.traces.take(messages, self.incoming)
            if self.times is not None:
                self.times.take(messages, self.incoming)
            meta, payloads, schemas, unreadable = self.incoming.taken(messages)
            payloads, large = limited(payloads, self.most)
            problems = pc.coalesce(unreadable, large)
            kinds = list(self.kind)[len(meta) :]
            *fields, problem = columns(reader, payloads, schemas, pa.struct(kinds)).flatten()
            if problems.null_count < len(problems):
                problem = pc.coalesce(problems, problem)
            columns_of_meta = [meta[name] for name in names[: len(meta)]]
            yield pa.RecordBatch.from_arrays([*columns_of_meta, *fields, problem], names=names)
