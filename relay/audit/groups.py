"""What each consumer group has applied: the ids in the sink, its positions and its dead letters."""

from __future__ import annotations

import datetime as dt
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from outbox.consumer.admin.offsets import GIVEN_UP
from outbox.consumer.model import DEDUP, DEDUP_BY_OFFSET
from outbox.consumer.postgres_errors import clear_errors
from outbox.consumer.statements import statement
from relay.audit.findings import STATEMENT_SECONDS
from relay.audit.sums import HAS_TIME, MINUTE, Sum, Window, first_id, halves, minute_start, reduced, total
from relay.audit.topics import Cell, OnKafka
from relay.database import one_snapshot
from relay.kafka.offsets import Partition

# A consumer that is killed gives up what it has not confirmed. It may be confirmed yet for a while: so long the group's
# position is before it.
_GROUPS: Final = """
SELECT g.grp, g.strategy, g.forgotten_before, o.topic, o.part,
       CASE WHEN {given_up} THEN o.next_offset ELSE least(o.next_offset, o.unconfirmed_from) END
  FROM {groups} AS g JOIN {offsets} AS o ON o.grp = g.grp
 WHERE %(group)s::text IS NULL OR g.grp = %(group)s
 ORDER BY 1, 4, 5"""

_CHOSEN: Final = """day >= %(first_day)s AND day < %(end_day)s
   AND message_id >= %(low)s::uuid AND message_id < %(high)s::uuid AND {has_time}
   AND grp = ANY(%(groups)s)"""

_SUMS: Final = """
SELECT grp, {minute} AS minute, count(*), {ids}
  FROM {processed_messages} AS p {hashed}
 WHERE {chosen} GROUP BY 1, 2"""

_IDS: Final = """
SELECT message_id FROM {processed_messages} AS p
 WHERE {chosen} AND {minute} = ANY(%(minutes)s::bigint[])"""

_UNTIMED: Final = """
SELECT message_id FROM {processed_messages}
 WHERE grp = ANY(%(groups)s) AND message_id = ANY(%(ids)s::uuid[])"""

# Of the topic that the group reads: one of its name that was deleted had other messages at these offsets. Discarded
# letters are kept in the audit alone.
_EXCUSED: Final = """
SELECT topic, part, message_offset FROM {dead_letters} JOIN {offsets} USING (grp, topic, part, topic_id)
 WHERE grp = %(group)s
UNION ALL
SELECT o.topic, o.part, (a.details->>'offset')::bigint FROM {audit} AS a JOIN {offsets} AS o
    ON a.details->>'group' = o.grp AND a.details->>'topic' = o.topic AND a.details->>'part' = o.part::text
       AND a.details->>'topic_id' = o.topic_id
 WHERE a.what = 'discard dead letter' AND o.grp = %(group)s"""

_GIVEN_UP: Final = """
SELECT grp, topic, part, first_offset, end_offset FROM {losses} JOIN {offsets} USING (grp, topic, part, topic_id)
 WHERE kind = 'given-up' AND grp = ANY(%(groups)s) AND found_at >= %(since)s
UNION ALL
SELECT grp, topic, part, unconfirmed_from, unconfirmed_end FROM {offsets}
 WHERE {given_up} AND grp = ANY(%(groups)s)
 ORDER BY 1, 2, 3, 4"""

_ID: Final = sql.SQL("message_id")
_PARTS: Final = {"has_time": sql.SQL(HAS_TIME).format(id=_ID), "minute": sql.SQL(MINUTE).format(id=_ID)}
_PIECES: Final[dict[str, sql.Composable]] = {
    **_PARTS,
    "chosen": sql.SQL(_CHOSEN).format(**_PARTS),
    "given_up": sql.SQL(GIVEN_UP),
    "ids": total("ids"),
    "hashed": halves("ids", sql.SQL("pg_catalog.uuid_send(message_id)")),
}


@dataclass
class Group:
    """A group that reads audited topics.

    remembers         whether it keeps the ids of what it has applied; otherwise only its positions can be audited.
    forgotten_before  the ids of earlier days are no longer all there.
    positions         the next offset of each partition of audited topics, or the first that may be confirmed yet.
    reads             all topics that it reads.
    given_up          the ranges of offsets that it has given up at-most-once, by partition: in order, and none overlap.
    """

    name: str
    remembers: bool
    forgotten_before: dt.date | None
    positions: dict[Partition, int] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    given_up: dict[Partition, list[range]] = field(default_factory=lambda: defaultdict(list))

    def gave_up(self, passed: Sequence[OnKafka]) -> str | None:
        """Return why an event is missing that the group has given up, or None. With its id, a repeat is dropped."""
        place, offset = passed[0].place, passed[0].offset
        if any(_within(self.given_up.get(place, ()), offset, offset)):
            return f"the group has given up {_shown(range(offset, offset + 1), place)}"
        return None

    def lacks(
        self, passed: Sequence[OnKafka], excused: Collection[tuple[Partition, int]], *, partial: bool
    ) -> str | None:
        """Return why an event is missing whose records it has passed, and whose id it has not; None if it need not.

        excused  places of dead letters. ``partial``: it leaves events out on purpose.
        """
        place, offset = passed[0].place, passed[0].offset
        if not self.remembers or partial or any((one.place, one.offset) in excused for one in passed):
            return None
        return (
            f"the group is beyond partition {place.number} offset {offset}, and has no id and no dead letter of it. If "
            f"its job leaves events out, give --partial {self.name}; events from before the group's beginning are "
            "missing too"
        )

    def forgot(self, minute: int) -> bool:
        """Return whether the ids of a minute may have been deleted."""
        return self.forgotten_before is not None and minute_start(minute).date() < self.forgotten_before

    @property
    def topics(self) -> set[str]:
        return {place.topic for place in self.positions}


class Groups:
    """Reads the groups of one sink in one snapshot: use it in a ``with`` block.

    group    the only one to look at; None for all.
    minutes  the range of minutes.
    """

    def __init__(
        self, connection: psycopg.Connection[Any], schema: str, group: str | None, minutes: range, key: bytes
    ) -> None:
        self._connection = connection
        self._schema = schema
        start, end = minute_start(minutes.start), minute_start(minutes.stop)
        self._bound: dict[str, Any] = {
            "key": key,
            "group": group,
            "since": start,
            "low": first_id(minutes.start),
            "high": first_id(minutes.stop),
            "first_day": start.date(),
            "end_day": end.date() + dt.timedelta(days=1),
        }

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read everything in this block in one snapshot. Raises ConsumerUnavailable and SchemaError."""
        with clear_errors("reading what groups have applied"), one_snapshot(self._connection, STATEMENT_SECONDS):
            yield

    def groups(self, topics: Collection[str] | None) -> list[Group]:
        """Return the groups that read one of the topics, with their positions there; None for all topics."""
        found: dict[str, Group] = {}
        for name, strategy, forgotten, topic, number, offset in self._rows(_GROUPS):
            group = found.setdefault(name, Group(name, strategy in {DEDUP, DEDUP_BY_OFFSET}, forgotten))
            group.reads.add(topic)
            if topics is None or topic in topics:
                group.positions[Partition(topic, number)] = offset
        for name, topic, number, first, end in self._rows(_GIVEN_UP, groups=list(found)):
            lost = found[name].given_up[Partition(topic, number)]
            # Offsets that were set back may be given up again.
            again = lost.pop() if lost and first < lost[-1].stop else range(first, end)
            lost.append(range(again.start, max(again.stop, end)))
        return [group for group in found.values() if group.positions]

    def sums(self, groups: Collection[Group]) -> dict[tuple[str, int], Sum]:
        """Return by group and minute the sum over the ids that it has applied, of those with a time."""
        rows = self._rows(_SUMS, groups=[group.name for group in groups])
        return {(name, minute): Sum(count, reduced(ids)) for name, minute, count, ids in rows}

    def ids(self, group: Group, minutes: Collection[int], untimed: Collection[bytes]) -> set[bytes]:
        """Return the ids of these minutes that a group has applied, and which of the ids without a time it has."""
        ids = {"low": first_id(min(minutes)), "high": first_id(max(minutes) + 1)}
        rows = self._rows(_IDS, groups=[group.name], minutes=list(minutes), **ids)
        if untimed:
            rows += self._rows(_UNTIMED, groups=[group.name], ids=[one.hex() for one in untimed])
        return {message_id.bytes for (message_id,) in rows}

    def excused(self, group: Group) -> set[tuple[Partition, int]]:
        """Return the places of messages that are dead letters of a group, or were discarded."""
        rows = self._rows(_EXCUSED, group=group.name)
        return {(Partition(topic, number), offset) for topic, number, offset in rows}

    def _rows(self, query: LiteralString, **values: Any) -> list[tuple[Any, ...]]:
        cursor = psycopg.Cursor(self._connection)
        return cursor.execute(statement(self._schema, query, **_PIECES), self._bound | values).fetchall()


def expected_of(
    group: Group, cells: Mapping[tuple[Partition, int], Cell]
) -> tuple[dict[Window, Sum], dict[Window, int], set[int]]:
    """Return by window what a group must have applied and how much it has not reached, and the minutes that are unsure.

    Those in which its position is, and those with ids without a time, are to be compared one by one.
    """
    expected: dict[Window, Sum] = defaultdict(Sum)
    waiting: Counter[Window] = Counter()
    unsure: set[int] = set()
    for (place, minute), cell in cells.items():
        if place.topic not in group.topics:
            continue
        position = group.positions.get(place, 0)
        window = Window(place.topic, minute)
        if cell.last >= position:
            waiting[window] += cell.count
        if cell.first < position:
            expected[window] += Sum(cell.count, cell.ids)
            if cell.last >= position or cell.untimed:
                unsure.add(minute)
    return expected, waiting, unsure


def with_applied(
    windows: Sequence[Window], groups: Sequence[Group], applied: Mapping[tuple[str, int], Sum]
) -> list[Window]:
    """Add a window for each minute of which only a group has events."""
    there = set(windows)
    for group in groups:
        minutes = {minute for name, minute in applied if name == group.name}
        minutes -= {window.minute for window in there if window.topic in group.topics}
        there |= {Window(min(group.topics), minute) for minute in minutes}
    return sorted(there, key=lambda one: (one.minute, one.topic))


def given_up(
    groups: Collection[Group], cells: Mapping[tuple[Partition, int], Cell]
) -> Iterator[tuple[Window, Group, str]]:
    """Yield each window in which a group may have given messages up, with the group and what these are."""
    for group in groups:
        for (place, minute), cell in cells.items():
            for lost in _within(group.given_up.get(place, ()), cell.first, cell.last):
                yield Window(place.topic, minute), group, f"the group has given up {_shown(lost, place)}"


def _within(ranges: Sequence[range], first: int, last: int) -> Iterator[range]:
    """Yield those of a group's given-up ranges that have one of these offsets. There may be one for each message."""
    for number in range(bisect_right(ranges, first, key=attrgetter("stop")), len(ranges)):
        if ranges[number].start > last:
            return
        yield ranges[number]


def _shown(lost: range, place: Partition) -> str:
    offsets = f"offset {lost.start}" if len(lost) == 1 else f"offsets {lost.start} to {lost.stop - 1}"
    return f"partition {place.number} {offsets} (at-most-once): see `outbox offsets show`"
