"""Arrow's rows into a table by COPY, and no row through Python.

In the binary format where all of the columns' types are known here: the server has nothing to parse then, which is
most of what COPY costs it. As CSV, which Arrow writes, for all other types.
https://www.postgresql.org/docs/current/sql-copy.html, "Binary Format"; the types' own are in their ``recv`` functions.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

HEAD: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TAIL: Final = b"\xff\xff"
POSTGRES_DAY: Final = 10_957
"""2000-01-01, from where Postgres counts, in days since 1970-01-01."""

_A_DAY: Final = 86_400_000_000
_POSTGRES_MICROSECOND: Final = POSTGRES_DAY * _A_DAY
# 0001-01-01 and the last microsecond of 9999.
_FIRST: Final = -62_135_596_800_000_000
_LAST: Final = 253_402_300_799_999_999
# Arrow has 32-bit offsets, and the server need not wait for the whole batch to be spelt.
_AT_ONCE: Final = 32 * 1024 * 1024
# What numpy reckons with in 64 bits.
_MOST_DIGITS: Final = 18

Spell = Callable[["pa.Array"], "np.ndarray[Any, Any]"]
"""Return values of a fixed width as rows of bytes. Where the column is NULL they say nothing."""


class Unfit(Exception):
    """A value that has no spelling as its column's type."""


def copy_rows(
    cursor: psycopg.Cursor[Any], table: sql.Composable, columns: Mapping[str, str], batches: Iterable[pa.RecordBatch]
) -> None:
    """Stream these columns of the batches into columns of the same names and these types. Raises Unfit."""
    spells = {name: _spell(kind) for name, kind in columns.items()}
    if None in spells.values():
        copy_csv(cursor, table, list(columns), batches)
        return
    # Those of a fixed width come first: together they are one piece of each row.
    fixed = {name: spell for name, spell in spells.items() if callable(spell)}
    texts = {name: spell for name, spell in spells.items() if isinstance(spell, bytes)}
    with cursor.copy(_into(table, [*fixed, *texts], "binary")) as copy:
        copy.write(HEAD)
        for batch in batches:
            for part in _parts(batch):
                copy.write(_rows(part, fixed, texts))
        copy.write(TAIL)


def copy_csv(
    cursor: psycopg.Cursor[Any], table: sql.Composable, columns: Sequence[str], batches: Iterable[pa.RecordBatch]
) -> None:
    """Stream these columns of the batches into a table, whatever it has for them that reads text. Raises Unfit."""
    from pyarrow import csv

    # "all_valid": every value in quotes and NULL bare, so that an empty text and NULL stay apart.
    options = csv.WriteOptions(include_header=False, quoting_style="all_valid")
    with cursor.copy(_into(table, columns, "csv")) as copy:
        for batch in batches:
            sink = io.BytesIO()
            csv.write_csv(_as_text(batch.select(list(columns))), sink, options)
            copy.write(sink.getbuffer())


def _into(table: sql.Composable, columns: Sequence[str], form: str) -> sql.Composed:
    listed = sql.SQL(", ").join(map(sql.Identifier, columns))
    return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT {})").format(table, listed, sql.SQL(form))


def _as_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return bytes as bytea reads them. Raises Unfit for times and dates of which Arrow would write another year."""
    import pyarrow as pa

    for index, field in enumerate(batch.schema):
        if has_beyond(field.type) and beyond(batch.column(index)).true_count:
            raise Unfit("a time beyond the years 1 to 9999")
        if pa.types.is_binary(field.type):
            texts = [None if value is None else "\\x" + value.hex() for value in batch.column(index).to_pylist()]
            batch = batch.set_column(index, field.name, pa.array(texts, pa.string()))
    return batch


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Return the batch in parts that are not too large. Not equal ones: a few rows may be most of it."""
    if batch.num_rows < 2 or batch.nbytes <= _AT_ONCE:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _parts(batch.slice(0, half))
    yield from _parts(batch.slice(half))


def _rows(batch: pa.RecordBatch, fixed: Mapping[str, Spell], texts: Mapping[str, bytes]) -> memoryview:
    """Spell rows: the number of fields, then each field behind its length, which is -1 for NULL."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = batch.num_rows
    pieces: list[pa.Array | np.ndarray[Any, Any]] = [_spread(len(fixed) + len(texts), ">i2", rows)]
    for name, spell in fixed.items():
        column = batch.column(name)
        spelt = spell(column)
        if not column.null_count:
            pieces += [_spread(spelt.shape[1], ">i4", rows), spelt]
            continue
        there = column.is_valid().to_numpy(zero_copy_only=False)
        pieces.append(_integers(np.where(there, spelt.shape[1], -1)))
        ends = np.concatenate([[0], np.cumsum(there * spelt.shape[1])]).astype(np.int32)
        pieces.append(_binary(ends, spelt[there]))
    for name, before in texts.items():
        column = batch.column(name)
        lengths = pc.fill_null(pc.add(pc.binary_length(column), len(before)), -1).to_numpy(zero_copy_only=False)
        text = column.cast(pa.binary())
        if before:
            text = pc.binary_join_element_wise(pa.scalar(before, pa.binary()), text, pa.scalar(b"", pa.binary()))
        pieces += [_integers(lengths), pc.fill_null(text, b"") if text.null_count else text]
    joined = pc.binary_join_element_wise(*_merged(pieces), pa.scalar(b"", pa.binary()))
    _, ends, data = joined.buffers()
    return memoryview(data)[: int(np.frombuffer(ends, np.int32)[rows])]


def _merged(pieces: Sequence[pa.Array | np.ndarray[Any, Any]]) -> Iterator[pa.Array]:
    """Return neighbours of a fixed width as one piece."""
    import numpy as np

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
    import numpy as np
    import pyarrow as pa

    return pa.Array.from_buffers(
        pa.binary(), len(ends) - 1, [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(data))]
    )


def _integers(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return _bytes_of(values, ">i4")


def _spread(value: int, kind: str, rows: int) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.tile(np.array([value], kind).view(np.uint8), (rows, 1))


def _bytes_of(values: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    import numpy as np

    spelt = values.astype(kind)
    return spelt.view(np.uint8).reshape(len(spelt), spelt.dtype.itemsize)


def _spell(kind: str) -> Spell | bytes | None:
    """How a type's values are spelt: those of a fixed width by a function; texts as they are, behind these bytes."""
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
    """Return values as numpy has them, zeros for NULLs."""
    import pyarrow.compute as pc

    found: np.ndarray[Any, Any] = (pc.fill_null(column, 0) if column.null_count else column).to_numpy(
        zero_copy_only=False
    )
    return found


def _truths(column: pa.Array) -> np.ndarray[Any, Any]:
    import pyarrow as pa

    return _bytes_of(_values(column.cast(pa.uint8())), "u1")


def _days(column: pa.Array) -> np.ndarray[Any, Any]:
    import pyarrow as pa

    if beyond(column).true_count:
        raise Unfit("a date beyond the years 1 to 9999")
    return _bytes_of(_values(column.cast(pa.int32())) - POSTGRES_DAY, ">i4")


def beyond(column: pa.Array) -> pa.Array:
    """Return which times or dates are not of the years 1 to 9999: neither CSV nor any calendar has them as they are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    dates = pa.types.is_date32(column.type)
    values = column.cast(pa.int32() if dates else pa.int64())
    first, last = (_FIRST // _A_DAY, _LAST // _A_DAY) if dates else (_FIRST, _LAST)
    return pc.fill_null(pc.or_(pc.less(values, first), pc.greater(values, last)), False)


def has_beyond(kind: pa.DataType) -> bool:
    """Return whether ``beyond`` is to be asked of columns of this type."""
    import pyarrow as pa

    return bool(pa.types.is_timestamp(kind) or pa.types.is_date32(kind))


def _moments(column: pa.Array) -> np.ndarray[Any, Any]:
    import pyarrow as pa

    if beyond(column).true_count:
        raise Unfit("a time beyond the years 1 to 9999")
    return _bytes_of(_values(column.cast(pa.int64())) - _POSTGRES_MICROSECOND, ">i8")


def _uuids(column: pa.Array) -> np.ndarray[Any, Any]:
    from spark_jobs import ids as identity

    ids, wrong = identity.parsed(column)
    if wrong[column.is_valid().to_numpy(zero_copy_only=False)].any():
        raise Unfit("a text that is no UUID")
    found: np.ndarray[Any, Any] = ids
    return found


def _decimals(column: pa.Array, precision: int, scale: int) -> np.ndarray[Any, Any]:
    """Spell decimals in groups of four digits: as many for each of them as the largest needs."""
    import numpy as np
    import pyarrow as pa

    whole_groups, groups_behind = -(-(precision - scale) // 4), -(-scale // 4)
    # The unscaled number: 128 bits, of which these precisions need the lower 64.
    spelt = column.cast(pa.decimal128(precision, scale))
    halves = np.frombuffer(spelt.buffers()[1], np.int64).reshape(-1, 2)[spelt.offset : spelt.offset + len(spelt), 0]
    unscaled = np.abs(halves)
    whole, behind = unscaled // 10**scale, unscaled % 10**scale
    digits = []
    for _ in range(whole_groups):
        digits.append(whole % 10_000)
        whole //= 10_000
    digits.reverse()
    for group in range(groups_behind):
        # The group's digits end this far from the last one; the last group is filled up with zeros.
        end = scale - 4 * (group + 1)
        digits.append(behind // 10**end % 10_000 if end >= 0 else behind % 10 ** (4 + end) * 10**-end)
    rows = len(column)
    pieces = [
        _spread(whole_groups + groups_behind, ">i2", rows),
        _spread(whole_groups - 1, ">i2", rows),
        _bytes_of(np.where(halves < 0, 0x4000, 0), ">u2"),
        _spread(scale, ">i2", rows),
        *(_bytes_of(group, ">i2") for group in digits),
    ]
    return np.concatenate(pieces, axis=1)


_NUMBERS: Final = {"smallint": ">i2", "integer": ">i4", "bigint": ">i8", "real": ">f4", "double precision": ">f8"}
# jsonb has the number of its format before the text.
_TEXTS: Final = {"text": b"", "bytea": b"", "json": b"", "jsonb": b"\x01"}
_OTHERS: Final[dict[str, Spell]] = {
    "boolean": _truths,
    "date": _days,
    "timestamptz": _moments,
    "timestamp": _moments,
    "uuid": _uuids,
}
