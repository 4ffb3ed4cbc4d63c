"""The job of the pipeline's sink: how many orders each customer has, and for how much."""

from __future__ import annotations

from spark_jobs import ConsumerJob

job = ConsumerJob(
    group="customer-totals",
    setup="CREATE TABLE IF NOT EXISTS customer_totals (customer text PRIMARY KEY, orders bigint, cents numeric)",
    effect="""
        INSERT INTO customer_totals AS t
        SELECT customer, count(*), sum(amount_cents) FROM batch GROUP BY customer ORDER BY customer
        ON CONFLICT (customer) DO UPDATE
           SET orders = t.orders + excluded.orders, cents = t.cents + excluded.cents""",
)
