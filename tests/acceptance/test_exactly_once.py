"""Exactly-once on Kafka, by a read_committed reader and the business rows, whatever is killed or stopped and where."""

from __future__ import annotations

import json
import signal
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from support import Load, await_stops, backlog, check, end_leases, halted, look_up, owners, wait_until, write
from wal_support import run_outbox

from outbox import Event
from relay.failpoints import VARIABLE

EXACTLY_ONCE = [
    "takeover.first_marker",
    "takeover.fenced",
    "takeover.marker_read",
    "takeover.settled",
    "batch.fetched",
    "txn.begun",
    "batch.half_sent",
    "batch.sent",
    "txn.marker_sent",
    "batch.acknowledged",
    "txn.confirmed",
    "txn.committed",
    "batch.settling",
    "batch.settled",
]
# Of those that are one line of a crash table, one.
PASSED_BY = {"takeover.marker_read", "batch.fetched", "batch.sent", "batch.acknowledged"}
KILLED = [name for name in EXACTLY_ONCE if name not in PASSED_BY]


@pytest.fixture
def exactly_once(outbox_kafka):
    """Settings of a relay of an outbox that no other test has."""
    return {
        "delivery": "exactly-once",
        "name": outbox_kafka.name("outbox"),
        "relay__lease_seconds": 1.0,
        "relay__batch_size": 50,
    }


@pytest.fixture
def back_soon(exactly_once):
    """The same, without long pauses between attempts: servers are killed on purpose here."""
    return exactly_once | {"relay__max_backoff_seconds": 0.5, "kafka__reconnect_backoff_max_ms": 500}


def failing(points: str) -> dict[str, str]:
    return {VARIABLE: points}


def test_killed_at_every_step(outbox_postgres, outbox_kafka, outbox_relay, exactly_once, order):
    """Each relay takes over from one that was killed, and is killed at the next step itself.

    At least once: test_failures.py.
    """
    url, (kind, topic) = outbox_postgres.url, order
    settings = exactly_once | {"relay__lease_seconds": 20}
    with Load(url, kind) as load:
        for point in KILLED:
            nth = 1 if point.startswith("takeover") else 5
            relay = outbox_relay(env=failing(f"{point}=kill@{nth}"), **settings)
            assert relay.wait(40) == -signal.SIGKILL, point
            end_leases(url)
        outbox_relay(**settings)
        load.drain()
    assert check(url, outbox_kafka.consume(topic)) == 0


def test_stopped_at_every_step_and_woken_after_the_take_over(
    outbox_postgres, outbox_kafka, outbox_relay, exactly_once, order
):
    """SIGSTOP midway, past the lease; another relay takes the lanes; SIGCONT. The sleeper must change nothing.

    Right before the commit: test_protocol_traces.py.
    """
    url, (kind, topic) = outbox_postgres.url, order
    points = ["takeover.marker_read", "txn.marker_sent", "txn.committed"]
    with Load(url, kind) as load:
        for point in points:
            # All lanes are taken over at once.
            nth = 1 if point.startswith("takeover") else 2
            sleeper = outbox_relay(env=failing(f"{point}=pause@{nth}"), **exactly_once)
            wait_until(lambda sleeper=sleeper: halted(sleeper), 30, f"the relay to stop at {point}")
            other = outbox_relay(relay__instance=f"after {point}", **exactly_once)
            wait_until(lambda point=point: owners(url) == {f"after {point}": 4}, 30, f"the take-over after {point}")
            load.more(100)
            sleeper.resume()
            sleeper.wait_for_log("lane lost")
            sleeper.kill()
            other.kill()
            # It is the sleeper's lease that has to run out by itself.
            end_leases(url)
        outbox_relay(**exactly_once)
        load.drain()
    assert check(url, outbox_kafka.consume(topic)) == 0


def test_errors_at_every_step(outbox_postgres, outbox_kafka, outbox_relay, back_soon, order):
    """A server that goes away at this very step: a new producer, the marker, and on."""
    url, (kind, topic) = outbox_postgres.url, order
    points = " ".join(f"{point}=error@{3 + n}" for n, point in enumerate(EXACTLY_ONCE[1:]))
    with Load(url, kind) as load:
        relay = outbox_relay(env=failing(points), **back_soon)
        for point in EXACTLY_ONCE[1:]:
            relay.wait_for_log(f'"failpoint": "{point}"', 60)
        load.drain()
        assert relay.running
    assert check(url, outbox_kafka.consume(topic)) == 0


def test_a_state_topic_that_lost_its_markers_stops_the_lanes(
    outbox_postgres, outbox_kafka, outbox_relay, back_soon, order
):
    url, (kind, topic), exactly_once = outbox_postgres.url, order, back_soon
    state = f"{exactly_once['name']}.relay.state"
    with Load(url, kind) as load:
        relay = outbox_relay(**exactly_once)
        wait_until(lambda: all_lanes_have_settled(url), what="a batch of every lane")
        relay.kill()
        # One batch is left committed and not settled: of a turn before it nothing may be left to settle.
        relay = outbox_relay(env=failing("txn.committed=kill@10"), **exactly_once)
        assert relay.wait(40) == -signal.SIGKILL
        load.more(100)
    admin = AdminClient({"bootstrap.servers": outbox_kafka.bootstrap_servers})
    admin.delete_topics([state])[state].result()
    left = backlog(url)
    # It tries again and again to take over its four lanes, one or more at a time.
    relay = outbox_relay(env=failing("takeover.settled=kill@12"), **exactly_once)
    assert relay.wait(60) == -signal.SIGKILL
    await_stops(relay, 4)
    end_leases(url)
    # Not before: what a killed relay had committed can stand behind a transaction that another lane left open.
    before = len(outbox_kafka.consume(topic))
    relay = outbox_relay(**exactly_once)
    relay.wait_for_log("outbox relay reconcile")
    await_stops(relay, 4)
    assert backlog(url) == left
    assert len(outbox_kafka.consume(topic)) == before
    # A person looks, then repairs; the relay is running all the while.
    status, states = reconcile(url, outbox_kafka, exactly_once)
    assert status == 1
    assert backlog(url) == left
    assert sum(state["found"] for state in states["lanes"]) > 0
    status, repaired = reconcile(url, outbox_kafka, exactly_once, "--apply", "--reason", "a test took the topic")
    assert status == 0
    assert {state["lane"] for state in repaired["repaired"]} == {0, 1, 2, 3}
    load.drain()
    assert check(url, outbox_kafka.consume(topic)) == 0
    assert reconcile(url, outbox_kafka, exactly_once)[0] == 0
    with psycopg.connect(url) as connection:
        audit = connection.execute("SELECT why FROM outbox.audit WHERE what = 'reconcile'").fetchall()
    assert audit == [("a test took the topic",)] * 4


def reconcile(url: str, kafka, settings, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run `outbox relay reconcile`; give its exit status and what it said."""
    given = {"name": settings["name"], "kafka__bootstrap_servers": kafka.bootstrap_servers}
    done = run_outbox(url, given, "relay", "reconcile", "--json", *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def all_lanes_have_settled(url: str) -> bool:
    return look_up(url, "SELECT bool_and(coalesce(last_batch, 0) > 2) FROM outbox.lanes")[0][0]


def test_a_state_topic_with_the_wrong_settings_is_refused(outbox_postgres, outbox_kafka, outbox_relay, exactly_once):
    outbox_kafka.create_topic(f"{exactly_once['name']}.relay.state", 4, {"cleanup.policy": "compact,delete"})
    relay = outbox_relay(**exactly_once)
    assert relay.wait() == 2
    assert "cleanup.policy=compact,delete" in relay.log()
    assert "Traceback" not in relay.log()


def test_two_outboxes_that_share_a_name_are_kept_apart(
    outbox_postgres, private_postgres, outbox_kafka, outbox_relay, back_soon, order
):
    """The second finds the first one's markers: it says so, publishes nothing, and does not fence the first."""
    url, (kind, topic) = outbox_postgres.url, order
    others = outbox_kafka.name("Other")
    other_topic = outbox_kafka.create_topic(f"{others.lower()}-events")
    settings = back_soon | {"relay__lease_seconds": 20}
    with Load(url, kind) as load:
        first = outbox_relay(**settings)
        wait_until(lambda: all_lanes_have_settled(url), what="a batch of every lane")
        other = private_postgres.database(private_postgres({"fsync": "off"}))
        write(other.url, [Event(others, f"k{number}", "Said", {}) for number in range(40)])
        elsewhere = settings | {"database_url": other.url, "log_format": "json"}
        second = outbox_relay(**elsewhere)
        await_stops(second, 4)
        assert "this OUTBOX_NAME, choose a new one" in second.log()
        load.more(100)
        load.drain()
        assert (first.running, second.running) == (True, True)
        assert "another relay has taken a lane over" not in first.log()
    assert backlog(other.url) == 40
    assert outbox_kafka.consume(other_topic) == []
    assert check(url, outbox_kafka.consume(topic)) == 0
