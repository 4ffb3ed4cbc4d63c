"""When a topic is asked for again, without a broker."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from sender_support import OPTIONS

from relay.core.ports import BrokerUnavailable, TopicUnusable
from relay.kafka.topics import Topics


class Broker:
    """What the metadata says, and how often it was asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.there: set[str] = set()
        self.away = False
        self.asked = 0
        self.clients = 0

    def topics(self) -> Topics:
        return Topics(OPTIONS, create=False, clock=lambda: self.now)

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
