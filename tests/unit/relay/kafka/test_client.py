"""What a relay says when it starts without Kafka."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

import relay.kafka.client
from outbox.sandbox._process import patience
from relay.config import load
from relay.wiring import build


@pytest.mark.parametrize(
    ("brokers", "why"),
    [
        ("127.0.0.1:1", "127.0.0.1:1/bootstrap: Connect to ipv4#127.0.0.1:1 failed: Connection refused"),
        ("broker.invalid:9092", "Failed to resolve 'broker.invalid:9092'"),
    ],
)
def test_the_address_and_the_reason_are_logged_once_and_at_once(brokers, why, monkeypatch):
    """Also without an event, and without a database: a newcomer's mistake is shown before anything is to be sent."""
    stop, said = threading.Event(), []

    def warning(_text: str, **values: Any) -> None:
        said.append((values, time.monotonic() - began))
        stop.set()

    monkeypatch.setattr(relay.kafka.client.log, "warning", warning)
    supervisor = build(load(database_url="postgresql://127.0.0.1:1/x", kafka={"bootstrap.servers": brokers}))
    began = time.monotonic()
    watchdog = threading.Timer(30 * patience(), stop.set)
    watchdog.start()
    with capture_logs():
        supervisor.run(stop, threading.Event())
    watchdog.cancel()
    [(values, seconds)] = said
    assert (values["brokers"], why in values["error"]) == (brokers, True), values
    # Two, where the machine is not busy; the first turn would need ten, and an event.
    assert seconds < 8 * patience()
