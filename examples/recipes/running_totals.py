"""A running total for each customer, from topic to topic: the state is a table, the results are events.

The consumer's position, the table and the new events change in one transaction, so each order counts once in both.

Run it in a shell, beside a relay:

    pip install 'outbox-kafka[relay]'
    export DATABASE_URL=postgresql://localhost/shop KAFKA_SERVERS=localhost:9092
    export OUTBOX_DATABASE_URL=$DATABASE_URL
    outbox db upgrade && outbox db upgrade --consumer
    python running_totals.py
"""

from __future__ import annotations

import json
import os
from typing import Any

import psycopg
from confluent_kafka import Message

from outbox import Event, Outbox
from outbox.inbox import Consumer

TABLES = "CREATE TABLE IF NOT EXISTS totals (customer text PRIMARY KEY, orders integer NOT NULL, cents bigint NOT NULL)"
ADD = """
INSERT INTO totals AS t VALUES (%(customer)s, 1, %(cents)s)
ON CONFLICT (customer) DO UPDATE SET orders = t.orders + 1, cents = t.cents + excluded.cents
RETURNING orders, cents"""

outbox = Outbox()


def add_to_total(connection: psycopg.Connection[Any], message: Message) -> None:
    """Add an order to its customer's total, and write the new total as an event."""
    order = json.loads(message.value() or b"{}")
    customer = order["customer"]
    [(orders, cents)] = connection.execute(ADD, {"customer": customer, "cents": order["cents"]}).fetchall()
    outbox.add(connection, Event("Customer", customer, "TotalChanged", {"orders": orders, "cents": cents}))


if __name__ == "__main__":
    url = os.environ["DATABASE_URL"]
    with psycopg.connect(url) as once:
        once.execute(TABLES)
    topic = os.environ.get("ORDER_TOPIC", "order-events")
    # With a name of its own in the group, a member that was killed and starts again goes on at once.
    kafka = {"bootstrap.servers": os.environ["KAFKA_SERVERS"], "group.instance.id": os.environ.get("MEMBER", "1")}
    Consumer(url, [topic], group="totals", kafka=kafka, on_failure="dead-letter").run(add_to_total)
