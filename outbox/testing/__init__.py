"""For the tests of services that write events: real servers, pytest fixtures, and a look at what was written.

    def test_placing_an_order(outbox_postgres):
        with Session(outbox_postgres.engine()) as session:
            place_order(session, …)
            assert [event.event_type for event in recorded_events(session)] == ["OrderPlaced"]

The fixtures (``outbox_postgres``, ``outbox_kafka``, ``outbox_relay`` …) are in ``plugin`` and come by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

    from outbox.event import Event

__all__ = ["recorded_events", "recorded_events_async"]


def recorded_events(target: Session | Connection | psycopg.Connection[Any], *, schema: str = "outbox") -> list[Event]:
    """Return the events that the open transaction of ``target`` has written so far, in the order of their ids.

    target   the session or connection that the code under test was given; a session is flushed first. No commit is
             needed, and after a commit or rollback there is nothing more to see.
    schema   where the outbox's tables are.

    Raises TargetError for a connection in autocommit mode without a transaction, or something else altogether.
    """
    from outbox.testing._recorded import read

    return read(target, schema)


async def recorded_events_async(
    target: AsyncSession | AsyncConnection | psycopg.AsyncConnection[Any], *, schema: str = "outbox"
) -> list[Event]:
    """The same for asynchronous sessions and connections."""
    from outbox.testing._recorded import read_async

    return await read_async(target, schema)
