"""The publisher on a real broker: what a message looks like, where it lands, and what is refused."""

from __future__ import annotations

import random
import uuid

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary_event

from outbox.errors import ConfigurationError
from relay.config import load, producer_options
from relay.ports import PUBLISHED, BatchRefused, Claim, Published, Refused
from relay.publisher import IdempotentPublisher
from relay.routing import Router
from relay.sending import Topics

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def claim(number: int, kind: str, key: str = "4711", value: bytes | None = b'{"a": 1}', headers=None) -> Claim:
    event_id = str(uuid.UUID(int=number + (7 << 76)))
    return Claim(number, event_id, kind, key, "OrderPlaced", "2026-01-02T03:04:05.678901Z", value, headers)


def publisher(kafka, *, create: bool = True, seconds: float = 10.0, **options: str) -> IdempotentPublisher:
    settings = load(kafka={"bootstrap.servers": kafka.bootstrap_servers, **options})
    topics = Topics({"bootstrap.servers": kafka.bootstrap_servers}, create=create)
    return IdempotentPublisher(producer_options(settings), Router(), topics, "/shop", seconds)


def test_a_message_is_a_cloudevent_and_what_debeziums_readers_expect(outbox_kafka):
    kind = outbox_kafka.name("Order")
    sender = publisher(outbox_kafka)
    headers = {"tenant": "acme", "traceparent": TRACE}
    first, second = claim(1, kind, headers=headers), claim(2, kind, value=None)
    third = claim(3, kind, value=b"\x00", headers={"content-type": "application/avro"})
    receipt = sender.publish([first, second, third])
    sender.close()
    assert receipt.failure is None
    assert [outcome for _, outcome in receipt.results] == [PUBLISHED] * 3
    message, tombstone, raw = outbox_kafka.consume(f"{kind.lower()}-events")
    assert message.key() == b"4711"
    assert message.value() == b'{"a": 1}'
    sent = dict(message.headers())
    event = from_binary_event(KafkaMessage(headers=sent, key=message.key(), value=message.value()))
    assert (event.get_id(), event.get_source(), event.get_type()) == (first.event_id, "/shop", "OrderPlaced")
    assert (event.get_subject(), event.get_datacontenttype()) == ("4711", "application/json")
    assert event.get_time().isoformat() == "2026-01-02T03:04:05.678901+00:00"
    assert event.get_data() == {"a": 1}
    for name in ("id", "idempotency-key"):
        assert sent[name] == first.event_id.encode()
    assert (sent["event-type"], sent["aggregate-type"]) == (b"OrderPlaced", kind.encode())
    assert (sent["tenant"], sent["ce_traceparent"], sent["traceparent"]) == (b"acme", TRACE.encode(), TRACE.encode())
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
    sender.publish([claim(n, kind, key) for n, key in enumerate(keys)])
    sender.close()
    where = {message.key().decode(): message.partition() for message in outbox_kafka.consume(topic)}
    assert where == {key: (number & 0x7FFFFFFF) % 12 for key, number in zip(keys, hashes, strict=True)}


def test_a_missing_topic_is_refused_or_created_as_asked(outbox_kafka):
    kind = outbox_kafka.name("Order")
    sender = publisher(outbox_kafka, create=False)
    [(_, outcome)] = sender.publish([claim(1, kind), claim(2, kind)]).results
    assert isinstance(outcome, Refused)
    assert "OUTBOX_CREATE_TOPICS" in outcome.reason
    sender.close()
    sender = publisher(outbox_kafka, create=True)
    assert [outcome for _, outcome in sender.publish([claim(1, kind)]).results] == [PUBLISHED]
    sender.close()


def test_a_refused_event_holds_up_its_own_key_and_no_other(outbox_kafka):
    kind = outbox_kafka.name("Order")
    sender = publisher(outbox_kafka)
    claims = [
        claim(1, kind),
        claim(2, "not a topic", "a"),
        claim(3, "not a topic", "a"),
        claim(4, kind, "a"),
        claim(5, "not a topic", "b"),
    ]
    receipt = sender.publish(claims)
    assert receipt.failure is None
    outcomes = {item.position: type(outcome) for item, outcome in receipt.results}
    assert outcomes == {1: Published, 2: Refused, 4: Published, 5: Refused}
    receipt = sender.publish([claim(4, kind, value=b"x" * 1_100_000)])
    assert isinstance(receipt.results[0][1], Refused)
    assert "size" in receipt.results[0][1].reason
    sender.close()


def test_what_the_broker_refuses_takes_its_followers_down_but_not_other_topics(outbox_kafka):
    """A topic with a lower limit: its batch fails as a whole, nothing behind it is sent, the other topic's goes on."""
    small, other = outbox_kafka.name("Small"), outbox_kafka.name("Other")
    outbox_kafka.create_topic(f"{small.lower()}-events", 1, {"max.message.bytes": "2000"})
    outbox_kafka.create_topic(f"{other.lower()}-events", 1)
    # One message a request: followers are requests of their own, which only the gapless guarantee holds back.
    sender = publisher(outbox_kafka, **{"batch.num.messages": "1"})
    sender.publish([claim(1, small), claim(2, other)])
    claims = [
        claim(3, other),
        claim(4, small, value=random.Random(1).randbytes(5000)),
        claim(5, small),
        claim(6, small, "another key"),
    ]
    receipt = sender.publish(claims)
    sender.close()
    assert isinstance(receipt.failure, BatchRefused)
    known = {item.position: type(outcome) for item, outcome in receipt.results}
    assert set(known.values()) == {Published}
    assert Published not in {known.get(4), known.get(5), known.get(6)}
    read = outbox_kafka.consume([f"{small.lower()}-events", f"{other.lower()}-events"])
    stored = {int(uuid.UUID(dict(message.headers())["id"].decode()).int & 0xFFFF) for message in read}
    published = {position for position, kind in known.items() if kind is Published}
    assert published <= stored
    assert stored.isdisjoint({4, 5, 6})


def test_no_acknowledgement_in_time_is_a_failure_and_nothing_is_said_to_be_published(private_kafka):
    cluster = private_kafka()
    topics = private_kafka.topics(cluster)
    topics.create_topic("order-events")
    sender = publisher(topics, seconds=1.0)
    assert sender.publish([claim(1, "Order")]).failure is None
    cluster.pause_broker(0)
    receipt = sender.publish([claim(2, "Order"), claim(3, "Order")])
    assert receipt.results == []
    assert "within 1 s" in str(receipt.failure)
    sender.close()
    cluster.resume_broker(0)
    # A closed one is of no use, and says so.
    assert sender.publish([claim(4, "Order")]).failure is not None


def test_an_option_that_librdkafka_does_not_know(outbox_kafka):
    with pytest.raises(ConfigurationError, match=r"no\.such\.option"):
        publisher(outbox_kafka, **{"no.such.option": "1"})


def test_librdkafka_says_nothing_on_stderr_by_itself(outbox_kafka, capfd):
    kind = outbox_kafka.name("Order")
    sender = publisher(outbox_kafka)
    sender.publish([claim(1, kind)])
    sender.close()
    assert capfd.readouterr().err == ""
