"""Which messages are the first of a producer in their partitions: they are sent by themselves, or others are lost.

An idempotent producer numbers its messages in each partition, and the broker refuses a request whose numbers do not
follow the last ones it has (KIP-98). From a producer that it does not know in the partition it takes any number. So if
it refuses the first request, it takes the second one, which is on its way:

| why it refuses the first request    | what librdkafka does                    | what follows                        |
|-------------------------------------|-----------------------------------------|-------------------------------------|
| a message is too large for the      | fails its messages; its fatal error     | they come again by the next         |
| topic, or invalid                   | comes too late, whatever max.in.flight  | producer, behind later ones of their|
|                                     |                                         | keys                                |
| it is not the leader yet, does not  | takes the second acknowledgement for    | they are lost and count as          |
| know the topic yet, or has too few  | the first one, too: an "implicit ack"   | published, also in a transaction    |
| replicas                            |                                         |                                     |

So a producer's first message in a partition is acknowledged before the next one is sent. Brokers forget a producer that
does not write to a partition for ``producer.id.expiration.ms``, partitions are added, and topics are made anew: after a
minute nothing is known of a topic any more.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

_KNOWN_SECONDS: Final = 60.0
_MOST_KEYS: Final = 100_000

Key = str | bytes | int
"""A message's key, or its partition if the producer does not choose that."""


@dataclass(slots=True)
class _Topic:
    """``cold``: the partitions without an acknowledged message; ``sent``: those of them with one on its way.

    ``count`` is 0 until the partitions are known: then the topic has one first message. ``keys``: known to be in other
    partitions. Where few keys have all the events, partitions without any stay cold, and to hash each key again would
    cost as much as to send the event.
    """

    count: int
    since: float
    cold: set[int]
    sent: set[int] = field(default_factory=set)
    keys: set[Key] = field(default_factory=set)


class FirstMessages:
    """The partitions in which Kafka has acknowledged a message of one producer. ``partitioner`` is librdkafka's.

    ``now`` is set before the messages of a turn. In between it stands still: if a topic's minute ended there, a message
    would be the first that is behind another one of its key.
    """

    def __init__(self, partitioner: str) -> None:
        self.now = time.monotonic()
        self._partitioner = partitioner
        self._hash = _HASHES[partitioner.removesuffix("_random")]
        self._topics: dict[str, _Topic] = {}

    def may_come(self, topic: str) -> bool:
        """Return whether a message to this topic may be the first in its partition."""
        return not self.is_known(topic) or bool(self._topics[topic].cold)

    def is_known(self, topic: str) -> bool:
        """Return whether ``learn`` was called for a topic, within the last minute."""
        known = self._topics.get(topic)
        return known is not None and self.now - known.since < _KNOWN_SECONDS

    def learn(self, topic: str, count: int) -> None:
        """Begin with a topic of so many partitions, none of which has a message; with 0 if that is not known."""
        self._topics[topic] = _Topic(count, self.now, set(range(max(count, 1))))

    def learn_all(self, counts: Mapping[str, int]) -> None:
        """Begin anew with topics that have other numbers of partitions than is known, or were learned a while ago."""
        for topic, known in list(self._topics.items()):
            count = counts.get(topic, 0)
            if count and (count != known.count or self.now - known.since >= _KNOWN_SECONDS / 2):
                self.learn(topic, count)

    def is_random(self, key: bytes | None) -> bool:
        """Return whether librdkafka chooses a partition at random for a message with this key."""
        without = key is None or (not key and self._partitioner == "consistent_random")
        return self._partitioner == "random" or (without and self._partitioner.endswith("_random"))

    def is_first(self, topic: str, key: Key) -> bool:
        """Return whether a message is the first in its partition, with none on its way. Call ``learn`` before."""
        partition = self.cold(topic, key)
        return partition is not None and partition not in self._topics[topic].sent

    def cold(self, topic: str, key: Key) -> int | None:
        """Return the partition of a message if none is acknowledged there. Call ``learn`` before."""
        known = self._topics[topic]
        if key in known.keys:
            return None
        partition = self._partition(known, key)
        if partition in known.cold:
            return partition
        if len(known.keys) >= _MOST_KEYS:
            known.keys.clear()
        known.keys.add(key)
        return None

    def is_on_its_way(self, topic: str, partition: int) -> bool:
        """Return whether the first message of a partition was sent, and is not acknowledged."""
        return topic in self._topics and partition in self._topics[topic].sent

    def sent(self, topic: str, key: Key) -> None:
        known = self._topics[topic]
        known.sent.add(self._partition(known, key))

    def arrived(self, topic: str, expected: int, partition: int) -> None:
        """Record that one message is acknowledged, which was ``expected`` in a partition, and in which one it is."""
        known = self._topics[topic]
        if not known.count:
            del self._topics[topic]
            return
        known.sent.discard(expected)
        known.cold.discard(partition)

    def acknowledged(self) -> list[str]:
        """Record that all that was sent is acknowledged. Returns the topics whose partitions are still not known."""
        for known in self._topics.values():
            if known.count:
                known.cold -= known.sent
            known.sent.clear()
        return [topic for topic, known in self._topics.items() if not known.count]

    def _partition(self, known: _Topic, key: Key) -> int:
        if not known.count:
            return 0
        if isinstance(key, int):
            return key
        return self._hash(key.encode() if isinstance(key, str) else key) % known.count


def _murmur2(key: bytes) -> int:
    """Return Java's hash of a key, without its sign (``Utils.murmur2``, ``Utils.toPositive``)."""
    mask, factor = 0xFFFFFFFF, 0x5BD1E995
    whole = len(key) & ~3
    found = 0x9747B28C ^ len(key)
    for at in range(0, whole, 4):
        word = int.from_bytes(key[at : at + 4], "little") * factor & mask
        word = (word ^ word >> 24) * factor & mask
        found = found * factor & mask ^ word
    if rest := key[whole:]:
        found = (found ^ int.from_bytes(rest, "little")) * factor & mask
    found = (found ^ found >> 13) * factor & mask
    return (found ^ found >> 15) & 0x7FFFFFFF


def _fnv1a(key: bytes) -> int:
    """Return the hash of Sarama's default partitioner: FNV-1a, of a negative number its amount."""
    found = 0x811C9DC5
    for byte in key:
        found = (found ^ byte) * 0x01000193 & 0xFFFFFFFF
    return found if found < 0x80000000 else 0x100000000 - found


_HASHES: Final[dict[str, Callable[[bytes], int]]] = {
    # Not asked: see ``is_random``.
    "random": lambda _: 0,
    "murmur2": _murmur2,
    "consistent": zlib.crc32,
    "fnv1a": _fnv1a,
}
