"""What an audit has found."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from relay.audit.sums import Window, minute_start

MOST_NAMED: Final = 1000
"""The most differences of one audit that are named; the others are counted."""

AT_ONCE: Final = 100_000
"""So many events are compared one by one at once; a minute that has more is compared as a whole."""

STATEMENT_SECONDS: Final = 300.0
"""How long a statement of an audit may take."""

EQUAL: Final = "equal"
DIFFERENT: Final = "different"
OPEN: Final = "open"
EXPIRED: Final = "expired"


@dataclass(frozen=True, slots=True)
class Difference:
    """One event that is not where it must be.

    kind      missing, repeated, unknown, order, partition or payload.
    event_id  None if only the number is known of those that differ: the ledger has no ids.
    group     the consumer group that lacks it, or has it too much; None for Kafka.
    """

    kind: str
    event_id: str | None
    topic: str
    window: dt.datetime
    text: str
    group: str | None = None


@dataclass(slots=True)
class GroupCount:
    """What a group has of one window. ``applied`` is None if it keeps no ids; ``waiting`` it has not reached."""

    applied: int | None
    waiting: int = 0
    hashes: int = 0


@dataclass(slots=True)
class WindowAudit:
    """What was found for one window.

    committed  the events that were written; None if it is not known, because archive and ledger were off.
    kafka      the events on Kafka, each once; ``repeated`` are the further records of them.
    waiting    the events in the outbox's table; ``dead`` those among its dead letters; ``discarded`` by operators;
               ``scheduled`` those that are not due yet.
    state      equal; different; open: something of it is still under way; expired: Kafka has deleted records.
    sums       the sums of the hashes that were compared, by reader, for the certificate; ``failed``: of dead and
               discarded events.
    """

    window: Window
    committed: int | None
    kafka: int
    waiting: int = 0
    dead: int = 0
    discarded: int = 0
    scheduled: int = 0
    repeated: int = 0
    state: str = EQUAL
    groups: dict[str, GroupCount] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)
    failed: int = 0

    def passed(self, group: str) -> int:
        """Return how many events on Kafka are before a group's position, whether it has applied them or not."""
        return self.kafka - self.groups[group].waiting

    @property
    def empty(self) -> bool:
        counts = (self.committed, self.kafka, self.waiting, self.dead, self.discarded, self.scheduled)
        return self.state != DIFFERENT and not any(counts) and not any(one.applied for one in self.groups.values())


@dataclass(slots=True)
class Audit:
    """The result of an audit.

    since, until   the range, in whole minutes.
    windows        in the order of time and topic.
    differences    the first of them; ``counts`` says how many there are, by window and kind.
    notes          what was not compared, and why. ``limit`` is one of them: that not all was compared one by one.
    absent         topics that Kafka does not have, or does not show.
    """

    since: dt.datetime
    until: dt.datetime
    key: bytes
    windows: list[WindowAudit] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    counts: dict[Window, Counter[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    limit: str | None = None
    absent: Collection[str] = ()

    @property
    def count(self) -> int:
        return sum(counts.total() for counts in self.counts.values())

    @property
    def differs(self) -> bool:
        return bool(self.counts) or any(one.state == DIFFERENT for one in self.windows)

    def add(self, window: Window, found: Difference) -> None:
        self.counts.setdefault(window, Counter())[found.kind] += 1
        if len(self.differences) < MOST_NAMED:
            self.differences.append(found)

    def stop(self, most: int, minute: int) -> None:
        """Note that from this minute on nothing was compared one by one: the differing minutes have too many events."""
        self.limit = (
            f"the minutes that differ have more than {most:,} events: those from {minute_start(minute):%Y-%m-%d %H:%M} "
            "on were not compared one by one; give a shorter range"
        )
        self.notes.append(self.limit)

    def explain(
        self, differ: Mapping[Window, str], explained: Container[Window], more: Audit, topics: Collection[str]
    ) -> None:
        """Withdraw the differences that only the ledger reported where ``more`` has explained them.

        ``differ`` has these windows, with the kinds; ``more`` is a second audit, which also read ``topics``.
        What was found one by one stays, and what is repeated on these topics is added.
        """
        windows = {window: kind for window, kind in differ.items() if window in explained}
        if more.limit is not None and len(windows) < len(differ):
            self.notes.append(more.limit)
        states = {one.window: one.state for one in more.windows}
        places = {(window.topic, window.start) for window in windows}
        self.differences = [
            one for one in self.differences if one.event_id or one.group or (one.topic, one.window) not in places
        ]
        for one in self.windows:
            if (kind := windows.get(one.window)) is None:
                continue
            counts = self.counts[one.window]
            counts -= Counter([kind])
            if not counts:
                del self.counts[one.window]
                state = states.get(one.window, EQUAL)
                one.state = EQUAL if state == DIFFERENT else state
        for found in more.windows:
            repeated = more.counts.get(found.window, Counter())["repeated"]
            if repeated and found.window.topic in topics:
                self.windows.append(found)
                at = found.window.topic, found.window.start
                for one_more in more.differences:
                    if (one_more.kind, one_more.topic, one_more.window) == ("repeated", *at):
                        self.add(found.window, one_more)
                # Not all of them are named.
                self.counts.setdefault(found.window, Counter())["repeated"] = repeated
        self.windows.sort(key=lambda one: (one.window.minute, one.window.topic))


@dataclass(frozen=True, slots=True)
class Scope:
    """What to audit.

    since, until  events that were written from ``since`` on and before ``until``, in whole minutes.
    topics        None for all topics to which this outbox's events go.
    group         the only consumer group to look at; None for all.
    partial       groups that leave events out on purpose: nothing is missing there.
    order_minutes  how many minutes before ``since`` the order of keys is compared with.
    closed        all its minutes are known to be over; a scheduled event keeps none of them open.
    former        topics of groups to which no route leads: only to find what the ledger counts and others have not, and
                  what is repeated there. No other difference is recorded, as only so many are named.
    more          further topics, if ``topics`` is None.
    key           of the hashes: that of a certificate, to repeat its sums; by default a new one.
    """

    since: dt.datetime
    until: dt.datetime
    topics: Collection[str] | None = None
    group: str | None = None
    partial: Collection[str] = ()
    key: bytes | None = None
    order_minutes: int = 0
    closed: bool = False
    former: Collection[str] = ()
    more: Collection[str] = ()


def parts(found: Mapping[Window, WindowAudit]) -> Iterator[list[int]]:
    """Yield the minutes in which sums differ, as many at once as may be kept in memory."""
    counts: Counter[int] = Counter()
    for window, one in found.items():
        counts[window.minute] += max(one.kafka, one.committed or 0)
    part: list[int] = []
    for minute in sorted({window.minute for window, one in found.items() if one.state == DIFFERENT}):
        if part and sum(counts[one] for one in part) + counts[minute] > AT_ONCE:
            yield part
            part = []
        part.append(minute)
    if part:
        yield part
