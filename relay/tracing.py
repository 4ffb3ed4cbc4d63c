"""A span for each turn that is published, with links to the contexts in which its events were written.

Links and not parents: a turn has events of many traces. The events keep their own ``traceparent`` on Kafka. Without a
tracer provider a turn costs one comparison, and no header is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import assert_never

from opentelemetry.trace import Span, SpanKind

from outbox import _trace
from outbox._app import tracing
from outbox._app.tracing import EventTrace
from outbox.errors import OutboxError
from outbox.event import TRACEPARENT, TRACESTATE
from relay.core.lease import Lease
from relay.core.ports import Batches, Completed, Confirm, Failed, Kind, Publisher, Sent, Unconfirmed
from relay.kafka.routing import NoRoute, Router


class TracedPublisher:
    """A Publisher whose turns are spans. ``router`` is one of its own: it names the turn's topic."""

    def __init__(self, publisher: Publisher, router: Router, outbox: str) -> None:
        self._publisher = publisher
        self._router = router
        self._outbox = outbox

    def join(self, leases: Sequence[Lease]) -> Mapping[int, OutboxError]:
        return self._publisher.join(leases)

    def publish(self, batches: Batches, confirm: Confirm | None = None) -> Sent:
        if not tracing.configured():
            return self._publisher.publish(batches, confirm)
        traces = dict.fromkeys(_traces(batches))
        attributes: dict[str, str | int] = {
            _trace.MESSAGE_COUNT: sum(map(len, batches.values())),
            tracing.OUTBOX: self._outbox,
            tracing.LANES: len(batches),
            tracing.LINKS_LEFT_OUT: max(0, len(traces) - tracing.MOST_LINKS),
        }
        links = tracing.links_to(islice(traces, tracing.MOST_LINKS))
        with tracing.batch_span(SpanKind.PRODUCER, "send", self._topics(batches), attributes, links) as span:
            sent = self._publisher.publish(batches, confirm)
            _conclude(span, sent)
            return sent

    def paused(self) -> frozenset[Kind]:
        return self._publisher.paused()

    def serve(self) -> None:
        self._publisher.serve()

    def close(self) -> None:
        self._publisher.close()

    def _topics(self, batches: Batches) -> set[str]:
        topics: set[str] = set()
        for claims in batches.values():
            for claim in claims:
                try:
                    topics.add(self._router.topic(claim))
                except NoRoute:
                    # The event is refused, and goes nowhere.
                    continue
        return topics


def _traces(batches: Batches) -> Iterator[EventTrace]:
    for claims in batches.values():
        for claim in claims:
            if claim.headers is not None and TRACEPARENT in claim.headers:
                yield claim.headers[TRACEPARENT], claim.headers.get(TRACESTATE)


def _conclude(span: Span, sent: Sent) -> None:
    match sent:
        case Unconfirmed(lanes):
            for error in lanes.values():
                _trace.fail(span, error)
            return
        case Failed(error):
            _trace.fail(span, error)
        case Completed():
            pass
        case _:
            assert_never(sent)
    refused = sum(len(receipt.refused) for receipt in sent.receipts.values())
    if refused:
        span.set_attribute(tracing.REFUSED, refused)
