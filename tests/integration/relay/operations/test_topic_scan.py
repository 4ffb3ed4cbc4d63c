"""What `relay reconcile` reads of the outbox's topics, whoever has written there."""

from __future__ import annotations

from typing import Any

from confluent_kafka import Producer
from raw_kafka import produce

from relay.operations.topic_scan import committed_since

ID = "0195d9c2-5c00-7abc-8def-0123456789ab"


def test_header_names_that_are_no_text_are_passed_over(outbox_kafka):
    """Often enough for Python to have optimised what is done with each: then the client's error goes unnoticed."""
    topic = outbox_kafka.create_topic(outbox_kafka.name("names"))
    servers = outbox_kafka.bootstrap_servers
    bad: Any = {b"\xff\xfe": b"x", b"ce_id": ID.encode()}
    for _ in range(100):
        produce(servers, topic, 0, [(b"k", b"bad", bad)])
    producer = Producer({"bootstrap.servers": servers})
    producer.produce(topic, b"fine", b"k", headers=[("ce_id", ID.encode())])
    assert producer.flush(30) == 0
    seen = [record for part in committed_since({"bootstrap.servers": servers}, {topic: 0}) for record in part]
    assert [(record.event_id, record.value) for record in seen] == [(None, b"bad")] * 100 + [(ID, b"fine")]
