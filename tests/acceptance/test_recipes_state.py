"""examples/recipes/running_totals.py: state from topic to topic, killed on the way. Each order counts once."""

from __future__ import annotations

import json
import random
import signal
from collections import defaultdict
from itertools import accumulate

from recipes_support import shop
from support import look_up, wait_until, write

from outbox import Event

__all__ = ["shop"]

KILLS = 1


def test_totals_and_their_events_count_each_order_once_whatever_is_killed(shop, outbox_kafka):
    chance = random.Random(7)
    orders = [(f"c{chance.randint(0, 19)}", chance.randint(1, 999)) for _ in range(1_000)]
    shop.execute("CREATE TABLE totals (customer text PRIMARY KEY, orders integer NOT NULL, cents bigint NOT NULL)")

    def count() -> int:
        return look_up(shop.url, "SELECT coalesce(sum(orders), 0) FROM totals")[0][0]

    shop.relay()
    each = len(orders) // (KILLS + 1)
    for number in range(KILLS + 1):
        service = shop.start("running_totals.py")
        part = orders[number * each : (number + 1) * each]
        write(shop.url, (Event("Order", customer, "T", {"customer": customer, "cents": n}) for customer, n in part))
        if number < KILLS:
            # In the middle of this part.
            wait_until(lambda done=number * each: count() > done, 60, "orders to count")
            service.stop(signal.SIGKILL)
    wait_until(lambda: count() == len(orders), 60, "all orders to count")
    expected = defaultdict(list)
    for customer, cents in orders:
        expected[customer].append(cents)
    assert dict(look_up(shop.url, "SELECT customer, cents FROM totals")) == {c: sum(n) for c, n in expected.items()}
    seen = defaultdict(list)
    for message in outbox_kafka.consume(shop.topic_of("Customer"), len(orders)):
        seen[message.key().decode()].append(json.loads(message.value())["cents"])
    # One event for each order, in order: every total is the sum of the customer's orders up to there.
    assert seen == {customer: list(accumulate(cents)) for customer, cents in expected.items()}
    assert service.stop(signal.SIGTERM) == 0, service.text()
