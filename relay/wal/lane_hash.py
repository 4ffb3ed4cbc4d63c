"""The lane of a key, as Postgres computes it for ``events.lane``: pgoutput does not send generated columns.

(Postgres 18 can, if the publication has that option.) The hash is Postgres's own for text (``hashtextextended``: Bob
Jenkins' lookup3 with a 64-bit seed, on the bytes of the text). A relay compares a few values with the server's before
it trusts these.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Final

_WORDS: Final = Struct("<III")
_MASK: Final = 0xFFFFFFFF

SAMPLES: Final = (
    ("Order", "4711"),
    ("Bestellung", "größer-als-zwölf-Bytes-€"),
    ("x", "0123456789abcdef0123456789abcdef"),
    ("account", "a"),
)
"""Keys to compare with a server: short and long, with bytes above 127."""


@lru_cache(maxsize=65_536)
def lane_of(aggregate_type: str, aggregate_id: str, lanes: int) -> int:
    return abs(hash_text(aggregate_id, _type_hash(aggregate_type))) % lanes


@lru_cache(maxsize=1024)
def _type_hash(aggregate_type: str) -> int:
    return hash_text(aggregate_type, 0)


def hash_text(text: str, seed: int) -> int:
    """Return ``hashtextextended(text, seed)`` of a database in UTF-8: a signed 64-bit number."""
    data = text.encode()
    length = len(data)
    a = b = c = (0x9E3779B9 + length + 3923095) & _MASK
    if seed:
        a = (a + (seed >> 32)) & _MASK
        b = (b + seed) & _MASK
        a, b, c = _mix(a, b, c)
    whole = length // 12 * 12
    for at in range(0, whole, 12):
        x, y, z = _WORDS.unpack_from(data, at)
        a, b, c = _mix((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)
    x, y, z = _WORDS.unpack(data[whole:].ljust(12, b"\0"))
    # The lowest byte of the last word is reserved for the length, which is in all three already.
    a, b, c = (a + x) & _MASK, (b + y) & _MASK, (c + (z << 8)) & _MASK
    c = ((c ^ b) - _rotated(b, 14)) & _MASK
    a = ((a ^ c) - _rotated(c, 11)) & _MASK
    b = ((b ^ a) - _rotated(a, 25)) & _MASK
    c = ((c ^ b) - _rotated(b, 16)) & _MASK
    a = ((a ^ c) - _rotated(c, 4)) & _MASK
    b = ((b ^ a) - _rotated(a, 14)) & _MASK
    c = ((c ^ b) - _rotated(b, 24)) & _MASK
    value: int = b << 32 | c
    return value - (1 << 64) if value >> 63 else value


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    a = ((a - c) & _MASK) ^ _rotated(c, 4)
    c = (c + b) & _MASK
    b = ((b - a) & _MASK) ^ _rotated(a, 6)
    a = (a + c) & _MASK
    c = ((c - b) & _MASK) ^ _rotated(b, 8)
    b = (b + a) & _MASK
    a = ((a - c) & _MASK) ^ _rotated(c, 16)
    c = (c + b) & _MASK
    b = ((b - a) & _MASK) ^ _rotated(a, 19)
    a = (a + c) & _MASK
    c = ((c - b) & _MASK) ^ _rotated(b, 4)
    b = (b + a) & _MASK
    return a, b, c


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & _MASK
