"""What the operations page says of an event without a row: it reads the message at its offset, whatever it holds."""

from __future__ import annotations

import html
import json
import re
from itertools import product
from typing import Any

import psycopg
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from hostile_messages import TOPIC
from page_access import SECRET, environment, serve
from raw_kafka import produce
from support import drained, write
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from outbox import Event
from relay.cli.app import app

__all__ = ["environment", "serve"]


@pytest.fixture
def topic(outbox_kafka, monkeypatch) -> str:
    name = str(outbox_kafka.create_topic(outbox_kafka.name("traced"), 1, TOPIC))
    monkeypatch.setenv("OUTBOX_ROUTES", json.dumps({"Order": {"topic": name}}))
    return name


def steps(text: str) -> list[str]:
    """Return the lines of a trace without their tags."""
    found = re.search(r'<ol class="trace">(.*?)</ol>', text, re.DOTALL)
    assert found is not None, text
    lines = re.findall(r"<li.*?>(.*?)</li>", found[1], re.DOTALL)
    return [" ".join(html.unescape(re.sub(r"<[^>]+>", " ", line)).split()) for line in lines]


def published(environment: str, outbox_relay: Any, topic: str, **settings: object) -> str:
    order = {"amount": 1.000000000000000000001, "card": SECRET}
    [event_id] = write(environment, [Event("Order", "o1", "order.placed", order, headers={"tenant": SECRET})])
    outbox_relay(routes=json.dumps({"Order": {"topic": topic}}), **settings)
    drained(environment)
    return str(event_id)


def test_an_event_without_a_row_is_shown_from_kafka(serve, environment, topic, outbox_relay):
    event_id = published(environment, outbox_relay, topic)
    with psycopg.connect(environment) as connection:
        connection.execute("INSERT INTO consumer.groups (grp, owner) VALUES ('sums', 'me')")
        connection.execute("INSERT INTO consumer.offsets VALUES ('sums', %s, 0, 'id', 1, 1)", (topic,))
        connection.execute(
            "INSERT INTO consumer.processed_messages (grp, message_id, day, seen_at) "
            "VALUES ('sums', %s, (now() AT TIME ZONE 'UTC')::date, now() + interval '1 second')",
            (event_id,),
        )
    page = serve().sign_in()
    text = page.ask(f"/events/{event_id}").text
    written, kafka, group = steps(text)
    assert re.search(r"^written \d{4}-", written)
    assert re.search(rf"^on Kafka .* [\d,]+ ms later {topic}-0 offset 0$", kafka)
    assert re.search(r"^group sums: applied .* [\d,]+ ms later", group)
    assert "order.placed of" in text
    assert "Order/o1" in text
    assert text.count(SECRET) == 2
    assert f"As read from Kafka, {topic}-0 offset 0" in text
    assert "&#34;amount&#34;: 1.0" in text
    assert "ce_time" in text
    hidden = serve(payloads="hidden").sign_in().ask(f"/events/{event_id}").text
    assert steps(hidden) == steps(text)
    assert SECRET not in hidden
    assert "ce_time" not in hidden
    # The command says the same.
    shown = CliRunner().invoke(app, ["trace", event_id]).stdout
    assert "order.placed of Order o1" in shown
    lines = [line.partition(" ")[2].replace(" UTC,", "").replace(" later,", " later") for line in shown.splitlines()]
    without_links = [line.removesuffix(" Its offsets") for line in steps(text)]
    assert [line.removesuffix(" UTC") for line in lines[1:]] == without_links


def test_what_kafka_has_no_longer_or_does_not_tell_is_said(
    serve, environment, topic, outbox_relay, outbox_kafka, monkeypatch
):
    event_id = published(environment, outbox_relay, topic, relay__archive_days=3)
    page = serve().sign_in()
    text = page.ask(f"/events/{event_id}").text
    assert ("As read from Kafka" in text, "no longer" in text, text.count(SECRET)) == (True, False, 2)
    with monkeypatch.context() as away:
        away.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", "127.0.0.1:1")
        text = serve().sign_in().ask(f"/events/{event_id}").text
    assert f"Kafka, reading {topic} partition 0 at offset 0: no answer within 3 s" in text
    assert "As it stands in the outbox" in text
    admin = AdminClient({"bootstrap.servers": outbox_kafka.bootstrap_servers})
    [done] = admin.delete_records([TopicPartition(topic, 0, 1)]).values()
    assert done.result(30).low_watermark == 1
    text = page.ask(f"/events/{event_id}").text
    assert "Kafka has it no longer" in steps(text)[2]
    assert "As it stands in the outbox" in text
    assert text.count(SECRET) == 2
    # The offset of another message, after the topic was made anew.
    with psycopg.connect(environment) as connection:
        connection.execute('UPDATE outbox.published SET "offset" = 1')
    produce(outbox_kafka.bootstrap_servers, topic, 0, [(b"k", SECRET.encode(), {"ce_id": str(uuid7())})])
    text = page.ask(f"/events/{event_id}").text
    assert "Kafka has it no longer" in steps(text)[2]
    assert text.count(SECRET) == 2


NESTED = b'{"a":' * 900 + b"1" + b"}" * 900
HOSTILE = {
    "HTML": (b"<script>alert(1)</script>", b'{"a": "</pre><script>alert(1)</script>"}', {}),
    "not UTF-8": (b"\xff\xfe", b"\xff\xfe\x00<script>", {b"tenant": b"\xff", b"ce_type": b"\xff\x00"}),
    "1 MB": (b"k", json.dumps(["<&'\"" * 50] * 3_900).encode(), {}),
    "1 MB of digits": (b"k", b"[" + b"1," * 490_000 + b"1]", {}),
    "deep": (b"k", NESTED, {}),
    "too deep": (b"k", b"[" * 500_000 + b"]" * 500_000, {}),
    "half a surrogate": (b"k", b'{"a": "\\ud800"}', {b"ce_time": b"9999-12-31T23:59:59-14:00"}),
    "no such time": (b"k", b"{}", {b"ce_time": b"noon", b"aggregate-type": b"a" * 10_000, b"ce_type": None}),
    "empty": (b"", b"", {b"": b""}),
    "a tombstone": (None, None, {b"a\0b": b"\0"}),
    "1,000 headers": (b"k", b"{}", {b"h%d" % number: b"<b>" for number in range(1_000)}),
}


def test_no_message_breaks_it(serve, environment, topic, outbox_kafka):
    """Small ones also at a time that no calendar has."""
    page = serve().sign_in()
    small = [name for name, (_, value, _) in HOSTILE.items() if value is None or len(value) < 100_000]
    for offset, (name, milliseconds) in enumerate([*product(small, [10**18]), *product(HOSTILE, [None])]):
        key, value, headers = HOSTILE[name]
        event_id = str(uuid7())
        record = (key, value, {b"ce_id": event_id.encode(), **headers})
        with psycopg.connect(environment) as connection:
            connection.execute(
                "INSERT INTO outbox.published (lane, id, event_id, aggregate_type, aggregate_id, event_type, "
                "created_at, topic, partition, \"offset\") VALUES (0, 1, %s, 'Order', 'k', 'T', now(), %s, 0, %s)",
                (event_id, topic, offset),
            )
        produce(outbox_kafka.bootstrap_servers, topic, 0, [record], milliseconds)
        found = page.ask(f"/events/{event_id}")
        assert found.status == 200, (name, found.text)
        assert "As read from Kafka" in found.text, name
        assert "<script>alert" not in found.text
        assert len(found.text) < 1_000_000, name
        # Also of what only Kafka has.
        with psycopg.connect(environment) as connection:
            connection.execute("DELETE FROM outbox.published")
        found = page.ask(f"/events/{event_id}")
        assert found.status == 200, (name, found.text)
        assert "<script>alert" not in found.text, name
