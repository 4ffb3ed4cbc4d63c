"""An order and its event in one transaction of plain psycopg.

Run it in a shell:

    pip install 'outbox-kafka[relay]'
    export DATABASE_URL=postgresql://localhost/shop
    OUTBOX_DATABASE_URL=$DATABASE_URL outbox db upgrade
    python plain_psycopg.py tea 2
"""

from __future__ import annotations

import os
import sys
from typing import Any

import psycopg

from outbox import Event, Outbox

TABLES = """
CREATE TABLE IF NOT EXISTS articles (name text PRIMARY KEY, stock integer NOT NULL);
CREATE TABLE IF NOT EXISTS orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, article text NOT NULL, quantity integer NOT NULL);
INSERT INTO articles VALUES ('tea', 10) ON CONFLICT DO NOTHING"""

outbox = Outbox()


class OutOfStock(Exception):
    """The stock of the article is too low."""


def place_order(connection: psycopg.Connection[Any], article: str, quantity: int) -> int:
    """Write an order and its event, and return the order's id. The caller commits both or neither."""
    order = "INSERT INTO orders (article, quantity) VALUES (%s, %s) RETURNING id"
    [(order_id,)] = connection.execute(order, (article, quantity)).fetchall()
    outbox.add(connection, Event("Order", order_id, "OrderPlaced", {"article": article, "quantity": quantity}))
    take = "UPDATE articles SET stock = stock - %(n)s WHERE name = %(name)s AND stock >= %(n)s"
    if connection.execute(take, {"name": article, "n": quantity}).rowcount == 0:
        raise OutOfStock(article)
    return int(order_id)


def main(article: str, quantity: str) -> None:
    """Place an order; print its id, or that the article is out of stock."""
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        connection.execute(TABLES)
        try:
            with connection.transaction():  # commits at its end; an exception rolls the order and its event back
                order_id = place_order(connection, article, int(quantity))
        except OutOfStock:
            sys.exit(f"out of stock: {article}")
        print(order_id)


if __name__ == "__main__":
    main(*sys.argv[1:])
