"""The publisher on a real broker: what a message looks like, where it lands, and what is refused."""

from __future__ import annotations

import random
import time
import uuid

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary_event

from relay.config import load, producer_options
from relay.core.lease import Lease
from relay.core.ports import (
    PUBLISHED,
    BatchRefused,
    BrokerUnavailable,
    Claim,
    Completed,
    DeliveryTimeout,
    Failed,
    Published,
    Receipt,
    Refused,
)
from relay.kafka.idempotent import IdempotentPublisher
from relay.kafka.routing import Router
from relay.kafka.topics import Topics

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def claim(
    number: int, kind: str, key: str = "4711", value: bytes | None = b'{"a": 1}', headers=None, lane: int = 0
) -> Claim:
    event_id = str(uuid.UUID(int=number + (7 << 76)))
    return Claim(number, event_id, kind, key, "OrderPlaced", "2026-01-02T03:04:05.678901Z", value, headers, lane=lane)


def publisher(
    kafka, *, create: bool = True, seconds: float = 60.0, topics: Topics | None = None, more=None, **options: str
) -> IdempotentPublisher:
    settings = load(kafka={"bootstrap.servers": kafka.bootstrap_servers, **options})
    topics = topics or Topics({"bootstrap.servers": kafka.bootstrap_servers}, create=create)
    return IdempotentPublisher(producer_options(settings), Router(), topics, "/shop", seconds, **(more or {}))


def outcomes(receipt: Receipt) -> dict[int, type]:
    return {item.position: type(outcome) for item, outcome in receipt.results}


def stored(messages) -> list[int]:
    """The numbers of the events, as they stand in the topic."""
    return [uuid.UUID(dict(message.headers())["id"].decode()).int & 0xFFFF for message in messages]


def test_a_message_is_a_cloudevent_and_what_debeziums_readers_expect(outbox_kafka):
    kind = outbox_kafka.name("Order")
    sender = publisher(outbox_kafka)
    headers = {"tenant": "acme", "traceparent": TRACE}
    first, second = claim(1, kind, headers=headers), claim(2, kind, value=None)
    third = claim(3, kind, value=b"\x00", headers={"content-type": "application/avro"})
    sent = sender.publish({0: [first, second, third]})
    sender.close()
    assert isinstance(sent, Completed)
    assert [outcome for _, outcome in sent.receipts[0].results] == [PUBLISHED] * 3
    message, tombstone, raw = outbox_kafka.consume(f"{kind.lower()}-events")
    assert message.key() == b"4711"
    assert message.value() == b'{"a": 1}'
    headers = dict(message.headers())
    event = from_binary_event(KafkaMessage(headers=headers, key=message.key(), value=message.value()))
    assert (event.get_id(), event.get_source(), event.get_type()) == (first.event_id, "/shop", "OrderPlaced")
    assert (event.get_subject(), event.get_datacontenttype()) == ("4711", "application/json")
    assert event.get_time().isoformat() == "2026-01-02T03:04:05.678901+00:00"
    assert event.get_data() == {"a": 1}
    for name in ("id", "idempotency-key"):
        assert headers[name] == first.event_id.encode()
    assert (headers["event-type"], headers["aggregate-type"]) == (b"OrderPlaced", kind.encode())
    traces = (headers["ce_traceparent"], headers["traceparent"])
    assert (headers["tenant"], traces) == (b"acme", (TRACE.encode(), TRACE.encode()))
    assert tombstone.value() is None
    assert "content-type" not in dict(tombstone.headers())
    assert dict(raw.headers())["content-type"] == b"application/avro"


def test_keys_land_where_java_clients_put_them(outbox_kafka):
    """murmur2 of these keys modulo 12, as the Java client's BuiltInPartitioner computes it."""
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 12)
    keys = ["21", "foobar", "a-little-bit-long-string", "a-little-bit-longer-string"]
    keys.append("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8")
    # From Kafka's own UtilsTest.testMurmur2, as signed 32-bit numbers.
    hashes = [-973932308, -790332482, -985981536, -1486304829, -58897971]
    sender = publisher(outbox_kafka)
    sender.publish({0: [claim(n, kind, key) for n, key in enumerate(keys)]})
    sender.close()
    where = {message.key().decode(): message.partition() for message in outbox_kafka.consume(topic)}
    assert where == {key: (number & 0x7FFFFFFF) % 12 for key, number in zip(keys, hashes, strict=True)}


def test_the_results_say_where_each_event_stands_if_asked(outbox_kafka):
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 1)
    sender = publisher(outbox_kafka, more={"record_offsets": True})
    sent = sender.publish({0: [claim(1, kind), claim(3, kind)], 5: [claim(2, kind, "b", lane=5)]})
    sender.close()
    assert [outcome for _, outcome in sent.receipts[0].results] == [Published(topic, 0, 0), Published(topic, 0, 1)]
    assert [outcome for _, outcome in sent.receipts[5].results] == [Published(topic, 0, 2)]


def test_events_of_a_missing_topic_are_left_out_while_others_go_on_and_it_is_tried_again(outbox_kafka):
    """No event is at fault: none is refused, and no attempt of it is counted."""
    kind, missing = outbox_kafka.name("Order"), outbox_kafka.name("Missing")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 1)
    seconds = 0.0
    topics = Topics({"bootstrap.servers": outbox_kafka.bootstrap_servers}, create=False, clock=lambda: seconds)
    sender = publisher(outbox_kafka, topics=topics)
    assert sender.paused() == frozenset()
    sent = sender.publish({0: [claim(1, kind), claim(2, missing), claim(3, kind)], 1: [claim(4, kind, "b", lane=1)]})
    assert isinstance(sent, Completed)
    assert outcomes(sent.receipts[0]) == {1: Published, 3: Published}
    assert (sent.receipts[0].left_out, sent.receipts[1].left_out) == (True, False)
    assert sender.paused() == {(missing, False)}
    [reason] = topics.reasons().values()
    assert "OUTBOX_CREATE_TOPICS" in reason
    # The state outlives the publisher.
    sender.close()
    sender = publisher(outbox_kafka, topics=topics)
    assert sender.paused() == {(missing, False)}
    sent = sender.publish({0: [claim(2, missing), claim(5, kind)]})
    assert (outcomes(sent.receipts[0]), sent.receipts[0].left_out) == ({5: Published}, True)
    late = outbox_kafka.create_topic(f"{missing.lower()}-events", 1)
    assert sender.paused() == {(missing, False)}
    seconds = 3.0
    assert sender.paused() == frozenset()
    sent = sender.publish({0: [claim(2, missing), claim(6, kind)]})
    assert outcomes(sent.receipts[0]) == {2: Published, 6: Published}
    assert topics.reasons() == {}
    sender.close()
    assert stored(outbox_kafka.consume(topic)) == [1, 3, 4, 5, 6]
    assert stored(outbox_kafka.consume(late)) == [2]


def test_a_missing_topic_is_created_as_asked(outbox_kafka):
    kind = outbox_kafka.name("Order")
    sender = publisher(outbox_kafka, create=True)
    assert outcomes(sender.publish({0: [claim(1, kind)]}).receipts[0]) == {1: Published}
    sender.close()


@pytest.mark.parametrize("once", [False, True])
def test_what_the_broker_refuses_takes_its_followers_down_but_not_other_topics(outbox_kafka, once):
    """A topic with a lower limit: its batch fails as a whole, nothing behind it is sent, the other topic's goes on."""
    small, other = outbox_kafka.name("Small"), outbox_kafka.name("Other")
    outbox_kafka.create_topic(f"{small.lower()}-events", 1, {"max.message.bytes": "2000"})
    outbox_kafka.create_topic(f"{other.lower()}-events", 1)
    # One message a request: followers are requests of their own, which only the gapless guarantee holds back.
    sender = publisher(outbox_kafka, more={"once": once}, **{"batch.num.messages": "1"})
    assert sender.join([Lease(lane, 1, 600.0, time.monotonic()) for lane in (0, 7)]) == {}
    sender.publish({0: [claim(1, small), claim(2, other)]})
    turn = {
        0: [claim(3, other)],
        7: [
            claim(4, small, value=random.Random(1).randbytes(5000), lane=7),
            claim(5, small, lane=7),
            claim(6, small, "another key", lane=7),
        ],
    }
    sent = sender.publish(turn)
    sender.close()
    known = {n: kind for receipt in sent.receipts.values() for n, kind in outcomes(receipt).items()}
    if once:
        # At-most-once has deleted the rows: nothing is looked for in smaller batches.
        assert (type(sent.error), list(sent.blamed)) == (BrokerUnavailable, [])
        assert known.pop(4) is Refused
    else:
        assert (type(sent.error), list(sent.blamed)) == (BatchRefused, [7])
    assert set(known.values()) <= {Published}
    assert known.keys().isdisjoint({4, 5, 6})
    there = stored(outbox_kafka.consume([f"{small.lower()}-events", f"{other.lower()}-events"]))
    assert known.keys() <= set(there)
    assert set(there).isdisjoint({4, 5, 6})


def test_at_most_once_a_turn_that_is_cut_because_a_lease_ends_has_failed(outbox_kafka):
    """Its rows are deleted, and Kafka is well: nothing else would say that its events are lost."""
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 1)
    sender = publisher(outbox_kafka, seconds=10.0, more={"once": True})
    assert sender.join([Lease(0, 1, 600.0, time.monotonic()), Lease(7, 1, 9.0, time.monotonic())]) == {}
    sent = sender.publish({0: [claim(1, kind)], 7: [claim(2, kind, lane=7), claim(3, kind, lane=7)]})
    assert isinstance(sent, Failed)
    assert isinstance(sent.error, DeliveryTimeout)
    assert "2 events were not sent" in str(sent.error)
    assert {lane: outcomes(receipt) for lane, receipt in sent.receipts.items()} == {0: {1: Published}, 7: {}}
    sender.close()
    assert stored(outbox_kafka.consume(topic)) == [1]


def test_no_acknowledgement_in_time_is_a_failure_and_nothing_is_said_to_be_published(private_kafka):
    cluster = private_kafka()
    topics = private_kafka.topics(cluster)
    topics.create_topic("order-events")
    sender = publisher(topics)
    assert isinstance(sender.publish({0: [claim(1, "Order")]}), Completed)
    cluster.pause_broker(0)
    sender._delivery_seconds = 1.0
    sent = sender.publish({0: [claim(2, "Order"), claim(3, "Order")], 1: [claim(4, "Order", lane=1)]})
    assert {lane: list(receipt.results) for lane, receipt in sent.receipts.items()} == {0: [], 1: []}
    assert isinstance(sent.error, DeliveryTimeout)
    assert "within 1 s (3 of 3 events" in str(sent.error)
    sender.close()
    cluster.resume_broker(0)
    # A closed one is of no use, and says so.
    assert isinstance(sender.publish({0: [claim(4, "Order")]}), Failed)


def test_librdkafka_says_nothing_on_stderr_by_itself(outbox_kafka, capfd):
    kind = outbox_kafka.name("Order")
    sender = publisher(outbox_kafka)
    sender.publish({0: [claim(1, kind)]})
    sender.close()
    assert capfd.readouterr().err == ""
