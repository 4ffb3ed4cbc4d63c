"""The runbooks of the replication slot. Each shows the cause of its failure, and its way out ends it.

Commands and queries come out of docs/operations/runbooks.md itself; see runbooks.py. They are run with the rights that
the page names. ``firing`` evaluates the real alert rules on what real relays and consumers show.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from alerting import firing, scraped
from rows_and_roles import execute
from runbook_support import alarmed, every_step_was_taken, forgotten, of
from support import ends, wait_until
from wal_support import set_up, streaming, to_wal


def wal_moves(url: str, mebibytes: int = 2) -> None:
    """Write so much into the WAL, and what the server writes by itself every few seconds."""
    padding = f"SELECT pg_logical_emit_message(false, 'pad', repeat('x', {mebibytes << 20}))"
    execute(url, padding)
    execute(url, "CHECKPOINT")


@pytest.fixture
def on_wal(outbox_kafka, settings) -> dict[str, Any]:
    """Settings of a relay that reads the WAL; the slot may keep a mebibyte."""
    settings["wal__slot"] = outbox_kafka.name("slot").replace("-", "_")
    settings["wal__retained_limit_bytes"] = 1 << 20
    settings["wal__heartbeat_seconds"] = 0.2
    return settings


@of("The slot is lost or keeps WAL")
def test_nobody_reads_the_slot(operator, on_wal, orders, address):
    """One that was set up and is not wanted; then one that is, and whose relay is missing."""
    url = orders.url
    set_up(url, on_wal)
    polling = operator.start()
    wal_moves(url)
    alarmed(address, "OutboxSlotRetainsWal")
    shown = operator.look("outbox cdc status")
    assert (shown.status, "ALERT" in shown.text) == (1, True), shown.text
    assert re.search(r"read by +- ", shown.text)
    operator.own("outbox cdc drop", SLOT=on_wal["wal__slot"])
    alarmed(address)
    ends(polling)
    to_wal(url, on_wal)
    orders.add(3)
    wal_moves(url)
    assert operator.look("outbox cdc status").status == 1
    operator.run_relay("OUTBOX_SOURCE=wal outbox relay run")
    orders.published(3)
    wait_until(lambda: streaming(url), what="the lanes to stream")
    orders.add(1)
    wait_until(lambda: wal_moves(url, 0) or not firing(scraped(address)), what="the slot to move")
    assert "The stream has no gap." in operator.look("outbox cdc status").text


@of("The slot is lost or keeps WAL")
def test_an_old_transaction_keeps_wal(operator, on_wal, orders, address):
    url = orders.url
    to_wal(url, on_wal)
    operator.start(source="wal")
    wait_until(lambda: streaming(url), what="the lanes to stream")
    # It has written something: what has not, the slot does not wait for.
    with forgotten(url, "SELECT pg_logical_emit_message(true, 'forgotten', '')") as pid:
        wal_moves(url)
        orders.add(3)
        orders.published(3)
        alarmed(address, "OutboxSlotRetainsWal")
        assert re.search(r"read by +server process \d+", operator.look("outbox cdc status").text)
        there = operator.follow("An old transaction")
        assert there.query("pg_stat_activity")[0]["pid"] == pid
        there.execute("pg_terminate_backend", PID=pid)
    wait_until(lambda: wal_moves(url, 0) or not firing(scraped(address)), what="the slot to move")


@of("The slot is lost or keeps WAL")
def test_the_slot_is_lost(operator, on_wal, orders, address):
    url = orders.url
    to_wal(url, on_wal)
    relay = operator.start(source="wal")
    wait_until(lambda: streaming(url), what="the lanes to stream")
    ends(relay)
    # A slot alone the relay would replace by itself.
    execute(url, "DROP PUBLICATION outbox_relay")
    orders.add(3)
    operator.start(source="wal")
    wait_until(lambda: "OutboxSlotUnhealthy" in firing(scraped(address)), what="the alert")
    assert "PROBLEM" in operator.look("outbox cdc status").text
    operator.own("outbox cdc setup --repair")
    orders.published(3)
    alarmed(address)


def test_every_step_was_taken(request):
    """Runs last; of a section only if all of its tests were to run."""
    every_step_was_taken(request)
