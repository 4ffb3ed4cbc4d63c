"""Invoices for orders with FastStream: one for each order, however often Kafka or the relay delivers its event.

Run it in a shell:

    pip install 'outbox-kafka[relay]' 'sqlalchemy[asyncio]' asyncpg 'faststream[confluent,cli]'
    export DATABASE_URL=postgresql+asyncpg://localhost/shop KAFKA_SERVERS=localhost:9092
    OUTBOX_DATABASE_URL=$DATABASE_URL outbox db upgrade --consumer
    faststream run faststream_inbox:app
"""

from __future__ import annotations

import os
from typing import Any

from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker, KafkaMessage
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from outbox.inbox import once_async

TABLES = """
CREATE TABLE IF NOT EXISTS invoices (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, order_id text NOT NULL, article text, quantity integer)"""
INVOICE = text("INSERT INTO invoices (order_id, article, quantity) VALUES (:order_id, :article, :quantity)")

engine = create_async_engine(os.environ["DATABASE_URL"])
broker = KafkaBroker(os.environ["KAFKA_SERVERS"])


class Order(BaseModel):
    """The payload of OrderPlaced."""

    article: str
    quantity: int


async def create_tables() -> None:
    """Create the table of invoices if it is missing."""
    async with engine.begin() as connection:
        await connection.execute(text(TABLES))


app = FastStream(broker, on_startup=[create_tables], after_shutdown=[engine.dispose])
order_events = broker.subscriber(
    os.environ.get("ORDER_TOPIC", "order-events"),
    group_id="billing",
    auto_offset_reset="earliest",
    isolation_level="read_committed",
    # After the handler, and so after its commit. By default FastStream acknowledges before the handler runs.
    ack_policy=AckPolicy.NACK_ON_ERROR,
)


@order_events(filter=lambda message: message.headers["ce_type"] == "OrderPlaced")
async def bill(order: Order, message: KafkaMessage) -> None:
    """Write an invoice in the transaction that records the event's id; do nothing if the id is already recorded."""
    async with engine.begin() as connection:
        if await once_async(connection, message, consumer="billing"):
            await connection.execute(INVOICE, {"order_id": message.headers["ce_subject"], **order.model_dump()})


@order_events
async def ignore(_: Any) -> None:
    """Ignore the other events of orders."""
