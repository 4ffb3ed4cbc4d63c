"""An event's headers: its own, those of all events, and the trace."""

from __future__ import annotations

import pytest

from outbox._trace import merged

TRACE = {"traceparent": "T", "tracestate": "S"}


@pytest.mark.parametrize(
    ("trace", "default", "own", "expected"),
    [
        (TRACE, {}, {}, TRACE),
        ({}, {"tracestate": "d"}, {"a": "b"}, {"tracestate": "d", "a": "b"}),
        # A tracestate belongs to the traceparent beside it.
        (TRACE, {}, {"tracestate": "mine"}, TRACE),
        (TRACE, {"tracestate": "d"}, {}, TRACE),
        ({"traceparent": "T"}, {}, {"tracestate": "mine"}, {"traceparent": "T"}),
        (TRACE, {}, {"traceparent": "mine"}, {"traceparent": "mine"}),
        (TRACE, {"traceparent": "d", "tracestate": "e"}, {}, {"traceparent": "d", "tracestate": "e"}),
        (TRACE, {"traceparent": "d", "tracestate": "e"}, {"traceparent": "mine"}, {"traceparent": "mine"}),
        ({}, {"Tenant": "a", "Region": "eu"}, {"tenant": "b"}, {"tenant": "b", "Region": "eu"}),
        ({}, {"tenant": "a"}, {"TENANT": "b"}, {"TENANT": "b"}),
    ],
)
def test_headers_of_the_events_own_replace_others(trace, default, own, expected):
    assert merged(trace, default, own) == expected
