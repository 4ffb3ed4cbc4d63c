"""Producers and addresses, without a server."""

from __future__ import annotations

import gc
import time
import weakref

import psycopg
import pytest
from confluent_kafka import KafkaError

from outbox.errors import ConfigurationError, SchemaError
from outbox.urls import display_url
from relay import sending
from relay.config import load, producer_options
from relay.database import Connector, unavailable_on_error
from relay.ports import BatchRefused, Claim, Unavailable
from relay.routing import Router
from relay.sending import Sender, Topics

OPTIONS = {"bootstrap.servers": "127.0.0.1:1"}


def test_a_sender_that_was_closed_is_gone_and_its_producer_with_it():
    """Without waiting for the collector of rings: each failure of a lane makes a new producer, with its own threads."""
    topics = Topics(OPTIONS, create=False)
    gc.disable()
    try:
        sender = Sender(producer_options(load(kafka=OPTIONS)), Router(), topics, "/shop")
        gone = weakref.ref(sender)
        sender.close()
        del sender
        assert gone() is None
    finally:
        gc.enable()


class AllThere(Topics):
    def require(self, topic: str) -> None:
        """No broker is asked."""


def failure_of(events: int, *, late: bool) -> str:
    """What a sender says of a batch of so many events and its marker when no broker is there."""
    sender = Sender(producer_options(load(kafka=OPTIONS)), Router(), AllThere(OPTIONS, create=False), "/shop")
    now = time.monotonic()
    sender.send([Claim(n + 1, f"id{n}", "Order", "k", "T", "", b"{}", None) for n in range(events)], now + 60)
    sender.send_marker("outbox.relay.state", 0, b"{}", now + 60)
    if not late:
        # As if another producer had fenced this one.
        sender.producer.purge()
    sender.drain(now if late else now + 60)
    assert sender.failed
    text = str(sender.failure(4))
    sender.close()
    return text


def test_what_was_not_acknowledged_is_said_in_a_sentence():
    assert failure_of(0, late=True) == "Kafka: no acknowledgement within 4 s"
    assert failure_of(2, late=True) == "Kafka: no acknowledgement within 4 s (2 of 2 events not acknowledged)"
    assert failure_of(2, late=False) == "Kafka: the batch was dropped (2 of 2 events not acknowledged)"


def test_a_failed_marker_is_named_and_no_event_is_at_fault_for_it():
    sender = Sender(producer_options(load(kafka=OPTIONS)), Router(), AllThere(OPTIONS, create=False), "/shop")
    events = [Claim(n + 1, f"id{n}", "Order", "k", "T", "", b"{}", None) for n in range(2)]
    sender.send(events, time.monotonic() + 60)
    sender.send_marker("outbox.relay.state", 0, b"{}", time.monotonic() + 60)
    sender.close()

    def said(code: int) -> Unavailable:
        sender._on_failure(sending._MARKER, KafkaError(code), None)
        return sender.failure(4)

    sender._failed.clear()
    fenced = said(KafkaError.INVALID_PRODUCER_EPOCH)
    assert str(fenced).startswith("Kafka, sending the batch's marker to 'outbox.relay.state': Broker: ")
    assert "events" not in str(fenced)
    assert type(said(KafkaError.TOPIC_AUTHORIZATION_FAILED)) is Unavailable
    assert type(said(KafkaError.MSG_SIZE_TOO_LARGE)) is BatchRefused
    del sender.sent[1:]
    assert type(said(KafkaError.MSG_SIZE_TOO_LARGE)) is Unavailable


def test_options_that_a_client_refuses_are_a_configuration_error():
    with pytest.raises(ConfigurationError, match=r"ssl\.ca"):
        Topics({**OPTIONS, "security.protocol": "ssl", "ssl.ca.location": "/nowhere"}, create=False)


def test_several_hosts_are_shown_and_no_secret():
    shown = display_url("postgresql://user:secret@one:5432,two:5433/db?target_session_attrs=read-write")
    assert shown == "postgresql://one:5432,two:5433/db"
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1,127\.0\.0\.1:2/db"):
        Connector("postgresql://u:secret@127.0.0.1:1,127.0.0.1:2/db", "test")()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (psycopg.errors.ReadOnlySqlTransaction, Unavailable),
        (psycopg.errors.IdleInTransactionSessionTimeout, Unavailable),
        (psycopg.errors.TransactionTimeout, Unavailable),
        (psycopg.errors.CheckViolation, Unavailable),
        (psycopg.errors.AdminShutdown, Unavailable),
        (psycopg.errors.UndefinedTable, SchemaError),
        (psycopg.errors.InsufficientPrivilege, SchemaError),
        (psycopg.errors.SyntaxError, psycopg.errors.SyntaxError),
    ],
)
def test_errors_that_pass_by_themselves_are_told_from_those_that_need_a_person(error, expected):
    with pytest.raises(expected), unavailable_on_error("testing"):
        raise error("no")
