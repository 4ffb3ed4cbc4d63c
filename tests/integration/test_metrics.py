"""The metrics: the slot as it is, over real HTTP."""

from __future__ import annotations

import socket
import urllib.request

import psycopg
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from support import wait_until
from wal_support import cdc, run_outbox, streaming, to_wal, wal

from outbox.errors import ConfigurationError
from outbox.testing._ports import free_ports
from relay.database import Connector
from relay.metrics import SlotWatch, serve
from relay.ports import Unavailable
from relay.slot import SlotNames

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
        commands.repair("it is in the way")
        assert logged() == [("info", "the slot keeps less WAL than its limit again")]
        assert (look("healthy"), look("retained_wal_over_limit"), look("lag_seconds")) == (1, 0, 0)
        admin.execute("SELECT pg_drop_replication_slot(%s)", (names.slot,))
        assert logged() == []
        assert (look("healthy"), look("retained_wal_bytes")) == (0, 0)


def test_a_server_that_is_away_is_not_a_healthy_slot():
    registry = CollectorRegistry()
    watch = SlotWatch(Connector("postgresql://127.0.0.1:1/x", "test"), SlotNames("outbox", "s", "p"), MEBI, registry)
    with pytest.raises(Unavailable):
        watch.look()
    assert registry.get_sample_value("outbox_slot_healthy") == 0


def test_a_relay_serves_them(outbox_postgres, outbox_kafka, outbox_relay, wal):
    url, (port,) = outbox_postgres.url, free_ports(1)
    to_wal(url, wal)
    relay = outbox_relay(**wal, relay__metrics_address=f"127.0.0.1:{port}")

    def metrics():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return {}
        return dict(line.rsplit(" ", 1) for line in lines if line.startswith("outbox_"))

    wait_until(lambda: streaming(url), 30, "the lanes to stream")
    wait_until(lambda: float(metrics().get("outbox_slot_healthy", 0)) == 1, 30, "the slot to be looked at")
    assert set(metrics()) == {
        "outbox_slot_retained_wal_bytes",
        "outbox_slot_retained_wal_over_limit",
        "outbox_slot_safe_wal_bytes",
        "outbox_slot_lag_bytes",
        "outbox_slot_lag_seconds",
        "outbox_slot_healthy",
    }
    # A second relay can't have the same port: it says so, and ends.
    other = outbox_relay(**wal, relay__metrics_address=f"127.0.0.1:{port}")
    assert other.wait() == 2
    assert f"relay.metrics_address=127.0.0.1:{port}: " in other.log()
    assert "Traceback" not in other.log()
    relay.terminate()
    assert relay.wait() == 0


@pytest.mark.parametrize(
    "address", ["nowhere", "127.0.0.1:99999", "no-such-host.invalid:9100", "203.0.113.1:9100", ":"]
)
def test_addresses_that_cannot_be(outbox_kafka, address):
    settings = {"relay__metrics_address": address, "kafka__bootstrap_servers": outbox_kafka.bootstrap_servers}
    done = run_outbox("postgresql://127.0.0.1:1/x", settings, "relay", "run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "metrics_address" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_of_version_six():
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    (port,) = free_ports(1)
    try:
        serve(f"[::1]:{port}", CollectorRegistry())
    except ConfigurationError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with urllib.request.urlopen(f"http://[::1]:{port}/metrics", timeout=30) as answer:
        assert answer.status == 200
