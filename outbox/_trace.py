"""The writer's W3C trace context, if this process uses OpenTelemetry."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from outbox.event import TRACEPARENT


def current() -> dict[str, str]:
    """Return ``traceparent`` and ``tracestate`` of the active span; empty without one.

    OpenTelemetry is never imported here: where it has not been imported, no span can be active.
    """
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


def merged(trace: Mapping[str, str], headers: Mapping[str, str]) -> dict[str, str]:
    """Return an event's headers with the trace added. A ``traceparent`` of the event's own replaces the whole trace:
    ``tracestate`` belongs to one ``traceparent``.
    """
    return dict(headers) if TRACEPARENT in headers else {**trace, **headers}
