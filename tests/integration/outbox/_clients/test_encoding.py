"""Texts in UTF-8, whatever the defaults are; and a database that does not say what its texts are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from psycopg import sql
from sessions_support import with_default
from support import drained, write

from outbox import Event, Outbox, SchemaError, TargetError
from outbox._app import migrate
from outbox._app.schema_connection import connected
from outbox.testing.fixtures import token
from relay.database import Connector


@pytest.fixture
def ascii_url(outbox_postgres_server) -> Iterator[str]:
    """A database with the encoding SQL_ASCII, in which others have created the tables."""
    name = f"ascii_{token()}"
    with psycopg.connect(outbox_postgres_server.url(), autocommit=True) as admin:
        create = "CREATE DATABASE {} ENCODING 'SQL_ASCII' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0"
        admin.execute(sql.SQL(create).format(sql.Identifier(name)))
    url = outbox_postgres_server.url(name)
    with psycopg.connect(url) as connection:
        connection.execute(migrate.sql().encode())
    yield url
    outbox_postgres_server.drop_database(name)


def test_keys_are_published_whatever_the_roles_default_is(outbox_postgres, outbox_kafka, outbox_relay):
    url, kind = outbox_postgres.url, outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 1)
    write(url, [Event(kind, "Łódź", "Gegründet", {"n": "№ 1"})])
    with_default(url, "client_encoding", "LATIN1")
    outbox_relay()
    drained(url)
    (message,) = outbox_kafka.consume(topic, 1)
    assert message.key().decode() == "Łódź"
    assert dict(message.headers())["ce_type"].decode() == "Gegründet"


def test_commands_speak_utf8_whatever_the_roles_default_is(outbox_postgres):
    url = outbox_postgres.url
    with_default(url, "client_encoding", "LATIN1")
    with closing(Connector(url, "a test")()) as connection:
        assert connection.execute("SHOW client_encoding").fetchone() == ("UTF8",)
    with connected(url) as connection:
        assert connection.exec_driver_sql("SHOW client_encoding").scalar() == "UTF8"


def test_a_database_that_does_not_say_what_its_texts_are_is_refused(ascii_url, outbox_relay):
    for connect in (Connector(ascii_url, "a test"), lambda: migrate.upgrade(ascii_url)):
        with pytest.raises(SchemaError, match="has the encoding SQL_ASCII"):
            connect()
    relay = outbox_relay(database_url=ascii_url)
    relay.wait_for_log("has the encoding SQL_ASCII")


def test_unique_keys_do_not_wait_for_ever_for_texts_that_come_as_bytes(ascii_url):
    with psycopg.connect(ascii_url) as connection, pytest.raises(TargetError, match="SQL_ASCII"):
        Outbox(unique_keys=True).add(connection, Event("Order", "o-1", "Placed", {}, idempotency_key="a"))
