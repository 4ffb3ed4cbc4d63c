"""The common part of the spans of the relay's turns and of the consumers' rounds, with OpenTelemetry's API alone.

A turn and a round have many events, so the events' contexts are links of the span and not its parents. No span is made
before a tracer provider is configured: by `opentelemetry-instrument`, or by ``configure`` with the SDK's variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outbox import _trace
from outbox.errors import ConfigurationError
from outbox.event import TRACEPARENT, TRACESTATE

MOST_LINKS: Final = 128
"""The SDK keeps as many links of a span, and drops the first ones of more."""

EventTrace = tuple[str, str | None]
"""An event's ``traceparent`` and ``tracestate``."""

LINKS_LEFT_OUT: Final = "outbox.links.left_out"
OUTBOX: Final = "outbox.name"
LANES: Final = "outbox.lanes"
REFUSED: Final = "outbox.refused"
DEAD: Final = "outbox.dead"
DUPLICATES: Final = "outbox.duplicates"
PARTITIONS: Final = "outbox.partitions"
RETRY: Final = "outbox.retry"

_EXPORTERS: Final = "OTEL_TRACES_EXPORTER"


def configured() -> bool:
    """Return whether spans go anywhere."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def batch_span(
    kind: SpanKind, operation: str, topics: Iterable[str], attributes: Mapping[str, str | int], links: Iterable[Link]
) -> AbstractContextManager[Span]:
    """Return the block of a turn's or a round's span, which is marked as failed by what the block raises.

    ``operation`` is one of messaging.operation.type. The topic is named if it is only one.
    """
    named = set(topics)
    topic = named.pop() if len(named) == 1 else None
    found: dict[str, str | int] = {
        _trace.SYSTEM: _trace.KAFKA,
        _trace.OPERATION_TYPE: operation,
        _trace.OPERATION_NAME: operation,
        **({} if topic is None else {_trace.DESTINATION: topic}),
        **attributes,
    }
    name = operation if topic is None else f"{operation} {topic}"
    return _trace.opened(trace.get_tracer_provider(), name, kind, found, list(links))


def links_to(traces: Iterable[EventTrace]) -> list[Link]:
    """Return links to these contexts, without those that are invalid."""
    propagator, found = TraceContextTextMapPropagator(), []
    for parent, state in traces:
        carrier = {TRACEPARENT: parent, **({} if state is None else {TRACESTATE: state})}
        context = trace.get_current_span(propagator.extract(carrier)).get_span_context()
        if context.is_valid:
            found.append(Link(context))
    return found


def configure(service: str) -> None:
    """Set the SDK up as its environment variables say, if OTEL_TRACES_EXPORTER names exporters and nothing did it yet.

    ``service`` is the name of the service unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES give another. Raises
    ConfigurationError for an exporter that is not installed.
    """
    names = [name.strip() for name in os.environ.get(_EXPORTERS, "").split(",") if name.strip()]
    if not names or names == ["none"] or configured():
        return
    from importlib.metadata import entry_points

    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(
            f"{_EXPORTERS} needs OpenTelemetry's SDK; run: pip install opentelemetry-sdk"
        ) from error
    own = {} if SERVICE_NAME in OTELResourceDetector().detect().attributes else {SERVICE_NAME: service}
    provider = TracerProvider(resource=Resource.create(own))
    for name in names:
        found = entry_points(group="opentelemetry_traces_exporter", name=name)
        if not found:
            raise ConfigurationError(
                f"{_EXPORTERS}={name}: no such exporter is installed; for otlp: pip install opentelemetry-exporter-otlp"
            )
        provider.add_span_processor(BatchSpanProcessor(next(iter(found)).load()()))
    trace.set_tracer_provider(provider)
