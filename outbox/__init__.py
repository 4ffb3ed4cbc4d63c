"""A transactional outbox: business rows and events in one Postgres transaction.

Import what you need from here; everything else in this package may change between minor versions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from outbox.errors import (
    ConfigurationError,
    EventError,
    EventTooLarge,
    IdempotencyKeyReused,
    MissingExtra,
    OutboxError,
    PayloadError,
    SchemaError,
    SchemaMismatch,
    SchemaRefused,
    SchemaRegistryUnavailable,
    TargetError,
)
from outbox.event import Event
from outbox.serializing import Serialized, Serializer

if TYPE_CHECKING:
    from outbox.tables import OutboxTables, outbox_tables
    from outbox.writer import AsyncOutbox, Outbox

__version__ = "0.1.0"

__all__ = [
    "AsyncOutbox",
    "ConfigurationError",
    "Event",
    "EventError",
    "EventTooLarge",
    "IdempotencyKeyReused",
    "MissingExtra",
    "Outbox",
    "OutboxError",
    "OutboxTables",
    "PayloadError",
    "SchemaError",
    "SchemaMismatch",
    "SchemaRefused",
    "SchemaRegistryUnavailable",
    "Serialized",
    "Serializer",
    "TargetError",
    "outbox_tables",
]

# Imported on first use: they import SQLAlchemy and psycopg, and this package's pytest plugin is loaded in every test
# run wherever the package is installed.
_LATER: Final = {
    "AsyncOutbox": "outbox.writer",
    "Outbox": "outbox.writer",
    "OutboxTables": "outbox.tables",
    "outbox_tables": "outbox.tables",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LATER[name]), name)
    globals()[name] = value
    return value
