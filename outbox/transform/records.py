"""The records that a transform returns, and the copies in the dead-letter topic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from confluent_kafka import Message

from outbox.event import PAYLOAD_OMITTED

DEAD_LETTER: Final = "outbox-dead-letter"
"""On a copy in the dead-letter topic: why the message could not be transformed."""
PLACE: Final = "outbox-dead-letter-place"
"""On such a copy: ``topic-partition@offset`` of the message."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record to be produced. Without ``partition`` the key decides, by Java's partitioner (murmur2)."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]] = ()
    partition: int | None = None


Transform = Callable[[Message], Iterable[Record]]


def dead_letter(topic: str, message: Message, error: Exception, *, whole: bool) -> Record:
    """Return the copy of a message for the dead-letter topic; ``whole``: with its value, unless it is too large."""
    why = f"{type(error).__name__}: {error}"[:1000]
    if not whole:
        why += "; without its value, as this topic takes no message of that size"
    place = f"{message.topic()}-{message.partition()}@{message.offset()}".encode()
    headers = [*(message.headers() or ()), (DEAD_LETTER, why.encode(errors="replace")), (PLACE, place)]
    if whole:
        return Record(topic, message.key(), message.value(), headers)
    return Record(topic, message.key(), None, [*headers, (PAYLOAD_OMITTED, b"true")])
