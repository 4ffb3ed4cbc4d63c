"""The event that a service writes, and the names of its headers in Kafka.

Wire contract (Kafka): key = aggregate_id, value = the payload's bytes unchanged, headers = CloudEvents 1.0 in binary
mode (https://github.com/cloudevents/spec, Kafka protocol binding) and the plain names that consumers of Debezium's
outbox router read. ``ce_traceparent`` is the writer's trace, ``traceparent`` that of the last hop.

Lanes, locks, blocked keys and dead letters know one key: (aggregate_type, aggregate_id). An event that is ordered by
something else than what it is about, as an order's by its customer, has the customer as its aggregate_id, and the order
as its subject: a header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

from uuid_utils.compat import uuid7

from outbox.errors import EventError

DEFAULT_SCHEMA: Final = "outbox"
"""Of the outbox's tables."""

MAX_AGGREGATE_TYPE: Final = 200
MAX_AGGREGATE_ID: Final = 1000
MAX_EVENT_TYPE: Final = 200
MAX_CONTENT_TYPE: Final = 200
MAX_IDEMPOTENCY_KEY: Final = 255
"""Lengths in characters, of an idempotency key in bytes of UTF-8. The table's CHECK constraints have the same limits,
except for the content type; of an idempotency key they count the characters. A subject has those of an aggregate_id."""

MAX_EVENT_BYTES: Final = 1_000_000
"""Payload, key and headers together. Below the broker's default ``message.max.bytes`` of 1,048,588."""

JSON_CONTENT_TYPE: Final = "application/json"
BYTES_CONTENT_TYPE: Final = "application/octet-stream"

CE_SPECVERSION: Final = "ce_specversion"
CE_ID: Final = "ce_id"
CE_SOURCE: Final = "ce_source"
CE_TYPE: Final = "ce_type"
CE_SUBJECT: Final = "ce_subject"
CE_TIME: Final = "ce_time"
CE_TRACEPARENT: Final = "ce_traceparent"
CE_TRACESTATE: Final = "ce_tracestate"
CONTENT_TYPE: Final = "content-type"
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
ID: Final = "id"
EVENT_TYPE: Final = "event-type"
AGGREGATE_TYPE: Final = "aggregate-type"
IDEMPOTENCY_KEY: Final = "idempotency-key"

RESERVED_HEADERS: Final = frozenset({ID, EVENT_TYPE, AGGREGATE_TYPE})
"""Names that the relay sets itself, like all names that begin with ``ce_`` or ``outbox-``. An event can't set them, in
upper case or lower."""

RELAY_HEADER_PREFIX: Final = "outbox-"
"""The prefix of the names below, by which the relay recognizes copies and replays. An event can't set such headers."""
DEAD_LETTER: Final = "outbox-dead-letter"
"""On a copy in a dead-letter topic: why the event could not be published."""
ATTEMPTS: Final = "outbox-attempts"
"""On a copy in a dead-letter topic: how often it was tried."""
PAYLOAD_OMITTED: Final = "outbox-payload-omitted"
"""On a copy in a dead-letter topic that would have been too large with its payload."""
REPLAY: Final = "outbox-replay"
"""On an event that `outbox replay` sends once more: when the replay was asked for."""

_HEADER_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FIELDS: Final = {CONTENT_TYPE: "content_type", IDEMPOTENCY_KEY: "idempotency_key", CE_SUBJECT: "subject"}
"""Headers that an event has a field for. The row keeps them among its headers."""


@dataclass(frozen=True, slots=True, kw_only=False)
class Event:
    """Something that happened to an aggregate, to be written in the transaction that changes the aggregate.

    aggregate_type  what it happened to: ``"Order"``. Decides the topic. 1-200 characters.
    aggregate_id    which one: ``"4711"``, or the row's own int or UUID, which become text. The Kafka key: events of one
                    aggregate keep their order. 1-1000 characters.
    event_type      what happened: ``"OrderPlaced"``. 1-200 characters.
    payload         a dict, list, dataclass or pydantic model (sent as JSON), bytes (sent unchanged), or None: a
                    tombstone, which deletes the key from a compacted topic. An orjson.Fragment in it is not checked.
    headers         text to text, sent as Kafka headers besides the relay's own.
    event_id        the id by which consumers recognize the event. Unless given, each ``add`` makes a new UUIDv7 and
                    returns it: an Event that is added twice is two events. A UUID of another version works, but see
                    docs/operations/offsets.md on how long consumers remember it; an event that is due in more than a
                    week gets a UUIDv4. Not compared: two events with the same contents are equal.
    content_type    of a bytes payload; JSON payloads are ``application/json`` unless a ``+json`` type is given.
    idempotency_key of your business: two events with the same key are the same fact, such as one for each request or
                    payment. Sent as the header ``idempotency-key``, which is otherwise the event's id. By itself it
                    prevents nothing: see ``Outbox(unique_keys=True)``, and ``Dedup(key="idempotency-key")`` of the
                    consumers. 1-255 bytes, no control characters.
    subject         what it is about, if that is not the aggregate whose events it is ordered with: text, or a row's int
                    or UUID. Sent as the header ``ce_subject``, which is otherwise the aggregate_id. 1-1000 characters.

    Raises EventError naming the field when a name is empty, too long, or contains a NUL character.
    """

    aggregate_type: str
    aggregate_id: str
    event_type: str
    payload: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    event_id: UUID | None = field(default=None, compare=False)
    content_type: str | None = None
    idempotency_key: str | None = field(default=None, kw_only=True)
    subject: str | None = field(default=None, kw_only=True)

    if TYPE_CHECKING:

        def __init__(
            self,
            aggregate_type: str,
            aggregate_id: str | int | UUID,
            event_type: str,
            payload: Any = None,
            headers: Mapping[str, str] = ...,
            event_id: UUID | None = None,
            content_type: str | None = None,
            *,
            idempotency_key: str | None = None,
            subject: str | int | UUID | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        check_text("aggregate_type", self.aggregate_type, MAX_AGGREGATE_TYPE)
        object.__setattr__(self, "aggregate_id", _key_text("aggregate_id", self.aggregate_id))
        check_text("aggregate_id", self.aggregate_id, MAX_AGGREGATE_ID)
        check_text("event_type", self.event_type, MAX_EVENT_TYPE)
        if self.event_id is not None:
            check_event_id(self.event_id)
        if self.content_type is not None:
            check_text("content_type", self.content_type, MAX_CONTENT_TYPE)
        if self.idempotency_key is not None:
            _check_idempotency_key(self.idempotency_key)
        if self.subject is not None:
            object.__setattr__(self, "subject", _key_text("subject", self.subject))
            check_text("subject", self.subject, MAX_AGGREGATE_ID)
        if not isinstance(self.headers, Mapping):
            raise EventError("headers", f"must be a mapping of text to text, not {type(self.headers).__name__}")
        # A copy: what is checked here will be written, even if the caller changes its dict.
        object.__setattr__(self, "headers", dict(self.headers))
        for name, value in self.headers.items():
            check_header(name, value)


def check_event_id(value: object) -> None:
    """Raise EventError unless this is a UUID."""
    if not isinstance(value, UUID):
        raise EventError("event_id", f"must be a uuid.UUID, not {type(value).__name__}")


def id_of(event: Event, *, dated: bool = True) -> UUID:
    """Return the id under which an event is written: its own, or a new UUIDv7, which has the day; else a UUIDv4.

    dated  False if it is published so long after it is written that consumers may have forgotten the ids of that day.
    """
    if event.event_id is not None:
        return event.event_id
    made: UUID = uuid7() if dated else uuid4()
    return made


def _key_text(field_name: str, value: object) -> str:
    """Return the text of a row's id. Raises EventError for anything but text, an int or a UUID."""
    if isinstance(value, str):
        return value
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        # Python writes no numbers of more than 4,300 digits.
        if value.bit_length() > 4 * MAX_AGGREGATE_ID:
            raise EventError(field_name, f"is a number of more than {MAX_AGGREGATE_ID} digits")
        return str(int(value))
    if value is None:
        raise EventError(field_name, "is None: flush first, since a row has its id only after session.flush()")
    raise EventError(field_name, f"must be text, an int or a UUID, not {type(value).__name__}")


def check_text(field_name: str, value: object, longest: int) -> None:
    """Raise EventError unless value is text of 1 to ``longest`` characters that Postgres and Kafka can both hold."""
    if not isinstance(value, str):
        raise EventError(field_name, f"must be text, not {type(value).__name__}")
    if not value:
        raise EventError(field_name, "must not be empty")
    if len(value) > longest:
        raise EventError(field_name, f"has {len(value)} characters, {longest} are allowed")
    if "\0" in value:
        raise EventError(field_name, "contains a NUL character, which Postgres can't store in text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise EventError(field_name, "contains a lone surrogate, which UTF-8 can't encode") from None


def _check_idempotency_key(value: object) -> None:
    """Raise EventError unless this can be an idempotency key."""
    name = "idempotency_key"
    check_text(name, value, MAX_IDEMPOTENCY_KEY)
    assert isinstance(value, str)
    if (size := len(value.encode())) > MAX_IDEMPOTENCY_KEY:
        raise EventError(name, f"has {size} bytes, {MAX_IDEMPOTENCY_KEY} are allowed")
    if found := _CONTROL.search(value):
        raise EventError(name, f"contains the control character {found[0]!r}")


def check_header(name: object, value: object) -> None:
    """Raise EventError unless an event may have this header."""
    shown = f"headers[{name!r}]"
    if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
        raise EventError(shown, "a header's name is 1 to 100 of A-Z a-z 0-9 . _ -")
    # In any case: many clients look headers up without regard to it, and would find either of two.
    lower = name.lower()
    if lower in _FIELDS:
        raise EventError(shown, f"must be given as the event's {_FIELDS[lower]}")
    if lower in RESERVED_HEADERS or lower.startswith(("ce_", RELAY_HEADER_PREFIX)):
        raise EventError(shown, "is a name that the relay sets itself; choose another")
    if lower in {TRACEPARENT, TRACESTATE} and name != lower:
        raise EventError(shown, f"must be written {lower!r}")
    if not isinstance(value, str):
        raise EventError(shown, f"must be text, not {type(value).__name__}")
    if "\0" in value:
        raise EventError(shown, "contains a NUL character, which Postgres can't store in jsonb")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise EventError(shown, "contains a lone surrogate, which UTF-8 can't encode") from None
