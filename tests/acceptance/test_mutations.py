"""The guards of the exactly-once protocol, each taken out once: the checker must see just that, on real services.

What a mutation breaks is an invariant of docs/explanation/protocol.tla. For every mutation the same scenario is run
with the relay as it is too, here or where a comment says, and passes: it is the guard that makes the difference.
A relay that goes on with a lane that another one has: tests/integration/relay/core/test_protocol_mutations.py.
What is settled before it is acknowledged, and a marker that comes first: test_protocol_traces.py shows that the
specification refuses these orders; relays as they are, killed at every step, lose and repeat nothing.
"""

from __future__ import annotations

import signal
from collections import Counter

import psycopg
import pytest
from invariants import Invariant
from restored import stop_flushing
from support import (
    MUTANT,
    Load,
    Unsound,
    backlog,
    check,
    drained,
    ends,
    look_up,
    owners,
    wait_until,
)
from wal_support import done

from outbox import Event, Outbox
from relay.failpoints import VARIABLE


@pytest.fixture
def scenario(outbox_kafka):
    """A topic, and the settings of relays of an outbox that no other test has."""
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 2)
    settings = {
        "delivery": "exactly-once",
        "name": outbox_kafka.name("outbox"),
        "relay__lease_seconds": 1.0,
        "relay__batch_size": 50,
    }
    return kind, topic, settings


def verdict(url: str, messages, twice: Invariant = Invariant.NO_DOUBLE) -> set[Invariant]:
    """Return which invariants are broken; ``twice`` if all is there and in order, and some of it repeated."""
    try:
        repeats = check(url, messages)
    except Unsound as unsound:
        return set(unsound.broken)
    return {twice} if repeats else set()


@pytest.mark.parametrize(
    ("mutation", "expected"), [("none", set()), ("let_go_unsettled", {Invariant.ONLY_WHAT_WAS_IN_FLIGHT_TWICE})]
)
def test_a_relay_that_stops(outbox_postgres, outbox_kafka, outbox_relay, scenario, mutation, expected):
    """At least once, and still nothing twice where nobody was killed."""
    url, (kind, topic, settings) = outbox_postgres.url, scenario
    settings = settings | {"delivery": "at-least-once", "relay__lease_seconds": 15.0}
    with Load(url, kind, pause=0) as load:
        load.more(400, 60)
    written = backlog(url)
    # Many turns that take a while, so that it is told to stop between two. One is published and not settled then.
    slow = settings | {"relay__batch_size": 5}
    first = outbox_relay(env={VARIABLE: "batch.sent=delay:0.3@1+"}, program=(MUTANT, mutation), **slow)
    wait_until(lambda: backlog(url) < written, 60, "some of it to be published")
    ends(first)
    assert owners(url) == {}
    assert look_up(url, "SELECT count(*) FROM outbox.relays") == [(0,)]
    assert backlog(url) > 0
    outbox_relay(**settings)
    drained(url)
    assert verdict(url, outbox_kafka.consume(topic), Invariant.ONLY_WHAT_WAS_IN_FLIGHT_TWICE) == expected


@pytest.mark.parametrize(("mutation", "expected"), [("none", set()), ("marker_of_all_claims", {Invariant.NO_LOSS})])
def test_a_kill_after_a_turn_that_left_rows_out(
    outbox_postgres, outbox_kafka, outbox_relay, scenario, mutation, expected
):
    """It is committed and not settled. The next relay deletes what the markers name, and the rest was not published."""
    url, (kind, topic, settings) = outbox_postgres.url, scenario
    missing = outbox_kafka.name("Missing")
    count = 60
    with psycopg.connect(url) as connection:
        # Of both kinds in every lane, one after the other.
        events = [Event(each, f"k{n}", "T", {"n": n}) for n in range(count) for each in (kind, missing)]
        Outbox().add_many(connection, events)
    settings = settings | {"create_topics": False, "state_replication": 1}
    victim = outbox_relay(env={VARIABLE: "txn.committed=kill"}, program=(MUTANT, mutation), **settings)
    assert victim.wait(40) == -signal.SIGKILL
    assert backlog(url) == 2 * count
    there = len(outbox_kafka.consume(topic))
    assert 0 < there <= count
    outbox_relay(**settings)
    left = "SELECT count(*) FROM outbox.events WHERE aggregate_type = %s"
    wait_until(lambda: look_up(url, left, kind) == [(0,)], 60, "what has a topic to be published")
    # The topic comes, and with it what waited for it.
    late = outbox_kafka.create_topic(f"{missing.lower()}-events", 2)
    drained(url)
    found = [Counter(message.key().decode() for message in outbox_kafka.consume(each)) for each in (topic, late)]
    once = Counter(f"k{n}" for n in range(count))
    assert found[0] == once
    assert (set() if found[1] == once else {Invariant.NO_LOSS}) == expected
    assert found[1] <= once


def unflushed(url: str) -> int:
    """Bytes of WAL that a crash would lose."""
    with psycopg.connect(url, autocommit=True) as connection:
        query = "SELECT (pg_current_wal_insert_lsn() - pg_current_wal_flush_lsn())::bigint"
        return connection.execute(query).fetchone()[0]


@pytest.mark.parametrize(
    ("mutation", "expected"), [("none", set()), ("no_flush_barrier", {Invariant.NOTHING_LEFT_BEHIND})]
)
def test_a_database_that_loses_commits(private_postgres, outbox_kafka, outbox_relay, scenario, mutation, expected):
    kind, topic, settings = scenario
    server = private_postgres({"wal_writer_delay": "10s", "synchronous_commit": "off"})
    database = private_postgres.database(server)
    stop_flushing(database.url)
    with Load(database.url, kind) as load:
        relay = outbox_relay(database_url=database.url, program=(MUTANT, mutation), **settings)
        relay.wait_for_log("lanes acquired")
        load.more(200)

        def to_be_lost() -> bool:
            """Where nobody flushes what is published, much of it is not flushed now."""
            return backlog(database.url) < 50 and (mutation == "none" or unflushed(database.url) > 100_000)

        wait_until(to_be_lost, 60, "the relay to keep up")
        server.kill()
        relay.kill()
        server.start()
        load.stop()
        # A lane that stopped because Postgres went back must not hide what was published before.
        given = {"name": settings["name"], "kafka__bootstrap_servers": outbox_kafka.bootstrap_servers}
        done(database.url, given, "relay", "reconcile", "--apply", "--reason", "a crash")
        outbox_relay(database_url=database.url, **settings)
        drained(database.url)
    # What is written after the crash takes the numbers of what was lost once more.
    assert verdict(database.url, outbox_kafka.consume(topic)) - {Invariant.ORDER_OF_A_KEY} == expected
