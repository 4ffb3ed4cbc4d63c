"""Orders and their events in transactions of asyncpg, without SQLAlchemy's asyncio.

Run it in a shell:

    pip install 'outbox-kafka[relay]' asyncpg
    export DATABASE_URL=postgresql://localhost/shop
    OUTBOX_DATABASE_URL=$DATABASE_URL outbox db upgrade
    python plain_asyncpg.py tea 2
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import asyncpg

from outbox import AsyncOutbox, Event

TABLES = """
CREATE TABLE IF NOT EXISTS articles (name text PRIMARY KEY, stock integer NOT NULL);
CREATE TABLE IF NOT EXISTS orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, article text NOT NULL, quantity integer NOT NULL);
INSERT INTO articles VALUES ('tea', 10) ON CONFLICT DO NOTHING"""

outbox = AsyncOutbox()


class OutOfStock(Exception):
    """The stock of the article is too low."""


async def place_order(pool: asyncpg.Pool[Any], article: str, quantity: int) -> int:
    """Commit an order and its event, or neither; return the order's id."""
    async with pool.acquire() as connection, connection.transaction():
        order_id: int = await connection.fetchval(
            "INSERT INTO orders (article, quantity) VALUES ($1, $2) RETURNING id", article, quantity
        )
        event = Event("Order", order_id, "OrderPlaced", {"article": article, "quantity": quantity})
        await outbox.add(connection, event)
        left = await connection.fetchval(
            "UPDATE articles SET stock = stock - $2 WHERE name = $1 AND stock >= $2 RETURNING stock", article, quantity
        )
        if left is None:
            raise OutOfStock(article)  # rolls the order and its event back
    return order_id


async def main(article: str, quantity: str) -> None:
    """Place an order; print its id, or that the article is out of stock."""
    async with asyncpg.create_pool(os.environ["DATABASE_URL"], min_size=1) as pool:
        await pool.execute(TABLES)
        try:
            print(await place_order(pool, article, int(quantity)))
        except OutOfStock:
            sys.exit(f"out of stock: {article}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
