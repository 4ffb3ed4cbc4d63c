"""The metrics: the slot as it is, over real HTTP."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from alerting import scraped
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from support import IMPATIENT, wait_until
from wal_support import cdc, set_up, streaming, switch, wal

from outbox._app.prometheus import serve
from outbox.errors import ConfigurationError
from outbox.sandbox._ports import free_ports
from relay.config import load
from relay.core.lane import LoopSettings
from relay.core.ports import Unavailable
from relay.database import Connector
from relay.metrics import relay as metrics
from relay.metrics.relay import SlotWatch
from relay.supervisor import Components, Supervisor
from relay.upkeep import MaintenanceTask
from relay.wal.slot import Slot, SlotNames, SlotState

__all__ = ["wal"]

MEBI = 1 << 20


def test_the_limit_is_crossed_and_crossed_back(outbox_postgres, wal):
    url = outbox_postgres.url
    names = SlotNames("outbox", wal["wal__slot"], "outbox_relay")
    registry = CollectorRegistry()
    watch = SlotWatch(Connector(url, "test"), names, MEBI, registry)

    def look(metric):
        return registry.get_sample_value(f"outbox_slot_{metric}")

    def logged():
        with capture_logs() as logs:
            watch.look()
        return [(entry["log_level"], entry["event"].partition(":")[0]) for entry in logs]

    with psycopg.connect(url, autocommit=True) as admin, cdc(url, wal) as commands:
        assert logged() == []
        assert (look("healthy"), look("retained_wal_bytes")) == (0, 0)
        commands.setup()
        assert logged() == []
        assert (look("healthy"), look("retained_wal_over_limit"), look("safe_wal_bytes")) == (1, 0, -1)
        assert look("retained_wal_bytes") > 0
        admin.execute(
            "SELECT count(pg_logical_emit_message(true, 'pad', repeat('x', 600000))) FROM generate_series(1, 3)"
        )
        assert logged() == [("error", "the slot keeps more WAL than its limit")]
        assert (look("healthy"), look("retained_wal_over_limit")) == (1, 1)
        assert look("retained_wal_bytes") > MEBI
        assert look("lag_bytes") > MEBI
        assert look("lag_seconds") > 0
        # Once is enough.
        assert logged() == []
        # A server that went away after all was well: what was seen stays, and how old it is, and nobody calls it well.
        seen_at = look("last_look_timestamp_seconds")
        assert abs(seen_at - time.time()) < 60
        watch._connect = Connector("postgresql://127.0.0.1:1/x", "test")
        with pytest.raises(Unavailable):
            watch.look()
        assert (look("healthy"), look("retained_wal_over_limit")) == (0, 1)
        assert look("last_look_timestamp_seconds") == seen_at
        watch._connect = Connector(url, "test")
        assert logged() == []
        assert look("healthy") == 1
        # A look that hangs.
        watch._looked -= 61
        assert look("healthy") == 0
        assert logged() == []
        commands.drop()
        commands.setup()
        assert logged() == [("info", "the slot keeps less WAL than its limit again")]
        assert (look("healthy"), look("retained_wal_over_limit"), look("lag_seconds")) == (1, 0, 0)
        admin.execute("SELECT pg_drop_replication_slot(%s)", (names.slot,))
        assert logged() == []
        assert (look("healthy"), look("retained_wal_bytes")) == (0, 0)


def test_a_slot_that_is_dropped_between_two_looks_has_no_position(outbox_postgres, wal, monkeypatch):
    """The second look is needed because the first has missed a checkpoint."""
    set_up(outbox_postgres.url, wal)
    names = SlotNames("outbox", wal["wal__slot"], "outbox_relay")
    real, looks = Slot._look_once, []
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        admin.execute("UPDATE outbox.streams SET flushed_lsn = flushed_lsn - 1")

        def look_once(slot: Slot) -> SlotState:
            looks.append(real(slot))
            if len(looks) == 1:
                admin.execute("UPDATE outbox.streams SET flushed_lsn = flushed_lsn + 1")
                admin.execute("SELECT pg_drop_replication_slot(%s)", (names.slot,))
            return looks[-1]

        monkeypatch.setattr(Slot, "_look_once", look_once)
        found = Slot(admin, names).look()
    assert [look.confirmed_lsn is None for look in looks] == [False, True]
    assert (found.confirmed_lsn, found.lag_bytes) == (None, 0)


def test_the_alert_of_a_relay_that_polls_and_whose_control_loop_hangs(outbox_postgres, wal, monkeypatch):
    """A slot that nobody reads yet, and commits that do not come back, as without a synchronous standby."""
    monkeypatch.setattr(metrics, "_LIMIT", "1s")
    url = outbox_postgres.url
    registry = CollectorRegistry()
    # The settings of a relay that polls need not name the slot.
    names = SlotNames("outbox", "of-no-outbox", "p")
    watch = SlotWatch(Connector(url, "watch"), names, MEBI, registry, by_checkpoint=True)

    def look(metric):
        return registry.get_sample_value(f"outbox_slot_{metric}")

    def away(*_):
        raise Unavailable("no lane is needed here")

    components = Components(
        instance="me",
        version="0",
        schema="outbox",
        lease_seconds=60.0,
        shutdown_seconds=1.0,
        loop=LoopSettings(),
        connect=Connector(url, "control loop"),
        source=away,
        publisher=away,
        upkeep=[MaintenanceTask("slot", watch.look, 0.05)],
    )
    watch.look()
    assert look("healthy") is None
    set_up(url, wal)
    stop = threading.Event()
    hanging = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'control loop' AND wait_event_type = 'Lock'"
    )
    with (
        ThreadPoolExecutor(1) as threads,
        psycopg.connect(url) as other,
        psycopg.connect(url, autocommit=True) as admin,
    ):
        other.execute("LOCK TABLE outbox.relays IN ACCESS EXCLUSIVE MODE")
        running = threads.submit(Supervisor(components).run, stop, threading.Event())
        try:
            wait_until(lambda: admin.execute(hanging).fetchone() == (1,), what="the control loop to hang")
            wait_until(lambda: look("healthy") == 1, what="a look")
            # So does a look, and says so.
            other.execute("SAVEPOINT before")
            other.execute("LOCK TABLE outbox.streams IN ACCESS EXCLUSIVE MODE")
            wait_until(lambda: look("healthy") == 0, what="the watch to say that it sees nothing")
            other.execute("ROLLBACK TO before")
            admin.execute(
                "SELECT count(pg_logical_emit_message(true, 'x', repeat('x', 600000))) FROM generate_series(1, 3)"
            )
            wait_until(lambda: (look("retained_wal_over_limit"), look("healthy")) == (1, 1), what="the alert")
            assert admin.execute(hanging).fetchone() == (1,)
        finally:
            stop.set()
            other.rollback()
        running.result(60)
    with cdc(url, wal) as commands:
        commands.drop()
    watch.look()
    assert look("healthy") is None


def test_a_relay_serves_them(outbox_postgres, outbox_kafka, outbox_relay, wal):
    url, (port,) = outbox_postgres.url, free_ports(1)
    set_up(url, wal)
    address = {"program": IMPATIENT, "relay__metrics_address": f"127.0.0.1:{port}"}

    def shown():
        found = scraped(f"127.0.0.1:{port}")
        return {series.partition("{")[0]: value for series, value in found.items() if series.startswith("outbox_slot_")}

    # One that polls, for as long as the slot waits to be read.
    relay = outbox_relay(**wal | {"source": "polling"}, **address)
    wait_until(lambda: shown().get("outbox_slot_healthy") == 1, 30, "the slot to be looked at")
    relay.terminate()
    assert relay.wait() == 0
    switch(url, wal, "wal")
    relay = outbox_relay(**wal, **address)
    wait_until(lambda: streaming(url), 30, "the lanes to stream")
    wait_until(lambda: shown().get("outbox_slot_healthy") == 1, 30, "the slot to be looked at")
    assert set(shown()) == {
        "outbox_slot_repairs_total",
        "outbox_slot_retained_wal_bytes",
        "outbox_slot_retained_wal_over_limit",
        "outbox_slot_safe_wal_bytes",
        "outbox_slot_lag_bytes",
        "outbox_slot_lag_seconds",
        "outbox_slot_healthy",
        "outbox_slot_last_look_timestamp_seconds",
    }
    # A second relay can't have the same port: it says so, and ends.
    other = outbox_relay(**wal, **address)
    assert other.wait() == 2
    assert f"OUTBOX_RELAY__METRICS_ADDRESS=127.0.0.1:{port}: " in other.log()
    assert "Traceback" not in other.log()
    relay.terminate()
    assert relay.wait() == 0


def test_addresses_that_cannot_be(monkeypatch):
    for address in ("nowhere", ":"):
        monkeypatch.setenv("OUTBOX_RELAY__METRICS_ADDRESS", address)
        with pytest.raises(ConfigurationError, match="OUTBOX_RELAY__METRICS_ADDRESS"):
            load()
    for address in ("127.0.0.1:99999", "no-such-host.invalid:9100", "203.0.113.1:9100"):
        with pytest.raises(ConfigurationError, match=f"OUTBOX_RELAY__METRICS_ADDRESS={address}: "):
            serve(address, CollectorRegistry())


def test_an_address_of_version_six():
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"this machine has no ::1: {error}")
    (port,) = free_ports(1)
    serve(f"[::1]:{port}", CollectorRegistry())
    with urllib.request.urlopen(f"http://[::1]:{port}/metrics", timeout=30) as answer:
        assert answer.status == 200
