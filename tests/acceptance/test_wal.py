"""The WAL as the source: real relays, Postgres, Kafka; a read_committed reader and the business rows judge."""

from __future__ import annotations

import pytest
from support import Load, check, order, wait_until
from wal_support import done, streaming, to_wal, wal

__all__ = ["order", "wal"]


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
        load.drain()
        relay.terminate()
        assert relay.wait() == 0
    assert check(url, outbox_kafka.consume(topic)) == 0
    assert '"problem":null' in done(url, settings, "cdc", "status", "--json")
