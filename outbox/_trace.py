"""The writer's span and W3C trace context, if this process uses OpenTelemetry; and the names of all spans' attributes.

The names are those of OpenTelemetry's semantic conventions for messaging, which may still change, and below
``outbox.`` those of our own. No span has a payload, a key or the text of an error, which may quote either.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID

from outbox.event import TRACEPARENT, TRACESTATE, Event

if TYPE_CHECKING:
    from opentelemetry.trace import Link, Span, SpanKind, Tracer, TracerProvider

SYSTEM: Final = "messaging.system"
OPERATION_TYPE: Final = "messaging.operation.type"
OPERATION_NAME: Final = "messaging.operation.name"
MESSAGE_ID: Final = "messaging.message.id"
MESSAGE_COUNT: Final = "messaging.batch.message_count"
DESTINATION: Final = "messaging.destination.name"
CONSUMER_GROUP: Final = "messaging.consumer.group.name"
ERROR_TYPE: Final = "error.type"
AGGREGATE_TYPE: Final = "outbox.aggregate.type"
EVENT_TYPE: Final = "outbox.event.type"

KAFKA: Final = "kafka"
_SCOPE: Final = "outbox"


@functools.lru_cache(maxsize=1)
def tracer(provider: TracerProvider) -> Tracer:
    """Return a provider's tracer for our spans."""
    return provider.get_tracer(_SCOPE)


def fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed, with the error's class. Its text may quote a row, and is left out."""
    from opentelemetry.trace import StatusCode

    kind = type(error)
    span.set_attribute(
        ERROR_TYPE, kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    )
    span.set_status(StatusCode.ERROR)


@contextmanager
def opened(
    provider: TracerProvider, name: str, kind: SpanKind, attributes: Mapping[str, str | int], links: Sequence[Link] = ()
) -> Iterator[Span]:
    """Open a span of ours, the active one in the block, and mark it as failed by what the block raises."""
    from opentelemetry.trace import use_span

    span = tracer(provider).start_span(name, kind=kind, attributes=attributes, links=links, record_exception=False)
    with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield span
        except BaseException as error:
            fail(span, error)
            raise


@dataclass(frozen=True, slots=True)
class WriteTrace:
    """The trace of one write of events.

    headers  ``traceparent`` and ``tracestate`` for the events; empty without a span.
    span     of this write, if it has one of its own.
    """

    headers: Mapping[str, str]
    span: Span | None = None

    def name_event(self, ids: Sequence[UUID]) -> None:
        """Add the id to the span, if there is one event. Only the write shows which event has its idempotency key."""
        if self.span is not None and len(ids) == 1:
            self.span.set_attribute(MESSAGE_ID, str(ids[0]))


_UNTRACED: Final[AbstractContextManager[WriteTrace]] = nullcontext(WriteTrace({}))


def writing(events: Sequence[Event]) -> AbstractContextManager[WriteTrace]:
    """Return a block in which these events are written.

    Their trace is that of a span of this write, or, where no tracer provider is configured, of the active span.
    OpenTelemetry is never imported here: where it has not been imported, no span can be active.
    """
    return _traced(events) if "opentelemetry.trace" in sys.modules else _UNTRACED


@contextmanager
def _traced(events: Sequence[Event]) -> Iterator[WriteTrace]:
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        yield WriteTrace(_current())
        return
    with opened(provider, "add", trace.SpanKind.PRODUCER, _attributes(events)) as span:
        yield WriteTrace(_current(), span)


def _current() -> dict[str, str]:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


def _attributes(events: Sequence[Event]) -> dict[str, str | int]:
    found: dict[str, str | int] = {SYSTEM: KAFKA, OPERATION_TYPE: "create", OPERATION_NAME: "add"}
    if len(events) != 1:
        found[MESSAGE_COUNT] = len(events)
    for name, values in (
        (AGGREGATE_TYPE, {event.aggregate_type for event in events}),
        (EVENT_TYPE, {event.event_type for event in events}),
    ):
        if len(values) == 1:
            found[name] = str(values.pop())
    return found


def merged(trace: Mapping[str, str], default: Mapping[str, str], headers: Mapping[str, str]) -> dict[str, str]:
    """Return an event's headers with those of all events and the trace added. A ``traceparent`` of the event's own
    replaces the whole trace, and a ``tracestate`` alone nothing: it belongs to one ``traceparent``. A header of its own
    replaces one of all events in any case: many clients would find either of two.
    """
    if default and headers:
        names = {name.lower() for name in headers}
        default = {name: value for name, value in default.items() if name.lower() not in names}
    own = {**default, **headers}
    if TRACEPARENT not in own:
        if TRACEPARENT in trace:
            own.pop(TRACESTATE, None)
        return {**trace, **own}
    if TRACEPARENT in headers and TRACESTATE not in headers:
        own.pop(TRACESTATE, None)
    return own
