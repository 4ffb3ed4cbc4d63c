"""Two relays, and published events that Postgres can't settle while all else works."""

from __future__ import annotations

import psycopg
from alerting import scraped
from failing_relays import add, delivery, event, names, routes, url
from support import drained, ends, look_up, wait_until

from outbox.sandbox._ports import free_ports

__all__ = ["delivery", "url"]

LEASE = 8.0
"""No machine is so slow that it runs out before it is renewed."""
LONG = 2.5 * LEASE
"""A relay that can't publish leaves its lanes after two leases."""
HOLDER = "SELECT owner, epoch FROM outbox.lanes"
PARTITIONS = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox.published'::regclass"


def test_at_least_once_no_relay_leaves_to_another_what_it_can_not_settle(url, outbox_kafka, outbox_relay, delivery):
    """Somebody has the archive locked, as by VACUUM FULL. The next holder would send it all again, and the next."""
    topic = outbox_kafka.create_topic(outbox_kafka.name("settled"))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    settings = delivery | {"relay__lease_seconds": LEASE, "relay__archive_days": 7, "env": routes(Order=topic)}
    first = outbox_relay(relay__instance="first", relay__metrics_address=address, **settings)
    add(url, event("Order", "a0"))
    drained(url)
    second = outbox_relay(relay__instance="second", **settings)
    wait_until(lambda: look_up(url, "SELECT count(*) FROM outbox.relays") == [(2,)], what="both relays")
    holder = look_up(url, HOLDER)

    def waited() -> float:
        return max(seconds for series, seconds in scraped(address).items() if "lane_wait_seconds" in series)

    first.wait_for_log("archive kept")
    with psycopg.connect(url) as other:
        # Not the table itself: then nothing would be published.
        for (partition,) in look_up(url, PARTITIONS):
            other.execute(f"LOCK TABLE {partition} IN ACCESS EXCLUSIVE MODE")
        add(url, *(event("Order", f"a{number}") for number in range(1, 10)))
        wait_until(lambda: waited() >= LONG or look_up(url, HOLDER) != holder, 3 * LONG, "the lane to wait for long")
        assert look_up(url, HOLDER) == holder
    drained(url)
    # It goes to the other one when it is settled.
    ends(first)
    add(url, event("Order", "b1"))
    drained(url)
    ends(second)
    assert names(outbox_kafka.consume(topic)) == [*(f"a{number}" for number in range(10)), "b1"]
