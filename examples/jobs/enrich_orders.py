"""A complete job to copy: order events, joined with a table of the sink, into a table and into new events.

One statement reads ``customers`` once, so the stored row and the new event agree. The relay publishes the events; with
delivery exactly-once there is one ``OrderEnriched`` in Kafka for each order event, in order per key.

The table has no unique constraint on purpose: an event applied twice would show as two rows, and ``id`` shows the order
in which they were applied.
"""

from __future__ import annotations

from typing import Final

from spark_jobs.effects.produce import Produce, Traced
from spark_jobs.job import ConsumerJob

_SETUP: Final = """
CREATE TABLE IF NOT EXISTS customers (
    customer text PRIMARY KEY,
    segment text NOT NULL,
    country text NOT NULL
);
CREATE TABLE IF NOT EXISTS enriched_orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id uuid NOT NULL,
    order_id text NOT NULL,
    seq integer NOT NULL,
    customer text NOT NULL,
    amount_cents bigint NOT NULL,
    status text NOT NULL,
    segment text NOT NULL,
    country text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS enriched_orders_order ON enriched_orders (order_id, id)"""

# A customer that is not in the sink yet is 'unknown'. If an order should wait for its customer instead, raise an error
# in the effect: the message becomes a dead letter, to be retried.
_EFFECT: Final = """
WITH enriched AS MATERIALIZED (
    SELECT batch.*, coalesce(c.segment, 'unknown') AS segment, coalesce(c.country, 'unknown') AS country
      FROM batch LEFT JOIN customers AS c USING (customer)
     WHERE NOT message_tombstone),
kept AS (
    INSERT INTO enriched_orders (message_id, order_id, seq, customer, amount_cents, status, segment, country)
    SELECT message_id, order_id, seq, customer, amount_cents, status, segment, country
      FROM enriched ORDER BY message_topic, message_part, message_offset)
"""

produce = Produce(
    name="enrich-orders",
    aggregate_type="EnrichedOrder",
    aggregate_id="order_id",
    event_type="OrderEnriched",
    payload="""
        jsonb_build_object('order_id', order_id, 'seq', seq, 'customer', customer, 'amount_cents', amount_cents,
                           'status', status, 'segment', segment, 'country', country)""",
    rows="enriched",
    traced=True,
)

job = ConsumerJob(
    group="enrich-orders",
    topics=("order-events",),
    schema=Traced(
        "order_id string NOT NULL, seq int NOT NULL, customer string NOT NULL, amount_cents long NOT NULL, "
        "status string NOT NULL"
    ),
    setup=_SETUP,
    effect=_EFFECT + produce.insert(),
)
