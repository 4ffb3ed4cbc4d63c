"""Producers and addresses, without a server."""

from __future__ import annotations

import gc
import weakref

import psycopg
import pytest

from outbox.errors import ConfigurationError, SchemaError
from outbox.urls import display_url
from relay.config import load, producer_options
from relay.database import Connector, unavailable_on_error
from relay.ports import Unavailable
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
