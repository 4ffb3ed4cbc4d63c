"""Message ids: the day in one, and the id made of contents that have none."""

from __future__ import annotations

import datetime as dt
import hashlib
from typing import Final
from uuid import UUID

NO_TIME: Final = dt.date(1970, 1, 1)
"""The day of every id without a time."""
LAST_DAY: Final = (dt.date.max - NO_TIME).days
"""The last day of the year 9999, counted from NO_TIME. Python and most drivers know no later date, and 48 bits of
milliseconds reach to the year 10889: an id of a later day has no time."""
DAY_MILLISECONDS: Final = 86_400_000
_DAYS: Final = (
    "(('x' || pg_catalog.substr(message_id::text, 1, 8) || pg_catalog.substr(message_id::text, 10, 4))"
    f"::bit(48)::bigint / {DAY_MILLISECONDS})"
)
DAY_OF_ID: Final = (
    "CASE WHEN pg_catalog.substr(message_id::text, 15, 1) = '7' "
    "AND pg_catalog.substr(message_id::text, 20, 1) IN ('8', '9', 'a', 'b') "
    f"AND {_DAYS} <= {LAST_DAY} THEN date '1970-01-01' + {_DAYS}::integer ELSE date '1970-01-01' END"
)
"""SQL over ``message_id``: the day of a UUIDv7 (RFC 9562: the first 48 bits are Unix milliseconds)."""


def day(id_: UUID) -> dt.date:
    """Return the day in a UUID of version 7 (RFC 9562: the first 48 bits are Unix milliseconds), else NO_TIME."""
    if id_.int >> 76 & 0xF != 7 or id_.int >> 62 & 0b11 != 0b10:
        return NO_TIME
    days = (id_.int >> 80) // DAY_MILLISECONDS
    return NO_TIME + dt.timedelta(days) if days <= LAST_DAY else NO_TIME


def key_id(source: bytes, kind: bytes, key: bytes) -> str:
    """Return the id of all messages with an idempotency key. Each source and aggregate type has keys of its own."""
    return uuid8(b"\0".join((b"key", source, kind, key)))


def uuid8(content: bytes) -> str:
    """Return a UUID of version 8 (RFC 9562: custom contents) from a SHA-256 of the content."""
    digits = hashlib.sha256(content).hexdigest()
    return f"{digits[:8]}-{digits[8:12]}-8{digits[12:15]}-8{digits[15:18]}-{digits[18:30]}"
