"""A relay that can't reach Kafka does not keep its lanes from one that can."""

from __future__ import annotations

from support import drained, owners, wait_until, write

from outbox import Event
from outbox.sandbox._ports import free_ports


def test_lanes_go_to_a_relay_that_reaches_kafka(outbox_postgres, outbox_kafka, outbox_relay):
    kind = outbox_kafka.name("Order")
    outbox_kafka.create_topic(f"{kind.lower()}-events", 3)
    [nobody] = free_ports(1)
    write(outbox_postgres.url, [Event(kind, f"key-{n}", "T", {"n": n}) for n in range(1_000)])
    blind = outbox_relay(
        bootstrap_servers=f"127.0.0.1:{nobody}", relay__lease_seconds=2, relay__instance="blind", create_topics=False
    )
    wait_until(lambda: owners(outbox_postgres.url) == {"blind": 4}, what="the blind relay to hold every lane")
    outbox_relay(relay__lease_seconds=2, relay__instance="seeing")
    # Not that its leases ran out on a slow machine: then it gets its share again, for which the wait begins anew.
    blind.wait_for_log("the lanes are left to another relay", 60)
    # Otherwise the two would share the lanes evenly by then.
    wait_until(lambda: owners(outbox_postgres.url) == {"seeing": 4}, 60, "the other one to hold every lane")
    drained(outbox_postgres.url)
    assert blind.running
