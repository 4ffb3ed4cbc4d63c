"""docs/reference/message-format.md shows the records that a relay writes: they are compared field by field."""

from __future__ import annotations

import datetime as dt
import json
import random
from typing import Any

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary_event
from cloudevents.core.formats.json import JSONFormat
from confluent_kafka import TIMESTAMP_CREATE_TIME, Message
from docs_support import ROOT, blocks
from rows_and_roles import outbox
from support import drained, wait_until

from outbox import Event, Outbox
from outbox._app.choices import HeaderSet
from relay.core.ports import Claim
from relay.kafka.headers import MessageHeaders
from relay.kafka.routing import Router

PAGE = "docs/reference/message-format.md"
WRITTEN = dt.datetime(2026, 11, 23, 9, 15, 4, 128_317, dt.UTC)
"""When the page's event was written."""


def shown() -> list[dict[str, Any]]:
    return [json.loads(block.text) for block in blocks("json") if block.page == PAGE]


def record(message: Message) -> dict[str, Any]:
    """A record as the page shows it: texts as texts, headers in their order."""
    value = message.value()
    return {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "key": message.key().decode(),
        "headers": [{name: content.decode()} for name, content in message.headers()],
        "value": value if value is None else value.decode(),
    }


def cloud_event(message: Message) -> Any:
    headers = dict(message.headers())
    # A tombstone is an event without data. The package reads bytes only.
    return from_binary_event(KafkaMessage(headers, message.key(), message.value() or b""))


def write(database, event: Event) -> None:
    """Write an event, at the page's time."""
    with database.connect() as connection:
        event_id = Outbox().add(connection, event)
        connection.execute("UPDATE outbox.events SET created_at = %s WHERE event_id = %s", (WRITTEN, event_id))


@pytest.fixture
def topic(outbox_kafka) -> str:
    """A topic that takes no batch of more than 2,000 bytes."""
    return outbox_kafka.create_topic(outbox_kafka.name("order-events"), config={"max.message.bytes": "2000"})


def test_the_records_are_those_of_the_page(outbox_postgres, outbox_kafka, outbox_relay, topic):
    expected, on_copy, on_replay, as_cloud_event = shown()
    (example,) = [block for block in blocks("python") if block.page == PAGE]
    engine = outbox_postgres.engine()
    exec(compile("\n" * (example.line - 1) + example.text, PAGE, "exec"), {"engine": engine})
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE outbox.events SET created_at = %(at)s", {"at": WRITTEN})
    dead = outbox_kafka.create_topic(outbox_kafka.name("order-dead-letters"))
    outbox_relay(
        routes=json.dumps({"Order": {"topic": topic, "dead_letter_topic": dead, "on_failure": "skip"}}),
        ce_source="/shop",
        failures__max_attempts=1,
        relay__archive_days=1,
    )
    before = dt.datetime.now(dt.UTC)
    [message] = outbox_kafka.consume(topic, 1)
    assert Router().route("Order").topic == expected["topic"]
    timestamp, kind = expected.pop("timestamp"), expected.pop("timestamp type")
    assert record(message) == expected | {"topic": topic}
    # The record's time is that of publishing, by the relay's clock; the page's lies a few milliseconds behind ce_time.
    assert (kind, message.timestamp()[0]) == ("CreateTime", TIMESTAMP_CREATE_TIME)
    published = dt.datetime.fromtimestamp(message.timestamp()[1] / 1000, dt.UTC)
    assert abs(published - before) < dt.timedelta(minutes=5)
    assert dt.timedelta() < dt.datetime.fromtimestamp(timestamp / 1000, dt.UTC) - WRITTEN < dt.timedelta(seconds=1)

    event = cloud_event(message)
    assert json.loads(JSONFormat().write(event)) == as_cloud_event
    assert (event.get_time(), event.get_data()) == (WRITTEN, {"items": 2, "total": "42.00"})

    photograph = random.Random(1).randbytes(3000)  # nothing to compress
    for each in (
        Event("Order", "4711", "OrderForgotten"),
        Event("Order", "4711", "OrderSigned", b"\x00\xff"),
        Event("Order", "4711", "OrderSealed", b"\x01", content_type="application/avro", idempotency_key="seal 1"),
        Event("Order", "4711", "OrderPatched", [1], content_type="application/merge-patch+json"),
        Event("Order", "4711", "OrderPhotographed", photograph, idempotency_key="photo 1", subject="photo-1"),
    ):
        write(outbox_postgres, each)
    drained(outbox_postgres.url)
    _, tombstone, raw, avro, patch = outbox_kafka.consume(topic)
    assert tombstone.value() is None
    assert "content-type" not in dict(tombstone.headers())
    assert (cloud_event(tombstone).get_type(), cloud_event(tombstone).get_subject()) == ("OrderForgotten", "4711")
    assert (raw.value(), avro.value(), patch.value()) == (b"\x00\xff", b"\x01", b"[1]")
    keys = [dict(each.headers())["idempotency-key"] for each in (raw, avro)]
    assert keys == [dict(raw.headers())["ce_id"], b"seal 1"]
    types = [cloud_event(each).get_datacontenttype() for each in (raw, avro, patch)]
    assert types == ["application/octet-stream", "application/avro", "application/merge-patch+json"]

    [copy] = outbox_kafka.consume(dead, 1)
    headers = {name: content.decode() for name, content in copy.headers()}
    marks = {name: text for name, text in headers.items() if name.startswith("outbox-")}
    assert marks == {name: text.replace("order-events", topic) for name, text in on_copy.items()}
    assert (copy.key(), copy.value()) == (b"4711", photograph)
    assert (headers["ce_type"], headers["ce_time"]) == ("OrderPhotographed", "2026-11-23T09:15:04.128317Z")
    assert (headers["idempotency-key"], headers["ce_subject"]) == ("photo 1", "photo-1")

    outbox(outbox_postgres.url, "replay", "--event-id", expected["headers"][1]["ce_id"], "--yes")
    replayed = wait_until(lambda: outbox_kafka.consume(topic)[5:], what="the replay")
    [again] = map(record, replayed)
    mark = again["headers"].pop()
    assert again == expected | {"topic": topic, "offset": 5}
    assert [len(text) for text in mark.values()] == [len(text) for text in on_replay.values()]
    assert mark.keys() == on_replay.keys()
    assert dt.datetime.fromisoformat(mark["outbox-replay"]).tzinfo == dt.UTC


def test_each_set_of_headers_is_that_of_the_pages_table():
    text = next(each for each in (ROOT / PAGE).read_text().split("\n\n") if each.startswith("| header | "))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    own = {"content-type": "application/json", "traceparent": "t", "tracestate": "s", "tenant": "acme"}
    claim = Claim(1, "id", "Order", "4711", "OrderPlaced", "time", b"{}", own)
    both = [name for name, _ in MessageHeaders("/shop", HeaderSet.BOTH).of(claim)]
    assert [row[0].strip("`") for row in rows if row[0] != "your own"] == [name for name in both if name != "tenant"]
    for column, which in ((2, HeaderSet.CLOUDEVENTS), (3, HeaderSet.DEBEZIUM)):
        names = {name for name, _ in MessageHeaders("/shop", which).of(claim)}
        marked = {row[0].strip("`").replace("your own", "tenant") for row in rows if row[column] == "✓"}
        assert marked == names
