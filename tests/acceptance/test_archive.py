"""Real relays that keep what they have published."""

from __future__ import annotations

import pytest
from failing_relays import DELIVERIES, add, delivery, event, headers, names, outbox, routes, url
from support import drained, end_leases, look_up, wait_until

__all__ = ["delivery", "url"]


def places(url: str) -> dict[str, tuple[str, int, int]]:
    found = look_up(url, 'SELECT event_id::text, topic, partition, "offset" FROM outbox.published')
    assert len({event_id for event_id, *_ in found}) == len(found)
    return {event_id: tuple(place) for event_id, *place in found}


@pytest.mark.parametrize("delivery", DELIVERIES, indirect=True)
def test_after_a_kill_each_event_is_archived_once(url, outbox_kafka, outbox_relay, delivery):
    topic = outbox_kafka.create_topic(outbox_kafka.name("archived"))
    settings = delivery | {"relay__archive_days": 7}
    exactly = delivery["delivery"] == "exactly-once"
    add(url, *(event("Order", f"a{number}") for number in range(5)))
    point = "txn.committed=kill" if exactly else "batch.acknowledged=kill"
    relay = outbox_relay(env=routes(Order=topic) | {"OUTBOX_FAILPOINTS": point}, **settings)
    assert relay.wait() == -9
    assert places(url) == {}
    end_leases(url)
    outbox_relay(env=routes(Order=topic), **settings)
    drained(url)
    wait_until(lambda: len(places(url)) == 5, what="the archive")
    messages = outbox_kafka.consume(topic)
    if exactly:
        assert set(places(url).values()) == {(None, None, None)}
        assert names(messages) == [f"a{number}" for number in range(5)]
    else:
        again = {headers(m)["ce_id"]: (m.topic(), m.partition(), m.offset()) for m in messages[-5:]}
        assert places(url) == again
        assert names(messages) == 2 * [f"a{number}" for number in range(5)]
    # A replay goes out once more, marked, in order, and is archived beside the first.
    assert outbox(url, "replay", "--aggregate", "Order/a", "--yes")["sent"] == 5
    drained(url)
    replayed = outbox_kafka.consume(topic)[len(messages) :]
    assert names(replayed) == [f"a{number}" for number in range(5)]
    assert all("outbox-replay" in headers(message) for message in replayed)
    assert {headers(message)["ce_id"] for message in replayed} == {headers(message)["ce_id"] for message in messages}
    wait_until(lambda: look_up(url, "SELECT count(*) FROM outbox.published") == [(10,)], what="the archive")
