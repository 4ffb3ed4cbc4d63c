"""Arrow's values as Postgres takes them in COPY: the binary format, or as text what CSV can't have of itself.

https://www.postgresql.org/docs/current/sql-copy.html, "Binary Format"; the formats of types are in their ``recv``
functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs import ids as identity
from spark_jobs.postgres.copying import Unfit

POSTGRES_DAY: Final = 10_957
"""The epoch of Postgres, 2000-01-01, in days since 1970-01-01."""

_A_DAY: Final = 86_400_000_000
_POSTGRES_MICROSECOND: Final = POSTGRES_DAY * _A_DAY
# 0001-01-01 and the last microsecond of 9999.
_FIRST: Final = -62_135_596_800_000_000
_LAST: Final = 253_402_300_799_999_999
# Arrow's offsets have 32 bits; and the server need not wait until the whole batch is encoded.
_AT_ONCE: Final = 32 * 1024 * 1024
# Decimals of up to 18 digits fit the 64-bit integers that numpy computes with.
_MOST_DIGITS: Final = 18
# The other forms that Postgres accepts: in braces, and with dashes after any four digits.
_UNUSUAL_UUID: Final = re.compile(r"(\{)?[0-9a-fA-F]{4}(?:-?[0-9a-fA-F]{4}){7}(?(1)\})")

Encoder = Callable[[pa.Array], np.ndarray[Any, Any]]
"""Encodes the values of a type of fixed width as rows of bytes, which are undefined where the column is NULL."""


def as_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with bytes in the text form of bytea. Raises Unfit for times that CSV can't represent."""
    for index, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type) or pa.types.is_date32(field.type):
            with _naming(field.name):
                _require_within(batch.column(index))
        if pa.types.is_binary(field.type):
            texts = [None if value is None else "\\x" + value.hex() for value in batch.column(index).to_pylist()]
            batch = batch.set_column(index, field.name, pa.array(texts, pa.string()))
    return batch


@contextmanager
def _naming(column: str) -> Iterator[None]:
    try:
        yield
    except Unfit as error:
        raise Unfit(f"column {column} holds {error}", error.sqlstate) from error


def parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Return the batch in parts of limited size. Parts need not have equally many rows: a few rows may be large."""
    if batch.num_rows < 2 or batch.nbytes <= _AT_ONCE:
        yield batch
        return
    half = batch.num_rows // 2
    yield from parts(batch.slice(0, half))
    yield from parts(batch.slice(half))


def rows_of(batch: pa.RecordBatch, fixed: Mapping[str, Encoder], texts: Mapping[str, bytes]) -> memoryview:
    """Encode rows: the number of fields, then for each field its length, -1 for NULL, and its bytes."""
    rows = batch.num_rows
    pieces: list[pa.Array | np.ndarray[Any, Any]] = [_repeated(len(fixed) + len(texts), ">i2", rows)]
    for name, encode in fixed.items():
        column = batch.column(name)
        with _naming(name):
            encoded = encode(column)
        if not column.null_count:
            pieces += [_repeated(encoded.shape[1], ">i4", rows), encoded]
            continue
        there = column.is_valid().to_numpy(zero_copy_only=False)
        pieces.append(_bytes_of(np.where(there, encoded.shape[1], -1), ">i4"))
        ends = np.concatenate([[0], np.cumsum(there * encoded.shape[1])]).astype(np.int32)
        pieces.append(_binary(ends, encoded[there]))
    for name, before in texts.items():
        column = batch.column(name)
        lengths = pc.fill_null(pc.add(pc.binary_length(column), len(before)), -1).to_numpy(zero_copy_only=False)
        text = column.cast(pa.binary())
        if before:
            text = pc.binary_join_element_wise(pa.scalar(before, pa.binary()), text, pa.scalar(b"", pa.binary()))
        pieces += [_bytes_of(lengths, ">i4"), pc.fill_null(text, b"") if text.null_count else text]
    joined = pc.binary_join_element_wise(*_merged(pieces), pa.scalar(b"", pa.binary()))
    _, ends, data = joined.buffers()
    return memoryview(data)[: int(np.frombuffer(ends, np.int32)[rows])]


def _merged(pieces: Sequence[pa.Array | np.ndarray[Any, Any]]) -> Iterator[pa.Array]:
    """Join neighbouring pieces of fixed width into one."""
    widths: list[np.ndarray[Any, Any]] = []
    for piece in [*pieces, None]:
        if isinstance(piece, np.ndarray):
            widths.append(piece)
            continue
        if widths:
            wide = np.concatenate(widths, axis=1)
            yield _binary(np.arange(0, wide.size + 1, wide.shape[1], dtype=np.int32), wide)
            widths = []
        if piece is not None:
            yield piece


def _binary(ends: np.ndarray[Any, Any], data: np.ndarray[Any, Any]) -> pa.Array:
    return pa.Array.from_buffers(
        pa.binary(), len(ends) - 1, [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(data))]
    )


def _repeated(value: int, kind: str, rows: int) -> np.ndarray[Any, Any]:
    return np.tile(np.array([value], kind).view(np.uint8), (rows, 1))


def _bytes_of(values: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    encoded = values.astype(kind)
    return encoded.view(np.uint8).reshape(len(encoded), encoded.dtype.itemsize)


def encoder_of(kind: str) -> Encoder | bytes | None:
    """Return how to encode a type: a function for fixed width, a prefix of the bytes for texts, None if unknown."""
    if kind in _NUMBERS:
        return lambda column: _bytes_of(_values(column), _NUMBERS[kind])
    if kind in _TEXTS:
        return _TEXTS[kind]
    if kind in _OTHERS:
        return _OTHERS[kind]
    if kind.startswith("numeric("):
        precision, _, scale = kind.removeprefix("numeric(").rstrip(")").partition(",")
        if int(precision) <= _MOST_DIGITS:
            return lambda column: _decimals(column, int(precision), int(scale or "0"))
    return None


def _values(column: pa.Array) -> np.ndarray[Any, Any]:
    """Return the values as a numpy array, with 0 for NULL."""
    found: np.ndarray[Any, Any] = (pc.fill_null(column, 0) if column.null_count else column).to_numpy(
        zero_copy_only=False
    )
    return found


def _booleans(column: pa.Array) -> np.ndarray[Any, Any]:
    return _bytes_of(_values(column.cast(pa.uint8())), "u1")


def _days(column: pa.Array) -> np.ndarray[Any, Any]:
    _require_within(column)
    return _bytes_of(_values(column.cast(pa.int32())) - POSTGRES_DAY, ">i4")


def _require_within(column: pa.Array) -> None:
    """Raise Unfit for times or dates outside the years 1 to 9999, which CSV can't represent."""
    dates = pa.types.is_date32(column.type)
    values = column.cast(pa.int32() if dates else pa.int64())
    first, last = (_FIRST // _A_DAY, _LAST // _A_DAY) if dates else (_FIRST, _LAST)
    if pc.or_(pc.less(values, first), pc.greater(values, last)).true_count:
        raise Unfit("a time or date beyond the years 1 to 9999", "22008")


def _timestamps(column: pa.Array) -> np.ndarray[Any, Any]:
    _require_within(column)
    return _bytes_of(_values(column.cast(pa.int64())) - _POSTGRES_MICROSECOND, ">i8")


def _uuids(column: pa.Array) -> np.ndarray[Any, Any]:
    ids, wrong = identity.parsed(column)
    for row in np.flatnonzero(wrong & column.is_valid().to_numpy(zero_copy_only=False)):
        text = column[int(row)].as_py()
        if not _UNUSUAL_UUID.fullmatch(text):
            raise Unfit("a text that is no UUID", "22P02")
        ids[row] = np.frombuffer(UUID(text).bytes, np.uint8)
    found: np.ndarray[Any, Any] = ids
    return found


def _decimals(column: pa.Array, precision: int, scale: int) -> np.ndarray[Any, Any]:
    """Encode decimals as groups of four digits, with the same number of groups for all."""
    whole_groups, groups_behind = -(-(precision - scale) // 4), -(-scale // 4)
    # The unscaled number: 128 bits, of which these precisions need the lower 64.
    numbers = column.cast(pa.decimal128(precision, scale))
    first, last = numbers.offset, numbers.offset + len(numbers)
    halves = np.frombuffer(numbers.buffers()[1], np.int64).reshape(-1, 2)[first:last, 0]
    unscaled = np.abs(halves)
    whole, behind = unscaled // 10**scale, unscaled % 10**scale
    digits = []
    for _ in range(whole_groups):
        digits.append(whole % 10_000)
        whole //= 10_000
    digits.reverse()
    for group in range(groups_behind):
        # How many digits follow the group. The last group is padded with zeros.
        end = scale - 4 * (group + 1)
        digits.append(behind // 10**end % 10_000 if end >= 0 else behind % 10 ** (4 + end) * 10**-end)
    rows = len(column)
    pieces = [
        _repeated(whole_groups + groups_behind, ">i2", rows),
        _repeated(whole_groups - 1, ">i2", rows),
        _bytes_of(np.where(halves < 0, 0x4000, 0), ">u2"),
        _repeated(scale, ">i2", rows),
        *(_bytes_of(group, ">i2") for group in digits),
    ]
    return np.concatenate(pieces, axis=1)


_NUMBERS: Final = {"smallint": ">i2", "integer": ">i4", "bigint": ">i8", "real": ">f4", "double precision": ">f8"}
# jsonb has a version number before the text.
_TEXTS: Final = {"text": b"", "bytea": b"", "json": b"", "jsonb": b"\x01"}
_OTHERS: Final[dict[str, Encoder]] = {
    "boolean": _booleans,
    "date": _days,
    "timestamptz": _timestamps,
    "timestamp": _timestamps,
    "uuid": _uuids,
}
