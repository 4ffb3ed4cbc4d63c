"""Of which windows an audit's readers still have every event: Kafka, the archive and the ledger delete old ones.

What is deleted while the audit reads must not be taken for a loss: each is asked again after the last reading.
"""

from __future__ import annotations

import datetime as dt
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Final

from outbox._clients.counting import counted
from outbox.consumer.kafka_admin import KafkaAdmin
from relay.audit.findings import EXPIRED, WindowAudit
from relay.audit.ledger import LedgerState
from relay.audit.sums import WINDOW_SECONDS, Window, minute_of, minute_start
from relay.audit.topics import Extent, Topics
from relay.audit.transactions import LATE_MINUTES
from relay.kafka.client import unavailable_on_kafka_error
from relay.kafka.offsets import Partition

# How far the clocks of a writer, a relay and a broker may be apart.
_CLOCKS_SECONDS: Final = 60
_DOING: Final = "reading what it deletes of topics"


class Coverage:
    """What can be compared of one audit's ``minutes``. ``own``: the topics to which events of this outbox go."""

    def __init__(self, minutes: range) -> None:
        self._minutes = minutes
        self.own: Collection[str] = ()
        self.archive = range(0)
        """The minutes of which the archive has all events."""
        self.archive_until = math.inf
        """The time, in seconds, after which what was published need not be in the archive."""
        self.low: Mapping[Partition, int] = {}
        """The first offset of each partition, after the last reading."""
        self._ledger_from = minutes.start
        self._expired: dict[str, float] = {}
        # By topic without a retention, the time before which records may have been deleted.
        self._cut: dict[str, float] = {}
        self._kept_since: Callable[[str], float] = lambda _: math.inf

    @property
    def whole(self) -> Collection[str]:
        """The topics of which the archive has all events of all minutes."""
        first, stop = self._minutes.start, self._minutes.stop
        return self.own if self.archive.start <= first and stop <= self.archive.stop else ()

    def archived(self, window: Window) -> bool:
        """Return whether the archive has all events of a window that were published."""
        return window.minute in self.archive and window.topic in self.own

    def counted(self, window: Window) -> bool:
        """Return whether the ledger has all events of a window."""
        return window.minute >= self._ledger_from

    def lost(self, window: Window) -> bool:
        """Return whether Kafka may have deleted records of a window."""
        return window.minute * WINDOW_SECONDS < self._expired.get(window.topic, 0)

    def cut(self, window: Window) -> bool:
        """Return whether records of a topic without a retention were deleted, perhaps some of a window."""
        return window.minute * WINDOW_SECONDS < self._cut.get(window.topic, 0)

    def of_archive(self, found: tuple[int, dt.datetime] | None, *, on: bool) -> None:
        """Note since when the archive is known to have been on, and its last time; ``on``: relays still keep it."""
        if found is not None:
            first, last = found
            self.archive = range(first, self._minutes.stop if on else minute_of(last) + 1)
            # Relays that keep no archive any more leave the old one. Its times are not by their clocks.
            self.archive_until = math.inf if on else last.timestamp() - _CLOCKS_SECONDS

    def of_archive_again(self, first: int | None) -> None:
        self.archive = range(0) if first is None else range(max(first, self.archive.start), self.archive.stop)

    def of_ledger(self, found: LedgerState | str | None, key: bytes) -> None:
        """Note since when a ledger whose hashes have this key is kept."""
        kept = isinstance(found, LedgerState) and found.key == key
        # Events of the minute in which it was turned on may have been written before; and so may those of later ones,
        # as the clocks of writers may be ahead.
        first = self._minutes.stop
        if isinstance(found, LedgerState) and kept:
            first = minute_of(found.since) + 1 + LATE_MINUTES
        self._ledger_from = max(self._ledger_from, first)

    def of_retention(
        self, admin: KafkaAdmin, extents: Mapping[Partition, Extent], first: Mapping[Partition, int], now: float
    ) -> list[str]:
        """Note what Kafka may have deleted before it was read; return what is to be said of it.

        first   the time of the first record of each partition, in milliseconds.

        Raises Unavailable: a minute that is not compared now never is.
        """
        notes = []
        for topic in sorted({place.topic for place in extents}):
            with unavailable_on_kafka_error(_DOING):
                compacted = admin.may_compact(topic)
            if compacted:
                self._expired[topic] = math.inf
                notes.append(
                    f"topic {topic} may be compacted (cleanup.policy), and then Kafka deletes records: not compared"
                )
        began = time.monotonic()
        retention = cache(admin.retention_seconds)

        def kept_since(topic: str) -> float:
            with unavailable_on_kafka_error(_DOING):
                seconds = retention(topic)
            return math.inf if seconds is None else now + time.monotonic() - began - seconds

        self._kept_since = kept_since
        for place, extent in extents.items():
            if extent.cut:
                # The log of a quiet partition begins late, or has no record. Yet none was deleted that was younger.
                self._lose(place, first.get(place), kept_since(place.topic))
        return notes

    def of_kafka(self, topics: Topics, extents: Mapping[Partition, Extent]) -> None:
        """Note what Kafka has deleted since ``extents`` were looked up. Raises Unavailable."""
        low = topics.low(extents)
        cut = {
            place: offset
            for place, offset in low.items()
            if offset > extents[place].start and offset != self.low.get(place)
        }
        times = topics.times(cut)
        for place in cut:
            self._lose(place, times.get(place), math.inf if place in times else self._kept_since(place.topic))
        self.low = low

    def notes(self, windows: Collection[WindowAudit]) -> list[str]:
        """Return what was not compared of these windows."""
        notes = []
        if any(one.committed is None for one in windows):
            until = ""
            if self.archive:
                first, end = minute_start(self.archive.start), minute_start(self.archive.stop)
                until = f" besides {first:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}"
            notes.append(
                f"the archive may lack events{until}, and the ledger too: what was committed is not known there. Set "
                "OUTBOX_RELAY__ARCHIVE_DAYS on relays and here, or `outbox db ledger on`: both count from "
                f"{LATE_MINUTES} minutes after they were turned on"
            )
        if any(self.counted(one.window) and not self.archived(one.window) for one in windows):
            notes.append("order, partition and payload are not compared of what is in the ledger, not the archive")
        expired = Counter(one.window.topic for one in windows if one.state == EXPIRED)
        for topic, count in sorted(expired.items()):
            notes.append(
                f"topic {topic}: Kafka has deleted records of {counted(count, 'minute')}, or may have: not compared"
            )
        return notes

    def _lose(self, place: Partition, first: int | None, most: float) -> None:
        """Note that what is older than the first record that is there, and than ``most``, may be gone."""
        there = (math.inf if first is None else first / 1000) + _CLOCKS_SECONDS
        if most == -math.inf:
            self._cut[place.topic] = max(self._cut.get(place.topic, 0.0), there)
        before = min(there, most + _CLOCKS_SECONDS)
        self._expired[place.topic] = max(self._expired.get(place.topic, 0.0), before)
