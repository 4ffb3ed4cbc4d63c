"""``OUTBOX_HEADERS``, from the environment of a relay to the message on the topic.

test_message_format.py has the default, and which headers each set is; here is that a relay takes the set it is given.
"""

from __future__ import annotations

import psycopg
from support import drained

from outbox import Event, Outbox

DEBEZIUM = ["ce_id", "id", "event-type", "aggregate-type", "idempotency-key"]


def test_a_message_has_the_headers_that_were_set(outbox_postgres, outbox_kafka, outbox_relay):
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events")
    with psycopg.connect(outbox_postgres.url) as connection:
        event_id = Outbox().add(connection, Event(kind, "4711", "OrderPlaced", {"total": 1}, {"tenant": "acme"}))
    outbox_relay(delivery="exactly-once", name=outbox_kafka.name("outbox"), headers="debezium")
    drained(outbox_postgres.url)
    [message] = outbox_kafka.consume(topic, 1)
    headers = dict(message.headers())
    assert [name for name, _ in message.headers()] == [*DEBEZIUM, "content-type", "tenant"]
    assert (headers["ce_id"].decode(), headers["tenant"]) == (str(event_id), b"acme")
