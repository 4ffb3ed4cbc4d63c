"""When a topic is asked for again, without a broker."""

from __future__ import annotations

import contextlib
import gc
import weakref
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.cimpl import NewTopic
from sender_support import OPTIONS

from relay.core.ports import BrokerUnavailable, TopicUnusable
from relay.kafka.topics import Topics


class Broker:
    """What the metadata says, and how often it was asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.there: set[str] = set()
        self.away = False
        self.creates: int | None = None
        """The error of each attempt to create a topic."""
        self.asked = 0
        self.clients = 0

    def topics(self, *, create: bool = False) -> Topics:
        return Topics(OPTIONS, create=create, clock=lambda: self.now)

    def connect(self, _options: object) -> Broker:
        self.clients += 1
        return self

    def explaining(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def list_topics(self, timeout: float) -> Any:
        assert timeout > 0
        self.asked += 1
        if self.away:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return SimpleNamespace(topics={name: SimpleNamespace(partitions={}) for name in self.there})

    def create_topics(self, new: list[NewTopic], **_seconds: float) -> dict[str, Future[None]]:
        answer: Future[None] = Future()
        if self.creates is None:
            answer.set_result(None)
        else:
            answer.set_exception(KafkaException(KafkaError(self.creates)))
        return {new[0].topic: answer}


@pytest.fixture
def broker(monkeypatch) -> Broker:
    made = Broker()
    monkeypatch.setattr("relay.kafka.metadata.Admin", made.connect)
    return made


def test_a_topic_that_is_tried_again_is_not_judged_by_what_others_asked_before(broker):
    topics = broker.topics()
    for broker.now in (0.0, 1.0):
        for name in ("late", "other"):
            with pytest.raises(TopicUnusable):
                topics.require(name)
    assert broker.asked == 2
    broker.now = 2.9
    # The look at a stalled topic, shortly before these are due again.
    topics._metadata.topics(1.0)
    broker.there = {"late"}
    broker.now = 3.1
    topics.require("late")
    # Others that are due by then are served by the same answer.
    with pytest.raises(TopicUnusable):
        topics.require("other")
    assert broker.asked == 4


def test_a_broker_that_is_back_is_asked_at_once(broker):
    """By a new client: certificates may have been renewed meanwhile, and a client reads them once."""
    topics = broker.topics()
    broker.away = True
    with pytest.raises(BrokerUnavailable):
        topics.require("there")
    assert broker.clients == 2
    broker.away, broker.there = False, {"there"}
    topics.require("there")
    assert broker.clients == 2


def test_a_failure_that_serves_for_a_second_keeps_nothing_of_the_turns_that_met_it(broker):
    metadata = broker.topics()._metadata
    broker.away = True

    def turn() -> weakref.ref[Broker]:
        batch = Broker()
        with pytest.raises(KafkaException):
            metadata.topics(1.0)
        return weakref.ref(batch)

    batches = [turn(), turn()]
    gc.collect()
    assert (broker.asked, [batch() for batch in batches]) == (1, [None, None])


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (KafkaError.POLICY_VIOLATION, "by hand"),
        (KafkaError.TOPIC_EXCEPTION, "by hand"),
        (KafkaError.INVALID_CONFIG, "by hand"),
        (KafkaError.INVALID_PARTITIONS, "OUTBOX_TOPIC_PARTITIONS"),
        (KafkaError.INVALID_REPLICATION_FACTOR, "OUTBOX_TOPIC_REPLICATION"),
        (KafkaError.THROTTLING_QUOTA_EXCEEDED, "tried again"),
    ],
)
def test_a_topic_that_can_not_be_created_is_alone_unusable_and_tried_again(broker, code, advice):
    """With too few brokers, by which the others may be on their way back."""
    topics = broker.topics(create=True)
    broker.there, broker.creates = {"there"}, code
    with pytest.raises(TopicUnusable, match=f"'new' can't be created: .*{advice}"):
        topics.require("new")
    topics.require("there")
    assert topics.paused() == {"new"}
    broker.creates, broker.now = None, 1.1
    assert topics.paused() == set()
    topics.require("new")
    topics.written(["new"])
    assert topics.reasons() == {}


def test_a_topic_that_has_no_events_any_more_is_not_named_for_ever(broker):
    """Another relay publishes them by now, or they were discarded."""
    topics = broker.topics()
    for broker.now in (0.0, 200.0):
        with pytest.raises(TopicUnusable):
            topics.require("late")
        assert topics.reasons().keys() == {"late"}
        broker.now += 120.5
        assert topics.reasons().keys() == {"late"}
        broker.now += 2.0
        assert topics.reasons() == {}


@pytest.mark.parametrize("code", [KafkaError._TRANSPORT, KafkaError.NOT_CONTROLLER, KafkaError.REQUEST_TIMED_OUT])
def test_a_broker_that_creates_nothing_at_the_moment_says_nothing_about_the_topic(broker, code):
    topics = broker.topics(create=True)
    broker.creates = code
    with pytest.raises(BrokerUnavailable, match="creating topic 'new'"):
        topics.require("new")
    assert topics.reasons() == {}
