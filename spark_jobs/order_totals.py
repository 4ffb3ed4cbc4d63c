"""A complete job to copy: order events into one row per order.

The effect adds up on purpose: an event applied twice would show in ``events_applied`` and in the total, and one that
came before its predecessor in ``out_of_order``. A batch may have several events of an order.
"""

from __future__ import annotations

from typing import Final

from spark_jobs.job import ConsumerJob

_SETUP: Final = """
CREATE TABLE IF NOT EXISTS order_totals (
    order_id text PRIMARY KEY,
    customer text NOT NULL,
    status text NOT NULL,
    total_cents bigint NOT NULL,
    events_applied integer NOT NULL,
    last_seq integer NOT NULL,
    out_of_order integer NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
)"""

# In the order of keys, so that two transactions never wait for each other in a circle.
_EFFECT: Final = """
WITH steps AS (
    SELECT order_id, customer, status, amount_cents, seq, message_offset,
           lag(seq) OVER (PARTITION BY order_id ORDER BY message_offset) AS before
      FROM batch),
orders AS (
    SELECT order_id,
           (array_agg(customer ORDER BY message_offset DESC))[1] AS customer,
           (array_agg(status ORDER BY message_offset DESC))[1] AS status,
           sum(amount_cents) AS total_cents,
           count(*) AS events,
           (array_agg(seq ORDER BY message_offset))[1] AS first_seq,
           (array_agg(seq ORDER BY message_offset DESC))[1] AS last_seq,
           count(*) FILTER (WHERE before IS NOT NULL AND seq <> before + 1) AS disorder
      FROM steps GROUP BY order_id)
INSERT INTO order_totals AS t
       (order_id, customer, status, total_cents, events_applied, last_seq, out_of_order)
SELECT o.order_id, o.customer, o.status, o.total_cents, o.events, o.last_seq,
       o.disorder + (o.first_seq <> coalesce(before.last_seq, 0) + 1)::int
  FROM orders AS o LEFT JOIN order_totals AS before USING (order_id)
 ORDER BY o.order_id
    ON CONFLICT (order_id) DO UPDATE
   SET customer = excluded.customer,
       status = excluded.status,
       total_cents = t.total_cents + excluded.total_cents,
       events_applied = t.events_applied + excluded.events_applied,
       last_seq = excluded.last_seq,
       out_of_order = t.out_of_order + excluded.out_of_order,
       updated_at = now()"""

job = ConsumerJob(
    group="order-totals",
    topics=("order-events",),
    schema="order_id string, seq int, customer string, amount_cents long, status string",
    setup=_SETUP,
    effect=_EFFECT,
)
