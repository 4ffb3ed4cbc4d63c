"""A month of orders into a second table, while the group that applies them all goes on as it was.

The backfill is a group of its own, so it remembers ids and offsets of its own: stopped, it goes on where it was; run
again, it applies nothing twice. The order's own time decides, not Kafka's (``message_time``), which is when it was
published: an order of March counts that was published in April, sent again or replayed. Nothing is published before it
happens, so Kafka's index of times says where to begin; the run ends where the topic ended when it began. What retention
removed is missing.

    outbox offsets reset sales-2026-03 --topic order-events --to 2026-03-01T00:00:00Z --new --skip --reason backfill
    outbox consume backfill:job --once
    outbox offsets forget sales-2026-03 --topic order-events --reason "backfill is done"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_jobs import ConsumerJob

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FROM, UNTIL = "2026-03-01T00:00:00Z", "2026-04-01T00:00:00Z"


def of_the_month(orders: DataFrame) -> DataFrame:
    """Leave out the orders of other times; their ids are not remembered either."""
    return orders.filter(f"ordered_at >= timestamp '{FROM}' AND ordered_at < timestamp '{UNTIL}'")


job = ConsumerJob(
    group="sales-2026-03",
    topics=("order-events",),
    schema="ordered_at timestamp NOT NULL, amount_cents long NOT NULL",
    transform=of_the_month,
    setup="CREATE TABLE IF NOT EXISTS sales_2026_03 (day date PRIMARY KEY, orders bigint, cents bigint)",
    effect="""
        INSERT INTO sales_2026_03 AS s
        SELECT (ordered_at AT TIME ZONE 'UTC')::date, count(*), sum(amount_cents)
          FROM batch WHERE NOT message_tombstone GROUP BY 1 ORDER BY 1
            ON CONFLICT (day) DO UPDATE SET orders = s.orders + excluded.orders, cents = s.cents + excluded.cents""",
)
