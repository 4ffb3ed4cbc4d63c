"""What tasks return to the driver in Spark's accumulators: the sizes of the ranges that they read, times and traces.

A driver that serves no metrics asks for no times, one that records no span for no traces, and a task then looks at no
header for them. Tasks need neither Prometheus nor OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.accumulators import Accumulator, AccumulatorParam

from outbox.consumer.delays import WrittenAt, sampled, written_at
from outbox.consumer.model import Partition

if TYPE_CHECKING:
    from pyspark import SparkContext

    from spark_jobs.task.incoming import Incoming, Messages

Sizes = dict[Partition, int]
Times = dict[Partition, dict[int, tuple[int, WrittenAt]]]
"""When the events of the batches were written: by the offset of a batch's first message, with that of its last."""
Trace = tuple[str, str | None]
"""``traceparent`` and ``tracestate``."""


class _Largest(AccumulatorParam[Sizes]):
    """Merges sizes. A range that is read twice counts once."""

    def zero(self, _value: Sizes) -> Sizes:
        return {}

    def addInPlace(self, value1: Sizes, value2: Sizes) -> Sizes:  # noqa: N802  Spark's
        return value1 | {partition: max(size, value1.get(partition, 0)) for partition, size in value2.items()}


class _Batches(AccumulatorParam[Times]):
    """Merges the times of batches. A batch that is read twice counts once."""

    def zero(self, _value: Times) -> Times:
        return {}

    def addInPlace(self, value1: Times, value2: Times) -> Times:  # noqa: N802  Spark's
        for partition, batches in value2.items():
            value1.setdefault(partition, {}).update(batches)
        return value1


@dataclass(frozen=True, slots=True)
class _Bounded(AccumulatorParam[list[Trace]]):
    """Merges samples of up to ``most`` distinct traces."""

    most: int

    def zero(self, _value: list[Trace]) -> list[Trace]:
        return []

    def addInPlace(self, value1: list[Trace], value2: list[Trace]) -> list[Trace]:  # noqa: N802  Spark's
        return list(dict.fromkeys([*value1, *value2]))[: self.most]


def read_sizes(context: SparkContext) -> Accumulator[Sizes]:
    """Return an accumulator of how many bytes were read of each partition: of all messages, also of those without rows.

    Use one for all rounds: Spark keeps every accumulator for as long as the driver runs. The same holds for traces.
    """
    return context.accumulator({}, _Largest())


@dataclass(frozen=True, slots=True)
class TimeSample:
    """When the events of a round's messages were written; of large batches a sample."""

    found: Accumulator[Times]

    @staticmethod
    def of(context: SparkContext) -> TimeSample:
        return TimeSample(context.accumulator({}, _Batches()))

    def take(self, messages: Messages, incoming: Incoming) -> None:
        """Add the times of the messages that are selected by their types."""
        if not messages:
            return
        some = sampled(len(messages))
        chosen = incoming.chosen(messages.only(range(len(messages))[some]))
        written = written_at(chosen.headers, some.step)
        times = {messages.offsets[0]: (messages.offsets[-1], written)}
        self.found.add({(messages.topic, messages.part): times})

    def batches(self, partition: Partition) -> Iterator[WrittenAt]:
        """Return the times of a partition's batches, each message once however often its range was read."""
        reached = -1
        for first, (last, written) in sorted(self.found.value.get(partition, {}).items()):
            if first > reached:
                reached = last
                yield written


@dataclass(frozen=True, slots=True)
class TraceSample:
    """Up to ``most`` distinct traces of the messages of a round."""

    found: Accumulator[list[Trace]]
    most: int

    @staticmethod
    def of(context: SparkContext, most: int) -> TraceSample:
        return TraceSample(context.accumulator([], _Bounded(most)), most)

    def take(self, messages: Messages, incoming: Incoming) -> None:
        """Add the traces of the messages that are selected by their types."""
        self.found.add(incoming.chosen(messages).traces(self.most))
