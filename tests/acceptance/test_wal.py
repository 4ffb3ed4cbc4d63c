"""The WAL as the source: real relays, Postgres, Kafka; a read_committed reader and the business rows judge."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import psycopg
import pytest
from support import Load, backlog, check, owners, wait_until

from relay.failpoints import VARIABLE

WAL_STEPS = [
    "stream.started",
    "batch.fetched",
    "batch.half_sent",
    "batch.acknowledged",
    "batch.settling",
    "batch.settled",
    "stream.noted",
    "stream.told",
]
WAL_EXACTLY_ONCE_STEPS = [
    "takeover.fenced",
    "takeover.settled",
    "stream.started",
    "batch.fetched",
    "txn.begun",
    "txn.marker_sent",
    "txn.committed",
    "batch.settling",
    "batch.settled",
    "stream.noted",
    "stream.told",
]

Outbox = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def wal(outbox_kafka) -> dict[str, Any]:
    """Settings of a relay that reads the WAL, of an outbox that no other test has."""
    name = outbox_kafka.name("outbox")
    return {
        "source": "wal",
        "name": name,
        "wal__slot": name.lower().replace("-", "_").replace(".", "_"),
        "relay__lease_seconds": 1.0,
        "relay__batch_size": 50,
    }


@pytest.fixture
def order(outbox_kafka):
    """An aggregate type, and its topic of three partitions."""
    kind = outbox_kafka.name("Order")
    return kind, outbox_kafka.create_topic(f"{kind.lower()}-events", 3)


def run_outbox(url: str, settings: Mapping[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the CLI with a relay's settings."""
    environment = os.environ | {f"OUTBOX_{name.upper()}": str(value) for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "relay.cli", *arguments],
        env=environment | {"OUTBOX_DATABASE_URL": url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def done(url: str, settings: Mapping[str, Any], *arguments: str) -> str:
    result = run_outbox(url, settings, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def to_wal(url: str, settings: Mapping[str, Any]) -> None:
    done(url, settings, "cdc", "setup")
    done(url, settings, "relay", "switch", "wal")


def streaming(url: str) -> bool:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute("SELECT bool_and(streaming) FROM outbox.lanes").fetchone()[0]


def drained(load: Load, url: str, seconds: float = 60.0) -> None:
    load.stop()
    wait_until(lambda: backlog(url) == 0, seconds, "the outbox to drain")


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_events_stream_in_order(outbox_postgres, outbox_kafka, outbox_relay, wal, order, delivery):
    """What was there before the slot, and what comes after: each once, in order."""
    url, (kind, topic) = outbox_postgres.url, order
    # A long lease: at-least-once repeats nothing as long as nothing is late.
    settings = wal | {"delivery": delivery, "relay__lease_seconds": 20}
    with Load(url, kind) as load:
        wait_until(lambda: load.committed() > 200, what="some load before the slot is there")
        to_wal(url, settings)
        relay = outbox_relay(**settings)
        wait_until(lambda: streaming(url), 30, "the lanes to stream")
        goal = load.committed() + 500
        wait_until(lambda: load.committed() > goal, what="load while streaming")
        drained(load, url)
        relay.terminate()
        assert relay.wait() == 0
    assert check(url, outbox_kafka.consume(topic)) == 0
    assert '"problem":null' in done(url, settings, "cdc", "status", "--json")


@pytest.mark.parametrize(
    ("delivery", "points"), [("at-least-once", WAL_STEPS), ("exactly-once", WAL_EXACTLY_ONCE_STEPS)], ids=str
)
def test_killed_at_every_step(outbox_postgres, outbox_kafka, outbox_relay, wal, order, delivery, points):
    """Each relay takes over from one that was killed, and is killed at the next step itself."""
    url, (kind, topic) = outbox_postgres.url, order
    settings = wal | {"delivery": delivery}
    to_wal(url, settings)
    with Load(url, kind) as load:
        for point in points:
            nth = 1 if point.startswith(("takeover", "stream")) else 5
            relay = outbox_relay(env={VARIABLE: f"{point}=kill@{nth}"}, **settings)
            assert relay.wait(40) == -signal.SIGKILL, point
        outbox_relay(**settings)
        drained(load, url)
    repeats = check(url, outbox_kafka.consume(topic))
    if delivery == "exactly-once":
        assert repeats == 0
    else:
        assert repeats <= len(points) * 4 * 50
    assert owners(url)
