"""Message ids as UUIDs, many at once.

The same rules as in SQL (consumer.ids.DAY_OF_ID) and Spark (strategies.uuid8); a test compares all three.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.consumer.ids import DAY_MILLISECONDS, LAST_DAY

_NO_DIGIT: Final = 255
_VALUES: Final = np.full(256, _NO_DIGIT, np.uint8)
for _value, _digit in enumerate("0123456789abcdef"):
    _VALUES[[ord(_digit), ord(_digit.upper())]] = _value
_DASHES: Final = [8, 13, 18, 23]
_DIGITS: Final = [place for place in range(36) if place not in _DASHES]

Ids = Any
"""UUIDs as a numpy array with 16 bytes in each row."""


def parsed(texts: pa.Array) -> tuple[Ids, Any]:
    """Parse UUIDs in the form 8-4-4-4-12. Returns the UUIDs, and a mask of the texts that are not valid.

    texts  string or binary. Null is not valid. The UUID of an invalid text is zero.
    """
    if pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type):
        texts = texts.cast(pa.binary())
    ids = np.zeros((len(texts), 16), np.uint8)
    right = pc.fill_null(pc.equal(pc.binary_length(texts), 36), False)
    some = texts if right.true_count == len(texts) else texts.filter(right)
    _, offsets, data = some.buffers()
    valid = right.to_numpy(zero_copy_only=False)
    if len(some):
        first = int(np.frombuffer(offsets, np.int32)[some.offset])
        characters = np.frombuffer(data, np.uint8)[first : first + 36 * len(some)].reshape(-1, 36)
        values = _VALUES[characters[:, _DIGITS]]
        fine = (values.max(axis=1) != _NO_DIGIT) & (characters[:, _DASHES] == ord("-")).all(axis=1)
        joined = (values[:, 0::2] << 4) | (values[:, 1::2] & 15)
        joined[~fine] = 0
        valid = valid.copy()
        ids[valid] = joined
        valid[valid] = fine
    return ids, ~valid


def days(ids: Ids) -> Any:
    """Return the day of each UUID of version 7 (RFC 9562), counted from 1970-01-01; day 0 for all without a time."""
    wide = np.zeros((len(ids), 8), np.uint8)
    wide[:, 2:] = ids[:, :6]
    found = (wide.view(">u8").ravel() // DAY_MILLISECONDS).astype(np.int32)
    found[(ids[:, 6] >> 4 != 7) | (ids[:, 8] >> 6 != 2) | (found > LAST_DAY)] = 0
    return found


def in_order(ids: Ids) -> Any:
    """Return the UUIDs sorted by their days, and within a day as the database sorts them."""
    halves = ids.view(">u8")
    return ids[np.lexsort((halves[:, 1], halves[:, 0], days(ids)))]
