"""The publisher on a real broker: what a message looks like, where it lands, and what is refused."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable

import pytest
from confluent_kafka import Producer
from structlog.testing import capture_logs
from support import wait_until
from takeover_support import place

from outbox._clients.clock import uptime
from outbox._clients.first_messages import FirstMessages
from outbox.event import DEAD_LETTER
from relay.config import load, producer_options
from relay.core import lease as core_lease
from relay.core.lease import Lease
from relay.core.ports import BatchRefused, Claim, Completed, DeliveryTimeout, Failed, Receipt, RecordMetadata
from relay.kafka import producer as kafka_producer
from relay.kafka.client import NewTopics, log_unreachable
from relay.kafka.idempotent import IdempotentPublisher
from relay.kafka.producer import BatchProducer, Sending
from relay.kafka.routing import Route, Router
from relay.kafka.topics import Topics

__all__ = ["place"]


def claim(number: int, kind: str, key: str = "4711", lane: int = 0) -> Claim:
    event_id = str(uuid.UUID(int=number + (7 << 76)))
    return Claim(number, event_id, kind, key, "OrderPlaced", "2026-01-02T03:04:05.678901Z", b"{}", None, lane=lane)


def publisher(kafka, *, seconds: float = 60.0, options=(), **more) -> IdempotentPublisher:
    options = {"bootstrap.servers": kafka.bootstrap_servers} | dict(options)
    topics = Topics(options, create=True)
    return IdempotentPublisher(
        Sending(producer_options(load(kafka=options)), Router(), topics, "/shop", seconds, **more)
    )


def published(receipt: Receipt) -> list[int]:
    """The events that are published; none is refused."""
    assert receipt.refused == []
    return [item.position for item in receipt.published.rows]


def stored(messages) -> list[int]:
    """The numbers of the events, as they stand in the topic."""
    return [uuid.UUID(dict(message.headers())["id"].decode()).int & 0xFFFF for message in messages]


def test_a_relay_that_reaches_kafka_says_nothing_about_it(outbox_kafka):
    with capture_logs() as said:
        log_unreachable({"bootstrap.servers": outbox_kafka.bootstrap_servers})
        assert said == []
        log_unreachable({"bootstrap.servers": "127.0.0.1:1"})
        assert [one["brokers"] for one in said] == ["127.0.0.1:1"]


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
    sender = publisher(outbox_kafka, record_offsets=True)
    sent = sender.publish({0: [claim(1, kind), claim(3, kind)], 5: [claim(2, kind, "b", lane=5)]})
    sender.close()
    assert sent.receipts[0].published.records == [RecordMetadata(topic, 0, 0), RecordMetadata(topic, 0, 1)]
    assert sent.receipts[5].published.records == [RecordMetadata(topic, 0, 2)]


def test_after_a_turn_whose_acknowledgements_were_read_late_comes_another_producer(outbox_kafka, monkeypatch):
    """As when the process has slept: all is on Kafka, but what is sent next may be purged with what was left."""
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 1)
    for number in range(1, 30):
        sender = publisher(outbox_kafka, record_offsets=True)
        assert isinstance(sender.publish({0: [claim(2 * number - 1, kind)]}), Completed)
        sender._delivery_seconds = 0.001
        with monkeypatch.context() as patched:
            patched.setattr("relay.kafka.producer.failpoint", lambda _, at=2 * number: outbox_kafka.consume(topic, at))
            sent = sender.publish({0: [claim(2 * number, kind)]})
        sender.close()
        # The answer may still be on its way to the client, and then it is no success.
        if isinstance(sent, Completed):
            break
    assert published(sent.receipts[0]) == [2 * number]
    assert sent.publisher_unusable


@pytest.mark.parametrize(("known", "in_flight"), [("nothing", "5"), ("partitions", "1"), ("acknowledged", "5")])
def test_nothing_overtakes_the_events_of_a_request_that_the_broker_refuses(outbox_kafka, known, in_flight):
    """A producer's first request to a partition may have any sequence number, so the broker takes the second if it
    refuses the first, as for one event of it that is too large. Turns have many requests for each of many partitions.
    """
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 16, {"max.message.bytes": "20000"})
    options = {"batch.num.messages": "3", "max.in.flight": in_flight, "compression.type": "none"}
    sender = publisher(outbox_kafka, options=options)
    if known == "nothing":
        # As if no broker had said in time how many partitions there are.
        sender._sender._new_topics = NewTopics(0.0)
    warm = known == "acknowledged"
    count = 64
    keys = {lane: f"k{lane}" for lane in range(count)}
    if warm:
        assert isinstance(
            sender.publish({lane: [claim(lane, kind, key, lane)] for lane, key in keys.items()}), Completed
        )
    batches = {lane: [claim(count * n + lane, kind, key, lane) for n in range(1, 100)] for lane, key in keys.items()}
    for claims in batches.values():
        claims[1] = claims[1]._replace(value=b"x" * 30_000)
    sent = sender.publish(batches)
    sender.close()
    assert isinstance(sent, Failed)
    assert isinstance(sent.error, BatchRefused)
    found: dict[int, list[int]] = {}
    for number in stored(outbox_kafka.consume(topic)):
        found.setdefault(number % count, []).append(number)
    for lane, numbers in found.items():
        due = ([lane] if warm else []) + [each.position for each in batches[lane]]
        assert numbers == due[: len(numbers)]


def test_the_first_messages_are_those_that_land_in_partitions_without_one(outbox_kafka):
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 97)
    # Of each length modulo 4, with bytes above 127.
    keys = [f"{'kü' * (n % 7)}{n}" for n in range(900)]
    for partitioner in ("murmur2", "murmur2_random", "consistent", "consistent_random", "fnv1a", "fnv1a_random"):
        sender = publisher(outbox_kafka, options={"partitioner": partitioner}, record_offsets=True)
        sent = sender.publish({0: [claim(n, kind, key) for n, key in enumerate(keys)]})
        sender.close()
        landed = {key: sent.receipts[0].published.records[n].partition for n, key in enumerate(keys)}
        first = FirstMessages(partitioner)
        first.learn(topic, 97)
        assert all(first.is_first(topic, key) for key in keys), partitioner
        written = set()
        for key in keys:
            assert first.is_first(topic, key) == (landed[key] not in written), partitioner
            written.add(landed[key])
            first.sent(topic, key)
            assert not first.is_first(topic, key), partitioner
        first.acknowledged()
        assert not any(first.is_first(topic, key) for key in keys), partitioner
        assert first.may_come(topic) == (len(set(landed.values())) < 97), partitioner


@pytest.fixture
def waits(monkeypatch) -> list[int]:
    """How many events were sent when a producer waited for acknowledgements.

    However long brokers take to say it, each producer knows how many partitions its topics have.
    """
    monkeypatch.setattr("relay.kafka.client._FETCH_SECONDS", 60.0)
    monkeypatch.setattr(NewTopics.__init__, "__defaults__", (60.0,))
    waits: list[int] = []
    drain = BatchProducer.drain

    def counted(self: BatchProducer, deadline: float, *more: Callable[[], bool]) -> None:
        ahead = sum(outcome is None for outcome in self._ahead.values())
        waits.append(max(ahead, sum(map(len, self.sent.values()))))
        drain(self, deadline, *more)

    monkeypatch.setattr(BatchProducer, "drain", counted)
    return waits


def test_a_turn_waits_once_for_its_first_messages_whatever_the_number_of_partitions(outbox_kafka, waits):
    kinds = [outbox_kafka.name("Order"), outbox_kafka.name("Bill")]
    for kind in kinds:
        outbox_kafka.create_topic(f"{kind.lower()}-events", 64)
    sender = publisher(outbox_kafka)
    claims = [claim(n, kinds[n % 2], f"k{n % 4000}") for n in range(16_000)]
    for _ in range(2):
        assert published(sender.publish({0: claims}).receipts[0]) == [each.position for each in claims]
    sender.close()
    # One of each partition, then all; the second turn has no first messages.
    assert waits == [128, 16_000, 16_000]


def test_a_transaction_has_first_messages_too_because_librdkafka_takes_one_acknowledgement_for_two(place, waits):
    """A request that was refused for a moment counts as acknowledged with the one behind it, and is lost."""
    worker = place.joined("a")
    del waits[:]
    # Two producers take turns.
    for number in range(3):
        place.tables.add(*["k"] * 5, kind=place.kind)
        assert worker.turn(50) == 5
        assert waits == [[1, 5], [1, 5], [5]][number]
        del waits[:]


def test_a_transaction_of_which_the_broker_refuses_a_first_message_fails_for_that_one(place, monkeypatch):
    """produce() takes no more by then, before anything has reported which event it was."""
    worker = place.joined("a", [0])
    kinds = [place.kafka.name(f"Kind{n}") for n in range(6)]
    limits = [{"max.message.bytes": "2000"}] + [{}] * 5
    topics = [
        place.kafka.create_topic(f"{kind.lower()}-events", 3, limit) for kind, limit in zip(kinds, limits, strict=True)
    ]
    claims = [claim(n, kind, f"k{n}") for n, kind in enumerate(kinds)]
    claims[0] = claims[0]._replace(value=os.urandom(5_000))
    fetch = NewTopics.fetch

    def later(new: NewTopics, producer: Producer, topic: str) -> None:
        fetch(new, producer, topic)
        if topic == topics[-1]:
            # Its answer is there.
            wait_until(lambda: producer.poll(0.1) or any(sender._failed for sender in worker.publisher._senders))

    monkeypatch.setattr(NewTopics, "fetch", later)
    failed = worker.publisher.publish({0: claims})
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, BatchRefused)
    assert [each.position for each, _ in failed.receipts[0].refused] == [0]
    assert not failed.publisher_unusable
    monkeypatch.undo()
    worker.publisher.serve()
    sent = worker.publisher.publish({0: claims[1:]})
    assert published(sent.receipts[0]) == [1, 2, 3, 4, 5]
    place.kafka.await_transactions(topics)
    assert [stored(place.kafka.consume(topic)) for topic in topics] == [[], [1], [2], [3], [4], [5]]


def test_an_event_that_was_sent_ahead_is_published_once_also_behind_a_copy_without_a_topic(place):
    """Exactly-once: otherwise it is committed without being in its lane's marker, and read and sent again."""
    worker = place.joined("a", [0])
    copy, *events = [claim(n, place.kind, key) for n, key in enumerate(["a", "a", "b"])]
    sent = worker.publisher.publish({0: [copy._replace(headers={DEAD_LETTER: "why"}), *events]})
    assert [each.position for each, _ in sent.receipts[0].refused] == [0]
    assert [each.position for each in sent.receipts[0].published.rows] == [1, 2]
    place.kafka.await_transactions([place.topic])
    assert sorted(stored(place.kafka.consume(place.topic))) == [1, 2]


def test_first_messages_that_were_acknowledged_are_settled_when_a_later_one_is_refused(outbox_kafka):
    """At least once: nothing has crashed, so nothing is sent again."""
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 3, {"max.message.bytes": "2000"})
    sender = publisher(outbox_kafka)
    # Of a topic whose partitions are not known one goes first, and then one for each partition.
    sender._sender._new_topics = NewTopics(0.0)
    sent = sender.publish({0: [claim(1, kind), claim(2, kind)._replace(value=os.urandom(5_000)), claim(3, kind)]})
    sender.close()
    assert isinstance(sent, Failed)
    assert isinstance(sent.error, BatchRefused)
    assert published(sent.receipts[0]) == [1]
    assert stored(outbox_kafka.consume(topic)) == [1]


@pytest.mark.parametrize("fetched", [True, False])
def test_a_key_waits_behind_its_event_that_is_too_large_for_a_message_also_among_first_messages(outbox_kafka, fetched):
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 3)
    sender = publisher(outbox_kafka)
    if not fetched:
        sender._sender._new_topics = NewTopics(0.0)
    first, *others = [claim(n, kind) for n in range(1, 4)]
    sent = sender.publish({0: [first._replace(value=b"x" * 2_000_000), *others, claim(4, kind, "another")]})
    assert isinstance(sent, Completed)
    assert [refused.position for refused, _ in sent.receipts[0].refused] == [1]
    assert [item.position for item in sent.receipts[0].published.rows] == [4]
    sender.close()
    assert stored(outbox_kafka.consume(topic)) == [4]


def test_copies_for_a_dead_letter_topic_have_first_messages(outbox_kafka, waits):
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 1)
    copies = outbox_kafka.create_topic(outbox_kafka.name("copies"), 4)
    options = {"bootstrap.servers": outbox_kafka.bootstrap_servers}
    router = Router({kind: Route(topic, dead_letter_topic=copies)})
    sending = Sending(producer_options(load(kafka=options)), router, Topics(options, create=False), "/shop", 60.0)
    sender = IdempotentPublisher(sending)
    claims = [claim(n, kind, f"k{n}")._replace(headers={DEAD_LETTER: "why"}) for n in range(100)]
    assert len(published(sender.publish({0: claims}).receipts[0])) == 100
    assert waits == [4, 100]
    sender.close()


def test_a_batch_that_is_larger_than_a_segment_is_refused_so_that_a_smaller_one_is_tried(outbox_kafka):
    kind = outbox_kafka.name("Order")
    outbox_kafka.create_topic(f"{kind.lower()}-events", 1, {"segment.bytes": "1048576", "max.message.bytes": "8000000"})
    large = {"batch.size": "4000000", "message.max.bytes": "8000000", "linger.ms": "1000", "compression.type": "none"}
    sender = publisher(outbox_kafka, options=large)
    claims = [claim(n, kind)._replace(value=b"x" * 50_000) for n in range(60)]
    sent = sender.publish({0: claims})
    assert isinstance(sent, Failed)
    assert isinstance(sent.error, BatchRefused)
    assert "segment.bytes" in str(sent.error)
    sender.close()


def test_at_most_once_a_turn_that_is_cut_because_a_lease_ends_has_failed(outbox_kafka):
    """Its rows are deleted, and Kafka is well: nothing else would say that its events are lost."""
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 1)
    sender = publisher(outbox_kafka, seconds=10.0, at_most_once=True)
    assert sender.join([Lease(0, 1, 600.0, uptime()), Lease(7, 1, 9.0, uptime())]) == {}
    sent = sender.publish({0: [claim(1, kind)], 7: [claim(2, kind, lane=7), claim(3, kind, lane=7)]})
    assert isinstance(sent, Failed)
    assert isinstance(sent.error, DeliveryTimeout)
    assert "2 events not sent" in str(sent.error)
    assert {lane: published(receipt) for lane, receipt in sent.receipts.items()} == {0: [1], 7: []}
    sender.close()
    assert stored(outbox_kafka.consume(topic)) == [1]


def test_at_most_once_what_a_suspended_machine_still_has_is_dropped_when_it_wakes(mortal_kafka, monkeypatch):
    """Another relay has sent what comes after it. librdkafka's timers stood still, like the turn's deadline."""
    cluster, topics = mortal_kafka
    kind = topics.name("Order")
    topics.create_topic(f"{kind.lower()}-events", 1)
    sender = publisher(topics, at_most_once=True)
    asleep = 0.0
    monkeypatch.setattr(core_lease, "uptime", lambda: uptime() + asleep)

    def suspend(point: str) -> None:
        nonlocal asleep
        asleep += 600.0 * (point == "batch.sent")

    assert sender.join([Lease(0, 1, 600.0, uptime()), Lease(1, 1, 0.0, uptime())]) == {}
    # A lease that ended before does not matter to the lanes that are sent.
    sent = sender.publish({0: [claim(1, kind)], 1: [claim(2, kind, lane=1)]})
    assert {lane: published(receipt) for lane, receipt in sent.receipts.items()} == {0: [1], 1: []}
    cluster.pause_broker(0)
    monkeypatch.setattr(kafka_producer, "failpoint", suspend)
    began = time.monotonic()
    sent = sender.publish({0: [claim(3, kind)]})
    seconds = time.monotonic() - began
    sender.close()
    cluster.resume_broker(0)
    assert isinstance(sent, Failed)
    assert isinstance(sent.error, DeliveryTimeout)
    assert sent.receipts[0].count == 0
    assert seconds < sender._delivery_seconds


def test_no_acknowledgement_in_time_is_a_failure_and_nothing_is_said_to_be_published(mortal_kafka):
    cluster, topics = mortal_kafka
    kind = topics.name("Order")
    topics.create_topic(f"{kind.lower()}-events")
    sender = publisher(topics)
    assert isinstance(sender.publish({0: [claim(1, kind)]}), Completed)
    cluster.pause_broker(0)
    sender._delivery_seconds = 1.0
    sent = sender.publish({0: [claim(2, kind), claim(3, kind)], 1: [claim(4, kind, lane=1)]})
    assert {lane: receipt.count for lane, receipt in sent.receipts.items()} == {0: 0, 1: 0}
    assert isinstance(sent.error, DeliveryTimeout)
    assert "within 1 s (3 of 3 events" in str(sent.error)
    sender.close()
    cluster.resume_broker(0)
    # A closed one is of no use, and says so.
    assert isinstance(sender.publish({0: [claim(4, kind)]}), Failed)


def test_a_missing_topic_is_created_as_asked_and_librdkafka_says_nothing_on_stderr_by_itself(outbox_kafka, capfd):
    # The name by which clients of other tests do not go: those may have lost their broker.
    sender = publisher(outbox_kafka, options={"client.id": "quiet"})
    assert published(sender.publish({0: [claim(1, outbox_kafka.name("Order"))]}).receipts[0]) == [1]
    sender.close()
    assert [line for line in capfd.readouterr().err.splitlines() if "|rdkafka#" not in line] == []
