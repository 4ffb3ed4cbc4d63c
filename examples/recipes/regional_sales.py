"""Sales by region: orders joined with reference data that another Postgres database has.

A round joins with the customers as they were when it began, or up to a minute before. An order counts once, in the
region that its customer had then; a change of the reference data does not move what was counted. If that database is
away, the rounds wait for it, as they do for the sink.

    export REFERENCE_URL=postgresql://crm.internal/crm
    outbox consume regional_sales:job --continuous
"""

from __future__ import annotations

import os
import time
from functools import lru_cache
from typing import TYPE_CHECKING

import psycopg

from spark_jobs import ConsumerJob

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REFRESH_SECONDS = 60


@lru_cache(maxsize=1)
def customers(_minute: int) -> list[tuple[str, str]]:
    """Return each customer's region: read once, until it is asked for in another minute.

    One row for each customer: an order joined with two would count twice.
    """
    with psycopg.connect(os.environ["REFERENCE_URL"]) as connection:
        return connection.execute(
            "SELECT DISTINCT ON (customer) customer, region FROM customers ORDER BY customer, region"
        ).fetchall()


def with_region(orders: DataFrame) -> DataFrame:
    """Join a round's orders with their customers. The broadcast moves no order into another partition."""
    from pyspark.sql import functions as F  # noqa: N812

    rows = customers(int(time.monotonic() // REFRESH_SECONDS))
    table = orders.sparkSession.createDataFrame(rows, "customer string, region string")
    # An inner join would silently drop the orders of customers that the table lacks.
    return orders.join(F.broadcast(table), "customer", "left")


job = ConsumerJob(
    group="regional-sales",
    topics=("order-events",),
    schema="customer string NOT NULL, amount_cents long NOT NULL",
    transform=with_region,
    setup="CREATE TABLE IF NOT EXISTS regional_sales (region text PRIMARY KEY, orders bigint, cents bigint)",
    effect="""
        INSERT INTO regional_sales AS s
        SELECT coalesce(region, 'unknown'), count(*), sum(amount_cents)
          FROM batch WHERE NOT message_tombstone GROUP BY 1 ORDER BY 1
            ON CONFLICT (region) DO UPDATE SET orders = s.orders + excluded.orders, cents = s.cents + excluded.cents""",
)
