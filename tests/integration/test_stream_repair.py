"""Setting up, switching and repairing, with a worker that streams before and after."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from stream_bench import both, outboxed
from support import wait_until

from outbox import Event, Outbox
from outbox.errors import SchemaError
from relay.config import SourceKind
from relay.operations import wal_setup as cdc
from relay.operations.wal_setup import Cdc, CdcRefused
from relay.ports import StreamLost, Unavailable

__all__ = ["outboxed"]


@pytest.mark.parametrize("error", ["22000", "57014"], ids=["unreadable", "takes too long"])
def test_a_repair_that_may_lose_messages_does_not_depend_on_reading_them(outboxed, monkeypatch, error):
    box = outboxed()
    box.admin.execute(
        "CREATE FUNCTION peek() RETURNS bigint LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'not now' USING ERRCODE = '{error}'; END $$"
    )
    monkeypatch.setattr(cdc, "_UNREAD", "SELECT peek()")
    box.add("a1")
    box.rows("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", box.names.slot)
    with pytest.raises((Unavailable, SchemaError), match="not now"):
        box.cdc.repair("its slot is too far behind")
    box.cdc.repair("its slot is too far behind", lose_messages=True)
    assert box.rows("SELECT details ->> 'messages_lost_at_most' FROM outbox.audit WHERE what = 'cdc repair'") == [
        (None,)
    ]
    assert box.cdc.status().problem is None


def test_a_place_in_another_servers_wal_is_not_gone_on_from(outboxed):
    """Moved by dump and restore: the lanes' places are from a server that had written more WAL than this one."""
    box = outboxed()
    box.relay()
    box.streams()
    box.add("a1", message=True)
    box.published("a1")
    box.kill()
    moved = "UPDATE outbox.lanes SET commit_lsn = commit_lsn + (1::bigint << 40)"
    box.cdc.switch(SourceKind.POLLING, leave_messages=True)
    box.cdc.drop()
    box.admin.execute(moved)
    box.cdc.setup()
    box.cdc.switch(SourceKind.WAL)
    box.relay()
    box.streams()
    box.add("a2", message=True)
    box.add("a3")
    box.published("a1", "a2", "a3")
    # The checkpoint came along too.
    box.kill()
    box.admin.execute(moved)
    with pytest.raises(CdcRefused, match="has not written so much"):
        box.cdc.setup()
    box.admin.execute("SELECT pg_drop_replication_slot(%s)", (box.names.slot,))
    box.cdc.repair("moved")
    box.relay()
    box.streams()
    box.add("a4", message=True)
    box.published("a1", "a2", "a3", "a4")


def test_a_relay_does_not_end_the_session_that_makes_a_slot(outboxed):
    """It waits for an open transaction, and is no former reader of the slot."""
    box = outboxed()
    box.admin.execute("SELECT pg_drop_replication_slot(%s)", (box.names.slot,))
    done: list[bool] = []

    def repair() -> None:
        with psycopg.connect(box.url, autocommit=True) as own:
            done.append(Cdc(own, box.names).repair("somebody dropped it"))

    thread = threading.Thread(target=repair)
    with psycopg.connect(box.url) as writer:
        writer.execute("SELECT pg_current_xact_id()")
        thread.start()
        box.relay()

        def stopped() -> bool:
            try:
                box.turn()
            except StreamLost as error:
                return "is being made, which waits" in str(error)
            return False

        wait_until(stopped, what="the relay to see it")
        writer.commit()
    thread.join(30)
    assert done == [False]
    box.relay()
    box.streams()
    box.add("a1")
    box.published("a1")


@both
def test_a_repair_after_a_change_of_the_publication_keeps_what_is_in_the_slot(outboxed, once):
    """The slot has every event without a row still; rows that were not published meanwhile are read from the table."""
    box = outboxed()
    box.relay(once=once)
    box.streams()
    box.add("m1", message=True)
    box.published("m1")
    ((columns,),) = box.rows("SELECT string_agg(attname, ', ') FROM pg_publication_tables, unnest(attnames) AS attname")
    box.kafka.away = True
    expected = ["m1"]
    changes = [
        "ALTER PUBLICATION outbox_relay SET (publish = 'update')",
        "ALTER PUBLICATION outbox_relay SET (publish = 'insert')",
        "ALTER PUBLICATION outbox_relay SET TABLE outbox.events (id)",
    ]
    if box.admin.info.server_version >= 180000:
        # Before, the slot can't be read past that.
        changes += [
            "DROP PUBLICATION outbox_relay",
            f"CREATE PUBLICATION outbox_relay FOR TABLE outbox.events ({columns}) WITH (publish = 'insert')",
        ]
    with psycopg.connect(box.url) as writer:
        for number, change in enumerate(changes):
            box.admin.execute(change)
            box.add(f"m{number + 2}", message=True)
            box.add(f"r{number}")
            Outbox().add(writer, Event("Order", "o", f"o{number}", {"n": number}))
            expected += [f"m{number + 2}", f"r{number}", f"o{number}"]
        with pytest.raises(CdcRefused, match=r"was changed.*--leave-messages"):
            box.cdc.switch(SourceKind.POLLING)
        box.kill()
        assert box.cdc.repair("somebody changed it")
        writer.commit()
    assert box.rows("SELECT details ->> 'slot_kept' FROM outbox.audit WHERE what = 'cdc repair'") == [("true",)]
    box.kafka.away = False
    box.relay(once=once)
    box.streams()
    box.add("m7", message=True)
    box.add("r7")
    box.until(lambda: len(box.kafka.names()) >= len(expected) + 2, f"{expected} after {box.kafka.names()}")
    box.turns(5)
    assert sorted(box.kafka.names()) == sorted([*expected, "m7", "r7"])
    assert box.kafka.names("m") == sorted(box.kafka.names("m"))
    # Where nothing is wrong a repair takes nothing away either.
    box.kafka.away = True
    box.add("m8", message=True)
    box.kill()
    assert box.cdc.repair("to be sure")
    box.kafka.away = False
    box.relay(once=once)
    box.until(lambda: "m8" in box.kafka.names(), "what the slot had")
    assert len(set(box.kafka.names())) == len(box.kafka.names())


def test_going_back_to_polling_waits_for_a_message_of_an_open_transaction(outboxed, outbox_postgres_server):
    box = outboxed()
    box.relay()
    box.streams()

    def switched(seconds: float) -> Any:
        done: list[Any] = []

        def switch() -> None:
            with psycopg.connect(box.url, autocommit=True) as own:
                try:
                    done.append(Cdc(own, box.names).switch(SourceKind.POLLING, wait_seconds=seconds))
                except CdcRefused as error:
                    done.append(str(error))

        thread = threading.Thread(target=switch)
        thread.start()
        while thread.is_alive():
            box.turns()
        return done[0]

    with psycopg.connect(outbox_postgres_server.url()) as elsewhere, psycopg.connect(box.url) as writer:
        # A transaction of another database holds no event of ours.
        elsewhere.execute("SELECT pg_current_xact_id()")
        Outbox(**box.transport(message=True)).add(writer, Event("Order", "a", "a1"))
        refused = switched(1)
        assert f"server process {writer.info.backend_pid}" in refused
        assert "--leave-messages" in refused
        writer.commit()
        assert switched(30) is True
    assert box.kafka.names() == ["a1"]
