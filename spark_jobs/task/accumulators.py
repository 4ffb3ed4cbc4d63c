"""What tasks return to the driver in Spark's accumulators: the sizes of the ranges that they read, and traces.

A driver that records no span asks for no traces, and a task then looks at no header for them. Tasks need no
OpenTelemetry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.accumulators import Accumulator, AccumulatorParam

from outbox.consumer.model import Partition

if TYPE_CHECKING:
    from pyspark import SparkContext

    from spark_jobs.task.incoming import Incoming, Messages

Sizes = dict[Partition, int]
Trace = tuple[str, str | None]
"""``traceparent`` and ``tracestate``."""


class _Largest(AccumulatorParam[Sizes]):
    """Merges sizes. A range that is read twice counts once."""

    def zero(self, _value: Sizes) -> Sizes:
        return {}

    def addInPlace(self, value1: Sizes, value2: Sizes) -> Sizes:  # noqa: N802  Spark's
        return value1 | {partition: max(size, value1.get(partition, 0)) for partition, size in value2.items()}


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
