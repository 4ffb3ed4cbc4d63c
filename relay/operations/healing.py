"""The repair of a lost slot by the relay itself.

Every event is a row of the table, so nothing is lost with a slot: each lane reads the table once, then the new slot.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import structlog

from outbox.errors import OperationRefused
from relay.database import Connector, begin_session, unavailable_on_error
from relay.operations.wal_setup import Cdc
from relay.wal.slot import SlotNames

log = structlog.get_logger("relay")


class SlotHealing:
    """Replaces the slot if it has a gap; see ``Cdc.heal``. ``on_repair`` is called after each repair."""

    def __init__(self, connect: Connector, names: SlotNames, instance: str, on_repair: Callable[[], None]) -> None:
        self._connect = connect
        self._names = names
        self._by = f"the relay {instance} itself"
        self._on_repair = on_repair
        self._refused: str | None = None

    def look(self) -> None:
        """Repair the slot if that is needed and safe; log why it is not. Raises Unavailable or SchemaError."""
        with self._connect() as connection:
            # The second look, under the lock, must see what another relay has repaired meanwhile.
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            with unavailable_on_error("looking at the slot"):
                begin_session(connection)
            try:
                fault = Cdc(connection, self._names).heal(self._by)
            except OperationRefused as error:
                self._refuse(str(error))
                return
        self._refused = None
        if fault is not None:
            self._on_repair()
            log.warning(
                "the relay has replaced the slot: each lane reads the table once, then the new slot",
                slot=self._names.slot,
                error=fault,
            )

    def _refuse(self, why: str) -> None:
        """Log why the slot is left to an operator, once for each reason."""
        if why == self._refused:
            return
        self._refused = why
        log.error("the relay does not repair the slot by itself", slot=self._names.slot, error=why)
