"""What an event says, as bytes that are the same in the archive and on Kafka: to notice when a payload was changed.

The key, the event type, the value and the writer's own headers, in the order of their names, each with its length.
Headers that the relay makes are left out; so are the content type, which it adds where the writer gave none, and for
the same reason an idempotency key that is the event's id, and a subject that is the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, Final, LiteralString

from psycopg import sql

from outbox.event import CE_ID, CE_SUBJECT, CE_TYPE, CONTENT_TYPE, EVENT_TYPE, IDEMPOTENCY_KEY, RESERVED_HEADERS

_LENGTH: Final = Struct(">i")
_NULL: Final = _LENGTH.pack(-1)

_TEXT: Final = "pg_catalog.int4send(pg_catalog.octet_length({bytes})) || {bytes}"
_UTF8: Final = "pg_catalog.convert_to({column}, 'UTF8')"
_CONTENT: Final = """(
    {key} || {event_type}
    || coalesce({payload}, pg_catalog.int4send(pg_catalog.octet_length(payload_bytes)) || payload_bytes,
                '\\xffffffff'::bytea)
    || CASE WHEN headers IS NULL THEN ''::bytea ELSE coalesce(
           (SELECT pg_catalog.string_agg({name} || {value}, ''::bytea ORDER BY own.key COLLATE pg_catalog."C")
              FROM pg_catalog.jsonb_each_text(headers) AS own WHERE own.key <> 'content-type'
               AND (own.key <> 'idempotency-key' OR own.value <> event_id::text)
               AND (own.key <> 'ce_subject' OR own.value <> aggregate_id)), ''::bytea) END)"""


def content() -> sql.Composed:
    """Return SQL over an event's columns: what it says."""

    def text(column: LiteralString) -> sql.Composed:
        return sql.SQL(_TEXT).format(bytes=sql.SQL(_UTF8).format(column=sql.SQL(column)))

    return sql.SQL(_CONTENT).format(
        key=text("aggregate_id"),
        event_type=text("event_type"),
        payload=text("payload::text"),
        name=text("own.key"),
        value=text("own.value"),
    )


def content_of(key: bytes | None, value: bytes | None, headers: Mapping[str, Any]) -> bytes:
    event_type = _bytes(headers.get(CE_TYPE, headers.get(EVENT_TYPE, b"")))
    parts = [_sized(key), _sized(event_type), _sized(value)]
    for name, sized in _own(tuple(headers)):
        text = _bytes(headers[name])
        usual = _bytes(headers.get(CE_ID)) if name == IDEMPOTENCY_KEY else key if name == CE_SUBJECT else None
        if text != usual:
            parts += sized, _sized(text)
    return b"".join(parts)


# Most events of a topic have the same names.
@lru_cache(maxsize=64)
def _own(names: Sequence[str]) -> Sequence[tuple[str, bytes]]:
    """Return the names that may be the writer's own, in the order of their bytes, which come with their length."""
    own = [
        name
        for name in names
        if not ((name.startswith("ce_") and name != CE_SUBJECT) or name in RESERVED_HEADERS or name == CONTENT_TYPE)
    ]
    return [(name, _sized(name.encode())) for name in sorted(own, key=str.encode)]


def _sized(content: bytes | None) -> bytes:
    return _NULL if content is None else _LENGTH.pack(len(content)) + content


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value or "").encode()
