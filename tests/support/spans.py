"""Spans that end are kept in memory, and looked at by what OpenTelemetry's semantic conventions call them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes as messaging
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from support import nested
from threads import in_background

from relay.config import load
from relay.wiring import build

__all__ = ["Spans", "error_attributes", "messaging", "spans"]


class Spans:
    """The spans of a provider that have ended."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def of(self, operation: str) -> list[ReadableSpan]:
        """Return those with this messaging.operation.type, in the order of their beginnings."""
        found = [
            span
            for span in self._exporter.get_finished_spans()
            if (span.attributes or {}).get(messaging.MESSAGING_OPERATION_TYPE) == operation
        ]
        return sorted(found, key=lambda span: span.start_time or 0)

    def one(self, operation: str) -> ReadableSpan:
        (span,) = self.of(operation)
        return span

    def clear(self) -> None:
        self._exporter.clear()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """A tracer provider for this test. A process can set one only once, so it is put in place of that."""
    exporter = InMemorySpanExporter()
    # No limit of the SDK's: that of the links is ours.
    provider = TracerProvider(span_limits=SpanLimits(max_links=10_000), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield Spans(exporter)
    provider.shutdown()


@contextmanager
def no_provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has imported OpenTelemetry's API and configured nothing."""
    with monkeypatch.context() as patched:
        patched.setattr(trace, "_TRACER_PROVIDER", None)
        yield


@contextmanager
def relay(database: Any, kafka: Any, **settings: Any) -> Iterator[None]:
    """A relay in this process, whose spans are those of the test."""
    kafka_options = {"bootstrap.servers": kafka.bootstrap_servers}
    given = load(database_url=database.url, kafka=kafka_options, create_topics=True, **nested(settings))
    with in_background(lambda stop: build(given).run(stop, threading.Event())):
        yield


def context_of(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def linked(span: ReadableSpan) -> list[str]:
    return [traceparent(link.context) for link in span.links]


def check(span: ReadableSpan, kind: SpanKind, operation: str, **given: object) -> None:
    """Compare what the semantic conventions ask of every span of messaging, and these attributes by their constants."""
    attributes = dict(span.attributes or {})
    assert span.kind is kind
    assert attributes[messaging.MESSAGING_SYSTEM] == messaging.MessagingSystemValues.KAFKA.value
    assert attributes[messaging.MESSAGING_OPERATION_TYPE] == messaging.MessagingOperationTypeValues(operation).value
    destination = attributes.get(messaging.MESSAGING_DESTINATION_NAME)
    named = [attributes[messaging.MESSAGING_OPERATION_NAME], destination]
    assert span.name == " ".join(str(part) for part in named if part)
    assert {name: attributes.get(getattr(messaging, name)) for name in given} == given
    known = {getattr(messaging, name) for name in dir(messaging) if name.isupper()}
    foreign = [name for name in attributes if name not in known and not name.startswith("outbox.")]
    assert set(foreign) <= {error_attributes.ERROR_TYPE}


def failed(span: ReadableSpan, kind: str, *secrets: str) -> None:
    """The span is an error of this class; neither text nor event has any of what must not be in it."""
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
    assert (span.attributes or {})[error_attributes.ERROR_TYPE] == kind
    assert list(span.events) == []
    assert_without([span], *secrets)


def assert_without(found: Sequence[ReadableSpan], *secrets: str) -> None:
    texts = [span.to_json() for span in found]
    assert texts
    assert not [secret for secret in secrets for text in texts if secret in text]
