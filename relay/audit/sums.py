"""Counts and sums of events by minute: two readers compare millions of events without keeping any.

A sum is that of a keyed hash of each event, modulo 2^128. It does not depend on the order, and a pair does not cancel
out, as it would with XOR. The key is random: who can't read it can't make events whose hashes add up to the same.
Operators and the page can.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, LiteralString, NamedTuple

from psycopg import sql

WINDOW_SECONDS: Final = 60
MODULUS: Final = 1 << 128
_VERSION_7: Final = 7
_VARIANT: Final = 2


class Window(NamedTuple):
    """The events of one topic that were written in one minute. ``minute`` counts from 1970, UTC."""

    topic: str
    minute: int

    @property
    def start(self) -> dt.datetime:
        return minute_start(self.minute)


@dataclass(frozen=True, slots=True)
class Sum:
    """A number of events, and the sum of their hashes."""

    events: int = 0
    hashes: int = 0

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.events + other.events, (self.hashes + other.hashes) % MODULUS)


NOTHING: Final = Sum()


def unlike(known: Mapping[Window, Sum], written: Mapping[Window, Sum], former: Collection[str] = ()) -> list[Window]:
    """Return the windows whose ledger sums differ from what is known.

    None of a minute of which that is equal over all topics: then events went elsewhere, as routes have changed since.
    Topics that are ``former`` count only for that: none of them, one, or all, as some may be another outbox's.
    """
    here, there = by_minute(known), by_minute(written)
    routed = {window: one for window, one in known.items() if window.topic not in former}
    ours = by_minute(routed)
    equal = {minute for minute, one in there.items() if one in (here[minute], ours[minute])}
    equal |= {
        window.minute
        for window, one in known.items()
        if window.topic in former and ours[window.minute] + one == there[window.minute]
    }
    return [
        window for window, one in routed.items() if one != written.get(window, NOTHING) and window.minute not in equal
    ]


def by_minute(windows: Mapping[Window, Sum]) -> defaultdict[int, Sum]:
    found: defaultdict[int, Sum] = defaultdict(Sum)
    for window, one in windows.items():
        found[window.minute] += one
    return found


def hash_of(key: bytes, content: bytes) -> int:
    """Return the keyed hash: the first 128 bits of SHA-256 over the key and the content."""
    return int.from_bytes(sha256(key + content).digest()[:16])


def minute_of(time: dt.datetime) -> int:
    return int(time.timestamp() // WINDOW_SECONDS)


def minute_start(minute: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(minute * WINDOW_SECONDS, dt.UTC)


def minute_of_id(event_id: bytes) -> int | None:
    """Return the minute in a UUID of version 7 (RFC 9562: the first 48 bits are Unix milliseconds), else None."""
    if event_id[6] >> 4 != _VERSION_7 or event_id[8] >> 6 != _VARIANT:
        return None
    return int.from_bytes(event_id[:6]) // (1000 * WINDOW_SECONDS)


def first_id(minute: int) -> str:
    """Return the lowest UUID of version 7 of a minute, to compare ids with."""
    return str(uuid.UUID(int=(minute * WINDOW_SECONDS * 1000) << 80))


HAS_TIME: Final = """(pg_catalog.get_byte(pg_catalog.uuid_send({id}), 6) >> 4 = 7
       AND pg_catalog.get_byte(pg_catalog.uuid_send({id}), 8) >> 6 = 2)"""
"""SQL: whether ``{id}`` is a UUID of version 7."""

MINUTE: Final = """(('x' || pg_catalog.left(pg_catalog.encode(pg_catalog.uuid_send({id}), 'hex'), 12))::bit(48)::bigint
        / 60000)"""
"""SQL: the minute in a UUID of version 7."""

_EVENT_MINUTE: Final = """CASE WHEN {has_time} THEN {minute_of_id}
            ELSE pg_catalog.floor(extract(epoch FROM {created_at}) / 60)::bigint END"""

_HALVES: Final = """
 CROSS JOIN LATERAL (SELECT pg_catalog.left(
        pg_catalog.encode(pg_catalog.sha256(%(key)s::bytea || {content}), 'hex'), 32) AS digits OFFSET 0) AS {digits}
 CROSS JOIN LATERAL (SELECT ('x' || pg_catalog.left({digits}.digits, 16))::bit(64)::bigint AS high,
                            ('x' || pg_catalog.right({digits}.digits, 16))::bit(64)::bigint AS low) AS {name}"""

_TOTAL: Final = """(sum({name}.high) FILTER (WHERE {where}) * 18446744073709551616
        + sum({name}.low) FILTER (WHERE {where})
        + 18446744073709551616 * count(*) FILTER (WHERE {name}.low < 0 AND {where}))"""


def event_minute(names: Mapping[str, sql.Composable]) -> dict[str, sql.Composable]:
    """Return SQL over an event's columns: ``has_time``, ``minute_of_id``, and ``minute``, else by ``created_at``."""
    event_id = sql.SQL("event_id")
    has_time, of_id = (sql.SQL(text).format(id=event_id) for text in (HAS_TIME, MINUTE))
    minute = sql.SQL(_EVENT_MINUTE).format(has_time=has_time, minute_of_id=of_id, created_at=names["created_at"])
    return {"has_time": has_time, "minute_of_id": of_id, "minute": minute}


def halves(name: str, content: sql.Composable) -> sql.Composed:
    """Return SQL for FROM: the two halves of the keyed hash of ``content``, for ``total`` of the same name."""
    return sql.SQL(_HALVES).format(content=content, name=sql.Identifier(name), digits=sql.Identifier(f"{name} digits"))


def total(name: str, where: LiteralString = "true") -> sql.Composed:
    """Return SQL: the sum of the hashes of ``halves``, to be reduced by ``reduced``; NULL over no rows.

    The low halves are signed: 2^64 is added for each that is negative. In the high halves that makes no difference
    modulo 2^128.
    """
    return sql.SQL(_TOTAL).format(name=sql.Identifier(name), where=sql.SQL(where))


def reduced(found: object) -> int:
    """Return a sum that Postgres computed, modulo 2^128; 0 for NULL."""
    return 0 if found is None else int(str(found)) % MODULUS
