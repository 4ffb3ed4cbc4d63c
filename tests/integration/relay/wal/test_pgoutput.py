"""The decoder on what a real server writes: every kind of message, of the outbox and of other tables."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from outbox import Event, Outbox
from relay.wal.pgoutput import (
    UNCHANGED,
    Begin,
    Commit,
    Decoded,
    Delete,
    Insert,
    Message,
    Relation,
    Truncate,
    Type,
    Update,
    decode,
)

PEEK = """
SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1', 'publication_names', %s,
                                                    'messages', 'true')"""


class Slot:
    """A slot and a publication of one database, read through SQL."""

    def __init__(self, admin: psycopg.Connection[Any], name: str) -> None:
        self.admin = admin
        self.name = name

    def read(self) -> list[Decoded]:
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
    assert abs(begin.committed_at - dt.datetime.now(dt.UTC)) < dt.timedelta(minutes=5)
    assert isinstance(relation, Relation)
    assert (relation.schema, relation.name) == ("outbox", "events")
    names = [column.name for column in relation.columns]
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
    assert commit.commit_lsn == begin.final_lsn < commit.end_lsn
    assert commit.committed_at == begin.committed_at


def test_every_other_kind(slot):
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
    oid = next(message.oid for message in messages if isinstance(message, Relation))
    assert {message.name for message in messages if isinstance(message, Type)} == {"mood"}
    # Described again when it was altered.
    identities = [message.replica_identity for message in messages if isinstance(message, Relation)]
    assert list(dict.fromkeys(identities)) == ["d", "f"]
    big = b"x" * 10000
    *changes, outside, inside = [m for m in messages if not isinstance(m, Begin | Commit | Type | Relation)]
    assert changes == [
        Insert(oid, (b"1", b"fine", big)),
        Update(oid, None, (b"1", None, UNCHANGED)),
        Update(oid, (b"1", None, None), (b"2", None, UNCHANGED)),
        Update(oid, (b"2", None, big), (b"2", b"fine", UNCHANGED)),
        Delete(oid, (b"2", b"fine", big)),
        Truncate((oid,), cascade=True, restart_identity=True),
    ]
    assert isinstance(inside, Message)
    assert isinstance(outside, Message)
    assert (inside.transactional, inside.prefix, inside.content) == (True, "outbox", b"in")
    assert (outside.transactional, outside.prefix, outside.content) == (False, "outbox", b"\x00\xff")


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
    key = [column.name for column in relation.columns].index("aggregate_id")
    assert [message.new[key] for message in messages if isinstance(message, Insert)] == [b"1", b"3"]
    assert sum(isinstance(message, Begin) for message in messages) == 1
