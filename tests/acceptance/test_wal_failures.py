"""Failures, kills and outages with the WAL as the source: real relays, Postgres, Kafka."""

from __future__ import annotations

import signal

import psycopg
import pytest
from acceptance.test_failures import (
    test_a_relay_killed_while_it_records_a_dead_letter_leaves_nothing_half_done,
    test_each_failure_ends_as_its_policy_says_and_the_lane_lives_on,
)
from failing_relays import QUICK, add, dead, event, names, routes
from support import IMPATIENT, Crashes, Load, await_stops, check, drained, look_up, wait_until
from wal_support import streaming, to_wal, used_up

from outbox._app import migrate as db
from relay.failpoints import VARIABLE
from relay.operations.dead_letters import DeadLetters, Selection

# The tests of failures.py's policies, with relays that read the WAL.
__all__ = [
    "test_a_relay_killed_while_it_records_a_dead_letter_leaves_nothing_half_done",
    "test_each_failure_ends_as_its_policy_says_and_the_lane_lives_on",
]

# What the table's relays are killed at in test_failures.py and test_exactly_once.py is not all repeated here.
AT_LEAST_ONCE_STEPS = ["stream.started", "batch.half_sent", "batch.acknowledged", "batch.settled"]
EXACTLY_ONCE_STEPS = ["takeover.settled", "txn.committed", "stream.noted", "stream.confirmed"]
KEEPS_TRYING = {
    "failures__max_attempts": 1000,
    "failures__min_backoff_seconds": 0.05,
    "failures__max_backoff_seconds": 0.1,
}


@pytest.fixture
def delivery(wal):
    """Exactly-once, which polling in test_failures.py has not."""
    return QUICK | wal | {"delivery": "exactly-once", "relay__lease_seconds": 20}


@pytest.fixture
def url(outbox_postgres, wal):
    """An outbox with one lane that is read from the WAL."""
    db.change_lanes(outbox_postgres.url, 1)
    to_wal(outbox_postgres.url, wal)
    look_up(outbox_postgres.url, "DELETE FROM outbox.audit RETURNING 1")
    return outbox_postgres.url


# --- refused events --------------------------------------------------------------------------------------------------


def test_a_missing_topic_holds_up_its_keys_and_then_the_lanes_stream_again(
    outbox_postgres, outbox_kafka, outbox_relay, delivery, order
):
    url, (kind, topic) = outbox_postgres.url, order
    settings = delivery | KEEPS_TRYING | {"create_topics": False}
    late = outbox_kafka.name("Late")
    to_wal(url, settings)
    relay = outbox_relay(**settings)
    with Load(url, kind) as load:
        wait_until(lambda: streaming(url), 30, "the lanes to stream")
        add(url, event(late, "a1"), event(late, "b1"), event(late, "a2"))
        relay.wait_for_log("topic can't be written to")
        wait_until(lambda: not streaming(url), what="a lane to read its table")
        add(url, event(late, "a3"))
        load.more(100)
        assert len(outbox_kafka.consume(topic, load.committed())) > 100
        assert "does not exist" in relay.log()
        # No event is at fault.
        assert look_up(url, "SELECT * FROM outbox.failures") == []
        outbox_kafka.create_topic(f"{late.lower()}-events", 1)
        outbox_kafka.consume(f"{late.lower()}-events", 4)
        wait_until(lambda: streaming(url), 30, "the lanes to stream again")
        add(url, event(late, "a4"))
        load.more(50)
        load.drain()
    assert check(url, outbox_kafka.consume(topic)) == 0
    arrived = names(outbox_kafka.consume(f"{late.lower()}-events"))
    assert [name for name in arrived if name[0] == "a"] == ["a1", "a2", "a3", "a4"]
    assert sorted(arrived) == ["a1", "a2", "a3", "a4", "b1"]
    assert streaming(url)
    assert relay.running


# --- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delivery", "points"),
    [("at-least-once", AT_LEAST_ONCE_STEPS), ("exactly-once", EXACTLY_ONCE_STEPS)],
    ids=["at-least-once", "exactly-once"],
)
def test_relays_killed_at_each_step(outbox_postgres, outbox_kafka, outbox_relay, wal, order, delivery, points):
    """Each relay takes over from one that was killed, and is killed at the next step itself."""
    url, (kind, topic) = outbox_postgres.url, order
    settings = wal | {"delivery": delivery, "wal__heartbeat_seconds": 0.2, "relay__lease_seconds": 20}
    to_wal(url, settings)
    crashes = Crashes(url, kind, settings["relay__batch_size"])
    with Load(url, kind) as load:
        for point in points:
            nth = 1 if point.startswith(("takeover", "stream")) else 5
            relay = outbox_relay(env={VARIABLE: f"{point}=kill@{nth}"}, **settings)
            assert relay.wait(40) == -signal.SIGKILL, point
            crashes.note()
        outbox_relay(**settings)
        load.stop()
        used_up(url, settings)
    messages = outbox_kafka.consume(topic)
    repeats = check(url, messages)
    if delivery == "exactly-once":
        assert repeats == 0
    else:
        # At most a batch of each lane.
        after = dict(zip(points, crashes.repeats(messages), strict=True))
        assert sum(after.values()) == repeats
        assert after["batch.acknowledged"] > 0, after


def test_relays_killed_between_stream_and_table(outbox_postgres, outbox_kafka, outbox_relay, wal, order):
    """Dead letters that are put back send their lanes to the table, and so each time."""
    url, (kind, topic) = outbox_postgres.url, order
    settings = QUICK | wal | {"delivery": "exactly-once", "failures__max_attempts": 1, "wal__heartbeat_seconds": 0.2}
    environment = routes(**{kind: topic}) | {"OUTBOX_FAILURES__ON_FAILURE": "skip"}
    to_wal(url, settings)
    with Load(url, kind) as load, psycopg.connect(url, autocommit=True) as connection:
        desk = DeadLetters(connection, "outbox")
        relay = outbox_relay(env=environment, **settings)
        wait_until(lambda: streaming(url), 30, "the lanes to stream")
        add(url, *(event("Nowhere", f"{key}1") for key in "abcdefgh"))
        wait_until(lambda: len(dead(url)) == 8 and streaming(url), 30, "dead letters")
        relay.kill()
        # The lanes leave the stream together.
        for point in ("stream.left=kill@1", "failure.recorded=kill@2", "stream.entered=kill@2"):
            desk.retry(Selection())
            relay = outbox_relay(env=environment | {VARIABLE: point}, **settings)
            assert relay.wait(40) == -signal.SIGKILL, point
        outbox_relay(env=environment, **settings)
        wait_until(lambda: streaming(url), 30, "the lanes to stream")
        load.stop()
        used_up(url, settings)
    assert check(url, outbox_kafka.consume(topic)) == 0


# --- one lane --------------------------------------------------------------------------------------------------------


def test_a_lane_that_lost_its_state_stops_alone_and_holds_no_wal(
    outbox_postgres, outbox_kafka, outbox_relay, wal, order
):
    """More events than the stream may hold go by; then the lane comes back, and nothing is lost or doubled."""
    url, (kind, topic) = outbox_postgres.url, order
    settings = wal | {"delivery": "exactly-once", "log_format": "json", "relay__max_backoff_seconds": 0.5}
    # Who loses its lease reads its table for a while.
    settings |= {"relay__batch_size": 5, "wal__heartbeat_seconds": 0.2, "relay__lease_seconds": 20}
    crashes = Crashes(url, kind, 5)
    confirmed = "SELECT (confirmed_flush_lsn - '0/0'::pg_lsn)::bigint FROM pg_replication_slots WHERE slot_name = %s"
    to_wal(url, settings)
    with Load(url, kind) as load:
        relay = outbox_relay(**settings)
        wait_until(lambda: streaming(url), 30, "the lanes to stream")
        load.more(100)
        relay.kill()
        crashes.note()
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE outbox.lanes SET last_batch = last_batch + 50 WHERE lane = 2")
        relay = outbox_relay(program=IMPATIENT, **settings)
        await_stops(relay, 1)
        relay.wait_for_log("the stream is read without lanes that can't be taken over", 60)
        load.more(200)
        [(written,)] = look_up(url, "SELECT (pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint")
        load.more(200)
        load.stop()
        wait_until(lambda: look_up(url, "SELECT DISTINCT lane FROM outbox.events") == [(2,)], 60, "the others to go on")
        wait_until(lambda: look_up(url, confirmed, settings["wal__slot"])[0][0] >= written, 60, "the slot to go on")
        assert look_up(url, "SELECT lane FROM outbox.lanes WHERE NOT streaming") == [(2,)]
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE outbox.lanes SET last_batch = last_batch - 50 WHERE lane = 2")
        drained(url)
        wait_until(lambda: streaming(url), 30, "the lane to stream again")
        assert relay.running
    assert check(url, outbox_kafka.consume(topic)) == 0


# --- servers are away, or killed -------------------------------------------------------------------------------------


def test_servers_are_away(private_postgres, mortal_network, mortal_kafka, outbox_relay, wal):
    """The walsender is killed; the broker is away for longer than Postgres waits for a silent stream; Postgres with
    asynchronous writers is killed.
    """
    server = private_postgres({"synchronous_commit": "off", "wal_writer_delay": "2s", "wal_sender_timeout": "3s"})
    url = private_postgres.database(server).url
    (_, proxy), (_, topics) = mortal_network, mortal_kafka
    kind = topics.name("Order")
    topic = topics.create_topic(f"{kind.lower()}-events", 3)
    settings = wal | {
        "delivery": "exactly-once",
        # Who loses its lease ends the stream as well.
        "relay__lease_seconds": 20,
        "kafka__delivery_timeout_ms": 4000,
        "relay__batch_size": 5,
        "relay__max_backoff_seconds": 0.2,
        "kafka__reconnect_backoff_max_ms": 500,
        "wal__heartbeat_seconds": 0.2,
    }
    to_wal(url, settings)
    heard = (
        "SELECT active_pid, extract(epoch FROM reply_time)::float8 "
        "FROM pg_replication_slots JOIN pg_stat_replication ON pid = active_pid WHERE database = current_database() "
        "AND reply_time IS NOT NULL"
    )
    first: dict[int, float] = {}

    def heard_for_long() -> bool:
        """Return whether one walsender has heard from the relay for longer than the server's patience."""
        return any(at > first.setdefault(pid, at) + 4.5 for pid, at in look_up(url, heard))

    with Load(url, kind) as load:
        relay = outbox_relay(database_url=url, bootstrap_servers=proxy.address, **settings)
        wait_until(lambda: streaming(url), 30, "the lanes to stream")
        load.more(80)
        look_up(url, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active_pid IS NOT NULL")
        load.more(80)
        wait_until(lambda: streaming(url) and look_up(url, heard), 30, "the lanes to stream again")
        proxy.stop()
        # Four batches of each lane are held.
        load.more(200)
        relay.wait_for_log("waiting for a server")
        wait_until(heard_for_long, what="feedback for longer than the server's patience")
        assert look_up(url, "SELECT count(*) FROM outbox.failures") == [(0,)]
        proxy.start()
        relay.wait_for_log("publishing again", 60)
        load.more(80)
        server.kill()
        server.start()
        load.more(80)
        load.stop()
        used_up(url, settings)
        assert relay.running
    assert check(url, topics.consume(topic, timeout=60)) == 0
