"""What a relay shows of a wait that lasts: the metrics and /readyz, over real HTTP, with real servers in the way."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import psycopg
import pytest
from shown import LEASE, Shown
from support import drained, logged, look_up, order, wait_until
from wal_support import wal

from outbox import Event, Outbox
from outbox.sandbox._ports import free_ports
from outbox.testing.fixtures import RelayProcess

__all__ = ["order", "wal"]

IMPATIENT = (str(Path(__file__).parents[3] / "support" / "impatient.py"),)
STANDING = 3
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


def add(url: str, kind: str, keys: int = 100, payload: object = None) -> None:
    with psycopg.connect(url) as connection:
        Outbox().add_many(connection, [Event(kind, f"k{n}", "T", payload or {}) for n in range(keys)])


def test_a_lane_whose_row_is_locked(outbox_postgres, outbox_relay, settings, shown, order):
    """The lease can't be prolonged either. The other lanes go on, and so does this one when the lock is gone."""
    url, (kind, _) = outbox_postgres.url, order
    outbox_relay(**settings)
    shown.recovers()
    assert shown.metric("lanes") == 4
    with psycopg.connect(url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 1 FOR UPDATE")
        wait_until(lambda: shown.ready()[1] == {"lease_expired": [1]}, what="the lease to run out")
        add(url, kind)
        shown.stands("lease_expired", [1])
        status, lines = shown.checks()
        failed = [line for line in lines if line.startswith("[-]")]
        assert (status, lines[-1], len(failed)) == (503, "readyz check failed", 1)
        assert re.fullmatch(r"\[-\]lane-1 failed: lease_expired for \d+ s", failed[0])
        assert {"[+]lane-0 ok", "[+]control-loop ok"} <= set(lines)
        others = "SELECT DISTINCT lane FROM outbox.events"
        wait_until(lambda: look_up(url, others) == [(1,)], what="the others to go on")
    shown.recovers()
    status, lines = shown.checks()
    assert (status, lines[-1]) == (200, "readyz check passed")
    drained(url)


def test_a_lane_that_lost_its_state(outbox_postgres, outbox_kafka, outbox_relay, settings, shown, order):
    url, (kind, _) = outbox_postgres.url, order
    settings |= {"delivery": "exactly-once", "name": outbox_kafka.name("outbox")}
    relay = outbox_relay(**settings)
    shown.recovers()
    add(url, kind)
    drained(url)
    relay.terminate()
    assert relay.wait() == 0
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE outbox.lanes SET last_batch = last_batch + 50 WHERE lane = 2")
    outbox_relay(**settings)
    shown.stands("state_lost", [2])
    add(url, kind)
    wait_until(lambda: look_up(url, "SELECT DISTINCT lane FROM outbox.events") == [(2,)], what="the others to go on")
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE outbox.lanes SET last_batch = last_batch - 50 WHERE lane = 2")
    shown.recovers()
    drained(url)


def test_what_concerns_events_and_topics_leaves_the_relay_ready(
    outbox_postgres, outbox_kafka, outbox_relay, settings, shown
):
    """A refused event and its key, and a topic that is missing: for longer than a lane may stand still."""
    url, refusing, missing = outbox_postgres.url, outbox_kafka.name("refusing"), outbox_kafka.name("missing")
    outbox_kafka.create_topic(f"{refusing.lower()}-events", 1, {"max.message.bytes": "2000"})
    outbox_relay(**settings, create_topics=False, failures__max_backoff_seconds=1)
    shown.recovers()
    add(url, refusing, 1, os.urandom(4000))
    add(url, missing)
    lasting = "SELECT last_failed_at > first_failed_at + interval '4 seconds' FROM outbox.failures"
    wait_until(lambda: look_up(url, lasting) == [(True,)], what="an event to be refused again and again")
    shown.stays_ready()
    wait_until(lambda: shown.metric("topics_unusable") == 1, what="the topic to be missed")
    status, lines = shown.checks()
    (line,) = [line for line in lines if line.startswith(f"[-]topic-{missing.lower()}-events failed: ")]
    assert (status, lines[-1], line.endswith("(leaves it ready)")) == (200, "readyz check passed", True)
    outbox_kafka.create_topic(f"{missing.lower()}-events")
    wait_until(lambda: shown.metric("topics_unusable") == 0, what="the topic to be usable")
    shown.stays_ready()


def test_servers_that_are_away(private_postgres, private_kafka, outbox_relay, settings, shown):
    server, cluster = private_postgres({"fsync": "off"}), private_kafka()
    url = private_postgres.database(server).url
    private_kafka.topics(cluster).create_topic("order-events")
    outbox_relay(database_url=url, bootstrap_servers=cluster.bootstrap_servers, **settings)
    shown.recovers()
    # A topic that it knows: what it asks the brokers for in vain takes ten seconds each time.
    add(url, "Order")
    drained(url)
    cluster.kill_broker(0)
    add(url, "Order")
    shown.stands("kafka_unavailable")
    cluster.start_broker(0)
    shown.recovers()
    drained(url)
    server.kill()
    shown.stands("postgres_unavailable")
    server.start()
    shown.recovers()


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
        assert line["seconds"] >= before.get("seconds", 0) + STANDING - 1


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


def test_what_fails_beside_publishing_leaves_the_relay_ready(outbox_postgres, outbox_relay, settings, shown):
    relay = outbox_relay(program=IMPATIENT, log_format="json", **settings)
    shown.recovers()
    assert shown.metric("upkeep_wait_seconds", task="slot") == 0
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox.streams RENAME TO away")
        wait_until(lambda: len(complaints(relay, '"upkeep": "slot"')) >= 3, what="it to be said again")
        assert shown.metric("upkeep_wait_seconds", task="slot") >= 2 * STANDING
        shown.stays_ready()
        said = [(line["event"], line["level"]) for line in complaints(relay, '"upkeep": "slot"')]
        assert said[:3] == [("upkeep has to wait", "warning"), *[("still waiting", "error")] * 2]
        connection.execute("ALTER TABLE outbox.away RENAME TO streams")
    wait_until(lambda: shown.metric("upkeep_wait_seconds", task="slot") == 0, what="the look at the slot to succeed")


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
