"""Which events are sent ahead of the others of their turn, and what is known of them. Without a server."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException
from sender_support import OPTIONS, AllThere, sending, soon
from sender_support import claim as plain_claim

from outbox._clients import first_messages
from outbox.event import DEAD_LETTER
from relay.core.ports import BatchRefused, BrokerUnavailable, Claim, TopicUnusable
from relay.kafka import client, ordered
from relay.kafka.client import NewTopics
from relay.kafka.ordered import OrderedProducer
from relay.kafka.routing import Route, Router

TOPIC = "order-events"


def claim(number: int, key: str, kind: str = "Order", *, lane: int = 0, copy: bool = False) -> Claim:
    made = plain_claim(lane, number, kind, key, b"%d" % number)
    return made._replace(headers={DEAD_LETTER: "why"}) if copy else made


class Wire:
    """A producer that acknowledges all. ``sent``: the numbers of the events, and None where they were waited for.

    counts   how many partitions each topic has.
    refused  the events for which produce() raises, with the error.
    asked    the topics whose partitions were asked for; None for all.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.refused: dict[int, int] = {}
        self.asked: list[str | None] = []
        self.sent: list[int | None] = []
        self.reports: dict[int, Callable[..., None]] = {}

    def __len__(self) -> int:
        if self.sent[-1:] != [None]:
            self.sent.append(None)
        return 0

    def produce(self, _topic: str, value: bytes, _key: str, *, on_delivery: Callable[..., None], **_: Any) -> None:
        number = int(value)
        if (code := self.refused.get(number)) is not None:
            raise KafkaException(KafkaError(code))
        self.sent.append(number)
        self.reports[number] = on_delivery

    def list_topics(self, topic: str | None = None, *, timeout: float) -> Any:
        del timeout
        self.asked.append(topic)
        topics = self.counts if topic is None else {topic: self.counts.get(topic, 12)}
        return SimpleNamespace(
            topics={name: SimpleNamespace(partitions=dict.fromkeys(range(count))) for name, count in topics.items()}
        )

    def fails(self, number: int, code: int, partition: int) -> None:
        self.reports[number](KafkaError(code), SimpleNamespace(partition=lambda: partition))

    def purge(self, **_: Any) -> None:
        """Nothing is left."""

    def poll(self, _seconds: float) -> None:
        """Nothing comes."""


def new_sender(transactional_id: str | None = None, **more: Any) -> tuple[OrderedProducer, Wire]:
    sender, wire = OrderedProducer(sending(**more), transactional_id), Wire()
    sender.producer = cast("Any", wire)
    return sender, wire


def positions(sender: OrderedProducer) -> dict[int, list[int]]:
    return {lane: [each.position for each in claims] for lane, claims in sender.sent.items()}


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time, and how much of it passes while it is asked for."""
    now = [0.0, 0.0]

    def monotonic() -> float:
        now[0] += now[1]
        return now[0]

    for module in (ordered, client, first_messages):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
    return now


def test_a_sender_that_was_closed_is_gone_and_its_producer_with_it():
    """Without waiting for the collector of rings."""
    gc.disable()
    try:
        sender = OrderedProducer(sending())
        sender.send({}, soon())
        gone = weakref.ref(sender)
        sender.close()
        del sender
        assert gone() is None
    finally:
        gc.enable()


def test_the_events_of_a_key_stay_in_order_where_the_minute_of_their_topic_ends_within_a_turn(now):
    sender, wire = new_sender()
    wire.counts = {TOPIC: 12}
    for _ in range(2):
        sender.send({0: [claim(1, "a"), claim(2, "b")]}, soon())
    del wire.sent[:]
    now[:] = [59.0, 0.05]
    numbers = list(range(11, 60))
    sender.send({0: [claim(number, "a") for number in numbers]}, soon())
    assert [each for each in wire.sent if each is not None] == numbers
    # But in the turn behind it, the first one is alone again.
    now[:] = [62.0, 0.0]
    del wire.sent[:]
    sender.send({0: [claim(101, "a"), claim(102, "a")]}, soon())
    assert wire.sent == [101, None, 102, None]


def test_what_was_sent_ahead_is_known_when_no_more_is_taken():
    """Exactly-once, the broker refuses one of the first messages: produce() takes no more, before it has its report."""
    sender, wire = new_sender("id")
    wire.refused = {3: KafkaError._STATE}
    large, second = claim(1, "a"), claim(2, "b", "Bill")
    with pytest.raises(BrokerUnavailable):
        sender.send({0: [large, second, claim(3, "c", "Cart")], 7: [claim(701, "d", lane=7)]}, soon())
    assert sender.broken_off
    wire.fails(1, KafkaError.MSG_SIZE_TOO_LARGE, 3)
    wire.fails(2, KafkaError._PURGE_QUEUE, 5)
    assert positions(sender) == {0: [1, 2], 7: []}
    assert [each for each, _ in sender.refused_alone()[0]] == [large]
    failure, blamed = sender.failure(4)
    assert (type(failure), list(blamed)) == (BatchRefused, [0])


def test_what_was_acknowledged_ahead_is_settled_when_a_later_one_fails():
    """At least once: otherwise it would be sent again, and nothing has crashed."""
    sender, wire = new_sender()
    sender._new_topics = NewTopics(0.0)
    wire.counts = {TOPIC: 12}
    wire.refused = {3: KafkaError._FATAL}
    # Of a topic whose partitions are not known one goes first, and then one for each partition.
    batches = {0: [claim(2, "b"), claim(4, "b")], 7: [claim(701, "a", lane=7), claim(3, "c", lane=7)]}
    with pytest.raises(BrokerUnavailable):
        sender.send(batches, soon())
    assert wire.sent == [2, None, 4, 701]
    wire.fails(701, KafkaError.NOT_ENOUGH_REPLICAS, 3)
    acknowledged = {lane: [each.position for each in sender.acknowledged(lane).rows] for lane in batches}
    assert acknowledged == {0: [2, 4], 7: []}


def test_what_was_acknowledged_ahead_is_settled_when_one_of_the_others_fails():
    sender, wire = new_sender()
    wire.refused = {13: KafkaError._FATAL}
    sender.send({0: [claim(1, "a")]}, soon())
    batches = {
        0: [claim(11, "a"), claim(12, "a"), claim(13, "a"), claim(14, "b", "Bill"), claim(15, "b", "Bill")],
        7: [claim(701, "c", "Cart", lane=7), claim(702, "c", "Cart", lane=7)],
    }
    with pytest.raises(BrokerUnavailable):
        sender.send(batches, soon())
    assert wire.sent[-5:] == [14, 701, None, 11, 12]
    assert positions(sender) == {0: [11, 12, 14], 7: [701]}


def test_nothing_is_sent_by_a_producer_that_has_purged(monkeypatch):
    """All was acknowledged in the moment of the deadline: what librdkafka is given now, it may drop."""
    sender, wire = new_sender()
    purged: list[bool] = []
    monkeypatch.setattr(Wire, "__len__", lambda _: 0 if purged else 1)
    monkeypatch.setattr(wire, "purge", lambda: purged.append(True))
    with pytest.raises(BrokerUnavailable):
        sender.send({0: [claim(1, "a"), claim(2, "a")]}, 0.0)
    assert (wire.sent, positions(sender), sender.failed) == ([1], {0: [1]}, False)


COPIES = [
    # There is no topic for the copy any more.
    (Router({"Order": Route(TOPIC)}), [claim(21, "a", copy=True), claim(22, "a"), claim(23, "a")], [21], [22]),
    # The event is too large for a message, in a partition that has some.
    (
        Router({"Order": Route(TOPIC, dead_letter_topic="copies")}),
        [claim(31, "a"), claim(32, "a", copy=True), claim(33, "a")],
        [31],
        [32],
    ),
]


@pytest.mark.parametrize(("router", "claims", "refused", "sent"), COPIES)
def test_what_was_sent_ahead_counts_as_sent_also_behind_a_refused_event_of_its_key(router, claims, refused, sent):
    """Exactly-once, it would be committed without being in the lane's marker, and so published again."""
    sender, wire = new_sender("id", router=router)
    if refused == [31]:
        for _ in range(2):
            sender.send({0: [claim(1, "a")]}, soon())
    del wire.sent[:]
    wire.refused = {31: KafkaError.MSG_SIZE_TOO_LARGE}
    sender.send({0: claims}, soon())
    assert [each for each in wire.sent if each is not None] == sent
    assert positions(sender) == {0: sent}
    assert [each.position for each, _ in sender.refused[0]] == refused
    assert any(sender.sent.values())


def test_partitions_that_were_added_have_first_messages_when_librdkafka_knows_of_them(monkeypatch):
    """It learns of them from each answer about all topics, also if another topic was the reason to ask."""
    monkeypatch.setattr(ordered, "_FEW_TOPICS", 0)
    sender, wire = new_sender()
    wire.counts = {TOPIC: 1}
    sender._first.learn(TOPIC, 1)
    sender.send({0: [claim(1, "a"), claim(2, "a")]}, soon())
    wire.counts |= {TOPIC: 12, "bill-events": 12}
    # As if the number of partitions of the other one was not known.
    sender._new_topics._left_seconds = 0.0
    del wire.sent[:]
    sender.send({0: [claim(11, "a"), claim(12, "a"), claim(13, "b", "Bill"), claim(14, "b", "Bill")]}, soon())
    assert wire.asked[-1] is None
    assert wire.sent == [13, None, 11, 14, None, 12]


class LateTopics(AllThere):
    """A topic that can be written to from the second question on."""

    asked = 0

    def require(self, topic: str) -> None:
        if topic == TOPIC:
            self.asked += 1
            if self.asked == 1:
                raise TopicUnusable("it is not there")


def test_a_topic_that_comes_within_a_turn_has_first_messages_too():
    sender, wire = new_sender(topics=LateTopics(OPTIONS, create=False))
    sender.send({0: [claim(1, "a"), claim(2, "a"), claim(3, "b"), claim(4, "b")]}, soon())
    assert wire.sent == [3, None, 4]
    assert sender.left_out == {0}


@pytest.mark.parametrize(("each", "seconds", "most"), [(1000, 5.0, 2), (100, 1.0, 4), (5, 0.5, 0)])
def test_all_topics_are_asked_for_once_a_minute_at_most_and_not_because_of_a_few(now, each, seconds, most):
    """Of thousands of topics that is megabytes. ``each``: of so many of the thousand topics a turn has an event."""
    sender, wire = new_sender()
    wire.counts = {f"kind{n}-events": 12 for n in range(1000)}
    for turn in range(int(120 / seconds)):
        now[0] = turn * seconds
        numbers = range(turn * each, (turn + 1) * each)
        sender.send({0: [claim(n, "k", f"Kind{n % 1000}") for n in numbers]}, soon())
        assert positions(sender) == {0: list(numbers)}
    assert wire.asked.count(None) <= most
    # By name once for each producer, and again after a minute where it is one of a few.
    assert len(wire.asked) <= 2 * 1000 + most
