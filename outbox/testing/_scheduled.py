"""What ``recorded_events`` returns for an event that waits for its time."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

from outbox.event import Event


@dataclass(frozen=True, slots=True)
class ScheduledEvent(Event):
    """An event that was written with ``not_before``."""

    not_before: dt.datetime = field(kw_only=True)
