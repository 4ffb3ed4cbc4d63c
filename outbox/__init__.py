"""A transactional outbox: business rows and events in one Postgres transaction.

Import what you need from here; everything else in this package may change between minor versions.
"""

from outbox.errors import (
    ConfigurationError,
    EventError,
    EventTooLarge,
    OutboxError,
    PayloadError,
    SchemaError,
    TargetError,
)
from outbox.event import Event
from outbox.tables import OutboxTables, outbox_tables
from outbox.writer import AsyncOutbox, Outbox

__version__ = "0.1.0"

__all__ = [
    "AsyncOutbox",
    "ConfigurationError",
    "Event",
    "EventError",
    "EventTooLarge",
    "Outbox",
    "OutboxError",
    "OutboxTables",
    "PayloadError",
    "SchemaError",
    "TargetError",
    "outbox_tables",
]
