"""A replication slot of a test's database, read through SQL as the relay reads it over a replication connection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import orjson
import psycopg

from outbox._message import EventMessage, decode, message_prefix
from relay.wal import pgoutput

CHANGES = """
SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1', 'publication_names',
                                                    'everything', 'messages', 'true')"""


class Slot:
    """A slot that sends every table's changes and all messages."""

    def __init__(self, admin: psycopg.Connection[Any], name: str) -> None:
        self.admin = admin
        self.name = name
        self.options = {"transport": "message", "slot": name}
        """For an outbox."""

    def raw(self) -> list[list[pgoutput.Decoded]]:
        """What was committed since the last call: for each transaction what is between its Begin and its Commit."""
        transactions: list[list[pgoutput.Decoded]] = []
        is_open = False
        for (data,) in self.admin.execute(CHANGES, (self.name,)):
            match pgoutput.decode(data):
                case pgoutput.Begin():
                    assert not is_open
                    transactions.append([])
                    is_open = True
                case pgoutput.Commit():
                    is_open = False
                case other:
                    assert is_open
                    transactions[-1].append(other)
        assert not is_open
        return transactions

    def read(self, schema: str = "outbox") -> list[list[EventMessage]]:
        """The events of each transaction. Fails if there was anything else."""
        found = self.raw()
        for message in (each for transaction in found for each in transaction):
            assert isinstance(message, pgoutput.Message)
            assert (message.transactional, message.prefix) == (True, message_prefix(schema))
        return [[decode(message.content) for message in transaction] for transaction in found]

    def numbers(self, schema: str = "outbox") -> list[list[int]]:
        return [[orjson.loads(each.payload)["n"] for each in transaction] for transaction in self.read(schema)]


@contextlib.contextmanager
def opened_slot(database: Any) -> Iterator[Slot]:
    """Make one, named as the database: slots are the whole server's."""
    admin = database.connect(autocommit=True)
    admin.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    admin.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (database.name,))
    yield Slot(admin, database.name)
    drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s"
    admin.execute(drop, (database.name,))
