"""One event all the way: a transaction of the service, the relay, Kafka, the consumer, a table."""

from __future__ import annotations

import json

import psycopg
import pytest
from support import backlog, wait_until

from outbox import Event, Outbox

pytestmark = pytest.mark.spark


def test_one_event_goes_all_the_way(bench, outbox_relay):
    url = bench.database.url
    placed = {"order_id": "17", "seq": 1, "customer": "ada", "amount_cents": 4200, "status": "placed"}
    with psycopg.connect(url) as service:
        service.execute("CREATE TABLE orders (id int)")
        service.execute("INSERT INTO orders VALUES (17)")
        Outbox().add(service, Event("Order", "17", "OrderPlaced", placed))
        # Nothing is anywhere before the service commits.
        assert backlog(url) == 0
    outbox_relay(env={"OUTBOX_ROUTES": json.dumps({"Order": bench.topic})})
    wait_until(lambda: backlog(url) == 0, what="the event to be published")
    assert (bench.once().applied, bench.totals()) == (1, {"17": (4200, 1, 1, 0, "placed")})
    # And once only.
    assert (bench.once().applied, bench.totals()) == (0, {"17": (4200, 1, 1, 0, "placed")})
