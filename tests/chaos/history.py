"""What happened in a run, as plain data: what was attempted, what is committed, and what stands on the topics.

The truth is the business table after the run: a transaction whose outcome its writer does not know, or that Postgres
lost in a crash, is committed if its rows are there. Everything is kept as numbers and digests, never as payloads, so
that hundreds of thousands of events of up to 1 MB fit into memory.
"""

from __future__ import annotations

import hashlib
import uuid
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import orjson

Place = tuple[str, int]
"""A topic and a partition."""

STRANGER: Final = "stranger"
"""The header of what strangers write: what groups are to make of it."""
_WRITER_BITS: Final = 12
_NUMBER_BITS: Final = 40
_MILLISECONDS: Final = 5
"""Between the ids of two events of a writer."""


class Committed(NamedTuple):
    """One row of the business table.

    ``seq`` counts the events of a key in the order in which they were committed. ``poisoned``: its topic refuses it.
    """

    event: int
    kind: int
    key: str
    seq: int
    digest: bytes
    poisoned: bool = False


class Message(NamedTuple):
    """One message, as a reader of what is committed finds it. ``event`` is None where the id is not of this run.

    ``replay``: the header that marks an archived event that was sent again. ``stranger``: another program has written
    it, and this is to become of it: ``dead`` or ``applied``. ``milliseconds``: when its producer took it.
    """

    event: int | None
    topic: str
    partition: int
    offset: int
    key: str
    digest: bytes
    replay: str | None = None
    stranger: str | None = None
    milliseconds: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """An aggregate type: where its events go, and what becomes of a key with a dead letter.

    ``partitions`` are the numbers of partitions that its topic has had: more than one when an operator added some.
    ``mended``: for a while an operator let the topic take what it refuses.
    """

    name: str
    topic: str
    blocks: bool = False
    dead_letter_topic: str | None = None
    partitions: Sequence[int] = ()
    mended: bool = False


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay: an operator sent archived events again, chosen by aggregate (``kind`` and ``key``) or by topic."""

    events: int
    kind: str | None = None
    key: str | None = None
    topic: str | None = None

    def covers(self, kind: Kind, key: str) -> bool:
        """Return whether the replay was of events of a key."""
        return (
            self.kind in {None, kind.name}
            and (self.key is None or self.key == key)
            and (self.topic is None or self.topic == kind.topic)
        )


@dataclass(slots=True)
class OnceSpan:
    """While only exactly-once relays could publish: from these offsets on, and up to those (None: to the end).

    A partition without an offset in ``begin`` is younger than the span's begin; in ``end``, than its end.
    """

    begin: Mapping[Place, int] = field(default_factory=dict)
    end: Mapping[Place, int] | None = None

    def __contains__(self, message: Message) -> bool:
        place = message.topic, message.partition
        return self.begin.get(place, 0) <= message.offset and (
            self.end is None or message.offset < self.end.get(place, 0)
        )


def event_of(writer: int, number: int) -> int:
    """Return the number by which one event of a writer is known. Numbers begin with 0."""
    return writer << _NUMBER_BITS | number


def writer_and_number(event: int) -> tuple[int, int]:
    """Return the parts of what ``event_of`` returned."""
    return event >> _NUMBER_BITS, event & ((1 << _NUMBER_BITS) - 1)


class EventIds:
    """UUIDs (version 7) that hold the run's token, the writer and the number: nothing is kept to recognize them.

    Their times begin at ``begin``, in seconds, and go on with the numbers, about as fast as events are written.
    """

    def __init__(self, token: str, begin: float) -> None:
        self._token = int.from_bytes(hashlib.blake2b(token.encode(), digest_size=6).digest()) >> 26
        self._begin = int(begin * 1000)

    def id_of(self, event: int) -> uuid.UUID:
        """Return the event id of an event."""
        writer, number = writer_and_number(event)
        milliseconds = self._begin + _MILLISECONDS * number
        return uuid.UUID(int=milliseconds << 80 | 7 << 76 | writer << 64 | 2 << 62 | self._token << 40 | number)

    def event(self, event_id: str) -> int | None:
        """Return the event of an id, None for an id of somebody else."""
        try:
            value = uuid.UUID(event_id).int
        except ValueError:
            return None
        event = event_of(value >> 64 & ((1 << _WRITER_BITS) - 1), value & ((1 << _NUMBER_BITS) - 1))
        return event if self.id_of(event).int == value else None


def partition_of(key: str, partitions: int) -> int:
    """Return the partition of a key as Java clients place it: murmur2."""
    data, mask = key.encode(), 0xFFFFFFFF
    value = 0x9747B28C ^ len(data)
    whole = len(data) - len(data) % 4
    for begin in range(0, whole, 4):
        part = int.from_bytes(data[begin : begin + 4], "little") * 0x5BD1E995 & mask
        value = (value * 0x5BD1E995 & mask) ^ ((part ^ part >> 24) * 0x5BD1E995 & mask)
    if whole < len(data):
        value = (value ^ int.from_bytes(data[whole:], "little")) * 0x5BD1E995 & mask
    value = (value ^ value >> 13) * 0x5BD1E995 & mask
    return ((value ^ value >> 15) & 0x7FFFFFFF) % partitions


def digest_of(value: bytes | None, content_type: str | None) -> bytes:
    """Return the digest of a payload; of JSON in one form, because Postgres keeps it in a form of its own."""
    if value is None:
        return b"tombstone"
    if content_type == "application/json":
        value = b"json " + orjson.dumps(orjson.loads(value), option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(value, digest_size=12).digest()


class Sightings:
    """What a reader saw at which offset while the run was under way: two numbers for each message."""

    def __init__(self) -> None:
        self._offsets: dict[Place, array[int]] = {}
        self._events: dict[Place, array[int]] = {}

    def add(self, place: Place, offset: int, event: int | None) -> None:
        """Record a message. A partition's messages come in the order of their offsets."""
        if place not in self._offsets:
            self._offsets[place], self._events[place] = array("q"), array("q")
        self._offsets[place].append(offset)
        self._events[place].append(-1 if event is None else event)

    def items(self) -> Iterable[tuple[Place, int, int]]:
        """Return place, offset and event (-1 for a foreign one) of each message."""
        for place, offsets in self._offsets.items():
            for offset, event in zip(offsets, self._events[place], strict=True):
                yield place, offset, event

    def at(self, place: Place, offset: int) -> int | None:
        """Return the event at an offset, -1 for a foreign one, None when nothing was seen there."""
        offsets = self._offsets.get(place)
        if offsets is None:
            return None
        index = bisect_left(offsets, offset)
        return self._events[place][index] if index < len(offsets) and offsets[index] == offset else None

    def ends(self) -> dict[Place, int]:
        """Return the offset behind the last message of each partition. May be called while messages are added."""
        return {place: offsets[-1] + 1 for place, offsets in list(self._offsets.items()) if offsets}

    def __len__(self) -> int:
        return sum(map(len, self._offsets.values()))


class Effect(NamedTuple):
    """What a group has applied: an event (None: of another program), where it stood, and at which offset."""

    event: int | None
    place: Place
    offset: int


@dataclass(frozen=True, slots=True)
class Group:
    """What one consumer group has made of the topics that it reads.

    effects      in the order in which they came about.
    per_message  whether a message that repeats an event has an effect of its own, as where nothing is deduplicated.
    by_key       whether only the effects of each key are in order, and not those of each partition.
    dead         how often each message became a dead letter; None: that is another group's.
    audited      whether `outbox audit` knows the group: its positions and ids are in Postgres.
    losses       at-most-once: the ranges of offsets that it has recorded as given up.
    """

    name: str
    topics: Collection[str]
    effects: Iterable[Effect]
    per_message: bool = False
    by_key: bool = False
    dead: Mapping[tuple[Place, int], int] | None = None
    audited: bool = False
    losses: Mapping[Place, Sequence[range]] = field(default_factory=dict)

    def gave_up(self, place: Place, offset: int) -> bool:
        """Return whether the group has recorded that it may lack the effect of a message."""
        return any(offset in lost for lost in self.losses.get(place, ()))


@dataclass(slots=True)
class History:
    """One run. ``messages`` is read once, each partition's in the order of offsets, from its first to its last.

    attempted   how many events each writer has begun to write; those that are not committed were rolled back or lost.
    dead        events in the table of dead letters.
    waiting     events whose rows are still in the outbox when the run has ended and everything was given its time.
    copies      messages of dead-letter topics.
    seen        what another reader had seen before the end.
    discarded   events that operators have discarded.
    retried     how often operators have retried an event.
    replays     what operators have sent again.
    groups      what consumer groups made of the messages.
    once        while there was only exactly-once. Not needed where there was never anything else.
    """

    kinds: Mapping[int, Kind]
    committed: Iterable[Committed]
    attempted: Mapping[int, int]
    messages: Iterable[Message]
    dead: Collection[int] = ()
    waiting: Collection[int] = ()
    copies: Iterable[Message] = ()
    seen: Sightings = field(default_factory=Sightings)
    discarded: Collection[int] = ()
    retried: Mapping[int, int] = field(default_factory=dict)
    replays: Sequence[Replay] = ()
    once: Sequence[OnceSpan] = ()
    groups: Sequence[Group] = ()

    def was_attempted(self, event: int) -> bool:
        """Return whether a writer of this run has begun to write the event."""
        writer, number = writer_and_number(event)
        return number < self.attempted.get(writer, 0)
