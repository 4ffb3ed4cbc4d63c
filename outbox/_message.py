"""Events as logical decoding messages: what ``transport="message"`` writes and the relay's WAL source reads. No I/O.

The content of a message is one line of JSON, and then the payload's bytes exactly as Kafka will carry them:

    {"version":1,"event_id":"…","aggregate_type":"Order","aggregate_id":"4711","event_type":"OrderPlaced",
     "headers":{"tenant":"acme"},"payload":"json"}⏎{"total":"42.00"}

``headers`` may be absent; ``payload`` is the kind of what follows the line: ``json``, ``bytes`` or ``none``. There are
no other fields: a new field means a new version. No table with CHECKs stands between the writer and the relay here, so
``decode`` applies the same rules to a message as the table does to a row.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import orjson

from outbox import _payload
from outbox.errors import EventError, MessageError
from outbox.event import (
    CONTENT_TYPE,
    MAX_AGGREGATE_ID,
    MAX_AGGREGATE_TYPE,
    MAX_CONTENT_TYPE,
    MAX_EVENT_BYTES,
    MAX_EVENT_TYPE,
    check_header,
    check_text,
)

VERSION: Final = 1

DEFAULT_SLOT: Final = "outbox_relay"
"""The replication slot that the relay reads from by default."""

MAX_MESSAGE_BYTES: Final = MAX_EVENT_BYTES + 20_000
"""Longer messages are rejected unread. MAX_EVENT_BYTES counts payload, key and headers; the 20,000 cover the types, the
field names, and a key whose every character is escaped in JSON."""

_NEEDED: Final = ("version", "event_id", "aggregate_type", "aggregate_id", "event_type", "payload")
_FIELDS: Final = frozenset({*_NEEDED, "headers"})
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# An escaped NUL, not an escaped backslash followed by u0000.
_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


class EventMessage(NamedTuple):
    """The content of an event's message.

    A tuple, not a dataclass: a relay creates tens of thousands of these a second.
    ``event_id`` is a UUID's canonical text. ``headers`` are the event's own with the trace and ``content-type``, as in
    the table's column. ``payload`` is None for a tombstone; ``json`` says whether it is JSON text.
    """

    event_id: str
    aggregate_type: str
    aggregate_id: str
    event_type: str
    headers: dict[str, str] | None
    payload: bytes | None
    json: bool


def message_prefix(schema: str) -> str:
    """Return the prefix of this outbox's messages in the WAL."""
    return f"outbox.{schema}"


def encode(message: EventMessage) -> bytes:
    """Return the content of an event's message. Checks nothing: Event and ``_payload`` have checked the values."""
    head: dict[str, Any] = {
        "version": VERSION,
        "event_id": message.event_id,
        "aggregate_type": message.aggregate_type,
        "aggregate_id": message.aggregate_id,
        "event_type": message.event_type,
    }
    if message.headers is not None:
        head["headers"] = message.headers
    head["payload"] = "none" if message.payload is None else "json" if message.json else "bytes"
    # The options allow header names that are members of a StrEnum, and append the newline.
    line = orjson.dumps(head, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE)
    return line + (message.payload or b"")


def decode(content: bytes) -> EventMessage:
    """Return the event in a message's content. Raises MessageError if it is not a valid event.

    The length is checked first: any role of the database can write a message of a gigabyte, unless EXECUTE on
    pg_logical_emit_message was revoked from PUBLIC, and parsing that would take minutes and exhaust the relay's memory.
    """
    if len(content) > MAX_MESSAGE_BYTES:
        raise MessageError(f"has {len(content):,} bytes; no event takes more than {MAX_MESSAGE_BYTES:,}")
    line, newline, rest = content.partition(b"\n")
    if not newline:
        raise MessageError(f"no line ends in its {len(content):,} bytes")
    head = _head(line)
    try:
        payload, is_json = _body(head["payload"], rest)
        message = EventMessage(
            _event_id(head["event_id"]),
            _text("aggregate_type", head, MAX_AGGREGATE_TYPE),
            _text("aggregate_id", head, MAX_AGGREGATE_ID),
            _text("event_type", head, MAX_EVENT_TYPE),
            _headers(head["headers"]) if "headers" in head else None,
            payload,
            is_json,
        )
        _payload.check_size(
            message.aggregate_id,
            _payload.Encoded(payload if is_json else None, None if is_json else payload, None),
            None if message.headers is None else orjson.dumps(message.headers),
            MAX_EVENT_BYTES,
        )
    except EventError as error:
        raise MessageError(str(error)) from error
    except RecursionError as error:
        # Only the exact size of a payload near the limit is computed recursively; orjson writes about 250 levels, and
        # reads 1024.
        raise MessageError("payload: is nested too deeply") from error
    return message


def _head(line: bytes) -> dict[str, Any]:
    try:
        head = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise MessageError(f"its first line is no JSON: {error}") from error
    if not isinstance(head, dict):
        raise MessageError(f"its first line is no JSON object but a {type(head).__name__}")
    # Checked before the other fields, which belong to this version. ``True`` equals 1, but is not a version.
    version = head.get("version")
    if type(version) is not int:
        raise MessageError("version: is missing, or no integer")
    if version != VERSION:
        raise MessageError(f"version: is {version}, only {VERSION} is known here; a newer writer needs a newer relay")
    if missing := [name for name in _NEEDED if name not in head]:
        raise MessageError(f"{missing[0]}: is missing")
    if unknown := head.keys() - _FIELDS:
        raise MessageError(f"{min(unknown)!r}: no field of version {VERSION}")
    return head


def _event_id(value: object) -> str:
    # Lower case: consumers compare event ids as text.
    canonical = value.lower() if isinstance(value, str) else ""
    if not _UUID.fullmatch(canonical):
        raise EventError("event_id", "must be a UUID as text, like 0198a7c4-5d3e-7b21-9c55-2f6d8e1a4b70")
    return canonical


def _text(name: str, head: dict[str, Any], longest: int) -> str:
    value = head[name]
    check_text(name, value, longest)
    assert isinstance(value, str)
    return value


def _headers(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise EventError("headers", f"must be an object, not {type(value).__name__}")
    for name, text in value.items():
        if name == CONTENT_TYPE:
            check_text(f"headers[{name!r}]", text, MAX_CONTENT_TYPE)
        else:
            check_header(name, text)
    return value


def _body(kind: object, rest: bytes) -> tuple[bytes | None, bool]:
    match kind:
        case "json":
            _check_json(rest)
            return rest, True
        case "bytes":
            return rest, False
        case "none":
            if rest:
                raise EventError("payload", f'is "none", but {len(rest):,} bytes follow the line')
            return None, False
        case _:
            raise EventError("payload", 'must be "json", "bytes" or "none"')


def _check_json(text: bytes) -> None:
    """Raise EventError unless this is JSON that jsonb can hold too: consumers and dead letters may store it there."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise EventError("payload", f"is no JSON: {error}") from error
    if b"\\u0000" in text and _NUL.search(text):
        raise EventError("payload", "holds a NUL character, which Postgres can't store in jsonb")
