"""``outbox relay switch`` there and back, with events of both kinds under way."""

from __future__ import annotations

from typing import Any

import orjson
import psycopg
import pytest
from cdc_shell import shell
from support import order, wait_until
from wal_support import cdc, streaming, wal

from outbox import Event, Outbox
from relay.config import SourceKind
from relay.operations.wal_setup import Cdc, CdcRefused
from relay.wal.slot import SlotNames

__all__ = ["order", "shell", "wal"]


def test_no_slot_left_on_the_server(shell, monkeypatch):
    """The server's own error comes out as advice. (Using its slots up would disturb other tests.)"""

    class Full:
        info = shell.admin.info

        def execute(self, query: Any, *values: Any) -> Any:
            if "pg_create_logical_replication_slot" in str(query):
                raise psycopg.errors.ConfigurationLimitExceeded("all replication slots are in use")
            return shell.admin.execute(query, *values)

        def transaction(self) -> Any:
            return shell.admin.transaction()

    with pytest.raises(CdcRefused, match="raise max_replication_slots"):
        Cdc(Full(), SlotNames("outbox", shell.slot, "outbox_relay")).setup()


def test_back_to_polling_waits_for_events_without_a_row(shell, outbox_kafka, outbox_relay, wal, order):
    kind, topic = order
    url, outbox = shell.url, Outbox(transport="message", slot=wal["wal__slot"])
    shell.slot = wal["wal__slot"]
    settings = {"wal__slot": shell.slot}

    def say(number: int) -> None:
        with psycopg.connect(url) as writer:
            outbox.add(writer, Event(kind, "key", "Said", {"n": number}))

    with cdc(url, settings) as commands:
        commands.setup()
        commands.switch(SourceKind.WAL)
        relay = outbox_relay(**wal)
        wait_until(lambda: streaming(url), 30, "the lanes to stream")
        relay.pause()
        say(1)
        # The first one: no checkpoint knows yet that there are such events, but the slot is being read.
        with pytest.raises(CdcRefused, match="with source=wal get there first"):
            commands.switch(SourceKind.POLLING, wait_seconds=0.3)
        relay.resume()
        say(2)
        assert commands.switch(SourceKind.POLLING)
        assert [orjson.loads(message.value())["n"] for message in outbox_kafka.consume(topic, 2)] == [1, 2]
        assert commands.status().slot.message_at is not None
        relay.wait_for_log("read from another source; this relay waits")
        say(3)
        # Nobody reads the WAL now: it can't get there, from either side.
        commands.switch(SourceKind.WAL)
        relay.kill()
        with pytest.raises(CdcRefused, match="with source=wal get there first"):
            commands.switch(SourceKind.POLLING, wait_seconds=0.3)
        outbox_relay(**wal)
        assert commands.switch(SourceKind.POLLING)
        assert len(outbox_kafka.consume(topic, 3)) == 3
        # A slot that is gone will never get there: that is what it says, and not to wait.
        commands.switch(SourceKind.WAL)
    for process in outbox_relay._started:
        if process.running:
            process.kill()
    look = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    wait_until(lambda: not shell.query(look, shell.slot)[0][0], 10, "the slot to be free")
    shell.query("SELECT pg_drop_replication_slot(%s)", shell.slot)
    with cdc(url, settings) as commands, pytest.raises(CdcRefused, match="is gone"):
        commands.switch(SourceKind.POLLING)


def test_a_downgrade_does_not_forget_the_slot(shell):
    shell.done("cdc setup")
    shell.done("relay switch", "wal")
    _, output = shell.refused("db downgrade", "base")
    assert "outbox.streams still has rows" in output
    assert "outbox cdc drop" in output
    shell.done("relay switch", "polling", "--leave-messages")
    shell.done("cdc drop", "--slot", shell.slot)
    shell.done("db downgrade", "base")
    for command in (("cdc status",), ("cdc setup",), ("relay switch", "wal")):
        _, output = shell.refused(*command)
        assert "outbox db upgrade" in output
    shell.done("db upgrade")
    shell.done("db check")
