"""The writer's W3C trace context, when OpenTelemetry is in use in this process."""

from __future__ import annotations

import sys


def current() -> dict[str, str]:
    """Give ``traceparent`` and ``tracestate`` of the active span; nothing without one.

    OpenTelemetry is never imported here: where it has not been imported, no span can be active.
    """
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier
