"""For tests of services that write events: real servers, pytest fixtures, and the events of an open transaction.

    def test_placing_an_order(outbox_postgres):
        with Session(outbox_postgres.engine()) as session:
            place_order(session, …)
            assert [event.event_type for event in recorded_events(session)] == ["OrderPlaced"]

The fixtures (``outbox_postgres``, ``outbox_kafka``, ``outbox_relay`` …) are in ``plugin``, which pytest loads itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

    from outbox._targets import AsyncpgConnection
    from outbox.event import Event

__all__ = ["recorded_events", "recorded_events_async"]


def recorded_events(target: Session | Connection | psycopg.Connection[Any], *, schema: str = "outbox") -> list[Event]:
    """Return the events that the open transaction of ``target`` has written so far, in the order of their ids.

    target   the session or connection that the code under test was given; a session is flushed first. Empty after a
             commit or rollback.
    schema   of the outbox's tables.

    Raises TargetError for a connection in autocommit mode without a transaction, and for any other object.
    """
    from outbox.testing._recorded import read

    return read(target, schema)


async def recorded_events_async(
    target: AsyncSession | AsyncConnection | psycopg.AsyncConnection[Any] | AsyncpgConnection, *, schema: str = "outbox"
) -> list[Event]:
    """Return the same as ``recorded_events``, for asynchronous sessions and connections."""
    from outbox.testing._recorded import read_async

    return await read_async(target, schema)
