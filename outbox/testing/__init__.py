"""For tests of services that write events: real servers, pytest fixtures, and the events of an open transaction.

    def test_placing_an_order(outbox_postgres):
        with Session(outbox_postgres.engine()) as session:
            place_order(session, …)
            assert [event.event_type for event in recorded_events(session)] == ["OrderPlaced"]

The fixtures (``outbox_postgres``, ``outbox_kafka``, ``outbox_relay`` …) are in ``plugin``, which pytest loads itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.testing._scheduled import ScheduledEvent

if TYPE_CHECKING:
    from outbox._targets import AsyncTarget, SyncTarget
    from outbox.event import Event

__all__ = ["ScheduledEvent", "recorded_events", "recorded_events_async"]


def recorded_events(target: SyncTarget, *, schema: str = "outbox") -> list[Event]:
    """Return the events that the open transaction of ``target`` has written so far, in the order of their ids.

    The events that it has scheduled follow, as ``ScheduledEvent``, in the order in which they become due. After a
    commit or a rollback there are none.

    target   the session or connection that the code under test gave to ``Outbox.add``, or another one of the same
             transaction; a session is flushed first.
    schema   of the outbox's tables.

    Raises TargetError for a connection in autocommit mode without a transaction, and for a target that ``add`` refuses.
    """
    from outbox.testing._recorded import read

    return read(target, schema)


async def recorded_events_async(target: AsyncTarget, *, schema: str = "outbox") -> list[Event]:
    """Return the same as ``recorded_events``, for a target of ``AsyncOutbox.add``."""
    from outbox.testing._recorded import read_async

    return await read_async(target, schema)
