"""Events in the order of something else than what they are about: the orders of a customer, in the customer's order."""

from __future__ import annotations

import datetime as dt

import psycopg
import pytest
from failing_relays import SMALL, delivery, headers, let_pass, outbox, routes, url, wait_for_dead
from support import drained, look_up, wait_until
from wal_support import to_wal

from outbox import Event, Outbox

__all__ = ["delivery", "url"]


def about(order: str | None, name: str, payload: bytes | None = None) -> Event:
    return Event("Order", "customer-7", name, payload or {"n": name}, subject=order)


def seen(messages: list) -> list[tuple[str, str, bytes]]:
    """What a consumer reads: the event, what it is about, and the key by which it is ordered."""
    return [(headers(each)["event-type"], headers(each)["ce_subject"], each.key()) for each in messages]


@pytest.mark.parametrize(("source", "promise"), [("polling", "exactly-once"), ("wal", "at-least-once")])
def test_subjects_of_one_key_keep_its_order(url, outbox_kafka, outbox_relay, delivery, wal, source, promise):
    """A dead letter of order-1 holds up the order-2 of its customer; after that all keep their subjects."""
    settings = delivery | {"delivery": promise}
    if source == "wal":
        settings |= wal
        to_wal(url, wal)
    topic = outbox_kafka.create_topic(outbox_kafka.name("orders"), config=SMALL)
    with psycopg.connect(url) as connection:
        first = about("order-1", "a", bytes(range(256)) * 100), about("order-2", "b"), about(None, "c")
        for event in first:
            Outbox().add(connection, event)
        Outbox().add(connection, about("order-3", "d"), delay=dt.timedelta())
    env = routes(Order=topic) | {"OUTBOX_KAFKA__COMPRESSION_TYPE": "none"}
    outbox_relay(env=env, relay__archive_days=7, **settings)
    wait_for_dead(url, "a")
    wait_until(lambda: look_up(url, "SELECT 1 FROM outbox.scheduled") == [], what="the scheduled event to be due")
    assert outbox_kafka.consume(topic) == []
    let_pass(outbox_kafka, topic)
    outbox(url, "dead-letters", "retry", "--all")
    drained(url)
    expected = [
        ("a", "order-1", b"customer-7"),
        ("b", "order-2", b"customer-7"),
        ("c", "customer-7", b"customer-7"),
        ("d", "order-3", b"customer-7"),
    ]
    assert seen(outbox_kafka.consume(topic)) == expected
    archived = "SELECT count(*) FROM outbox.published"
    wait_until(lambda: look_up(url, archived) == [(4,)], what="the archive")
    assert outbox(url, "replay", "--aggregate", "Order/customer-7", "--yes")["sent"] == 4
    drained(url)
    assert seen(outbox_kafka.consume(topic)) == 2 * expected
