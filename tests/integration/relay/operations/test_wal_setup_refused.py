"""``outbox cdc`` on a server without room for a slot, and on older tables."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from cdc_shell import shell
from support import order
from wal_support import wal

from outbox.errors import OperationRefused
from relay.operations.wal_setup import Cdc
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

    with pytest.raises(OperationRefused, match="raise max_replication_slots"):
        Cdc(Full(), SlotNames("outbox", shell.slot, "outbox_relay")).setup()


def test_a_downgrade_does_not_forget_the_slot(shell):
    shell.done("cdc setup")
    shell.done("relay switch", "wal")
    _, output = shell.refused("db downgrade", "base")
    assert "outbox.streams still has rows" in output
    assert "outbox cdc drop" in output
    shell.done("relay switch", "polling")
    shell.done("cdc drop", "--slot", shell.slot)
    _, output = shell.refused("db downgrade", "base")
    assert "outbox.audit still has rows" in output
    shell.done("db downgrade", "base", "--drop-rows")
    for command in (("cdc status",), ("cdc setup",), ("relay switch", "wal")):
        _, output = shell.refused(*command)
        assert "outbox db upgrade" in output
    shell.done("db upgrade")
    shell.done("db check")
