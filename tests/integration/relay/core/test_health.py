"""What a relay shows of a wait that lasts: the metrics and /readyz, over real HTTP, with real servers in the way."""

from __future__ import annotations

import socket
from datetime import datetime
from typing import Any

import psycopg
import pytest
from shown import LEASE, Shown
from support import IMPATIENT, logged, order, wait_until
from wal_support import wal

from outbox.sandbox._ports import free_ports
from outbox.testing.fixtures import RelayProcess

__all__ = ["order", "wal"]

STANDING = 1.5
"""After how many seconds a wait is an error there."""


@pytest.fixture
def shown():
    return Shown(free_ports(1)[0])


@pytest.fixture
def settings(shown):
    return {
        "relay__lease_seconds": LEASE,
        "relay__max_backoff_seconds": 0.2,
        "relay__metrics_address": shown.address,
        "kafka__reconnect_backoff_max_ms": 500,
    }


def complaints(relay: RelayProcess, text: str) -> list[dict[str, Any]]:
    """Return the lines with this text that say that something waits."""
    return [line for line in logged(relay, text) if "wait" in line["event"]]


def test_a_server_that_never_was_there(outbox_kafka, outbox_relay, settings, shown):
    """It is not ready before it has reached Postgres. That is an error after a while, and again each time as long."""
    relay = outbox_relay(database_url="postgresql://127.0.0.1:1/x", program=IMPATIENT, log_format="json", **settings)
    relay.wait_for_log("waiting for Postgres")
    assert shown.ready() == (503, {"postgres_unavailable": []})
    still = '"what": "the leases"'
    wait_until(lambda: len(complaints(relay, still)) >= 3, what="it to be said again")
    assert shown.metric("lane_wait_seconds", "postgres_unavailable") >= 2 * STANDING
    assert shown.metric("lanes_waiting", "postgres_unavailable") == 0
    said = complaints(relay, still)
    assert (said[0]["event"], said[0]["level"]) == ("waiting for Postgres", "warning")
    for line, before in zip(said[1:], said, strict=False):
        assert (line["event"], line["level"], "127.0.0.1" in line["error"]) == ("still waiting", "error", True)
        assert line["seconds"] > before.get("seconds", 0)
        # The one before may have been late in its log.
        between = datetime.fromisoformat(line["timestamp"]) - datetime.fromisoformat(before["timestamp"])
        assert between.total_seconds() >= STANDING - 0.3


def test_a_table_that_the_control_loop_misses(outbox_postgres, outbox_relay, settings, shown):
    """It waits for a person, and goes on by itself then."""
    relay = outbox_relay(program=IMPATIENT, log_format="json", **settings)
    shown.recovers()
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox.relays RENAME TO away")
        wait_until(lambda: "postgres_refuses" in shown.ready()[1], what="the reason to be shown")
        wait_until(lambda: len(complaints(relay, '"what": "the leases"')) >= 2, what="it to be said again")
        wait_until(lambda: shown.ready()[0] == 503, what="the relay to be not ready")
        last = complaints(relay, '"what": "the leases"')[-1]
        assert (last["event"], last["level"], "outbox db upgrade" in last["error"]) == ("still waiting", "error", True)
        connection.execute("ALTER TABLE outbox.away RENAME TO relays")
    shown.recovers()


def test_each_worker_answers_at_a_port_of_its_own(outbox_postgres, outbox_relay, settings):
    first = next(port for port in free_ports(50) if is_free(port + 1))
    outbox_relay("--workers", "2", **settings | {"relay__metrics_address": f"127.0.0.1:{first}"})
    both = Shown(first), Shown(first + 1)
    for shown in both:
        shown.recovers()
    wait_until(lambda: [shown.metric("lanes") for shown in both] == [2, 2], what="the lanes to be shared")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
