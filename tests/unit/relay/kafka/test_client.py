"""What a relay says when it starts without Kafka, and when a client can't be made later."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaException
from secured import Certificates
from structlog.testing import capture_logs

import relay.kafka.client
from outbox.errors import ConfigurationError
from outbox.sandbox._process import patience
from relay import wiring
from relay.config import load, producer_options
from relay.core.ports import BrokerUnavailable
from relay.kafka.fencing import Fencing, ShortLivedProducer
from relay.kafka.metadata import SharedMetadata
from relay.kafka.open_transactions import OpenTransactions, TransactionWatch
from relay.kafka.state_topic import StateTopic
from relay.kafka.topics import Topics
from relay.parts import build_topics
from relay.wiring import _publisher, build


def test_the_address_and_the_reason_are_logged_once_and_at_once(monkeypatch):
    """Also without an event, and without a database: a newcomer's mistake is shown before anything is to be sent."""
    stop, said = threading.Event(), []

    def warning(_text: str, **values: Any) -> None:
        said.append((values, time.monotonic() - began))
        stop.set()

    monkeypatch.setattr(relay.kafka.client.log, "warning", warning)
    brokers = "127.0.0.1:1"
    supervisor = build(load(database_url="postgresql://127.0.0.1:1/x", kafka={"bootstrap.servers": brokers}))
    began = time.monotonic()
    watchdog = threading.Timer(30 * patience(), stop.set)
    watchdog.start()
    with capture_logs():
        supervisor.run(stop, threading.Event())
    watchdog.cancel()
    [(values, seconds)] = said
    why = "127.0.0.1:1/bootstrap: Connect to ipv4#127.0.0.1:1 failed: Connection refused"
    assert (values["brokers"], why in values["error"]) == (brokers, True), values
    # Two, where the machine is not busy; the first turn would need ten, and an event.
    assert seconds < 8 * patience()


def test_a_file_of_certificates_that_is_being_replaced_ends_no_relay(tmp_path):
    """A client that is made meanwhile can't read it. A missing one when the relay begins is a mistake."""
    file = Certificates.made(tmp_path).authority
    kafka = {"bootstrap.servers": "127.0.0.1:1", "security.protocol": "ssl", "ssl.ca.location": str(file)}
    settings = load(database_url="postgresql://127.0.0.1:1/x", kafka=kafka)
    options = producer_options(settings)
    source: Any = SimpleNamespace(store=None)
    new_publisher = _publisher(settings, Topics(options, create=False))
    new_publisher(source).close()
    state, metadata = StateTopic(kafka, "state"), SharedMetadata(options, time.monotonic)
    text = file.read_text()
    file.unlink()
    for made in (lambda: new_publisher(source), lambda: state.require(1), lambda: state.read([0])):
        with pytest.raises(BrokerUnavailable, match=r"ssl\.ca\.location"):
            made()
    transactions = TransactionWatch(OpenTransactions(kafka, bool, "state", 1.0))
    for asks in (lambda: Fencing(options)("id"), transactions.look):
        with pytest.raises(BrokerUnavailable, match="is a file being replaced"):
            asks()
    with pytest.raises(KafkaException):
        metadata.topics(0.5)
    file.write_text(text)
    new_publisher(source).close()


def test_options_that_librdkafka_refuses_for_a_transaction_end_the_relay_as_it_begins(monkeypatch):
    """Without transactions of its own it fences all the same."""
    kafka = {"bootstrap.servers": "127.0.0.1:1", "socket.timeout.ms": "120000"}
    settings = load(delivery="exactly-once", kafka=kafka)
    with pytest.raises(ConfigurationError, match=r"socket\.timeout\.ms"):
        _publisher(settings, build_topics(settings))
    options: list[Mapping[str, Any]] = []
    monkeypatch.setattr(wiring, "Fencing", options.append)
    for delivery in ("at-least-once", "at-most-once"):
        more = {"transaction.timeout.ms": "30000"}
        settings = load(delivery=delivery, kafka=kafka | more, relay={"lease_seconds": 300})
        _publisher(settings, build_topics(settings))
        ShortLivedProducer(options.pop(), "former").purge()
