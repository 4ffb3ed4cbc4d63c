"""The decoder on what a real server writes: every kind of message, of the outbox and of other tables."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from outbox import Event, Outbox
from relay.wal.pgoutput import Begin, Commit, Decoded, Insert, Message, Relation, decode

PEEK = """
SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1', 'publication_names', %s,
                                                    'messages', 'true')"""


class Slot:
    """A slot and a publication of one database, read through SQL."""

    def __init__(self, admin: psycopg.Connection[Any], name: str) -> None:
        self.admin = admin
        self.name = name

    def read(self) -> list[Decoded | None]:
        return [decode(row[0]) for row in self.admin.execute(PEEK, (self.name, "everything"))]


@pytest.fixture
def slot(outbox_postgres) -> Iterator[Slot]:
    admin = outbox_postgres.connect(autocommit=True)
    admin.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    admin.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (outbox_postgres.name,))
    yield Slot(admin, outbox_postgres.name)
    admin.execute("SELECT pg_drop_replication_slot(%s)", (outbox_postgres.name,))


def test_events_as_the_writer_writes_them(outbox_postgres, slot):
    event = Event("Order", "4711", "OrderPlaced", {"ü": 1}, headers={"tenant": "acme"})
    with outbox_postgres.connect() as connection:
        event_id = Outbox().add(connection, event)
        Outbox().add(connection, Event("Order", "4712", "OrderPlaced", b"\x00\xff"))
    begin, relation, first, second, commit = slot.read()
    assert isinstance(begin, Begin)
    assert isinstance(relation, Relation)
    assert (relation.schema, relation.name) == ("outbox", "events")
    names = list(relation.columns)
    # The generated column is not sent.
    assert "lane" not in names
    assert isinstance(first, Insert)
    values = dict(zip(names, first.new, strict=True))
    assert values["event_id"] == str(event_id).encode()
    assert values["aggregate_id"] == b"4711"
    assert values["payload"] == '{"ü": 1}'.encode()
    assert values["payload_bytes"] is None
    assert isinstance(second, Insert)
    assert dict(zip(names, second.new, strict=True))["payload_bytes"] == b"\\x00ff"
    assert isinstance(commit, Commit)
    assert begin.final_lsn < commit.end_lsn
    assert abs(commit.committed_at - dt.datetime.now(dt.UTC)) < dt.timedelta(minutes=5)


def test_every_kind_is_decoded_or_skipped(slot):
    run = slot.admin.execute
    run("CREATE TYPE mood AS ENUM ('fine')")
    run("CREATE TABLE plain (id int PRIMARY KEY, mood mood, big text)")
    run("ALTER TABLE plain ALTER big SET STORAGE EXTERNAL")
    slot.read()
    run("INSERT INTO plain VALUES (1, 'fine', repeat('x', 10000))")
    run("UPDATE plain SET mood = NULL")
    run("UPDATE plain SET id = 2")
    run("ALTER TABLE plain REPLICA IDENTITY FULL")
    run("UPDATE plain SET mood = 'fine'")
    run("DELETE FROM plain")
    run("TRUNCATE plain RESTART IDENTITY CASCADE")
    # The second one flushes the first, which no commit does.
    run("SELECT pg_logical_emit_message(false, 'outbox', '\\x00ff'::bytea)")
    run("SELECT pg_logical_emit_message(true, 'outbox', 'in')")
    messages = slot.read()
    # The table is described again when it was altered, which a TRUNCATE does, too.
    relations = [message for message in messages if isinstance(message, Relation)]
    assert len({one.oid for one in relations}) == 1
    *changes, outside, inside = [m for m in messages if not isinstance(m, Begin | Commit | Relation | None)]
    assert changes == [Insert(relations[0].oid, (b"1", b"fine", b"x" * 10000))]
    assert outside == Message(False, outside.lsn, "outbox")
    assert inside == Message(True, inside.lsn, "outbox")
    # The type, three updates, a delete and a truncation.
    assert messages.count(None) >= 6


def test_savepoints_and_rollbacks_leave_only_what_was_committed(outbox_postgres, slot):
    with outbox_postgres.connect() as connection:
        Outbox().add(connection, Event("Order", "1", "T"))
        with connection.transaction():
            Outbox().add(connection, Event("Order", "2", "T"))
            raise psycopg.Rollback
        with connection.transaction():
            Outbox().add(connection, Event("Order", "3", "T"))
    with outbox_postgres.connect() as connection:
        Outbox().add(connection, Event("Order", "4", "T"))
        connection.rollback()
    messages = slot.read()
    (relation,) = [message for message in messages if isinstance(message, Relation)]
    key = list(relation.columns).index("aggregate_id")
    assert [message.new[key] for message in messages if isinstance(message, Insert)] == [b"1", b"3"]
    assert sum(isinstance(message, Begin) for message in messages) == 1
