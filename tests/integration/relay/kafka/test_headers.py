"""``OUTBOX_HEADERS``, from the environment of a relay to the message on the topic."""

from __future__ import annotations

import psycopg
import pytest
from support import drained

from outbox import Event, Outbox

CLOUDEVENTS = ["ce_specversion", "ce_id", "ce_source", "ce_type", "ce_subject", "ce_time"]
PLAIN = ["id", "event-type", "aggregate-type", "idempotency-key"]
OWN = ["content-type", "tenant"]

SETS = {
    None: CLOUDEVENTS + PLAIN + OWN,
    "both": CLOUDEVENTS + PLAIN + OWN,
    "cloudevents": CLOUDEVENTS + OWN,
    "debezium": ["ce_id", *PLAIN, *OWN],
}


@pytest.mark.parametrize(
    ("delivery", "which"),
    [("at-least-once", None), ("at-most-once", "both"), ("exactly-once", "cloudevents"), ("at-least-once", "debezium")],
)
def test_a_message_has_the_headers_that_were_set(outbox_postgres, outbox_kafka, outbox_relay, delivery, which):
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events")
    with psycopg.connect(outbox_postgres.url) as connection:
        event_id = Outbox().add(connection, Event(kind, "4711", "OrderPlaced", {"total": 1}, {"tenant": "acme"}))
    settings = {"delivery": delivery, "name": outbox_kafka.name("outbox"), "ce_source": "/shop"}
    outbox_relay(**settings | ({} if which is None else {"headers": which}))
    drained(outbox_postgres.url)
    [message] = outbox_kafka.consume(topic, 1)
    headers = [(name, value.decode()) for name, value in message.headers()]
    values = {
        "ce_specversion": "1.0",
        "ce_id": str(event_id),
        "ce_source": "/shop",
        "ce_type": "OrderPlaced",
        "ce_subject": "4711",
        # By the database's clock.
        "ce_time": dict(headers).get("ce_time"),
        "id": str(event_id),
        "event-type": "OrderPlaced",
        "aggregate-type": kind,
        "idempotency-key": str(event_id),
        "content-type": "application/json",
        "tenant": "acme",
    }
    assert headers == [(name, values[name]) for name in SETS[which]]
