"""Durations, sizes, times and ids as text and from it, for commands and the operations page."""

from __future__ import annotations

import datetime as dt
from typing import Final, overload
from uuid import UUID

from outbox.errors import ConfigurationError

_FIRST: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_END: Final = dt.datetime(9999, 1, 1, tzinfo=dt.UTC)
"""Kafka and ids of version 7 count from 1970 on, and Python ends with 9999: commands add hours and days to times."""


def age_text(seconds: float | None) -> str:
    """Return a duration as text, with a decimal below ten seconds."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def bytes_text(count: float | None) -> str:
    if count is None:
        return "?"
    for size, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count:.0f} bytes"


def time_text(time: dt.datetime | None) -> str:
    """Return a time in UTC, with milliseconds."""
    return "-" if time is None else f"{time.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S}.{time.microsecond // 1000:03} UTC"


@overload
def as_utc(option: str, time: dt.datetime) -> dt.datetime: ...
@overload
def as_utc(option: str, time: dt.datetime | None) -> dt.datetime | None: ...
def as_utc(option: str, time: dt.datetime | None) -> dt.datetime | None:
    """Return a time that was given as a command's option; UTC unless it has a zone. Raises ConfigurationError."""
    if time is None:
        return None
    known = time if time.tzinfo is not None else time.replace(tzinfo=dt.UTC)
    if not _FIRST <= known < _END:
        raise ConfigurationError(f"{option} {known}: must be a time of the years 1970 to 9998, in UTC")
    return known


def event_id_of(text: str, hint: str = "") -> UUID:
    """Return an event id. Raises ConfigurationError, which ends with the hint."""
    try:
        return UUID(text)
    except ValueError:
        raise ConfigurationError(f"{text!r} is not an event id (a UUID){hint}") from None
