"""For tests of services that write events: real servers, pytest fixtures, and the events that were written.

    def test_placing_an_order(outbox_postgres):
        with Session(outbox_postgres.engine()) as session:
            place_order(session, …)
            assert [event.event_type for event in recorded_events(session)] == ["OrderPlaced"]

The fixtures (``outbox_postgres``, ``outbox_kafka``, ``outbox_relay`` …) are in ``plugin``, which pytest loads itself.
"""

from __future__ import annotations

from outbox.testing._recorded import (
    ScheduledEvent,
    committed_events,
    committed_events_async,
    recorded_events,
    recorded_events_async,
)

__all__ = ["ScheduledEvent", "committed_events", "committed_events_async", "recorded_events", "recorded_events_async"]
