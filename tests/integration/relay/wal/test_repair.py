"""Setting up, switching and repairing, with a worker that streams before and after."""

from __future__ import annotations

import threading

import psycopg
import pytest
from stream_bench import Outboxed, outboxed
from support import wait_until

from outbox import Event, Outbox
from outbox.errors import OperationRefused
from relay.config import SourceKind
from relay.core.ports import StreamLost
from relay.operations.wal_setup import Cdc

__all__ = ["outboxed"]


def repair(box: Outboxed, reason: str) -> None:
    """Repair on a connection of its own, for a thread."""
    with psycopg.connect(box.url, autocommit=True) as own:
        Cdc(own, box.names).repair(reason)


def test_a_place_in_another_servers_wal_is_not_gone_on_from(outboxed):
    """Moved by dump and restore: the lanes' places are from a server that had written more WAL than this one."""
    box = outboxed()
    box.relay()
    box.streams()
    box.add("a1")
    box.published("a1")
    box.kill()
    moved = "UPDATE outbox.lanes SET commit_lsn = commit_lsn + (1::bigint << 40)"
    box.cdc.switch(SourceKind.POLLING)
    box.cdc.drop()
    box.admin.execute(moved)
    box.cdc.setup()
    box.cdc.switch(SourceKind.WAL)
    box.relay()
    box.streams()
    box.add("a2")
    box.add("a3")
    box.published("a1", "a2", "a3")
    # The checkpoint came along too.
    box.kill()
    box.admin.execute(moved)
    with pytest.raises(OperationRefused, match="has not written so much"):
        box.cdc.setup()
    box.admin.execute("SELECT pg_drop_replication_slot(%s)", (box.names.slot,))
    box.cdc.repair("moved")
    box.relay()
    box.streams()
    box.add("a4")
    box.published("a1", "a2", "a3", "a4")


def test_a_relay_does_not_end_the_session_that_makes_a_slot(outboxed):
    """It waits for an open transaction, and is no former reader of the slot."""
    box = outboxed()
    box.admin.execute("SELECT pg_drop_replication_slot(%s)", (box.names.slot,))
    thread = threading.Thread(target=repair, args=(box, "somebody dropped it"))
    with psycopg.connect(box.url) as writer:
        writer.execute("SELECT pg_current_xact_id()")
        thread.start()
        box.relay()

        def stopped() -> bool:
            try:
                box.turn()
            except StreamLost as error:
                # As the loop does: a later session sees the slot, if this one came before it.
                assert box.loop is not None
                box.loop._back_off(error)
                return "is being made, which waits" in str(error)
            return False

        wait_until(stopped, what="the relay to see it")
        writer.commit()
    thread.join(30)
    box.relay()
    box.streams()
    box.add("a1")
    box.published("a1")


def test_after_a_repair_the_table_has_what_the_publication_had_not(outboxed):
    """Also rows of transactions that were open while the publication was changed."""
    box = outboxed()
    box.relay(once=True)
    box.streams()
    box.add("m0")
    box.published("m0")
    box.kafka.away = True
    ((columns,),) = box.rows("SELECT string_agg(attname, ', ') FROM pg_publication_tables, unnest(attnames) AS attname")
    expected = ["m0"]
    changes = [
        "ALTER PUBLICATION outbox_relay SET (publish = 'update')",
        "ALTER PUBLICATION outbox_relay SET (publish = 'insert')",
        "ALTER PUBLICATION outbox_relay SET TABLE outbox.events (id)",
        "DROP PUBLICATION outbox_relay",
        f"CREATE PUBLICATION outbox_relay FOR TABLE outbox.events ({columns}) WITH (publish = 'insert')",
    ]
    with psycopg.connect(box.url) as writer:
        for number, change in enumerate(changes, 1):
            box.admin.execute(change)
            box.add(f"m{number}")
            Outbox().add(writer, Event("Order", "o", f"o{number}", {"n": number}))
            expected += [f"m{number}", f"o{number}"]
        box.kill()
        # Making a slot waits for the transactions that are open.
        thread = threading.Thread(target=repair, args=(box, "somebody changed it"))
        thread.start()
        made = "SELECT FROM pg_replication_slots WHERE slot_name = %s AND confirmed_flush_lsn IS NULL"
        wait_until(lambda: box.rows(made, box.names.slot), what="the repair to wait")
        writer.commit()
    thread.join(30)
    box.kafka.away = False
    box.relay(once=True)
    box.streams()
    box.add("m6")
    box.until(lambda: len(box.kafka.names()) > len(expected), f"{expected} after {box.kafka.names()}")
    box.turns(5)
    assert sorted(box.kafka.names()) == sorted([*expected, "m6"])
    assert box.kafka.names("m") == sorted(box.kafka.names("m"))
    # Where nothing is wrong a repair takes nothing away either.
    box.kafka.away = True
    box.add("m7")
    box.kill()
    box.cdc.repair("to be sure")
    box.kafka.away = False
    box.relay(once=True)
    box.until(lambda: "m7" in box.kafka.names(), "what was in the slot")
    assert len(set(box.kafka.names())) == len(box.kafka.names())
