"""Write events in the caller's transaction.

    outbox = Outbox()
    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.add(session, Event("Order", order.id, "OrderPlaced", {"total": order.total}))

Nothing here commits, rolls back or opens a transaction: events are committed or rolled back with the business rows.
Events are checked before anything is sent, so a rejected one leaves the transaction usable.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from outbox import _trace
from outbox._sending import run, run_async
from outbox._writing import DefaultHeaders, Writer
from outbox.event import DEFAULT_SCHEMA, MAX_EVENT_BYTES, Event
from outbox.serializing import Serializer

if TYPE_CHECKING:
    from outbox._targets import AsyncTarget, SyncTarget


class _Configured:
    """The constructor of both outboxes."""

    def __init__(
        self,
        *,
        schema: str = DEFAULT_SCHEMA,
        max_event_bytes: int = MAX_EVENT_BYTES,
        serializer: Serializer | None = None,
        routed: Collection[str] = (),
        unique_keys: bool = False,
        headers: DefaultHeaders = None,
    ) -> None:
        """Check and store the arguments, which ``Outbox`` describes.

        Raises ConfigurationError for a limit above 1,000,000 (that of the table's CHECK), and for headers that no event
        may have.
        """
        self._writer = Writer(schema, max_event_bytes, serializer, routed, unique_keys, headers)


class Outbox(_Configured):
    """Writes events through synchronous sessions and connections. Stateless: one per process is enough.

    schema           of the outbox's tables.
    max_event_bytes  for payload, key and headers together; at most the table's limit of 1,000,000.
    serializer       turns payloads into bytes before they are written, such as ``outbox.registry.RegistrySerializer``.
                     AsyncOutbox calls it in a thread, because it may send requests.
    routed           aggregate types to which the relay's routes assign a topic. All others may contain only characters
                     that a topic's name can have.
    unique_keys      an event whose ``idempotency_key`` was added before, for the same aggregate type, is the same one:
                     it is not written again, and ``add`` returns the id of the first. The database knows a key for as
                     long as OUTBOX_RELAY__IDEMPOTENCY_DAYS says. A call waits for other transactions that have added
                     the same key. Events without a key cost nothing more.
    headers          of all events, such as the tenant: a mapping, or a function without arguments that each ``add`` and
                     ``add_many`` calls once. An event's own headers take precedence.
    """

    def add(
        self,
        target: SyncTarget,
        event: Event,
        *,
        lock_key: bool = False,
        not_before: dt.datetime | None = None,
        delay: dt.timedelta | None = None,
    ) -> UUID:
        """Write one event in the target's transaction, and return its event_id, given or new.

        With one statement; with ``unique_keys`` with more if the key is known.

        not_before schedules the event: it waits in a table of its own until this time, by the database's clock. Then a
        relay writes it like a new event of that moment, behind all earlier ones; until then it delays no other event.
        Scheduled events of one key are published in the order in which they become due. ``delay`` says the same as the
        time from now, by the database's clock. See ``cancel`` and ``reschedule``.

        lock_key takes a transaction-level advisory lock on (aggregate_type, aggregate_id) first. Writers of one
        aggregate are then serialized, and its events are published in commit order. Not needed if they lock or update
        the aggregate's row anyway. At most 1,000 keys in one call.

        Raises EventError and its subclasses for an event that can't be written, TargetError for a target without a
        transaction: then the transaction stays usable. Raises SchemaError, from the driver's error, if the outbox's
        tables are missing or of another version. The driver's other errors are passed through; where a command helps, a
        note names it. With ``unique_keys`` raises IdempotencyKeyReused for a key that another event has.
        """
        return self.add_many(target, (event,), lock_key=lock_key, not_before=not_before, delay=delay)[0]

    def add_many(
        self,
        target: SyncTarget,
        events: Iterable[Event],
        *,
        lock_key: bool = False,
        not_before: dt.datetime | None = None,
        delay: dt.timedelta | None = None,
    ) -> list[UUID]:
        """Write events in the list's order, and return their ids. See ``add``.

        In one round trip; with ``unique_keys`` in more if a key is known. Sends nothing for an empty list.
        """
        events = tuple(events)
        send = self._writer.sender.to(target)
        due, ids = self._writer.prepare(events, not_before, delay)
        if not events:
            return []
        with _trace.writing(events) as trace:
            ready = self._writer.serialize_payloads(events, ids)
            written = run(self._writer.steps(ready, ids, trace.headers, due, lock_key=lock_key), send)
            trace.name_event(written)
        return written

    def cancel(self, target: SyncTarget, event_id: UUID) -> bool:
        """Delete an event that was written with ``not_before``, in the target's transaction.

        Returns False if it is no longer scheduled, or never was. Waits while a relay moves the event or another
        transaction cancels it. The role needs the rights of a `canceller` (`outbox db roles`). Raises TargetError for a
        target without a transaction, EventError for an id that is not a UUID.
        """
        return run(self._writer.cancel(event_id), self._writer.sender.to(target))

    def reschedule(
        self,
        target: SyncTarget,
        event_id: UUID,
        *,
        not_before: dt.datetime | None = None,
        delay: dt.timedelta | None = None,
    ) -> bool:
        """Change the time of a scheduled event, in the target's transaction. Otherwise as ``cancel``.

        delay counts from now, by the database's clock.
        """
        return run(self._writer.reschedule(event_id, not_before, delay), self._writer.sender.to(target))

    def check(self, target: SyncTarget) -> None:
        """Raise what would keep ``add`` from writing in the target's transaction; for a readiness probe.

        Reads the catalog, and writes nothing: whether the tables have this version's columns, whether the role may
        insert, and whether the transaction may write. Raises SchemaError, TargetError.
        """
        run(self._writer.check(), self._writer.sender.to(target))


class AsyncOutbox(_Configured):
    """Writes events through asynchronous sessions and connections. Otherwise the same as Outbox."""

    async def add(
        self,
        target: AsyncTarget,
        event: Event,
        *,
        lock_key: bool = False,
        not_before: dt.datetime | None = None,
        delay: dt.timedelta | None = None,
    ) -> UUID:
        """Write one event in the target's transaction; see ``Outbox.add``."""
        return (await self.add_many(target, (event,), lock_key=lock_key, not_before=not_before, delay=delay))[0]

    async def add_many(
        self,
        target: AsyncTarget,
        events: Iterable[Event],
        *,
        lock_key: bool = False,
        not_before: dt.datetime | None = None,
        delay: dt.timedelta | None = None,
    ) -> list[UUID]:
        """Write events in the list's order; see ``Outbox.add_many``."""
        events = tuple(events)
        send = self._writer.sender.to_async(target)
        due, ids = self._writer.prepare(events, not_before, delay)
        if not events:
            return []
        with _trace.writing(events) as trace:
            ready: Sequence[Event] = events
            if self._writer.has_serializer:
                ready = await asyncio.to_thread(self._writer.serialize_payloads, events, ids)
            written = await run_async(self._writer.steps(ready, ids, trace.headers, due, lock_key=lock_key), send)
            trace.name_event(written)
        return written

    async def cancel(self, target: AsyncTarget, event_id: UUID) -> bool:
        """Delete an event that was written with ``not_before``; see ``Outbox.cancel``."""
        return await run_async(self._writer.cancel(event_id), self._writer.sender.to_async(target))

    async def reschedule(
        self,
        target: AsyncTarget,
        event_id: UUID,
        *,
        not_before: dt.datetime | None = None,
        delay: dt.timedelta | None = None,
    ) -> bool:
        """Change the time of a scheduled event; see ``Outbox.reschedule``."""
        return await run_async(
            self._writer.reschedule(event_id, not_before, delay), self._writer.sender.to_async(target)
        )

    async def check(self, target: AsyncTarget) -> None:
        """Raise what would keep ``add`` from writing in the target's transaction; see ``Outbox.check``."""
        await run_async(self._writer.check(), self._writer.sender.to_async(target))
