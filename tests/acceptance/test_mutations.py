"""The four guards of the exactly-once protocol, each taken out once: the checker must see it, on real services.

For every mutation the same scenario is first run with the relay as it is, and passes: it is the guard that makes the
difference.
"""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import psycopg
import pytest
from support import Load, backlog, caught_up, check, drained, owners, wait_until

from relay.failpoints import VARIABLE

MUTANT = str(Path(__file__).parents[1] / "mutant.py")


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


def verdict(url: str, messages) -> str:
    """Say sound, twice (all there and in order, some repeated), or unsound (lost, invented or out of order)."""
    try:
        repeats = check(url, messages)
    except AssertionError:
        return "unsound"
    return "twice" if repeats else "sound"


@pytest.mark.parametrize(
    ("mutation", "point", "expected"),
    [
        ("none", "batch.sent=kill@5", "sound"),
        ("settle_before_ack", "batch.sent=kill@5", "unsound"),
        ("none", "txn.begun=kill@5", "sound"),
        ("marker_first", "txn.begun=kill@5", "unsound"),
    ],
)
def test_a_kill_between_the_steps(outbox_postgres, outbox_kafka, outbox_relay, scenario, mutation, point, expected):
    url, (kind, topic, settings) = outbox_postgres.url, scenario
    with Load(url, kind) as load:
        victim = outbox_relay(env={VARIABLE: point}, program=(MUTANT, mutation), **settings)
        assert victim.wait(40) == -signal.SIGKILL
        successor = outbox_relay(**settings)
        load.stop()
        # Where a guard notices by itself that rows are missing, its lane stops for good.
        wait_until(lambda: backlog(url) == 0 or "lane stopped" in successor.log(), 60, "the outbox to drain")
    assert verdict(url, outbox_kafka.consume(topic)) == expected


@pytest.mark.parametrize(("mutation", "expected"), [("none", "sound"), ("no_epoch_recheck", "caught")])
def test_a_sleeper_that_wakes_with_a_batch_in_hand(
    outbox_postgres, outbox_kafka, outbox_relay, scenario, mutation, expected
):
    url, (kind, topic, settings) = outbox_postgres.url, scenario
    # Time enough for what the sleeper sends when it wakes.
    settings = settings | {"relay__lease_seconds": 4.0}
    with Load(url, kind) as load:
        sleeper = outbox_relay(env={VARIABLE: "batch.fetched=pause@8"}, program=(MUTANT, mutation), **settings)
        wait_until(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED, what="the relay to stop")
        other = outbox_relay(relay__instance="other", **settings)
        wait_until(lambda: owners(url) == {"other": 4}, what="the other relay with all lanes")
        # The other relay must have published what the sleeper has in hand.
        caught_up(url)
        sleeper.resume()
        # What it has in hand it may finish.
        sleeper.terminate()
        sleeper.wait()
        load.stop()
        # What the sleeper has written may also stop the lane of the rightful owner.
        wait_until(lambda: backlog(url) == 0 or "lane stopped" in other.log(), 60, "the outbox to drain")
        assert other.running
    assert (verdict(url, outbox_kafka.consume(topic)) == "sound") is (expected == "sound")


def unflushed(url: str) -> int:
    """Bytes of WAL that a crash would lose."""
    with psycopg.connect(url, autocommit=True) as connection:
        query = "SELECT (pg_current_wal_insert_lsn() - pg_current_wal_flush_lsn())::bigint"
        return connection.execute(query).fetchone()[0]


@pytest.mark.parametrize(("mutation", "expected"), [("none", "sound"), ("no_flush_barrier", "unsound")])
def test_a_database_that_loses_commits(private_postgres, outbox_kafka, outbox_relay, scenario, mutation, expected):
    kind, topic, settings = scenario
    server = private_postgres({"wal_writer_delay": "10s", "synchronous_commit": "off"})
    database = private_postgres.database(server)
    with Load(database.url, kind, pause=0.02) as load:
        relay = outbox_relay(database_url=database.url, program=(MUTANT, mutation), **settings)
        relay.wait_for_log("lane acquired")
        before = load.committed()

        def to_be_lost() -> bool:
            """Where nobody flushes what is published, much of it is not flushed now."""
            keeps_up = load.committed() > before + 200 and backlog(database.url) < 50
            return keeps_up and (mutation == "none" or unflushed(database.url) > 100_000)

        wait_until(to_be_lost, 60, "the relay to keep up")
        server.kill()
        relay.kill()
        server.start()
        load.stop()
        with psycopg.connect(database.url, autocommit=True) as connection:
            # A lane that stopped because Postgres went back must not hide what was published before.
            connection.execute("UPDATE outbox.lanes SET last_batch = NULL")
        outbox_relay(database_url=database.url, **settings)
        drained(database.url)
    assert verdict(database.url, outbox_kafka.consume(topic)) == expected
