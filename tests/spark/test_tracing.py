"""The span of a round, in each way in which messages are read; and an event's way over all hops."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
from bench import ided
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from round_support import order, put, retry
from spans import assert_without, check, context_of, failed, linked, messaging, no_provider, relay, spans, traceparent
from support import drained

from outbox import Event, Outbox
from outbox.consumer.errors import EffectFailed

__all__ = ["spans"]

pytestmark = pytest.mark.spark


def traced(number: int) -> str:
    return f"00-{number:032x}-{number:016x}-01"


def send(bench, count: int, first: int = 1) -> list[str]:
    """Each message has a trace of its own."""
    bench.produce(
        (order(f"secret-{number}", 1), f"key-{number}", number % 2, [*ided(), ("traceparent", traced(number).encode())])
        for number in range(first, first + count)
    )
    return [traced(number) for number in range(first, first + count)]


WAYS = {
    "in the driver": ({}, {}),
    "in tasks": ({}, {"driver_records": 0}),
    "through a transform": ({"transform": lambda rows: rows.filter("seq > 0")}, {}),
    "as one batch": ({"atomic": "batch"}, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_round_is_linked_to_the_writes_of_its_messages(bench, spans, way):
    declared, options = WAYS[way]
    written = send(bench, 5)
    bench.send_raw(json.dumps(order("untraced", 1)).encode(), ided())
    for number, odd in enumerate((b"00-not-a-trace", traced(0).encode())):
        value = json.dumps(order(f"odd-{number}", 1)).encode()
        bench.send_raw(value, [*ided(), ("traceparent", odd)])
    assert bench.once(replace(bench.job, **declared), outbox="orders", **options).applied == 8
    span = spans.one("process")
    check(
        span,
        SpanKind.CONSUMER,
        "process",
        MESSAGING_DESTINATION_NAME=bench.topic,
        MESSAGING_CONSUMER_GROUP_NAME="order-totals",
        MESSAGING_BATCH_MESSAGE_COUNT=8,
        MESSAGING_MESSAGE_ID=None,
    )
    assert sorted(linked(span)) == written
    assert (span.status.status_code, span.attributes["outbox.partitions"]) == (StatusCode.UNSET, 2)
    assert span.attributes["outbox.name"] == "orders"
    assert_without([span], "secret-", "key-")


def test_a_round_has_a_bounded_number_of_links_and_the_next_of_its_runner_has_its_own(bench, spans):
    written = send(bench, 300)
    with bench.runner(driver_records=0) as runner:
        runner.once(threading.Event())
        later = send(bench, 2, first=1001)
        runner.once(threading.Event())
    first, second = spans.of("process")
    assert (len(first.links), first.attributes[messaging.MESSAGING_BATCH_MESSAGE_COUNT]) == (128, 300)
    assert set(linked(first)) < set(written)
    assert sorted(linked(second)) == later


def test_a_round_that_fails_is_an_error_with_its_links(bench, spans):
    written = send(bench, 3)
    with pytest.raises(EffectFailed):
        bench.once(replace(bench.job, effect="INSERT INTO nowhere SELECT order_id FROM batch"))
    span = spans.one("process")
    failed(span, "outbox.consumer.errors.EffectFailed", "nowhere", "secret-")
    assert sorted(linked(span)) == written


def test_dead_letters_are_counted_and_their_retry_is_a_span_of_its_own(bench, spans):
    put(bench, order("good", 1))
    put(bench, b"not json", key="bad")
    assert bench.once().dead == 1
    (span,) = spans.of("process")
    assert (span.attributes["outbox.dead"], span.attributes["outbox.retry"]) == (1, False)
    # No name was given.
    assert "outbox.name" not in span.attributes
    retry(bench)
    bench.once()
    span = spans.of("process")[1]
    assert (span.attributes["outbox.retry"], span.status.status_code) == (True, StatusCode.UNSET)
    assert_without([span], "not json")


@pytest.mark.parametrize("recorded", ["no provider", "sampled out"])
def test_tasks_look_at_no_trace_where_no_span_is_recorded(bench, monkeypatch, recorded):
    seen = []
    send(bench, 3)
    with bench.runner() as runner, monkeypatch.context() as patched:
        attempt = runner._rounds._attempts.attempt

        def watched(*given):
            seen.append(runner._context.task_decoder.traces)
            return attempt(*given)

        patched.setattr(runner._rounds._attempts, "attempt", watched)
        with no_provider(monkeypatch):
            if recorded == "sampled out":
                patched.setattr(trace, "_TRACER_PROVIDER", TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))
            assert runner.once(threading.Event()).applied == 3
    assert seen == [None]
    assert runner._rounds._spans._sample is None


def test_an_event_from_its_write_to_its_effect(bench, spans):
    """One trace id from the service's span on; the relay's turn and the consumer's round link to the write."""
    kind = bench.topics.name("Order")
    bench.topic = bench.topics.create_topic(f"{kind.lower()}-events", 2)
    with trace.get_tracer("service").start_as_current_span("placing") as placing:
        with bench.database.connect() as connection:
            for number in (1, 2):
                Outbox().add(connection, Event(kind, f"key-{number}", "Placed", order(f"secret-{number}", 1)))
    with relay(bench.database, bench.topics):
        drained(bench.database.url)
    assert bench.once(bench.job.with_topics([bench.topic])).applied == 2
    writes = [context_of(span) for span in spans.of("create")]
    assert {write.trace_id for write in writes} == {placing.get_span_context().trace_id}
    for hop in ("send", "process"):
        assert sorted(link for span in spans.of(hop) for link in linked(span)) == sorted(map(traceparent, writes))
    assert_without([*spans.of("create"), *spans.of("send"), *spans.of("process")], "secret-", "key-")
