"""Write events in the open transaction of Django's connection."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypedDict
from uuid import UUID

from django.db import connections

from outbox.django.conf import options
from outbox.errors import TargetError
from outbox.event import Event
from outbox.writer import Outbox

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of type checkers


class _Adding(TypedDict, total=False):
    """The options of ``Outbox.add``."""

    lock_key: bool
    not_before: dt.datetime | None
    delay: dt.timedelta | None


class DjangoOutbox:
    """``outbox.Outbox`` for a database of Django's: its methods, without the target.

    They belong to the innermost block of transaction.atomic(), and raise as those of ``Outbox`` do. Outside of a block
    they raise TargetError. Errors of the database are Django's: django.db.IntegrityError, for example.

    schema     of the outbox's tables, and ``database``, the alias: by default those of the setting OUTBOX.
    given      of ``outbox.Outbox``, such as ``serializer`` and ``headers``.
    """

    def __init__(self, *, schema: str | None = None, database: str | None = None, **given: Any) -> None:
        self._schema = schema
        self._database = database
        self._given = given

    def add(self, event: Event, **given: Unpack[_Adding]) -> UUID:
        """Write one event; see ``Outbox.add``."""
        with self._transaction() as target:
            return self._outbox.add(target, event, **given)

    def add_many(self, events: Iterable[Event], **given: Unpack[_Adding]) -> list[UUID]:
        """Write events in the list's order; see ``Outbox.add_many``."""
        with self._transaction() as target:
            return self._outbox.add_many(target, events, **given)

    def cancel(self, event_id: UUID) -> bool:
        """Delete a scheduled event; see ``Outbox.cancel``."""
        with self._transaction() as target:
            return self._outbox.cancel(target, event_id)

    def reschedule(
        self, event_id: UUID, *, not_before: dt.datetime | None = None, delay: dt.timedelta | None = None
    ) -> bool:
        """Change the time of a scheduled event; see ``Outbox.reschedule``."""
        with self._transaction() as target:
            return self._outbox.reschedule(target, event_id, not_before=not_before, delay=delay)

    def check(self) -> None:
        """Raise what would keep ``add`` from writing; see ``Outbox.check``."""
        with self._transaction() as target:
            self._outbox.check(target)

    @cached_property
    def _outbox(self) -> Outbox:
        # Not before the first call: this module is imported before the settings are complete.
        return Outbox(schema=self._schema or options().schema, **self._given)

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Yield the driver's connection."""
        alias = self._database or options().database
        connection = connections[alias]
        # Opening a cursor connects, and refuses what Django refuses: another thread's connection, a test's other alias.
        with connection.cursor():
            if connection.get_autocommit():
                raise TargetError(
                    f"no transaction is open on the database {alias!r}, so the event would be committed apart from the "
                    f"business rows: write it inside transaction.atomic(using={alias!r})"
                )
            # After an error, Django rolls the block back even if the code goes on.
            connection.validate_no_broken_transaction()
            with connection.wrap_database_errors:
                yield connection.connection


outbox: Final = DjangoOutbox()
"""The project's outbox."""
