"""The way of one event, step by step, each with the time that it took."""

from __future__ import annotations

import datetime as dt
from uuid import UUID

from outbox.consumer.admin.trace import GroupTrace
from relay.operations.trace import Event, MessageRef
from relay.pipeline.trace import Found

WRITTEN = dt.datetime(2026, 11, 23, 9, 15, 4, tzinfo=dt.UTC)


def at(milliseconds: int) -> dt.datetime:
    return WRITTEN + dt.timedelta(milliseconds=milliseconds)


def hops(kafka: int | None, published: int, applied: int) -> list[tuple[str, float | None]]:
    event = Event(UUID(int=1), "published", created_at=WRITTEN, published_at=at(published))
    found = Found(event)
    found.messages = [MessageRef("orders", 1, 4711, None if kafka is None else at(kafka))]
    found.groups = [GroupTrace(name, "applied", at(applied)) for name in ("sums", "totals")]
    return [(step.title, step.milliseconds) for step in found.steps()]


def test_steps_are_in_the_order_of_time_and_have_the_time_since_the_one_before():
    assert hops(kafka=3, published=7, applied=43) == [
        ("written", None),
        ("on Kafka", 3),
        ("published", 4),
        # Groups do not wait for the outbox, nor for one another.
        ("group sums: applied", 40),
        ("group totals: applied", 40),
    ]


def test_no_time_is_shown_where_a_clock_is_behind_or_kafka_has_lost_the_message():
    assert hops(kafka=-5, published=7, applied=43)[1:3] == [("on Kafka", None), ("published", 12)]
    assert hops(kafka=None, published=7, applied=6)[1:4] == [
        ("published", 7),
        ("on Kafka", None),
        ("group sums: applied", None),
    ]
