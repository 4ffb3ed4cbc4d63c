"""What is on Kafka: reads the outbox's topics with a read_committed client, from a time to their stable ends."""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Mapping
from itertools import chain
from struct import Struct
from typing import Any, Final, NamedTuple

from confluent_kafka import Message

from outbox.event import CE_ID, CE_SOURCE, CE_TIME, DEAD_LETTER, REPLAY
from relay.audit.content import content_of
from relay.audit.sums import WINDOW_SECONDS, Sum, Window, hash_of, minute_of, minute_of_id
from relay.kafka.client import headers_of, unavailable_on_kafka_error
from relay.kafka.offsets import Offsets, Partition
from relay.operations.topic_scan import first_times, header_text, read

_GROUP: Final = "outbox-audit"
_PLACE: Final = Struct(">iq")

_SLACK_SECONDS: Final = 900
"""Kafka's time of an event is the relay's, and that of its id the writer's: how far the clocks may be apart."""


class OnKafka(NamedTuple):
    """One event's record. ``content`` is a hash of what it says; its time is that of Kafka."""

    place: Partition
    offset: int
    content: bytes
    milliseconds: int


class Cell:
    """The events of one window in one partition.

    ids      the sum over their ids; ``whole`` over ids, places and contents.
    untimed  those whose ids have no time.
    """

    __slots__ = ("count", "first", "ids", "last", "untimed", "whole")

    def __init__(self, offset: int) -> None:
        self.count = self.ids = self.whole = self.untimed = 0
        self.first = self.last = offset


class Extent(NamedTuple):
    """The offsets of a partition that are read: from ``start`` to ``end``, which is the last stable offset.

    cut   whether the log begins at ``start``, so that retention may have deleted events of the range.
    """

    start: int
    end: int
    cut: bool = False


class Topics:
    """Reads these topics for one audit. What asks Kafka raises Unavailable.

    source   the relays' ``ce_source``: records of another one are of another outbox.
    key      of the hashes.
    ce_time  whether records have this header: without it, events whose ids have no time are left out.
    """

    def __init__(
        self, options: Mapping[str, str], topics: Collection[str], source: str, key: bytes, *, ce_time: bool = True
    ) -> None:
        self._options = options
        self._topics = topics
        self._source = source.encode()
        self._key = key
        self._ce_time = ce_time
        self._offsets = Offsets(options)
        self.others: Counter[str] = Counter()
        """By topic, the records that are not of this outbox, each once."""
        # By partition, the offset after the last record that ``others`` counts: some are read again.
        self._others_end: dict[Partition, int] = {}
        self.copies: set[bytes] = set()
        """The ids of replays, and of copies in dead-letter topics, that ``events`` has met."""
        self.renamed: dict[Window, dict[bytes, list[tuple[Partition, int]]]] = defaultdict(dict)
        """By window and id the places of records with another source that ``events`` has met: they are of this outbox
        if its source was changed."""
        self.untimed: set[str] = set()
        """The topics with events that were left out."""
        self._cells: Mapping[tuple[Partition, int], Cell] = {}
        self._copied: dict[tuple[Partition, int], Cell] = {}

    def extents(
        self, since: dt.datetime, at_most: Mapping[Partition, int], *, complete: Container[str] = ()
    ) -> dict[Partition, Extent]:
        """Return what to read of each partition that exists, to find all events written since a time.

        at_most   offsets that must be included. ``complete``: the topics of which they are the lowest of all events of
                  the range.
        """
        milliseconds = max(int((since.timestamp() - _SLACK_SECONDS) * 1000), 0)
        with unavailable_on_kafka_error("looking for the records to audit"):
            partitions = self._offsets.partitions(self._topics)
            low, ends = self._offsets.low(partitions), self._offsets.stable(partitions)
            found = self._offsets.since(partitions, milliseconds)
        extents = {}
        for one in partitions:
            start = ends[one] if found[one] < 0 else found[one]
            start = max(min(start, at_most.get(one, start)), low[one])
            cut = start == low[one] > 0 and not (one.topic in complete and at_most.get(one, start) >= start)
            extents[one] = Extent(start, max(ends[one], start), cut)
        return extents

    def since(self, extents: Mapping[Partition, Extent]) -> tuple[dict[Partition, Extent], dict[Partition, range]]:
        """Return what has come since ``extents``, and the offsets that open transactions hide, by partition."""
        with unavailable_on_kafka_error("looking for the ends of the topics"):
            partitions = self._offsets.partitions(self._topics)
            stable, high = self._offsets.stable(partitions), self._offsets.high(partitions)
        behind = {one: extents[one].end if one in extents else 0 for one in partitions}
        new = {one: Extent(behind[one], max(stable[one], behind[one])) for one in partitions}
        return new, {one: range(stable[one], high[one]) for one in partitions if stable[one] < high[one]}

    def low(self, extents: Mapping[Partition, Extent]) -> dict[Partition, int]:
        """Return the first offset of each of these partitions that still exists."""
        with unavailable_on_kafka_error("looking for the beginnings of the topics"):
            return self._offsets.low(one for one in self._offsets.partitions(self._topics) if one in extents)

    def times(self, starts: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return the time of each partition's first record from an offset on, in milliseconds, if there is one."""
        return first_times(self._options, self._offsets, starts, group=_GROUP)

    def sums(
        self, extents: Mapping[Partition, Extent], minutes: range, *, contents: bool
    ) -> tuple[dict[tuple[Partition, int], Cell], dict[Partition, int]]:
        """Return the events of each partition and minute, and the time of each partition's first record, in
        milliseconds.

        contents   whether the sums over ids, places and contents are wanted.
        """
        cells: dict[tuple[Partition, int], Cell] = {}
        first: dict[Partition, int] = {}

        def add(place: Partition, offset: int, message: Message, headers: Mapping[str, Any]) -> None:
            if place not in first:
                first[place] = message.timestamp()[1]
            if (event := self._event(place, offset, message, headers, minutes)) is None:
                return
            event_id, minute, timed, ours = event
            found = cells if ours and not _is_copy(headers) else self._copied
            cell = found.get((place, minute))
            if cell is None:
                cell = found[place, minute] = Cell(offset)
            cell.count += 1
            cell.last = offset
            if found is not cells:
                return
            cell.ids += hash_of(self._key, event_id)
            if contents:
                cell.whole += hash_of(self._key, whole(event_id, place.number, offset, _content(message, headers)))
            cell.untimed += not timed

        self._read_extents(extents, add)
        self._cells = cells
        return cells, first

    def spans(self, minutes: Container[int]) -> dict[Partition, Extent]:
        """Return the offsets at which ``sums`` has found the events of these minutes, copies, and records of others."""
        found: dict[Partition, Extent] = {}
        for (place, minute), cell in chain(self._cells.items(), self._copied.items()):
            if minute in minutes:
                known = found.get(place, Extent(cell.first, 0))
                found[place] = Extent(min(known.start, cell.first), max(known.end, cell.last + 1))
        return found

    def events(
        self, windows: Collection[Window], *extents: Mapping[Partition, Extent]
    ) -> dict[Window, dict[bytes, list[OnKafka]]]:
        """Return each event of these windows, by its id (16 bytes), with all its records."""
        found: dict[Window, dict[bytes, list[OnKafka]]] = {window: {} for window in windows}
        minutes = {window.minute for window in windows}

        def add(place: Partition, offset: int, message: Message, headers: Mapping[str, Any]) -> None:
            if (event := self._event(place, offset, message, headers, minutes)) is None:
                return
            event_id, minute, _, ours = event
            if _is_copy(headers):
                self.copies.add(event_id)
            elif not ours:
                self.renamed[Window(place.topic, minute)].setdefault(event_id, []).append((place, offset))
            elif (events := found.get(Window(place.topic, minute))) is not None:
                said = hash_of(b"", _content(message, headers)).to_bytes(16)
                record = OnKafka(place, offset, said, message.timestamp()[1])
                events.setdefault(event_id, []).append(record)

        for one in extents:
            self._read_extents(one, add)
        return found

    def _event(
        self, place: Partition, offset: int, message: Message, headers: Mapping[str, Any], minutes: Container[int]
    ) -> tuple[bytes, int, bool, bool] | None:
        """Return the id and the minute of an event or a copy, whether the minute is the id's, and whether it is ours.

        None unless it has an id and is of these minutes.
        """
        event_id = _id_of(headers)
        ours = event_id is not None and headers.get(CE_SOURCE, self._source) == self._source
        if not ours:
            self._count_other(place, offset)
        if event_id is None:
            return None
        minute = minute_of_id(event_id)
        timed = minute is not None
        if minute is None and not self._ce_time:
            self.untimed |= {place.topic} if ours else set()
            return None
        if minute is None:
            minute = _written(header_text(headers.get(CE_TIME)), message.timestamp()[1])
        return (event_id, minute, timed, ours) if minute in minutes else None

    def _count_other(self, place: Partition, offset: int) -> None:
        if offset >= self._others_end.get(place, 0):
            self.others[place.topic] += 1
            self._others_end[place] = offset + 1

    def _read_extents(
        self, extents: Mapping[Partition, Extent], add: Callable[[Partition, int, Message, Mapping[str, Any]], None]
    ) -> None:
        starts = {place: extent.start for place, extent in extents.items() if extent.start < extent.end}
        ends = {place: extent.end for place, extent in extents.items()}

        def within(place: Partition, message: Message) -> None:
            offset = message.offset() or 0
            if offset < ends[place]:
                add(place, offset, message, headers_of(message))

        with unavailable_on_kafka_error(f"reading {', '.join(sorted(self._topics))}"):
            for _ in read(self._options, starts, ends, within, isolation="read_committed", group=_GROUP):
                pass


def window_sums(cells: Mapping[tuple[Partition, int], Cell]) -> tuple[dict[Window, Sum], dict[Window, Sum]]:
    ids: dict[Window, Sum] = defaultdict(Sum)
    wholes: dict[Window, Sum] = defaultdict(Sum)
    for (place, minute), cell in cells.items():
        window = Window(place.topic, minute)
        ids[window] += Sum(cell.count, cell.ids)
        wholes[window] += Sum(cell.count, cell.whole)
    return ids, wholes


def whole(event_id: bytes, partition: int, offset: int, content: bytes) -> bytes:
    return event_id + _PLACE.pack(partition, offset) + content


def _is_copy(headers: Container[str]) -> bool:
    return REPLAY in headers or DEAD_LETTER in headers


def _content(message: Message, headers: Mapping[str, Any]) -> bytes:
    key, value = message.key(), message.value()
    return content_of(key if isinstance(key, bytes) else None, value if isinstance(value, bytes) else None, headers)


def _id_of(headers: Mapping[str, Any]) -> bytes | None:
    try:
        found = bytes.fromhex(header_text(headers.get(CE_ID)).replace("-", ""))
    except ValueError:
        return None
    return found if len(found) == 16 else None


def _written(ce_time: str, milliseconds: int) -> int:
    try:
        return minute_of(dt.datetime.fromisoformat(ce_time))
    except (ValueError, OverflowError):
        return milliseconds // (1000 * WINDOW_SECONDS)
