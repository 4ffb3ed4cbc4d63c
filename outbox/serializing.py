"""Serializers: an outbox calls one, in the caller's process, to turn a payload into bytes before it is written."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

from outbox.errors import OutboxError, PayloadError
from outbox.event import Event


class Serialized(NamedTuple):
    """A payload as Kafka will carry it, and its media type."""

    payload: bytes
    content_type: str


class Serializer(Protocol):
    """Turns the payload of an event into bytes. Called by several threads at once if the outbox is."""

    def __call__(self, event: Event) -> Serialized | None:
        """Return the event's payload as bytes, or None to write it as an outbox without a serializer does.

        Called for each event except tombstones and those whose payload is already bytes. Raises EventError for a
        payload that can't be serialized; any exception other than an OutboxError becomes a PayloadError.
        """
        ...


def serialize(serializer: Serializer, event: Event) -> Event:
    """Return the event with its payload serialized. Raises EventError, and any OutboxError of the serializer."""
    if event.payload is None or isinstance(event.payload, bytes | bytearray | memoryview):
        return event
    try:
        made = serializer(event)
    except OutboxError:
        raise
    except Exception as error:
        raise PayloadError("payload", f"the serializer failed: {type(error).__name__}: {error}") from error
    if made is None:
        return event
    if not isinstance(made, Serialized):
        raise PayloadError("payload", f"the serializer returned a {type(made).__name__}, not outbox.Serialized or None")
    if not isinstance(made.payload, bytes | bytearray | memoryview):
        raise PayloadError("payload", f"the serializer's payload is a {type(made.payload).__name__}, not bytes")
    return replace(event, payload=bytes(made.payload), content_type=made.content_type)
