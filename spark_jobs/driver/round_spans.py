"""A span for each round, with links to the contexts in which its messages were written.

A driver needs no OpenTelemetry: a process that has not imported it has no tracer provider.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outbox import _trace
from outbox.consumer.model import Partition
from spark_jobs.driver.round_context import Counts, RoundContext

if TYPE_CHECKING:
    from spark_jobs.task.accumulators import TraceSample


class RoundSpans:
    def __init__(self, context: RoundContext) -> None:
        self._context = context
        self._sample: TraceSample | None = None

    @contextmanager
    def traced(self, partitions: Collection[Partition], counts: Counts) -> Iterator[None]:
        """Put the block in a span, if there is a tracer provider. No partitions: dead letters are retried.

        counts  the figures of the round, at the end of the block.
        """
        if not _configured():
            yield
            return
        from opentelemetry.trace import SpanKind

        from outbox._app import tracing

        job = self._context.job
        topics = {topic for topic, _ in partitions} or set(job.topics)
        attributes: dict[str, str | int] = {
            _trace.CONSUMER_GROUP: job.group,
            tracing.PARTITIONS: len(partitions),
            tracing.RETRY: not partitions,
            **({} if self._context.outbox is None else {tracing.OUTBOX: self._context.outbox}),
        }
        with tracing.batch_span(SpanKind.CONSUMER, "process", topics, attributes, []) as span:
            if not span.is_recording():
                yield
                return
            # Tasks return a sample of their messages' traces, also of a round that fails.
            if self._sample is None:
                from spark_jobs.task.accumulators import TraceSample

                self._sample = TraceSample.of(self._context.session.sparkContext, tracing.MOST_LINKS)
            self._sample.found.value = []
            self._context.traces = self._sample
            try:
                yield
            finally:
                self._context.traces = None
                for link in tracing.links_to(self._sample.found.value):
                    span.add_link(link.context)
            span.set_attribute(_trace.MESSAGE_COUNT, counts.read)
            span.set_attribute(tracing.DUPLICATES, counts.duplicates)
            span.set_attribute(tracing.DEAD, counts.dead)


def _configured() -> bool:
    if "opentelemetry.trace" not in sys.modules:
        return False
    from outbox._app import tracing

    return tracing.configured()
