"""Durations, sizes and times as text and from it, for commands and the operations page."""

from __future__ import annotations

import datetime as dt


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


def as_utc(time: dt.datetime | None) -> dt.datetime | None:
    """Return a time that was given to a command; UTC unless it has a zone."""
    return time.replace(tzinfo=dt.UTC) if time is not None and time.tzinfo is None else time
