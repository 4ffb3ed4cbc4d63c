"""examples/recipes: consumers with the inbox. The effect of an event happens once, however often it is delivered."""

from __future__ import annotations

import signal

from confluent_kafka import Producer
from recipes_support import shop
from support import look_up, wait_until, write

from outbox import Event
from outbox.urls import sqlalchemy_url

__all__ = ["shop"]


def test_faststream_inbox(shop, outbox_kafka):
    def happen(*events: Event) -> None:
        write(shop.url, events)

    def invoiced(count: int) -> list[tuple[str, str, int]]:
        """Wait for so many invoices, and return them all."""
        query = "SELECT order_id, article, quantity FROM invoices ORDER BY id"
        wait_until(lambda: len(look_up(shop.url, query)) >= count, 60, f"{count} invoices")
        return look_up(shop.url, query)

    service = shop.start(
        *("-m", "faststream", "run", "faststream_inbox:app"), DATABASE_URL=sqlalchemy_url(shop.url, "asyncpg")
    )
    service.logged("FastStream app started")
    shop.relay()
    happen(
        Event("Order", "4711", "OrderPlaced", {"article": "tea", "quantity": 2}), Event("Order", "4711", "OrderSent")
    )
    first = [("4711", "tea", 2)]
    assert invoiced(1) == first
    # A relay that runs at-least-once publishes an event again after a crash: the same record at another offset.
    (message, *_) = outbox_kafka.consume(shop.topic, count=2)
    producer = Producer({"bootstrap.servers": shop.servers})
    for _ in range(3):
        producer.produce(shop.topic, message.value(), message.key(), headers=message.headers())
    assert producer.flush(60) == 0
    # Behind the repetitions in the only partition. One can't be applied for a while, and the next one waits for it.
    shop.execute("ALTER TABLE invoices ADD CONSTRAINT no_milk CHECK (article <> 'milk')")
    happen(
        Event("Order", "4712", "OrderPlaced", {"article": "milk", "quantity": 1}),
        Event("Order", "4713", "OrderPlaced", {"article": "bread", "quantity": 4}),
    )
    service.logged("no_milk")
    assert invoiced(1) == first
    shop.execute("ALTER TABLE invoices DROP CONSTRAINT no_milk")
    assert invoiced(3) == [*first, ("4712", "milk", 1), ("4713", "bread", 4)]
    assert len(outbox_kafka.consume(shop.topic)) == 7
    assert service.stop(signal.SIGTERM) == 0, service.text()
