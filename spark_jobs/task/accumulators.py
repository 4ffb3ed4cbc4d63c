"""What tasks return to the driver in Spark's accumulators: the sizes of the ranges that they read, times and traces.

A driver that serves no metrics asks for no times, one that records no span for no traces, and a task then looks at no
header for them. Tasks need neither Prometheus nor OpenTelemetry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pyspark.accumulators import Accumulator, AccumulatorParam

from outbox.consumer.delays import WrittenAt, sampled, written_at
from outbox.consumer.model import Partition

if TYPE_CHECKING:
    from pyspark import SparkContext

    from spark_jobs.task.incoming import Incoming, Messages

T = TypeVar("T")

Sizes = dict[Partition, int]
Times = dict[Partition, dict[int, tuple[int, WrittenAt]]]
"""When the events of the batches were written: by the offset of a batch's first message, with that of its last."""
Trace = tuple[str, str | None]
"""``traceparent`` and ``tracestate``."""


@dataclass(frozen=True, slots=True)
class _Merged(AccumulatorParam[T]):
    """Merges what tasks return with a function. A range that is read twice counts once."""

    merge: Callable[[T, T], T]

    def zero(self, value: T) -> T:
        return type(value)()

    def addInPlace(self, value1: T, value2: T) -> T:  # noqa: N802  Spark's
        return self.merge(value1, value2)


def _largest(sizes: Sizes, more: Sizes) -> Sizes:
    return sizes | {partition: max(size, sizes.get(partition, 0)) for partition, size in more.items()}


def _batches(times: Times, more: Times) -> Times:
    for partition, batches in more.items():
        times.setdefault(partition, {}).update(batches)
    return times


def _distinct(most: int, traces: list[Trace], more: list[Trace]) -> list[Trace]:
    return list(dict.fromkeys([*traces, *more]))[:most]


def read_sizes(context: SparkContext) -> Accumulator[Sizes]:
    """Return an accumulator of the bytes read of each partition, including those of messages without rows.

    Use one for all rounds: Spark keeps every accumulator for as long as the driver runs. The same holds for traces.
    """
    return context.accumulator({}, _Merged(_largest))


@dataclass(frozen=True, slots=True)
class TimeSample:
    """When the events of a round's messages were written; for large batches, of a sample."""

    found: Accumulator[Times]

    @staticmethod
    def of(context: SparkContext) -> TimeSample:
        return TimeSample(context.accumulator({}, _Merged(_batches)))

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
        return TraceSample(context.accumulator([], _Merged(functools.partial(_distinct, most))), most)

    def take(self, messages: Messages, incoming: Incoming) -> None:
        """Add the traces of the messages that are selected by their types."""
        self.found.add(incoming.chosen(messages).traces(self.most))
