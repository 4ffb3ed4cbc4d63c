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


def day(id_: UUID) -> dt.date:
    """Return the day in a UUID of version 7 (RFC 9562: the first 48 bits are Unix milliseconds), else NO_TIME."""
    if id_.int >> 76 & 0xF != 7 or id_.int >> 62 & 0b11 != 0b10:
        return NO_TIME
    days = (id_.int >> 80) // DAY_MILLISECONDS
    return NO_TIME + dt.timedelta(days) if days <= LAST_DAY else NO_TIME


def uuid8(content: bytes) -> str:
    """Return a UUID of version 8 (RFC 9562: custom contents) from a SHA-256 of the content."""
    digits = hashlib.sha256(content).hexdigest()
    return f"{digits[:8]}-{digits[8:12]}-8{digits[12:15]}-8{digits[15:18]}-{digits[18:30]}"
