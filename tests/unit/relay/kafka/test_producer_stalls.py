"""A topic of which nothing is acknowledged while others are, without a server."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sender_support import OPTIONS, AllThere, claim, new_sender, soon

from relay.core.ports import DeliveryTimeout, TopicUnusable, Unavailable
from relay.kafka import client
from relay.kafka.producer import BatchProducer
from relay.kafka.topics import Topics, Unanswered


@pytest.fixture(autouse=True)
def _no_partitions(monkeypatch):
    """Nobody is there whom the first turn of each producer would ask for them, half a second long."""
    monkeypatch.setattr(client, "_FETCH_SECONDS", 0.01)


class Looked(AllThere):
    """Topics of which the metadata says what the test does; its time is the test's too."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lacks: dict[str, str] | None = {}
        self.looks = 0
        super().__init__(OPTIONS, create=False, clock=lambda: self.now)

    def _blocked(self, unanswered: Mapping[str, Unanswered], seconds: float) -> dict[str, str] | None:
        self.looks += 1
        assert seconds <= 2
        return None if self.lacks is None else {t: self.lacks[t] for t in unanswered if t in self.lacks}


def late_turn(topics: Topics, acknowledged: Collection[int]) -> tuple[BatchProducer, Unavailable]:
    """A turn of events 1 to 3 of Order and 4 to 6 of Invoice, of which only these were acknowledged in time."""
    sender = new_sender(topics)
    sender.send({0: [claim(0, n, "Order" if n < 4 else "Invoice") for n in range(1, 7)]}, soon())
    sender.drain(time.monotonic())
    for position in acknowledged:
        del sender._failed[position]
    failure, blamed = sender.failure(4)
    assert list(blamed) == []
    sender.close()
    return sender, failure


NO_LEADER = {"invoice-events": "topic 'invoice-events' has no leader for partition 0"}


def test_a_topic_of_which_nothing_is_acknowledged_while_others_are_holds_itself_up_only():
    topics = Looked()
    sender, failure = late_turn(topics, [1, 2, 3])
    assert isinstance(failure, TopicUnusable)
    assert "'invoice-events'" in str(failure)
    assert str(failure).endswith("(3 of 6 events not acknowledged)")
    assert sender._topics.unpublishable_kinds() == {("Invoice", False)}
    # Others of its turn may be late themselves: they come again.
    sender, failure = late_turn(Looked(), [1])
    assert isinstance(failure, TopicUnusable)
    assert sender._topics.unpublishable_kinds() == {("Invoice", False)}
    # It is asked more than once what failed: that is one attempt.
    assert str(sender.failure(4)[0]) == str(failure)
    topics.now = 1.0
    assert topics.paused() == frozenset()


def test_a_turn_that_is_merely_late_pauses_no_topic():
    for acknowledged in ([], [1, 4], [1, 2, 3, 6]):
        sender, failure = late_turn(Looked(), acknowledged)
        assert isinstance(failure, DeliveryTimeout)
        assert sender._topics.unpublishable_kinds() == frozenset()
    # Nobody answers who could say more: the brokers are away.
    topics = Looked()
    topics.lacks = None
    _, failure = late_turn(topics, [1, 2, 3])
    assert isinstance(failure, DeliveryTimeout)
    assert topics.paused() == frozenset()


@pytest.mark.parametrize("acknowledged", [[], [1], [1, 4, 5]])
def test_a_topic_that_lacks_a_leader_waits_whatever_else_was_acknowledged(acknowledged):
    topics = Looked()
    topics.lacks = NO_LEADER
    sender, failure = late_turn(topics, acknowledged)
    assert isinstance(failure, TopicUnusable)
    assert "no leader" in str(failure)
    assert sender._topics.unpublishable_kinds() == {("Invoice", False)}


def test_a_stalled_topic_is_tried_when_the_metadata_shows_no_reason_against_it_and_takes_little_time():
    topics = Looked()
    topics.lacks = NO_LEADER
    late_turn(topics, [1, 2, 3])
    used = ["order-events", "invoice-events"]
    looks = []
    while topics.now < 30:
        topics.now += 0.5
        before = topics.looks
        assert topics.paused() == {"invoice-events"}
        if topics.looks > before:
            looks.append(topics.now)
    # Each costs the others next to nothing, and still they become rare.
    assert looks == [1.0, 3.0, 7.0, 12.0, 17.0, 22.0, 27.0]
    topics.lacks = {}
    topics.now = 32.0
    assert topics.paused() == frozenset()
    assert (topics.trial_seconds(used), topics.trial_seconds(used[:1])) == (1.0, None)
    # In vain again and again: the waits grow, and with them what an attempt may take, so that a slow topic gets it.
    waits, trials = [], []
    for _ in range(8):
        _, failure = late_turn(topics, [1, 2, 3])
        assert isinstance(failure, TopicUnusable)
        started = topics.now
        while topics.paused():
            topics.now += 0.5
        waits.append(topics.now - started)
        trials.append(topics.trial_seconds(used))
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert trials == [1.0, 1.0, pytest.approx(8 / 6), pytest.approx(16 / 6), pytest.approx(32 / 6), 10.0, 10.0, 10.0]
    assert topics.reasons().keys() == {"invoice-events"}
    # Once it takes anything, it has as much time as others.
    _, failure = late_turn(topics, [1, 2, 3, 4])
    assert isinstance(failure, DeliveryTimeout)
    assert (topics.reasons(), topics.trial_seconds(used)) == ({}, None)


def test_an_attempt_that_fails_while_nothing_else_is_sent_is_the_topics_too():
    topics = Looked()
    late_turn(topics, [1, 2, 3])
    topics.now = 1.0
    assert topics.paused() == frozenset()
    sender, failure = late_turn(topics, [])
    assert isinstance(failure, TopicUnusable)
    # The others are not, of which nothing is known.
    assert sender._topics.unpublishable_kinds() == {("Invoice", False)}


def test_an_attempt_says_nothing_of_the_topics_beside_it():
    """They had less time than a turn has, because of the topic that was tried."""
    topics = Looked()
    late_turn(topics, [1, 2, 3])
    topics.now = 1.0
    assert topics.paused() == frozenset()
    sender = new_sender(topics)
    sender.send({0: [claim(0, n, kind) for n, kind in enumerate(["Order", "Invoice", "Refund"], 1)]}, soon())
    sender.drain(time.monotonic())
    del sender._failed[3]
    failure, _ = sender.failure(4)
    assert isinstance(failure, TopicUnusable)
    assert "'invoice-events'" in str(failure)
    assert sender._topics.unpublishable_kinds() == {("Invoice", False)}
    assert topics.reasons().keys() == {"invoice-events"}
    sender.close()


def test_a_turn_with_a_stalled_topic_ends_early():
    topics = Looked()
    late_turn(topics, [1, 2, 3])
    topics.now = 1.0
    sender = new_sender(topics)
    sender.send({0: [claim(0, 1, "Invoice")]}, soon())
    started = time.monotonic()
    sender.drain(soon())
    assert time.monotonic() - started < 30
    assert sender.failed
    sender.close()


def lacks(in_sync: int | None, states: Sequence[tuple[int, list[int]]], **what: Any) -> str | None:
    """What a topic lacks by its partitions' leaders and replicas in sync, of three each; brokers 1 and 2 are there."""
    found = SimpleNamespace(
        partitions={
            number: SimpleNamespace(id=number, leader=leader, replicas=[1, 2, 3], isrs=isrs)
            for number, (leader, isrs) in enumerate(states)
        }
    )
    topics: Any = Topics(OPTIONS, create=False)
    # The relay may not read it, or it is known.
    topics._metadata.min_in_sync = lambda *_: in_sync
    metadata = SimpleNamespace(topics={"t": found}, brokers={1: "", 2: ""})
    return cast("str | None", topics._lack("t", metadata, Unanswered(**what), 1.0))


def test_what_a_topic_lacks_is_told_by_its_partitions():
    well, thin = (1, [1, 2, 3]), (1, [1])
    assert lacks(2, [well, well]) is None
    assert lacks(2, [well, (-1, [3]), (3, [3])]) == "topic 't' has no leader for partitions 1, 2: a broker is away"
    # Two of three are enough.
    assert lacks(2, [well, (1, [1, 2])]) is None
    assert lacks(2, [well, thin]) == "topic 't' has too few replicas in sync for partition 1: a broker is away"
    # What became of its messages, the others need not care for.
    assert lacks(2, [well, thin], partitions=frozenset({0})) is None
    # Not known how many it needs: where only those wait that miss some, it is more than there are.
    waiting = {"partitions": frozenset({1}), "silent": False, "alone": False}
    assert "partition 1:" in str(lacks(None, [well, thin], **waiting))
    assert lacks(None, [well, thin], **waiting | {"alone": True}) is None
    assert lacks(None, [well, thin], **waiting | {"partitions": frozenset({0, 1})}) is None
    assert lacks(None, [well, thin]) is None
