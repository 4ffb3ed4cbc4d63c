"""A span for each publish, with links to the contexts in which its events were written.

Links and not parents: it has events of many traces. The events keep their own ``traceparent`` on Kafka. Without a
tracer provider it costs one comparison, and no header is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from typing import Any, TypeVar, assert_never, cast

from opentelemetry.trace import Span, SpanKind

from outbox import _trace
from outbox._app import tracing
from outbox._app.tracing import EventTrace
from outbox.event import TRACEPARENT, TRACESTATE
from relay.core.ports import Batches, Completed, Confirm, Failed, Sent, Unconfirmed, kind_of
from relay.kafka.routing import Router

_Publish = TypeVar("_Publish", bound=Callable[..., Sent])


def traced(publish: _Publish) -> _Publish:
    """Make each call of this method of a publisher a span. The publisher's ``sending`` has the router."""

    @wraps(publish)
    def in_span(self: Any, batches: Batches, confirm: Confirm | None = None) -> Sent:
        if not tracing.configured():
            return publish(self, batches, confirm)
        traces = dict.fromkeys(_traces(batches))
        attributes: dict[str, str | int] = {
            _trace.MESSAGE_COUNT: sum(map(len, batches.values())),
            tracing.OUTBOX: self.sending.outbox,
            tracing.LANES: len(batches),
            tracing.LINKS_LEFT_OUT: max(0, len(traces) - tracing.MOST_LINKS),
        }
        links = tracing.links_to(islice(traces, tracing.MOST_LINKS))
        topics = _topics(self.sending.router, batches)
        with tracing.batch_span(SpanKind.PRODUCER, "send", topics, attributes, links) as span:
            sent = publish(self, batches, confirm)
            _conclude(span, sent)
            return sent

    return cast("_Publish", in_span)


def _topics(router: Router, batches: Batches) -> set[str]:
    kinds = {kind_of(claim) for claims in batches.values() for claim in claims}
    # Without a route an event is refused, and goes nowhere.
    return {topic for kind, copy in kinds if (topic := router.known_topic(kind, copy=copy)) is not None}


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
