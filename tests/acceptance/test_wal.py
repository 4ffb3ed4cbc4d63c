"""The WAL as the source: real relays, Postgres, Kafka; a read_committed reader and the business rows judge."""

from __future__ import annotations

import signal

import pytest
from support import Load, check, owners, wait_until
from wal_support import done, drained, order, streaming, to_wal, wal

from relay.failpoints import VARIABLE

__all__ = ["order", "wal"]

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
